"""GLUE, and any classification or regression of texts and pairs of texts: columns, labels, metrics, submission files.

    python -m hf_deberta.fine_tuning.tasks.glue submission.zip runs/*

makes the zip that gluebenchmark.com takes from the files that `run_glue.py --do_predict` has written.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Value
from scipy.special import expit
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.tasks.submission import command, numbered, write_lines
from hf_deberta.runs.data_files import require_columns

ENTAILMENT = ("entailment", "neutral", "contradiction")
PAIR = ("entailment", "not_entailment")
SEVERAL = ("f1_micro", "f1_macro", "accuracy")  # metrics where a row has a list of labels

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Task:
    """A task of sentences or pairs; `labels` are None for a regression."""

    columns: tuple[str, ...]
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...]  # the first decides which model is best
    files: dict[str, str] = field(default_factory=dict)  # of a submission, by split
    named: bool = False  # whether a submission names labels, not numbers them
    several: bool = False  # whether a row has a list of labels, which may be empty


TASKS = {
    "cola": Task(("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",), {"test": "CoLA.tsv"}),
    "sst2": Task(("sentence",), ("negative", "positive"), ("accuracy",), {"test": "SST-2.tsv"}),
    "mrpc": Task(
        ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1"), {"test": "MRPC.tsv"}
    ),
    "stsb": Task(("sentence1", "sentence2"), None, ("pearson", "spearmanr"), {"test": "STS-B.tsv"}),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1"), {"test": "QQP.tsv"}),
    "mnli": Task(
        ("premise", "hypothesis"),
        ENTAILMENT,
        ("accuracy",),
        {"test": "MNLI-m.tsv", "test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
        named=True,
    ),
    "qnli": Task(("question", "sentence"), PAIR, ("accuracy",), {"test": "QNLI.tsv"}, named=True),
    "rte": Task(("sentence1", "sentence2"), PAIR, ("accuracy",), {"test": "RTE.tsv"}, named=True),
    "wnli": Task(("sentence1", "sentence2"), ("not_entailment", "entailment"), ("accuracy",), {"test": "WNLI.tsv"}),
    "ax": Task(("premise", "hypothesis"), ENTAILMENT, ("matthews_correlation",), {"test": "AX.tsv"}, named=True),
}
SUBMISSION = [file for task in TASKS.values() for split, file in task.files.items() if split != "test_matched"]


def infer_task(
    splits: dict[str, Dataset],
    label_column: str = "label",
    regression: bool | None = None,
    columns: list[str] | None = None,
) -> Task:
    """The task of somebody's own rows: one or two columns of text, and labels as they are found, if there are any.

    Args:
        columns: of text; by default sentence1 and sentence2, or the first two that hold text.
        regression: whether labels are numbers to come near to; by default, whether they are floats.
    """
    rows = splits.get("train", next(iter(splits.values())))
    texts = columns or [name for name, kind in rows.features.items() if name != label_column and _is_text(kind)]
    texts = [name for name in ("sentence1", "sentence2") if name in texts and columns is None] or texts[:2]
    if not texts:
        raise ValueError(f"there is no column of text among {', '.join(rows.column_names)}")
    if label_column not in rows.column_names:
        return Task(tuple(texts), (), ("accuracy",))
    split, kind = "train" if "train" in splits else next(iter(splits)), rows.features[label_column]
    if _is_list(kind) and not regression:
        return Task(tuple(texts), _names(kind.feature, _listed(rows, label_column, split)), SEVERAL, several=True)
    require_one_label(rows, label_column, split)
    if regression or (regression is None and getattr(kind, "dtype", "").startswith("float")):
        return Task(tuple(texts), None, ("pearson", "spearmanr"))
    return Task(tuple(texts), _names(kind, rows[label_column]), ("accuracy", "f1"))


def _names(kind: Any, values: Iterable) -> tuple[str, ...]:
    """Of the labels, in order; numbers from 0 on are called LABEL_0 and so on."""
    if hasattr(kind, "names"):
        return tuple(kind.names)
    found = sorted(value for value in set(values) if value is not None)
    from_zero = all(type(value) is not float for value in found) and found == list(range(len(found)))  # or false, true
    return tuple(f"LABEL_{value:d}" if from_zero else str(value) for value in found)


def _is_list(kind: Any) -> bool:
    """Whether a row has a list of names or whole numbers."""
    of = getattr(kind, "feature", None)
    return isinstance(of, Value | ClassLabel) and not of.dtype.startswith(("float", "bool"))


def _listed(rows: Dataset, column: str, split: str) -> list:
    lists = [row for row in rows[column] if row]
    found = [value for row in lists for value in row]
    if set(found) == {0, 1} and (twice := [row for row in lists if len(set(row)) < len(row)]):
        raise ValueError(
            f"the {split} rows have {twice[0]!r} in the column {column!r}, a 0 or 1 for each label as it seems: put "
            "there the names or numbers of the labels that a row has"
        )
    return found


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", None) in ("string", "large_string")


def require_one_label(rows: Dataset, column: str, split: str) -> None:
    if not isinstance(rows.features[column], Value | ClassLabel):
        raise ValueError(
            f"a row has one label, a number or a name, and the {split} rows have {rows[0][column]!r} in the column "
            f"{column!r}: several are a list of names or whole numbers, in rows of your own (run_glue.py without "
            "--task_name and --do_regression)"
        )


def require_list_of_labels(rows: Dataset, column: str, split: str) -> None:
    kind = rows.features[column]
    if not _is_list(kind) and getattr(kind, "dtype", None) != "null":
        raise ValueError(
            f"a row has a list of labels in this task, and the {split} rows have {rows[0][column]!r} in the column "
            f"{column!r}: write a list there, also of one label or none"
        )


def require_labels(missing: list[bool], split: str) -> None:
    """Only test rows may have none."""
    if any(missing) and not split.startswith("test"):
        raise ValueError(f"{sum(missing)} of {len(missing)} {split} rows have no label")


def require_texts(rows: Dataset, columns: Iterable[str], split: str) -> None:
    """Numbers will do: a csv column of numbers alone is read as numbers."""
    require_columns(rows, list(columns), split)
    for name in columns:
        if not isinstance(rows.features[name], Value | ClassLabel):
            raise ValueError(f"the {split} rows hold {rows[0][name]!r} in the column {name!r}, where a text should be")


def numbered_labels(
    rows: Dataset, labels: tuple[str, ...], split: str, column: str = "label", several: bool = False
) -> Callable:
    """From a label as it stands in the rows, a number or a name, to its number. Only test rows may have none (-1)."""
    (require_list_of_labels if several else require_one_label)(rows, column, split)
    kind, values = rows.features[column], rows[column]
    kind = getattr(kind, "feature", kind)
    by_number = hasattr(kind, "names") or not any(label.lstrip("-").isdigit() for label in labels)
    numbers = {label: number for number, label in enumerate(labels)}
    names = kind.names if hasattr(kind, "names") and set(kind.names) == set(labels) else None

    def number(value: Any) -> int | None:
        if names is not None and isinstance(value, int) and 0 <= value < len(names):
            return numbers[names[value]]
        if by_number and isinstance(value, int):  # true and false are 1 and 0
            return int(value) if 0 <= value < len(labels) else None
        return numbers.get(str(value))

    missing = [value is None or (value == -1 and "-1" not in numbers) for value in values]
    require_labels(missing, split)
    given = [value for value, none in zip(values, missing, strict=True) if not none]
    given = [value for row in given for value in row] if several else given
    unknown = {value for value in given if number(value) is None}
    if unknown:
        raise ValueError(
            f"the {split} rows have labels that are not known: {', '.join(map(repr, sorted(unknown, key=str)))}; "
            f"known are {', '.join(labels)}" + (f", or 0 to {len(labels) - 1}" if by_number else "")
        )
    return lambda value: -1 if value is None or number(value) is None else number(value)


def targets(
    rows: Dataset, split: str, task: Task, labels: tuple[str, ...] | None, column: str
) -> Callable[[Any], int | float | list[float]] | None:
    """From a row's label to what the model is to say: a number, or 0 or 1 for each label; None if it is not told."""
    if column not in rows.column_names or task.labels == ():
        return None
    missing = [value is None for value in rows[column]]
    if task.labels is None:
        require_one_label(rows, column, split)
        require_labels(missing, split)
        return None if any(missing) else float
    number = numbered_labels(rows, task.labels, split, column, task.several)
    order = [*map(labels.index, task.labels), -1]  # where -1 is -1
    if not task.several:
        return lambda value: order[number(value)]
    if any(missing):
        return None

    def each(values: list) -> list[float]:
        found = {order[number(value)] for value in values}
        return [float(place in found) for place in range(len(labels))]

    return each


