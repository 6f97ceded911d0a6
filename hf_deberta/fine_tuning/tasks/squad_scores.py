"""The official metrics of SQuAD 1.1 and 2.0: exact match, F1 of the words, and the best null threshold.

>>> squad_scores({"q1": "the Panthers"}, {"q1": ["Panthers", "Carolina Panthers"]})
{'exact_match': 100.0, 'f1': 100.0}
"""

import re
import string
from collections import Counter
from collections.abc import Collection

METRICS = ("f1", "exact_match")  # SQuAD 1.1
METRICS_V2 = ("f1", "exact", "HasAns_f1", "HasAns_exact", "NoAns_f1", "NoAns_exact", "best_f1", "best_exact")


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
    _require_each_question(predictions, golds, "prediction")
    exact = [max((compute_exact(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    f1 = [max((compute_f1(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    return {"exact_match": 100 * sum(exact) / len(golds), "f1": 100 * sum(f1) / len(golds)}


def squad_v2_scores(
    texts: dict[str, str],
    golds: dict[str, list[str]],
    null_odds: dict[str, float] | None = None,
    threshold: float = 0.0,
) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0 in percent, under their official names.

    Args:
        texts: the predicted answer by question id.
        golds: the gold answers by question id; empty if the question has none.
        null_odds: a score that grows with the odds of "no answer". Above `threshold` the prediction is empty. Adds
            best_exact, best_f1 and their thresholds, the best for these questions.
    """
    _require_each_question(texts, golds, "prediction")
    answerable = {x: bool(answers) for x, answers in golds.items()}
    golds = {x: [answer for answer in answers if normalize_answer(answer)] or [""] for x, answers in golds.items()}
    answer_scores = {
        "exact": {x: max(compute_exact(texts[x], gold) for gold in answers) for x, answers in golds.items()},
        "f1": {
            x: max(compute_f1(texts[x], gold, if_both_empty=1.0) for gold in answers) for x, answers in golds.items()
        },
    }
    scores = answer_scores
    if null_odds is not None:
        _require_each_question(null_odds, golds, "null odds")
        scores = {
            name: {x: s if null_odds[x] <= threshold else float(not answerable[x]) for x, s in by_id.items()}
            for name, by_id in answer_scores.items()
        }
    metrics = _averages(scores, list(golds), "")
    for prefix, has_answer in {"HasAns_": True, "NoAns_": False}.items():
        if ids := [x for x in golds if answerable[x] == has_answer]:
            metrics |= _averages(scores, ids, prefix)
    if null_odds is not None:
        for name, by_id in answer_scores.items():
            best, best_at = best_threshold(texts, by_id, null_odds, answerable)
            metrics |= {f"best_{name}": best, f"best_{name}_thresh": best_at}
    return metrics


def _averages(scores: dict[str, dict[str, float]], ids: list[str], prefix: str) -> dict[str, float]:
    averages = {f"{prefix}{name}": 100 * sum(by_id[x] for x in ids) / len(ids) for name, by_id in scores.items()}
    return averages | {f"{prefix}total": len(ids)}


def best_threshold(
    texts: dict[str, str], scores: dict[str, float], null_odds: dict[str, float], answerable: dict[str, bool]
) -> tuple[float, float]:
    """Return the best score in percent over all thresholds on the null odds, and that threshold.

    Starts with no question answered, then answers them in the order of their odds. If answering none is best, the
    threshold is 0, as in the official script.
    """
    score: float = sum(not has_answer for has_answer in answerable.values())
    best, threshold = score, 0.0
    for x in sorted(answerable, key=null_odds.__getitem__):
        score += scores[x] if answerable[x] else -bool(texts[x])
        if score > best:
            best, threshold = score, null_odds[x]
    return 100 * best / len(answerable), threshold


def _require_each_question(values: Collection[str], golds: Collection[str], name: str) -> None:
    missing = [row_id for row_id in golds if row_id not in values]
    if missing:
        raise ValueError(f"{len(missing)} of {len(golds)} questions have no {name}, the first is {missing[0]!r}")
