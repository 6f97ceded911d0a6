"""benchmarks/released.py on a tiny checkpoint, and the tables of benchmarks/results/README.md."""

import csv
import json
import sys
from pathlib import Path

import pytest
from test_parity_with_transformers import in_tree
from tokenizer_files import write_spm

from hf_deberta import HfDebertaForSequenceClassification

pytest.importorskip("sentencepiece")
ROOT = Path(__file__).parents[1]
EVIDENCE = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "We \ufb01nd the file.",
    "In 1998 they ate, we slept",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Write a tiny classifier of Transformers with an `spm.model`, like a released v3."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-v3"
    write_spm(folder, [TEXTS[0], "We find the file.", TEXTS[2]], vocab_size=80)
    fields = {"vocab_size": 128, "num_labels": 3, "type_vocab_size": 0, "initializer_range": 0.3}
    in_tree("v3", "ForSequenceClassification", **fields).save_pretrained(folder)
    return folder


@pytest.fixture
def inputs(tmp_path) -> tuple[Path, Path]:
    """Write files of texts and of pairs."""
    texts, pairs = tmp_path / "texts.txt", tmp_path / "pairs.jsonl"
    texts.write_text("\n".join([*TEXTS, "", TEXTS[0]]), encoding="utf-8")
    rows = [{"premise": a, "hypothesis": b, "label": 0} for a in TEXTS for b in TEXTS]
    pairs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return texts, pairs


def saved_by_us(checkpoint: Path, folder: Path) -> Path:
    """Return the checkpoint as one that this package saved, such as a fine-tuned one."""
    HfDebertaForSequenceClassification.from_pretrained(checkpoint).save_pretrained(folder)
    for name in ("spm.model", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def run(load, monkeypatch, folder: Path, results: Path, inputs: tuple[Path, Path]) -> dict:
    """Run the benchmark; return its rows by measure and peer."""
    monkeypatch.setenv("RESULTS", str(results))
    texts, pairs = map(str, inputs)
    arguments = ["--model", str(folder), "--texts", texts, "--rows", pairs]
    monkeypatch.setattr(sys, "argv", ["released.py", *arguments])
    released = load("released")
    released.main()
    with (results / "released.csv").open() as file:
        return {(row["measure"], row["peer"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("saved_by", ["transformers", "hf_deberta"])
def test_a_checkpoint_is_compared_in_every_way(load, monkeypatch, checkpoint, inputs, tmp_path, saved_by):
    if saved_by == "hf_deberta":
        checkpoint = saved_by_us(checkpoint, tmp_path / "tiny-v3")
    rows = run(load, monkeypatch, checkpoint, tmp_path, inputs)
    value = {key: row["value"] for key, row in rows.items()}
    assert value["weights missing in the checkpoint", "ours sdpa"] == "0"
    assert (
        value["weights missing after export", "in-tree"]
        == value["weights changed by export and back", "ours sdpa"]
        == "0"
    )
    for kind in ("hidden states", "logits"):
        for peer in ("ours sdpa", "enabled"):
            assert float(value[f"{kind}, difference from in-tree", peer]) < 1e-5
        assert 0 < float(value[f"{kind}, difference from ours in float64", "ours sdpa"]) < 1e-5
    pieces = {peer: row for (measure, peer), row in rows.items() if "other pieces than sentencepiece's" in measure}
    assert pieces["ours, spm.model"]["value"] == "0"
    assert (pieces["in-tree"]["value"], pieces["in-tree"]["where"]) == ("1", "LATIN SMALL LIGATURE FI: 1")
    assert value["rows with in-tree's label, of 9", "ours sdpa"] == "9"
    assert rows["hidden states, difference from in-tree", "ours sdpa"]["model"] == "tiny-v3"


def test_the_page_says_what_was_measured(load):
    table = load("released").table("v3-xsmall-nli")
    assert table in EVIDENCE, "replace it by `benchmarks/released.py --print v3-xsmall-nli`"


def test_the_tables_of_fine_tuning_are_those_of_the_page(load):
    tables = load("fine_tuning").tables("v3-xsmall-nli")
    assert tables in EVIDENCE, "replace them by `python benchmarks/fine_tuning.py --print v3-xsmall-nli`"
