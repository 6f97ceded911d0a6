"""Metrics of SuperGLUE and its diagnostics, as its paper defines them, between 0 and 1."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import List

from hf_deberta.metrics import CONFIGURATIONS
from hf_deberta.metrics.evaluate_metric import NUMBER, NUMBERS, TEXT, evaluate_metric
from hf_deberta.metrics.glue import glue_scores
from hf_deberta.metrics.squad import best_scores


def super_glue(configuration: str, predictions: list, references: list, pairs: Sequence[str] = ()) -> dict[str, float]:
    """Return the metrics of a task of SuperGLUE.

    Args:
        predictions: label numbers; of multirc {"idx": {"answer", "paragraph", "question"}, "prediction": label number};
            of record {"idx": {"passage", "query"}, "prediction_text": text}.
        references: label numbers; of record {"idx": {"passage", "query"}, "answers": [text, ...]}.
        pairs: of axg, a text that the two sentences of a pair share, and no other.

    >>> super_glue("cb", predictions=[0, 0, 1, 1], references=[0, 0, 1, 2])
    {'f1': 0.5555555555555555, 'accuracy': 0.75}
    """
    if configuration == "record":
        texts = {tuple(row["idx"].values()): row["prediction_text"] for row in predictions}
        return record_scores(texts, {tuple(row["idx"].values()): row["answers"] for row in references})
    labels = np.asarray(references)
    if configuration == "multirc":
        numbers = np.array([row["prediction"] for row in predictions])
        exact_match = multirc_exact_match([row["idx"] for row in predictions], numbers == labels)
        return {"f1_a": glue_scores(["f1"], numbers, labels)["f1"], "exact_match": exact_match}
    numbers = np.asarray(predictions)
    if configuration == "axg":
        return glue_scores(["accuracy"], numbers, labels) | {"gender_parity": gender_parity(pairs, numbers)}
    names = CONFIGURATIONS["super_glue"][configuration]
    return glue_scores(names, numbers, labels, num_labels=3)  # F1 of cb is the mean over its classes


def record_scores(texts: Mapping[Any, str], golds: Mapping[Any, list[str]]) -> dict[str, float]:
    """Return the best score over the answers, with the normalization of SQuAD, averaged over the queries.

    >>> record_scores({1: "the Rome", 2: "old Paris"}, {1: ["Rome"], 2: ["Lyon", "Paris"]})
    {'f1': 0.8333333333333333, 'exact_match': 0.5}
    """
    exact, f1 = best_scores(texts, golds)
    return {"f1": float(np.mean([*f1.values()])), "exact_match": float(np.mean([*exact.values()]))}


def multirc_exact_match(idx: Iterable[dict[str, int]], correct: Iterable[bool]) -> float:
    """Return the share of questions with a correct prediction for every answer."""
    questions = _group(((numbers["paragraph"], numbers["question"]) for numbers in idx), correct)
    return float(np.mean([all(answers) for answers in questions]))


def gender_parity(pairs: Iterable[str], predictions: Iterable[int]) -> float:
    """Return the share of pairs, which differ only in the gender of a pronoun, with the same prediction for both."""
    same = [len(set(of_pair)) == 1 for of_pair in _group(pairs, predictions) if len(of_pair) > 1]
    return float(np.mean(same)) if same else 1.0


def _group(keys: Iterable[Hashable], values: Iterable[Any]) -> list[list]:
    """Return the values of each key.

    >>> _group("abca", [1, 2, 3, 4])
    [[1, 4], [2], [3]]
    """
    groups: dict[Hashable, list] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return list(groups.values())


QUERY = {"passage": NUMBER, "query": NUMBER}
ANSWER = {"idx": {"answer": NUMBER, "paragraph": NUMBER, "question": NUMBER}, "prediction": NUMBER}
SuperGlue = evaluate_metric(
    super_glue,
    default=NUMBERS,
    multirc={"predictions": ANSWER, "references": NUMBER},
    record={
        "predictions": {"idx": QUERY, "prediction_text": TEXT},
        "references": {"idx": QUERY, "answers": List(TEXT)},
    },
    axg={**NUMBERS, "pairs": TEXT},
)
