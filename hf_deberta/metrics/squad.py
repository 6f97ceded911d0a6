"""The official metrics of SQuAD 1.1 in percent: exact match, and F1 of the words."""

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import List, Value

from hf_deberta.metrics.evaluate_metric import TEXT, evaluate_metric

Rows = Sequence[dict[str, Any]]


def squad(predictions: Rows, references: Rows) -> dict[str, float]:
    """Return exact match and F1 of SQuAD 1.1, from rows.

    Args:
        predictions: {"id", "prediction_text"} of each question.
        references: {"id", "answers": {"text": [...], "answer_start": [...]}}, in any order.

    >>> answers = {"text": ["Panthers", "Carolina Panthers"], "answer_start": [9, 0]}
    >>> squad([{"id": "1", "prediction_text": "the Panthers"}], [{"id": "1", "answers": answers}])
    {'exact_match': 100.0, 'f1': 100.0}
    """
    return squad_scores(*texts_by_id(predictions, references))


def texts_by_id(predictions: Rows, references: Rows) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the predicted answer and the gold answers of each question."""
    texts = {row["id"]: row["prediction_text"] for row in predictions}
    return texts, {row["id"]: row["answers"]["text"] for row in references}


def normalize_answer(answer: str) -> str:
    """Return the answer in lower case, without ASCII punctuation and articles, with single spaces.

    >>> normalize_answer("The  Panthers' defense!")
    'panthers defense'
    """
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def compute_exact(prediction: str, gold: str) -> float:
    return float(normalize_answer(prediction) == normalize_answer(gold))


def compute_f1(prediction: str, gold: str, if_both_empty: float = 0.0) -> float:
    """Return the F1 of the words; `if_both_empty` is 0 in SQuAD 1.1 and 1 in 2.0."""
    words, gold_words = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not words and not gold_words:
        return if_both_empty
    shared = sum((Counter(words) & Counter(gold_words)).values())
    return 2 * shared / (len(words) + len(gold_words))


def best_scores(
    texts: Mapping[Any, str], golds: Mapping[Any, Iterable[str]], if_both_empty: float = 0.0
) -> tuple[dict[Any, float], ...]:
    """Return exact match and F1 of each predicted answer by question id: the best over the gold answers."""
    require_each_question(texts, golds, "prediction")
    f1 = partial(compute_f1, if_both_empty=if_both_empty)
    return tuple(
        {x: max((score(texts[x], gold) for gold in answers), default=0.0) for x, answers in golds.items()}
        for score in (compute_exact, f1)
    )


def squad_scores(predictions: Mapping[str, str], golds: Mapping[str, list[str]]) -> dict[str, float]:
    """Return the averages over questions in percent, from the predicted answer and the gold answers by question id."""
    exact, f1 = best_scores(predictions, golds)
    return {"exact_match": 100 * sum(exact.values()) / len(golds), "f1": 100 * sum(f1.values()) / len(golds)}


def require_each_question(values: Collection, golds: Collection, name: str) -> None:
    missing = [row_id for row_id in golds if row_id not in values]
    if missing:
        raise ValueError(f"{len(missing)} of {len(golds)} questions have no {name}, the first is {missing[0]!r}")


QUESTION = {"id": TEXT, "answers": {"text": List(TEXT), "answer_start": List(Value("int32"))}}
Squad = evaluate_metric(squad, default={"predictions": {"id": TEXT, "prediction_text": TEXT}, "references": QUESTION})
