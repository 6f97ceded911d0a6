"""Metrics of named entities against values computed by hand, and against seqeval."""

import random

import pytest

from hf_deberta.metrics import compute_metric
from hf_deberta.metrics.named_entities import entity_scores


def random_tags(rng, sentences, kinds):
    return [[rng.choice(kinds) for _ in range(rng.randrange(9))] for _ in range(sentences)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [("O", "B-P", "I-P", "B-L-x", "I-L-x"), ("O", "B", "I"), ("O", "O", "I-P", "I-L")])
def test_metrics_equal_those_of_seqeval(seed, kinds):
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = random.Random(seed)
    gold = random_tags(rng, 12, kinds)
    predicted = [[tag if rng.random() < 0.6 else rng.choice(kinds) for tag in tags] for tags in gold]
    report = seqeval.classification_report(gold, predicted, output_dict=True, zero_division=0)
    metrics = entity_scores(gold, predicted)
    assert metrics["f1"] == pytest.approx(seqeval.f1_score(gold, predicted, zero_division=0))
    assert metrics["precision"] == pytest.approx(report["micro avg"]["precision"])
    assert metrics["recall"] == pytest.approx(report["micro avg"]["recall"])
    assert metrics["accuracy"] == pytest.approx(seqeval.accuracy_score(gold, predicted))
    assert metrics["types"].keys() == report.keys() - {"micro avg", "macro avg", "weighted avg"}
    for kind, values in metrics["types"].items():
        expected = [report[kind][name] for name in ("precision", "recall", "f1-score", "support")]
        assert list(values.values()) == pytest.approx(expected)


def test_metrics_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "B-LOC"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "I-LOC"]]
    metrics = entity_scores(gold, predicted)
    assert (metrics["precision"], metrics["recall"]) == (1 / 3, 1 / 4) and metrics["f1"] == pytest.approx(2 / 7)
    assert metrics["accuracy"] == 4 / 6 and metrics["types"]["PER"]["number"] == 1
    by_type = compute_metric("named_entities", predictions=predicted, references=gold, by_type=True)
    assert by_type["LOC_recall"] == metrics["types"]["LOC"]["recall"] and by_type["PER_number"] == 1
    without_types = compute_metric("named_entities", predictions=predicted, references=gold)
    assert without_types == {name: metrics[name] for name in ("precision", "recall", "f1", "accuracy")}
    assert entity_scores([["O"]], [["O"]])["f1"] == 0 and entity_scores([], [])["accuracy"] == 0


def test_labels_without_prefixes():
    metrics = entity_scores([["PER", "PER", "O", "LOC"]], [["PER", "PER", "O", "PER"]])
    assert (metrics["precision"], metrics["recall"]) == (0.5, 0.5)
    assert entity_scores([["NN", "VB"]], [["NN", "NN"]]) == {"accuracy": 0.5}
