"""The official scores of SQuAD 1.1 and 2.0: exact match and F1 of the words, and the best null threshold.

>>> squad_scores({"q1": "the Panthers"}, {"q1": ["Panthers", "Carolina Panthers"]})
{'exact_match': 100.0, 'f1': 100.0}
"""

import re
import string
from collections import Counter
from typing import Any

METRICS = ("f1", "exact_match")  # of version 1.1, and of 2.0:
METRICS_V2 = ("f1", "exact", "HasAns_f1", "HasAns_exact", "NoAns_f1", "NoAns_exact", "best_f1", "best_exact")


def normalized(answer: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces.

    >>> normalized("The  Panthers' defense!")
    'panthers defense'
    """
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(prediction: str, gold: str) -> float:
    return float(normalized(prediction) == normalized(gold))


def f1(prediction: str, gold: str, nothing: float = 0.0) -> float:
    """Overlap of the words; `nothing` where neither side has any, which is 0 in version 1.1 and 1 in 2.0."""
    words, gold_words = normalized(prediction).split(), normalized(gold).split()
    if not words and not gold_words:
        return nothing
    shared = sum((Counter(words) & Counter(gold_words)).values())
    return 2 * shared / (len(words) + len(gold_words))


def squad_scores(predictions: dict[str, str], golds: dict[str, list[str]]) -> dict[str, float]:
    """exact_match and f1 of SQuAD 1.1 in percent: the best over the gold answers, averaged over the questions."""
    _check_answered(predictions, golds)
    exact = [max((exact_match(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    overlap = [max((f1(predictions[x], gold) for gold in texts), default=0.0) for x, texts in golds.items()]
    return {"exact_match": 100 * sum(exact) / len(golds), "f1": 100 * sum(overlap) / len(golds)}


def squad_v2_scores(
    texts: dict[str, str],
    golds: dict[str, list[str]],
    null_odds: dict[str, float] | None = None,
    threshold: float = 0.0,
) -> dict[str, float]:
    """The scores of SQuAD 2.0 in percent, under their official names.

    Above `threshold`, null odds (any number that grows with "no answer") make an answer of `texts` empty. With them
    come the thresholds that would have been best for these questions: best_exact_thresh, best_f1_thresh.
    """
    _check_answered(texts, golds)
    if null_odds is not None:
        _check_answered(null_odds, golds, "null odds")
    answerable = {x: bool(answers) for x, answers in golds.items()}
    golds = {x: [answer for answer in answers if normalized(answer)] or [""] for x, answers in golds.items()}
    raw = {
        "exact": {x: max(exact_match(texts[x], gold) for gold in answers) for x, answers in golds.items()},
        "f1": {x: max(f1(texts[x], gold, nothing=1.0) for gold in answers) for x, answers in golds.items()},
    }
    scores = raw
    if null_odds is not None:
        scores = {
            name: {x: s if null_odds[x] <= threshold else float(not answerable[x]) for x, s in of.items()}
            for name, of in raw.items()
        }
    found = _averages(scores, list(golds), "")
    for prefix, kept in {"HasAns_": True, "NoAns_": False}.items():
        some = [x for x in golds if answerable[x] == kept]
        if some:
            found |= _averages(scores, some, prefix)
    if null_odds is not None:
        for name, of in raw.items():
            found[f"best_{name}"], found[f"best_{name}_thresh"] = best_threshold(texts, of, null_odds, answerable)
    return found


def _averages(scores: dict[str, dict[str, float]], ids: list[str], prefix: str) -> dict[str, float]:
    averages = {f"{prefix}{name}": 100 * sum(of[x] for x in ids) / len(ids) for name, of in scores.items()}
    return averages | {f"{prefix}total": len(ids)}


def best_threshold(
    texts: dict[str, str], scores: dict[str, float], null_odds: dict[str, float], answerable: dict[str, bool]
) -> tuple[float, float]:
    """The best score in percent that any threshold on the null odds gives, and that threshold.

    From "never answer" on, questions are answered in the order of their odds. Where never to answer is best, the
    threshold is 0, officially.
    """
    score = best = sum(not has for has in answerable.values())
    threshold = 0.0
    for x in sorted(answerable, key=null_odds.__getitem__):
        score += scores[x] if answerable[x] else -bool(texts[x])
        if score > best:
            best, threshold = score, null_odds[x]
    return 100 * best / len(answerable), threshold


def _check_answered(found: dict[str, Any], golds: dict[str, list[str]], what: str = "prediction") -> None:
    missing = [row_id for row_id in golds if row_id not in found]
    if missing:
        raise ValueError(f"{len(missing)} of {len(golds)} questions have no {what}, the first is {missing[0]!r}")
