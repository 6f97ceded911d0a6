"""Metrics of named entities against values computed by hand, and against seqeval."""

import random

import pytest

from hf_deberta.metrics.named_entities import named_entities


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [("O", "B-P", "I-P", "B-L-x", "I-L-x"), ("O", "B", "I"), ("O", "O", "I-P", "I-L")])
def test_metrics_equal_those_of_seqeval(seed, kinds):
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = random.Random(seed)
    gold = [rng.choices(kinds, k=rng.randrange(9)) for _ in range(12)]
    predicted = [[tag if rng.random() < 0.6 else rng.choice(kinds) for tag in tags] for tags in gold]
    report = seqeval.classification_report(gold, predicted, output_dict=True, zero_division=0)
    names = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}
    expected = {name: report["micro avg"][theirs] for name, theirs in names.items() if name != "number"}
    expected |= {"accuracy": seqeval.accuracy_score(gold, predicted)}
    assert named_entities(predicted, gold) == pytest.approx(expected)
    for kind in report.keys() - {"micro avg", "macro avg", "weighted avg"}:
        expected |= {f"{kind}_{name}": report[kind][theirs] for name, theirs in names.items()}
    assert named_entities(predicted, gold, by_type=True) == pytest.approx(expected)


def test_metrics_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "B-LOC"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "I-LOC"]]
    metrics = named_entities(predicted, gold, by_type=True)
    assert (metrics["precision"], metrics["recall"]) == (1 / 3, 1 / 4) and metrics["f1"] == pytest.approx(2 / 7)
    assert metrics["accuracy"] == 4 / 6 and metrics["PER_number"] == 1
    assert named_entities([["O"]], [["O"]])["f1"] == 0 and named_entities([], [])["accuracy"] == 0


def test_labels_without_prefixes():
    metrics = named_entities([["PER", "PER", "O", "PER"]], [["PER", "PER", "O", "LOC"]])
    assert (metrics["precision"], metrics["recall"]) == (0.5, 0.5)
    assert named_entities([["NN", "NN"]], [["NN", "VB"]]) == {"accuracy": 0.5}