def encode(
    rows: Dataset,
    split: str,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    labels: tuple[str, ...] | None,
    label_column: str = "label",
    mapping: dict[str, Any] | None = None,
    padding: bool = False,
) -> Dataset:
    """Rows as inputs of the model: `input_ids`, `attention_mask`, and `labels`.

    Args:
        labels: in the model's order.
        mapping: options of `Dataset.map`.
    """
    require_texts(rows, task.columns, split)
    target = targets(rows, split, task, labels, label_column)

    def encoded(batch: dict[str, list]) -> dict[str, list]:
        texts = [["" if text is None else str(text) for text in batch[name]] for name in task.columns]
        found = dict(tokenizer(*texts, truncation=True, max_length=length, padding="max_length" if padding else False))
        if target is not None:
            found["labels"] = [target(value) for value in batch[label_column]]
        return found

    found = rows.map(encoded, remove_columns=rows.column_names, **mapping or {"batched": True})
    warn_of_cut_inputs(found, split, length)
    return found


def warn_of_cut_inputs(rows: Dataset, split: str, length: int) -> None:
    """Rows of just the greatest length were cut, or all but."""
    if "attention_mask" in rows.column_names:
        full = sum(sum(mask) >= length for mask in rows["attention_mask"])
    else:
        full = sum(len(ids) >= length for ids in rows["input_ids"])
    if full:
        logger.warning(f"{split}: {full:,} of {len(rows):,} inputs fill --max_seq_length {length}, the longer were cut")


