"""Metrics of SuperGLUE and its diagnostics, as its paper defines them, between 0 and 1.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("super_glue"), "cb")
>>> metric.compute(predictions=[0, 0, 1, 1], references=[0, 0, 1, 2])
{'f1': 0.5555555555555555, 'accuracy': 0.75}
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score, matthews_corrcoef

from hf_deberta.metrics import CONFIGURATIONS, require_configuration
from hf_deberta.metrics.squad import compute_exact, compute_f1

NUMBER, TEXT = datasets.Value("int64"), datasets.Value("string")
NUMBERS = {"predictions": NUMBER, "references": NUMBER}
MULTIRC_IDX = {"answer": NUMBER, "paragraph": NUMBER, "question": NUMBER}
RECORD_IDX = {"passage": NUMBER, "query": NUMBER}
FEATURES: dict[str, dict[str, Any]] = {
    "multirc": {"predictions": {"idx": MULTIRC_IDX, "prediction": NUMBER}, "references": NUMBER},
    "record": {
        "predictions": {"idx": RECORD_IDX, "prediction_text": TEXT},
        "references": {"idx": RECORD_IDX, "answers": datasets.List(TEXT)},
    },
    "axg": {**NUMBERS, "pairs": TEXT},
}
INPUTS = """
Args:
    predictions: label numbers; of multirc {"idx": {"answer", "paragraph", "question"}, "prediction": label number};
        of record {"idx": {"passage", "query"}, "prediction_text": text}.
    references: label numbers; of record {"idx": {"passage", "query"}, "answers": [text, ...]}.
    pairs: of axg, a text that the two sentences of a pair share, and no other.
"""


class SuperGlue(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        require_configuration("super_glue", self.config_name)
        features = datasets.Features(FEATURES.get(self.config_name, NUMBERS))
        return evaluate.MetricInfo(__doc__ or "", citation="", features=features, inputs_description=INPUTS)

    def _compute(self, predictions: list, references: list, pairs: list[str] | None = None) -> dict[str, float]:
        if self.config_name == "record":
            return record_scores(predictions, references)
        if self.config_name == "multirc":
            idx, predictions = [row["idx"] for row in predictions], [row["prediction"] for row in predictions]
        predicted, labels = np.asarray(predictions), np.asarray(references)
        metrics: dict[str, Callable[[], float]] = {
            "accuracy": lambda: (predicted == labels).mean(),
            "f1": lambda: f1_score(labels, predicted, average="macro", zero_division=0),
            "f1_a": lambda: f1_score(labels, predicted, zero_division=0),
            "exact_match": lambda: multirc_exact_match(idx, predicted == labels),
            "matthews_correlation": lambda: matthews_corrcoef(labels, predicted),
            "gender_parity": lambda: gender_parity(pairs or [], predicted),
        }
        return {metric: float(metrics[metric]()) for metric in CONFIGURATIONS["super_glue"][self.config_name]}


def record_scores(predictions: list[dict[str, Any]], references: list[dict[str, Any]]) -> dict[str, float]:
    """Return the best score over the answers, with the normalization of SQuAD, averaged over the queries."""
    texts = {tuple(row["idx"].values()): row["prediction_text"] for row in predictions}
    golds = {tuple(row["idx"].values()): row["answers"] for row in references}
    if missing := golds.keys() - texts.keys():
        raise ValueError(f"{len(missing)} of {len(golds)} queries have no prediction, such as {min(missing)}")
    return {
        metric: float(
            np.mean([max(map(partial(score, texts[idx]), answers), default=0.0) for idx, answers in golds.items()])
        )
        for metric, score in {"f1": compute_f1, "exact_match": compute_exact}.items()
    }


def multirc_exact_match(idx: list[dict[str, int]], correct: np.ndarray) -> float:
    """Return the share of questions with a correct prediction for every answer."""
    questions: dict[tuple, bool] = {}
    for numbers, is_correct in zip(idx, correct, strict=True):
        key = numbers["paragraph"], numbers["question"]
        questions[key] = questions.get(key, True) and bool(is_correct)
    return float(np.mean(list(questions.values())))


def gender_parity(pairs: list[str], predictions: np.ndarray) -> float:
    """Return the share of pairs, which differ only in the gender of a pronoun, with the same prediction for both."""
    by_pair: dict[str, list[int]] = {}
    for pair, prediction in zip(pairs, predictions, strict=True):
        by_pair.setdefault(pair, []).append(int(prediction))
    same = [len(set(predicted)) == 1 for predicted in by_pair.values() if len(predicted) > 1]
    return float(np.mean(same)) if same else 1.0
