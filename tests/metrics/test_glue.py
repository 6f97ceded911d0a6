"""Metrics of GLUE against values computed by hand, and against scikit-learn and scipy."""

import math
import random

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from hf_deberta.fine_tuning.tasks.glue import MULTI_LABEL_METRICS, TASKS
from hf_deberta.metrics import compute_metric
from hf_deberta.metrics.glue import glue_scores


def answers(classes: int, rows: int = 400, right: float = 0.8) -> tuple[list[int], list[int]]:
    """Labels, of which the first is the most frequent, and predictions that are mostly right."""
    rng = random.Random(classes)
    labels = [min(rng.randrange(classes), rng.randrange(classes)) for _ in range(rows)]
    return labels, [label if rng.random() < right else rng.randrange(classes) for label in labels]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.labels])
def test_classification_tasks_equal_scikit_learn(name):
    labels, predictions = answers(len(TASKS[name].labels))
    expected = {
        "accuracy": accuracy_score(labels, predictions),
        "matthews_correlation": matthews_corrcoef(labels, predictions),
        "f1": f1_score(labels, predictions) if len(TASKS[name].labels) == 2 else None,
    }
    metrics = compute_metric("glue", name, predictions=predictions, references=labels)
    assert metrics == pytest.approx({metric: expected[metric] for metric in TASKS[name].metrics})


def test_own_rows_equal_scikit_learn():
    labels, predictions = answers(4)
    metrics = compute_metric("glue", "classification", predictions=predictions, references=labels, num_labels=4)
    assert metrics["f1"] == pytest.approx(f1_score(labels, predictions, average="macro"))


@pytest.mark.parametrize("name", ["stsb", "regression"])
def test_regression_equals_scipy(name):
    rng = random.Random(0)
    labels = [rng.randrange(26) / 5 for _ in range(200)]
    predictions = [label + rng.gauss(0, 1) for label in labels]
    expected = {"pearson": pearsonr(predictions, labels)[0], "spearmanr": spearmanr(predictions, labels)[0]}
    assert compute_metric("glue", name, predictions=predictions, references=labels) == pytest.approx(expected)


def test_multi_label_metrics():
    rng = np.random.default_rng(0)
    predictions, labels = rng.random((50, 4)) > 0.4, rng.random((50, 4)) > 0.5
    assert glue_scores(MULTI_LABEL_METRICS, predictions, labels) == {
        "f1_micro": pytest.approx(f1_score(labels, predictions, average="micro")),
        "f1_macro": pytest.approx(f1_score(labels, predictions, average="macro")),
        "accuracy": pytest.approx(accuracy_score(labels, predictions)),
    }
    one = glue_scores(MULTI_LABEL_METRICS, np.array([[1], [1], [0], [0]]) > 0, np.array([[1], [0], [0], [0]]) > 0)
    assert one == {"f1_micro": pytest.approx(2 / 3), "f1_macro": pytest.approx(2 / 3), "accuracy": 0.75}


def test_classification_metrics_by_hand():
    predictions, labels = np.array([1, 1, 1, 0, 0, 1]), np.array([1, 1, 0, 0, 1, 1])
    tp, tn, fp, fn = 3, 1, 1, 1
    by_hand = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert glue_scores(["matthews_correlation"], predictions, labels) == {
        "matthews_correlation": pytest.approx(by_hand)
    }
    metrics = glue_scores(["accuracy", "f1"], predictions, labels)
    assert metrics == {"accuracy": pytest.approx(4 / 6), "f1": pytest.approx(2 * 3 / (2 * 3 + 1 + 1))}
    macro = glue_scores(["f1"], predictions, labels, num_labels=3)  # the third does not occur
    assert macro == {"f1": pytest.approx((2 * 3 / (2 * 3 + 1 + 1) + 2 * 1 / (2 * 1 + 1 + 1)) / 2)}


def test_correlations_by_hand():
    values, labels = np.array([0.1, 0.4, 0.35, 0.8]), np.array([1.0, 2.0, 3.0, 4.0])
    assert glue_scores(["spearmanr"], values, labels)["spearmanr"] == pytest.approx(1 - 6 * 2 / (4 * 15))  # 1 3 2 4
    assert glue_scores(["pearson"], np.zeros(4), labels) == {"pearson": 0.0}
