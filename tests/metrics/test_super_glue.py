"""Metrics of SuperGLUE against values computed by hand, from rows in the format of the Hub."""

import numpy as np
import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.tasks.superglue import metric_inputs
from hf_deberta.metrics import compute_metric


def scores(name: str, rows: Dataset, predictions: np.ndarray) -> dict:
    return compute_metric("super_glue", name, **metric_inputs(name, rows, np.array(rows["label"]), predictions))


def test_multirc_metrics():
    """F1 over all answers; exact match over questions, whose numbers may repeat in other paragraphs."""
    idx = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0)]
    rows = Dataset.from_list(
        [
            {"idx": {"paragraph": p, "question": q, "answer": a}, "label": label}
            for a, ((p, q), label) in enumerate(zip(idx, [1, 0, 1, 1, 1], strict=True))
        ]
    )
    metrics = scores("multirc", rows, np.array([1, 0, 0, 1, 1]))
    assert metrics == pytest.approx({"f1_a": 2 * 3 / (3 + 4), "exact_match": 2 / 3})
    assert scores("multirc", rows, np.zeros(5, int))["f1_a"] == 0


@pytest.mark.parametrize("with_pairs", [False, True])
def test_gender_parity(with_pairs):
    pairs = [("The cook met {} aunt.", "The cook has an aunt."), ("The nurse saw that {} ran.", "The nurse ran.")]
    pronouns = (("his", "her"), ("he", "she"))
    rows = [
        {"premise": premise.format(of[n]), "hypothesis": hypothesis, "label": 0, "pair_id": str(i)}
        for n in range(2)  # the rows of a pair need not be neighbours
        for i, ((premise, hypothesis), of) in enumerate(zip(pairs, pronouns, strict=True))
    ]
    rows = Dataset.from_list(rows if with_pairs else [{k: row[k] for k in row if k != "pair_id"} for row in rows])
    assert scores("axg", rows, np.array([0, 0, 0, 1])) == {"accuracy": 0.75, "gender_parity": 0.5}
