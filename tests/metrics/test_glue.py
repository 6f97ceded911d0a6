"""Metrics of GLUE against values computed by hand, and against scikit-learn and scipy."""

import random

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from hf_deberta.fine_tuning.tasks.glue import TASKS
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.metrics.glue import glue_scores

METRICS = CONFIGURATIONS["glue"]


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
    assert metrics == pytest.approx({metric: expected[metric] for metric in METRICS[name]})


@pytest.mark.parametrize("classes", [2, 4])
def test_own_rows_equal_scikit_learn(classes):
    """Of more than two classes F1 is the mean, also if only two occur."""
    labels, predictions = answers(classes)
    metrics = compute_metric("glue", "classification", predictions=predictions, references=labels, num_labels=4)
    assert metrics["f1"] == pytest.approx(f1_score(labels, predictions, average="macro"))


def test_f1_is_the_mean_over_the_classes_that_occur():
    for predictions, expected in {(0, 1, 0, 1): 1.0, (0, 1, 0, 2): (1 + 2 / 3 + 0) / 3}.items():
        metrics = compute_metric(
            "glue", "classification", predictions=[*predictions], references=[0, 1, 0, 1], num_labels=3
        )
        assert metrics["f1"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["stsb", "regression"])
def test_regression_equals_scipy(name):
    rng = random.Random(0)
    labels = [rng.randrange(26) / 5 for _ in range(200)]
    predictions = [label + rng.gauss(0, 1) for label in labels]
    expected = {"pearson": pearsonr(predictions, labels)[0], "spearmanr": spearmanr(predictions, labels)[0]}
    assert compute_metric("glue", name, predictions=predictions, references=labels) == pytest.approx(expected)
    assert glue_scores(["pearson"], np.zeros(200), np.array(labels)) == {"pearson": 0.0}


def test_multi_label_metrics():
    rng = np.random.default_rng(0)
    predictions, labels = rng.random((50, 4)) > 0.4, rng.random((50, 4)) > 0.5
    assert glue_scores(METRICS["multi_label"], predictions, labels) == {
        "f1_micro": pytest.approx(f1_score(labels, predictions, average="micro")),
        "f1_macro": pytest.approx(f1_score(labels, predictions, average="macro")),
        "accuracy": pytest.approx(accuracy_score(labels, predictions)),
    }
    one = glue_scores(METRICS["multi_label"], np.array([[1], [1], [0], [0]]) > 0, np.array([[1], [0], [0], [0]]) > 0)
    assert one == {"f1_micro": pytest.approx(2 / 3), "f1_macro": pytest.approx(2 / 3), "accuracy": 0.75}
