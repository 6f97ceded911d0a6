"""Accuracy of multiple choice, and for RACE that on middle and high school articles.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("multiple_choice"), "race")
>>> metric.compute(predictions=[1, 0], references=[1, 3], ids=["middle1.txt", "high2.txt"])
{'accuracy': 0.5, 'accuracy_middle': 1.0, 'accuracy_high': 0.0}
"""

from typing import Any

import datasets
import evaluate
import numpy as np

from hf_deberta.metrics import require_configuration

LEVELS = ("middle", "high")  # the ids of RACE begin with the level
INPUTS = """
Args:
    predictions: the number of the chosen option, from 0.
    references: likewise.
    ids: of race, the ids of the questions.
"""


class MultipleChoice(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        require_configuration("multiple_choice", self.config_name)
        features: dict[str, Any] = dict.fromkeys(("predictions", "references"), datasets.Value("int64"))
        if self.config_name == "race":
            features["ids"] = datasets.Value("string")
        features = datasets.Features(features)
        return evaluate.MetricInfo(__doc__ or "", citation="", features=features, inputs_description=INPUTS)

    def _compute(self, predictions: list[int], references: list[int], ids: list[str] | None = None) -> dict[str, float]:
        correct = np.asarray(predictions) == np.asarray(references)
        scores = {"accuracy": float(correct.mean())}
        for level in LEVELS:
            in_level = np.array([row_id.startswith(level) for row_id in ids or []], bool)
            if in_level.any():
                scores[f"accuracy_{level}"] = float(correct[in_level].mean())
        return scores
