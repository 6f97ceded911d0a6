"""Labels of rows as targets of a model: names, numbers, lists of them, or numbers to predict."""

from collections.abc import Sequence
from math import isfinite, isnan, nan
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Value
from transformers.utils import logging

from hf_deberta.training.data_files import Source, require_columns
from hf_deberta.training.errors import InputError, RowError, short_repr

NAMES_SHOWN = 10  # in messages that list columns or labels

logger = logging.get_logger(__name__)


def listed(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def as_number(label: Any) -> float:
    """Return a label as a number; NaN if it is none."""
    try:
        return float(label)
    except (TypeError, ValueError, OverflowError):
        return nan


def is_empty(value: Any) -> bool:
    """True for null, NaN and blank names."""
    if isinstance(value, float):
        return isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def is_label_list(feature: Any) -> bool:
    element = getattr(feature, "feature", None)
    return isinstance(element, Value | ClassLabel) and not element.dtype.startswith(("float", "bool"))


def require_label_format(rows: Dataset, column: str, split: str, multi_label: bool = False) -> None:
    """Require one label in each row, or a list of labels in a multi-label task."""
    feature = rows.features[column]
    if multi_label:
        is_right = is_label_list(feature) or getattr(feature, "dtype", None) == "null"
        rule = "a list of labels, also for one label or none"
    else:
        is_right = isinstance(feature, Value | ClassLabel)
        rule = "one label; for several, lists of names or integers, without --task_name and --do_regression"
    if not is_right:
        value = short_repr(rows[0][column])
        raise InputError(f"each row needs {rule}; the {split} rows have {value} in row 1 of the column {column!r}")


def require_no_missing_labels(is_missing: list[bool], source: Source, column: str) -> None:
    """Require a label in every row. In test splits missing labels are allowed, with a warning if only some are."""
    missing = [row for row, value in enumerate(is_missing) if value]
    text = f"no label in the column {column!r}"
    if missing and not source.split.startswith("test"):
        raise RowError(dict.fromkeys(missing, f"{text}: add labels, or remove these rows"))
    if 0 < len(missing) < len(is_missing):
        logger.warning(f"{source(missing)}: {text}: the predictions are written without metrics")


class NumberReader:
    """Reads the labels of a regression."""

    rule = "the labels of a regression are numbers"

    def is_missing(self, label: Any) -> bool:
        return is_empty(label)

    def read(self, label: Any) -> float | None:
        """Return a label as a number; None if it is none, or not finite."""
        return number if isfinite(number := as_number(label)) else None

    def spell(self, label: Any) -> str:
        return short_repr(label)


class LabelReader:
    """Reads labels, which are names or numbers, as their numbers in the order of a task.

    Args:
        labels: the names in the order of the task.
        feature: the type of the labels. The names of a ClassLabel say what its numbers mean; other numbers are those of
            the task, unless its names are numbers themselves.
    """

    def __init__(self, labels: Sequence[str], feature: Any) -> None:
        self.by_name = {label: number for number, label in enumerate(labels)}
        self.names = getattr(feature, "names", ())
        in_any_case = {label.lower(): number for label, number in self.by_name.items()} | self.by_name
        numbers: Sequence[int | None] = [in_any_case.get(name, in_any_case.get(name.lower())) for name in self.names]
        self.names_are_known = any(number is not None for number in numbers)
        if not self.names_are_known:
            are_names = not self.names and any(isfinite(as_number(label)) for label in labels)
            numbers = range(0 if are_names else len(labels))
        by_number = {str(number): of_task for number, of_task in enumerate(numbers)}
        self.by_text = {**self.by_name, **by_number}  # as a csv file has them
        numbers_hint = f", or 0 to {len(labels) - 1}" * bool(by_number and not self.names_are_known)
        self.rule = f"known are {listed(labels)}{numbers_hint}"

    def is_missing(self, label: Any) -> bool:
        """Return whether a label is null, NaN, blank, or -1 where that hides it, as in GLUE."""
        return is_empty(label) or (label == -1 and bool(self.names or "-1" not in self.by_name))

    def read(self, label: Any) -> int | None:
        """Return the number of a label; None if it is empty, or the task does not have it."""
        is_truth = isinstance(label, bool) and len(self.by_name) == 2
        if is_truth or (isinstance(label, float) and label.is_integer()):  # decimals, if one is missing
            return self.by_text.get(str(label), self.by_text.get(str(int(label))))
        text = str(label)
        return None if is_empty(label) else self.by_text.get(text, self.by_text.get(text.strip()))

    def spell(self, label: Any) -> str:
        return short_repr(self.names[label] if self.names_are_known else label)


def read_targets(
    rows: Dataset,
    source: Source,
    labels: tuple[str, ...] | None,
    column: str = "label",
    multi_label: bool = False,
    flag: str = "",
) -> np.ndarray | None:
    """Return the targets of all rows in the order `labels`; None without labels.

    A target is the label's number, -1 if missing, a float (regression), or 0.0 or 1.0 for each label (multi-label).

    Args:
        flag: the one that names the column, if a user can choose it.
    """
    is_test = source.split.startswith("test")
    if column not in rows.column_names and is_test:
        logger.warning(
            f"The {source.split} rows have no column {column!r}: the predictions are written without metrics"
        )
        return None
    require_columns(rows, [column], source.split, f": name the column of labels with {flag}" * bool(flag))
    require_label_format(rows, column, source.split, multi_label)
    feature, values = rows.features[column], rows[column][:]
    reader = NumberReader() if labels is None else LabelReader(labels, getattr(feature, "feature", feature))
    is_missing = list(map(reader.is_missing, values))
    require_no_missing_labels(is_missing, source, column)
    lists = [
        [] if missing else value if multi_label else [value] for value, missing in zip(values, is_missing, strict=True)
    ]
    targets = [list(map(reader.read, row)) for row in lists]
    if unknown := {row: lists[row][of_row.index(None)] for row, of_row in enumerate(targets) if None in of_row}:
        way_out = f"name another with {flag}" if flag else "remove the column"
        hint = f"; to predict without these labels, {way_out}" * is_test
        spelled = listed(sorted(set(map(reader.spell, unknown.values()))))
        text = f"unknown labels in the column {column!r}: {spelled}; {reader.rule}{hint}"
        raise RowError(dict.fromkeys(unknown, text))
    if multi_label:
        places = [[number in row for number in range(len(labels or ()))] for row in targets]
        return None if None in values else np.array(places, np.float32)
    if labels is not None:
        return np.array([row[0] if row else -1 for row in targets])
    numbers = None if any(is_missing) else np.array(targets, np.float32)[:, 0]
    is_hidden = is_test and numbers is not None and (numbers == -1).all()  # as GLUE hides all numbers of a split
    return None if is_hidden else numbers