def scores(names: Iterable[str], predictions: np.ndarray, labels: np.ndarray, classes: int = 2) -> dict[str, float]:
    """Of GLUE's metrics those asked for.

    Args:
        predictions: class numbers, values of a regression, or [rows, labels] of 0 and 1, like the labels then.
        classes: how many there are; of two, F1 is that of the second, of more the mean over all.
    """
    average, f1 = "binary" if classes == 2 else "macro", partial(f1_score, zero_division=0)
    known = {
        "accuracy": lambda: (predictions == labels).reshape(len(labels), -1).all(-1).mean(),
        "f1": lambda: f1(labels, predictions, average=average),
        "f1_micro": lambda: f1(labels.ravel(), predictions.ravel()),
        "f1_macro": lambda: np.mean([*map(f1, labels.T, predictions.T)]),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "pearson": lambda: _correlation(pearsonr, predictions, labels),
        "spearmanr": lambda: _correlation(spearmanr, predictions, labels),
    }
    return {name: float(known[name]()) for name in names}


def _correlation(kind: Callable, predictions: np.ndarray, labels: np.ndarray) -> float:
    """Zero where either side is constant, for which none is defined."""
    if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return kind(predictions, labels).statistic


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[rows, labels]"""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def write_predictions(
    folder: Path, task: Task, name: str, split: str, logits: np.ndarray, labels: tuple[str, ...] | None
) -> None:
    """What the model says of each row, in the order of the rows.

    `predict_results_NAME.txt` as Transformers' example writes it, `predictions_NAME.jsonl` with probabilities, and the
    file of a GLUE submission.

    Args:
        labels: in the model's order.
    """
    suffix = split.removeprefix("test").removeprefix("_")
    name = f"{name}_{suffix}" if suffix else name
    if task.labels is None:
        said = [f"{value:.3f}" for value in logits]
        rows = [{"index": i, "prediction": float(value)} for i, value in enumerate(logits)]
        submitted = [f"{min(5.0, max(0.0, value)):.3f}" for value in logits]
    else:
        shares = (expit if task.several else probabilities)(logits.astype(np.float64))
        if task.several:
            predicted = [[label for label, share in zip(labels, row, strict=True) if share > 0.5] for row in shares]
            submitted = said = [", ".join(words) for words in predicted]
        else:
            predicted = said = [labels[number] for number in logits.argmax(-1)]
            submitted = said if task.named else [str(task.labels.index(word)) for word in said]
        rows = [
            {"index": i, "prediction": found, "probabilities": dict(zip(labels, map(float, share), strict=True))}
            for i, (found, share) in enumerate(zip(predicted, shares, strict=True))
        ]
    write_lines(folder / f"predict_results_{name}.txt", ["index\tprediction", *numbered(said)])
    write_lines(folder / f"predictions_{name}.jsonl", [json.dumps(row, ensure_ascii=False) for row in rows])
    if split in task.files:
        write_lines(folder / task.files[split], ["index\tprediction", *numbered(submitted)])


def made_up_rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Verdicts of a made-up critic for a demonstration: positive if most of what he says is."""
    rng, rows = random.Random(seed), []
    good = ["lovely", "brilliant", "warm", "witty", "moving", "fresh", "gentle", "clever", "honest", "charming"]
    bad = ["dull", "clumsy", "loud", "empty", "bitter", "stale", "hollow", "tired", "awkward", "cheap"]
    things = ["film", "story", "plot", "cast", "music", "script", "ending", "picture", "scene", "voice"]
    for _ in range(number):
        label = rng.randrange(2)
        words = rng.choices((bad, good)[label], k=2) + rng.choices((good, bad)[label], k=1)
        rng.shuffle(words)
        first, second, third = rng.sample(things, 3)
        text = f"the {first} is {words[0]} , the {second} {words[1]} and its {third} rather {words[2]}"
        rows.append({"sentence": text, "label": label})
    return rows


if __name__ == "__main__":
    command("glue", SUBMISSION)
