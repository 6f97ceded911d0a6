"""The metrics of SQuAD against the results of the official scripts on these rows."""

import pytest

from hf_deberta.metrics import compute_metric

# The predicted answer, the score of "no answer" (some are equal), and the gold answers.
QUESTIONS = {
    "year": ("in 1889,", 0.1, ["1889", "the year 1889"]),
    "tower": ("The Eiffel tower!", 0.5, ["Eiffel Tower", "a tower"]),
    "city": ("capital city Paris", 0.2, ["Paris", "the city of Paris", "Paris, the capital"]),
    "twice": ("no no yes", 0.9, ["no yes yes"]),
    "article": ("the", 0.3, ["an", "A."]),
    "empty": ("", 0.5, ["Gustave"]),
    "wrong": ("Lyon", 0.5, ["Gustave Eiffel"]),
    "right": ("Gustave Eiffel", 0.5, ["Gustave Eiffel"]),
    "dash": ("iron-works", 0.7, ["iron works", "ironworks"]),
    "none": ("Lyon", 0.5, []),
    "nothing": ("", 0.8, []),
    "spaces": (" ", 0.5, []),
    "never": ("1887", 1.0, []),
}
ANSWERABLE = [name for name, (_, _, golds) in QUESTIONS.items() if golds]
ORDERS = {"same": list(QUESTIONS), "reversed": list(reversed(QUESTIONS))}
THRESHOLD = 0.6

# computed by the functions of the official scripts, with a threshold of 0.6 for "no answer"
VERSION_1 = {"exact_match": 44.44444444444444, "f1": 57.03703703703703}  # of the questions with answers
VERSION_2 = {
    "exact": 46.15384615384615,
    "f1": 57.43589743589743,
    "total": 13,
    "HasAns_exact": 33.333333333333336,
    "HasAns_f1": 49.62962962962963,
    "HasAns_total": 9,
    "NoAns_exact": 75.0,
    "NoAns_f1": 75.0,
    "NoAns_total": 4,
}
BEST = {
    "same": {
        "best_exact": 53.84615384615385,
        "best_exact_thresh": 0.5,
        "best_f1": 65.12820512820512,
        "best_f1_thresh": 0.5,
    },
    "reversed": {
        "best_exact": 46.15384615384615,
        "best_exact_thresh": 0.7,
        "best_f1": 62.564102564102555,
        "best_f1_thresh": 0.9,
    },
}


def inputs(names: list[str], with_odds: bool) -> dict[str, list]:
    """Predictions in the order of `names`, references in that of the questions."""
    predictions, references = [], []
    for name in names:
        text, odds, _ = QUESTIONS[name]
        predictions.append(
            {"id": name, "prediction_text": text} | ({"no_answer_probability": odds} if with_odds else {})
        )
    for name in sorted(names, key=list(QUESTIONS).index):
        golds = QUESTIONS[name][2]
        references.append({"id": name, "answers": {"text": golds, "answer_start": [0] * len(golds)}})
    return {"predictions": predictions, "references": references}


def test_version_1():
    metrics = compute_metric("squad", **inputs(ANSWERABLE, with_odds=False))
    assert metrics == pytest.approx(VERSION_1, rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_version_2(order):
    """The order of predictions decides between equal odds."""
    metrics = compute_metric("squad_v2", **inputs(ORDERS[order], with_odds=True), no_answer_threshold=THRESHOLD)
    assert metrics == pytest.approx(VERSION_2 | BEST[order], rel=1e-12)
    default = compute_metric("squad_v2", **inputs(ORDERS[order], with_odds=True))
    assert default == compute_metric("squad_v2", **inputs(ORDERS[order], with_odds=True), no_answer_threshold=1.0)
