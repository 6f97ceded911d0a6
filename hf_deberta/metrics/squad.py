"""The official metrics of SQuAD 1.1 in percent: exact match, and F1 of the words.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("squad"))
>>> predictions = [{"id": "1", "prediction_text": "the Panthers"}]
>>> answers = {"text": ["Panthers", "Carolina Panthers"], "answer_start": [9, 0]}
>>> metric.compute(predictions=predictions, references=[{"id": "1", "answers": answers}])
{'exact_match': 100.0, 'f1': 100.0}
"""

import re
import string
from collections import Counter
from collections.abc import Collection
from typing import Any

import datasets
import evaluate

TEXT = datasets.Value("string")
ANSWERS = {"text": datasets.List(TEXT), "answer_start": datasets.List(datasets.Value("int32"))}
QUESTION = {"id": TEXT, "answers": ANSWERS}
INPUTS = """
Args:
    predictions: {"id", "prediction_text"} of each question.
    references: {"id", "answers": {"text": [...], "answer_start": [...]}}, in any order.
"""


class Squad(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": {"id": TEXT, "prediction_text": TEXT}, "references": QUESTION})
        return evaluate.MetricInfo(__doc__ or "", citation="", features=features, inputs_description=INPUTS)

    def _compute(self, predictions: list[dict[str, Any]], references: list[dict[str, Any]]) -> dict[str, float]:
        texts = {row["id"]: row["prediction_text"] for row in predictions}
        return squad_scores(texts, {row["id"]: row["answers"]["text"] for row in references})


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


def squad_scores(predictions: dict[str, str], golds: dict[str, list[str]]) -> dict[str, float]:
    """Return exact_match and f1 of SQuAD 1.1 in percent: the best over the gold answers, averaged over questions.

    Args:
        predictions: the predicted answer by question id.
        golds: the gold answers by question id.
    """
    require_each_question(predictions, golds, "prediction")
    exact = [max((compute_exact(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    f1 = [max((compute_f1(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    return {"exact_match": 100 * sum(exact) / len(golds), "f1": 100 * sum(f1) / len(golds)}


def require_each_question(values: Collection[str], golds: Collection[str], name: str) -> None:
    missing = [row_id for row_id in golds if row_id not in values]
    if missing:
        raise ValueError(f"{len(missing)} of {len(golds)} questions have no {name}, the first is {missing[0]!r}")
