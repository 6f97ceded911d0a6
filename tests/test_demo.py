"""`demo.py` from end to end, in both modes, with a few steps; and what it says to files it cannot use."""

import random
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

DEMO = Path(__file__).parents[1] / "demo.py"
WORDS = "the old man walked slowly down to a quiet harbour where small boats wait for wind and his friends"


@pytest.fixture
def run_demo(monkeypatch):
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(DEMO), *map(str, arguments)])
        runpy.run_path(str(DEMO), run_name="__main__")

    return run


@pytest.fixture
def my_text(tmp_path) -> Path:
    rng = random.Random(0)
    path = tmp_path / "my.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS.split(), k=40)) + "." for _ in range(80)), encoding="utf-8")
    return path


def check_output(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["loss_curves.png", "model"]
    assert (folder / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    assert model.config.emd_steps == 2
    fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    assert 0 < fill("the [MASK]")[0]["score"] < 1


def test_made_up_language(run_demo, tmp_path, capsys):
    run_demo("--steps", 2, "--output_dir", tmp_path / "out")
    said = capsys.readouterr().out
    for part in ("place in the row", "without EMD", "with EMD", "a new [MASK] opened", "gives the same answers"):
        assert part in said
    check_output(tmp_path / "out")


def test_own_text(run_demo, my_text, tmp_path, capsys):
    run_demo("--text", my_text, "--steps", 2, "--seed", 1, "--output_dir", tmp_path / "out")
    said = capsys.readouterr().out
    for part in ("15% of the tokens masked", "without EMD", "with EMD", "right answer", "gives the same answers"):
        assert part in said
    check_output(tmp_path / "out")


def test_only_the_place_decides_the_noun():
    demo = runpy.run_path(str(DEMO))
    rng = random.Random(0)
    places = {"opened": [], "other": []}  # of nouns, by the word that follows
    for _ in range(3000):
        words = demo["made_up_sentence"](rng).split()
        for place, word in enumerate(words, 1):
            if word in demo["NOUNS"]:
                assert word == ("store" if place % 2 else "mall")
                assert words[place - 2] == "new" and words[place - 3] in ("a", "the")
                places["opened" if words[place : place + 1] == ["opened"] else "other"].append(place)
    for found in places.values():
        assert len(found) == 3000
        assert 0.46 < sum(place % 2 for place in found) / len(found) < 0.54
    assert demo["nouns_of"](demo["PAPER"]) == ["store", "mall"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is too small: the demo needs 50 lines"),
        (b"one line of text\n" * 60, "10,000 characters at least, and it has 60 and 960"),
        (b"word " * 10_000, "is too small: the demo needs 50 lines"),
        ("Stra\u00dfe ".encode("latin-1") * 5000, "is not UTF-8 text"),
    ],
    ids=["missing", "empty", "too few characters", "one line", "latin-1"],
)
def test_unusable_text(run_demo, tmp_path, content, message):
    path = tmp_path / "my.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        run_demo("--text", path, "--output_dir", tmp_path / "out")
    said = stopped.value.code  # a text: Python prints it and exits with status 1
    assert message in said and str(path) in said and "\n" not in said
    assert not (tmp_path / "out").exists()


def test_unusable_output_folder(run_demo, my_text):
    with pytest.raises(SystemExit, match="cannot be written to"):
        run_demo("--text", my_text, "--output_dir", my_text)


def test_unusable_number_of_steps(run_demo, capsys):
    with pytest.raises(SystemExit):
        run_demo("--steps", 0)
    assert "--steps must be 1 or more, not 0" in capsys.readouterr().err
