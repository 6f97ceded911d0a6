"""Accuracy of multiple choice, and for RACE that on middle and high school articles."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score

from hf_deberta.metrics.evaluate_metric import NUMBERS, TEXT, evaluate_metric

LEVELS = ("middle", "high")  # the ids of RACE begin with the level


def multiple_choice(configuration: str, predictions: Any, references: Any, ids: Sequence[str] = ()) -> dict[str, float]:
    """Return the accuracy, and of race that of each level.

    Args:
        predictions: the number of the chosen option, from 0.
        references: likewise.
        ids: of race, the ids of the questions.

    >>> multiple_choice("race", predictions=[1, 0], references=[1, 3], ids=["middle1.txt", "high2.txt"])
    {'accuracy': 0.5, 'accuracy_middle': 1.0, 'accuracy_high': 0.0}
    """
    options, labels = np.asarray(predictions), np.asarray(references)
    scores = {"accuracy": float(accuracy_score(labels, options))}
    for level in LEVELS if configuration == "race" else ():
        in_level = np.array([row_id.startswith(level) for row_id in ids], bool)
        if in_level.any():
            scores[f"accuracy_{level}"] = float(accuracy_score(labels[in_level], options[in_level]))
    return scores


MultipleChoice = evaluate_metric(multiple_choice, default=NUMBERS, race={**NUMBERS, "ids": TEXT})
