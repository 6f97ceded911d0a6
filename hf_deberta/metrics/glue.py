"""Metrics of GLUE, and of your own classes, regression targets or lists of labels."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from datasets import List, Value
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from sklearn.utils import check_consistent_length

from hf_deberta.metrics import CONFIGURATIONS
from hf_deberta.metrics.evaluate_metric import NUMBER, NUMBERS, evaluate_metric


def glue(configuration: str, predictions: Any, references: Any, num_labels: int = 2) -> dict[str, float]:
    """Return the metrics of a task of GLUE, or of `classification`, `regression` or `multi_label`.

    Args:
        predictions: class numbers; values of stsb and regression; of multi_label 0 or 1 for each label in each row.
        references: likewise.
        num_labels: with two classes, the default, F1 is that of class 1; with more, the mean over the classes that
            occur in predictions or references.

    >>> glue("mrpc", predictions=[1, 0, 0, 0], references=[1, 0, 1, 0])
    {'accuracy': 0.75, 'f1': 0.6666666666666666}
    """
    names = CONFIGURATIONS["glue"][configuration]
    return glue_scores(names, np.asarray(predictions), np.asarray(references), num_labels)


def glue_scores(
    names: Iterable[str], predictions: np.ndarray, labels: np.ndarray, num_labels: int = 2
) -> dict[str, float]:
    """Return the metrics `names` of [rows] or, for several labels, [rows, labels]."""
    check_consistent_length(predictions, labels)
    f1 = partial(f1_score, zero_division=0)
    metrics: dict[str, Callable[[], float]] = {
        "accuracy": lambda: accuracy_score(labels, predictions),
        "f1": lambda: f1(labels, predictions, average="binary" if num_labels == 2 else "macro"),
        "f1_micro": lambda: f1(labels.ravel(), predictions.ravel()),
        "f1_macro": lambda: np.mean([*map(f1, labels.T, predictions.T)]),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "pearson": lambda: _correlation(pearsonr, predictions, labels),
        "spearmanr": lambda: _correlation(spearmanr, predictions, labels),
    }
    return {name: float(metrics[name]()) for name in names}


def _correlation(correlation: Callable, predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return a correlation coefficient; 0 where it is undefined because either side is constant."""
    if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return correlation(predictions.astype(float), labels.astype(float)).statistic


VALUES = dict.fromkeys(NUMBERS, Value("float64"))
Glue = evaluate_metric(
    glue, default=NUMBERS, stsb=VALUES, regression=VALUES, multi_label=dict.fromkeys(NUMBERS, List(NUMBER))
)
