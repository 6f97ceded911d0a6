"""Accuracy of multiple choice: the example of its function has levels, these have none."""

from hf_deberta.metrics import compute_metric


def test_without_levels():
    inputs = {"predictions": [1, 0, 1, 0], "references": [1, 0, 0, 0]}
    assert compute_metric("multiple_choice", **inputs) == {"accuracy": 3 / 4}
    assert compute_metric("multiple_choice", "race", **inputs, ids=list("abcd")) == {"accuracy": 3 / 4}
