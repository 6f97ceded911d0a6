"""Metrics of GLUE, and of your own labels, against values computed by hand."""

import numpy as np
import pytest

from hf_deberta.fine_tuning.tasks.glue import TASKS
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.metrics.glue import glue_scores

MULTI_LABEL = ([[1, 0], [1, 1], [0, 0], [0, 0]], [[1, 0], [0, 1], [0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("name", "predictions", "references", "options", "expected"),
    [
        ("cola", [1, 0, 0, 0], [1, 0, 1, 0], {}, {"matthews_correlation": 2 / 12**0.5}),
        ("mrpc", [1, 0, 0, 0], [1, 0, 1, 0], {}, {"accuracy": 3 / 4, "f1": 2 / 3}),
        ("mnli", [0, 1, 2, 2], [0, 1, 2, 0], {}, {"accuracy": 3 / 4}),
        ("stsb", [1.0, 2.0, 4.0], [0.0, 1.0, 2.0], {}, {"pearson": 3 / (2 * 14 / 3) ** 0.5, "spearmanr": 1}),
        ("regression", [0.0, 0.0, 0.0], [0.0, 1.0, 2.0], {}, {"pearson": 0, "spearmanr": 0}),
        # of more than two classes, the mean over those that occur
        ("classification", [0, 1, 0, 1], [0, 1, 0, 1], {"num_labels": 3}, {"accuracy": 1, "f1": 1}),
        ("classification", [0, 1, 0, 2], [0, 1, 0, 1], {"num_labels": 3}, {"accuracy": 3 / 4, "f1": (1 + 2 / 3) / 3}),
        ("multi_label", *MULTI_LABEL, {}, {"f1_micro": 2 / 3, "f1_macro": (1 / 2 + 1) / 2, "accuracy": 1 / 2}),
    ],
)
def test_metrics_by_hand(name, predictions, references, options, expected):
    inputs = {"predictions": np.array(predictions), "references": np.array(references)}
    assert compute_metric("glue", name, **inputs, **options) == pytest.approx(expected)


def test_metrics_of_one_label_that_a_row_may_have():
    labels = np.array([[1], [0], [0], [0]]) > 0
    metrics = glue_scores(CONFIGURATIONS["glue"]["multi_label"], np.array([[1], [1], [0], [0]]) > 0, labels)
    assert metrics == {"f1_micro": pytest.approx(2 / 3), "f1_macro": pytest.approx(2 / 3), "accuracy": 0.75}


def test_every_task_has_metrics():
    assert TASKS.keys() <= CONFIGURATIONS["glue"].keys()
