"""Accuracy of multiple choice, overall and by level of RACE."""

import pytest

from hf_deberta.metrics import compute_metric

PREDICTIONS, LABELS = [1, 0, 1, 0], [1, 0, 0, 0]


def test_accuracy_overall_and_by_level():
    ids = ["middle1.txt", "high2.txt", "high2.txt", "high3.txt"]
    metrics = compute_metric("multiple_choice", "race", predictions=PREDICTIONS, references=LABELS, ids=ids)
    assert metrics == pytest.approx({"accuracy": 3 / 4, "accuracy_middle": 1.0, "accuracy_high": 2 / 3})


def test_without_levels():
    inputs = {"predictions": PREDICTIONS, "references": LABELS}
    assert compute_metric("multiple_choice", **inputs) == {"accuracy": 3 / 4}
    assert compute_metric("multiple_choice", "race", **inputs, ids=list("abcd")) == {"accuracy": 3 / 4}
