"""Metrics of SuperGLUE against values computed by hand and by scikit-learn, from rows in the format of the Hub."""

import random

import numpy as np
import pytest
from datasets import Dataset
from sklearn.metrics import accuracy_score, matthews_corrcoef

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


def test_rows_without_a_label_are_left_out():
    assert scores("boolq", Dataset.from_dict({"label": [1, -1, 0]}), np.array([1, 1, 1])) == {"accuracy": 0.5}


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


def test_diagnostics_equal_scikit_learn():
    """Gender parity is the accuracy of the predictions for one pronoun as labels of those for the other."""
    rng = random.Random(0)
    labels = [rng.randrange(2) for _ in range(200)]
    predictions = [label if rng.random() < 0.7 else 1 - label for label in labels]
    found = compute_metric("super_glue", "axb", predictions=predictions, references=labels)
    assert found == pytest.approx({"matthews_correlation": matthews_corrcoef(labels, predictions)})
    rows = list(range(200))
    rng.shuffle(rows)  # the two rows of pair n are n and n + 100
    shuffled = {"predictions": [predictions[n] for n in rows], "references": [labels[n] for n in rows]}
    found = compute_metric("super_glue", "axg", **shuffled, pairs=[str(n % 100) for n in rows])
    parity = accuracy_score(predictions[:100], predictions[100:])
    assert found == pytest.approx({"accuracy": accuracy_score(labels, predictions), "gender_parity": parity})
    assert 0.3 < parity < 0.7
