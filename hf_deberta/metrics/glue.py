"""Metrics of GLUE, and of your own classes, regression targets or lists of labels.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("glue"), "mrpc")
>>> metric.compute(predictions=[1, 0, 0, 0], references=[1, 0, 1, 0])
{'accuracy': 0.75, 'f1': 0.6666666666666666}
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from hf_deberta.metrics import CONFIGURATIONS, require_configuration

INPUTS = """
Args:
    predictions: class numbers; regression values (stsb, regression); 0 or 1 for each label in each row (multi_label).
    references: likewise.
    num_labels: with two classes, the default, F1 is that of class 1; with more, the mean over the classes.
"""


class Glue(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        require_configuration("glue", self.config_name)
        kind: Any = datasets.Value("float64" if self.config_name in ("stsb", "regression") else "int64")
        if self.config_name == "multi_label":
            kind = datasets.List(kind)
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(__doc__ or "", citation="", features=features, inputs_description=INPUTS)

    def _compute(self, predictions: list, references: list, num_labels: int = 2) -> dict[str, float]:
        names = CONFIGURATIONS["glue"][self.config_name]
        return glue_scores(names, np.asarray(predictions), np.asarray(references), num_labels)


def glue_scores(
    names: Iterable[str], predictions: np.ndarray, labels: np.ndarray, num_labels: int = 2
) -> dict[str, float]:
    """Return the metrics `names`.

    Args:
        predictions: class numbers, regression values, or [rows, labels] of 0 and 1 (multi-label); `labels` likewise.
        num_labels: with two classes F1 is that of class 1; with more, the mean over the classes.
    """
    f1 = partial(f1_score, zero_division=0)
    metrics: dict[str, Callable[[], float]] = {
        "accuracy": lambda: (predictions == labels).reshape(len(labels), -1).all(-1).mean(),
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
    return correlation(predictions, labels).statistic
