"""The official metrics of SQuAD 2.0 in percent, with the best threshold on the odds of "no answer"."""

from datasets import Value

from hf_deberta.metrics.evaluate_metric import TEXT, evaluate_metric
from hf_deberta.metrics.squad import QUESTION, Rows, best_scores, normalize_answer, require_each_question, texts_by_id


def squad_v2(predictions: Rows, references: Rows, no_answer_threshold: float = 1.0) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0, from rows.

    Args:
        predictions: {"id", "prediction_text", "no_answer_probability"} of each question. The text is the best answer,
            also where no answer is more likely; instead of a probability, any score that grows with it will do.
        references: {"id", "answers": {"text": [...], "answer_start": [...]}}, with empty lists if there is no answer.
        no_answer_threshold: above it, no answer is predicted.

    >>> prediction = {"id": "1", "prediction_text": "Rome", "no_answer_probability": 0.1}
    >>> squad_v2([prediction], [{"id": "1", "answers": {"text": ["Rome"], "answer_start": [0]}}])["exact"]
    100.0
    """
    null_odds = {row["id"]: row["no_answer_probability"] for row in predictions}
    return squad_v2_scores(*texts_by_id(predictions, references), null_odds, no_answer_threshold)


def squad_v2_scores(
    texts: dict[str, str], golds: dict[str, list[str]], null_odds: dict[str, float], threshold: float
) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0 in percent, under their official names.

    Args:
        texts: the best answer by question id.
        golds: the gold answers by question id; empty if the question has none.
        null_odds: a score that grows with the odds of "no answer". Above `threshold` no answer is predicted. best_exact
            and best_f1 have the thresholds that are the best for these questions.
    """
    require_each_question(null_odds, golds, "null odds")
    answerable = {x: bool(answers) for x, answers in golds.items()}
    golds = {x: [answer for answer in answers if normalize_answer(answer)] or [""] for x, answers in golds.items()}
    answer_scores = dict(zip(("exact", "f1"), best_scores(texts, golds, if_both_empty=1.0), strict=True))
    scores = {
        name: {x: s if null_odds[x] <= threshold else float(not answerable[x]) for x, s in by_id.items()}
        for name, by_id in answer_scores.items()
    }
    metrics = _averages(scores, list(golds), "")
    for prefix, has_answer in {"HasAns_": True, "NoAns_": False}.items():
        if ids := [x for x in golds if answerable[x] == has_answer]:
            metrics |= _averages(scores, ids, prefix)
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

    Starts with no question answered, then answers them in the order of their odds, equal odds in the order of
    `null_odds`. If answering none is best, the threshold is 0. Both as in the official script.
    """
    score: float = sum(not has_answer for has_answer in answerable.values())
    best, threshold = score, 0.0
    for x in sorted((x for x in null_odds if x in answerable), key=null_odds.__getitem__):
        score += scores[x] if answerable[x] else -bool(texts[x])
        if score > best:
            best, threshold = score, null_odds[x]
    return 100 * best / len(answerable), threshold


PREDICTION = {"id": TEXT, "prediction_text": TEXT, "no_answer_probability": Value("float64")}
SquadV2 = evaluate_metric(squad_v2, default={"predictions": PREDICTION, "references": QUESTION})
