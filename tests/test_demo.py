"""`hf-deberta demo` from end to end with a few steps, and its messages for flags that it cannot use."""

import random
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from hf_deberta.commands import demo
from hf_deberta_command import main


def run_demo(*arguments: object) -> None:
    main(["demo", *map(str, arguments)])


def check_output(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["loss_curves.png", "model"]
    assert (folder / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    assert model.config.emd_steps == 2
    fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    assert 0 < fill("the [MASK]")[0]["score"] < 1


@pytest.mark.slow
def test_made_up_language(tmp_path, capsys):
    run_demo("--steps", 2, "--output_dir", tmp_path / "out")
    output = capsys.readouterr().out
    for part in ("position", "without EMD", "with EMD", "a new [MASK] opened", "for AutoModelForMaskedLM"):
        assert part in output
    check_output(tmp_path / "out")


def test_only_the_position_determines_the_noun():
    rng = random.Random(0)
    positions = {"opened": [], "other": []}  # of nouns, by the word that follows
    for _ in range(3000):
        words = demo.made_up_sentence(rng).split()
        for position, word in enumerate(words, 1):
            if word in demo.NOUNS:
                assert word == ("store" if position % 2 else "mall")
                assert words[position - 2] == "new" and words[position - 3] in ("a", "the")
                follows = words[position : position + 1] == ["opened"]
                positions["opened" if follows else "other"].append(position)
    for values in positions.values():
        assert len(values) == 3000
        assert 0.46 < sum(position % 2 for position in values) / len(values) < 0.54
    assert demo.right_nouns(demo.PAPER_SENTENCE) == ["store", "mall"]


def test_unusable_output_folder(tmp_path):
    file = tmp_path / "my.txt"
    file.touch()
    with pytest.raises(SystemExit, match=r"--output_dir: .*my\.txt"):
        run_demo("--output_dir", file)


def test_unusable_number_of_steps(capsys):
    with pytest.raises(SystemExit):
        run_demo("--steps", 0)
    error = capsys.readouterr().err
    assert "argument --steps: '0' is not a whole number above 0" in error
