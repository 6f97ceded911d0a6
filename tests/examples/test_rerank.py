"""The reranker learns which documents answer, and is saved as a model of Transformers."""

import json

import pytest

pytest.importorskip("sentence_transformers", reason="needs pip install sentence-transformers")
import rerank
from example_rows import sentiment_rows
from fine_tuning_models import write_json_lines
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def relevance_rows(count: int, seed: int) -> list[dict]:
    """Queries with eight documents each; those with the word `good` are the relevant ones."""
    rows = sentiment_rows(count, seed)
    return [
        {"query": f"film {number // 8}", "document": row["sentence"], "label": row["label"]}
        for number, row in enumerate(rows)
    ]


def test_it_learns_from_a_model_with_another_head(in_tree_model, tmp_path, capsys):
    nli_model = tmp_path / "nli"
    AutoModelForSequenceClassification.from_pretrained(in_tree_model, num_labels=3).save_pretrained(nli_model)
    AutoTokenizer.from_pretrained(in_tree_model).save_pretrained(nli_model)
    train = write_json_lines(tmp_path / "train.jsonl", relevance_rows(640, 1))
    validation = write_json_lines(tmp_path / "dev.jsonl", relevance_rows(64, 2))
    flags = ["--model", nli_model, "--train_file", train, "--validation_file", validation, "--learning_rate", "5e-3"]
    before, after, ranking = rerank.main([*map(str, flags)])
    assert before < 0.9 < 0.95 < after
    assert ranking[0]["score"] > ranking[-1]["score"]
    assert "good" in ranking[0]["text"] and "bad" in ranking[-1]["text"]
    assert f"MAP {before:.3f}, after training {after:.3f}" in capsys.readouterr().out
    assert json.loads((tmp_path / "reranker" / "config.json").read_text())["model_type"] == "deberta-v2"
    again = CrossEncoder("reranker", device="cpu").predict([("film 0", ranking[0]["text"])])  # without this package
    assert again[0] == pytest.approx(ranking[0]["score"], abs=1e-4)
