"""Read a file of rows: json lines, csv, tsv or parquet, also gzipped; name the file and row of a mistake.

A function that checks rows raises `RowError`, and `input_errors` names the file:

>>> with input_errors(source_of(rows, "train")):
...     require_texts(rows, ["question"], "train")
InputError: train.jsonl, row 7: the question must be text, not null
"""

import csv
import glob
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset
from transformers.utils import logging

from hf_deberta.training.errors import InputError, RowError, input_errors, name_rows
from hf_deberta.training.file_faults import check_file, describe, file_kind, raise_fault, read_lines

BUILDERS = {"jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet", "txt": "text"}
TABLES = ("jsonl", "json", "csv", "tsv", "parquet")
CSV_OPTIONS = {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are words
OPTIONS: dict[str, dict[str, Any]] = {
    "csv": CSV_OPTIONS,
    "tsv": {**CSV_OPTIONS, "sep": "\t", "quoting": csv.QUOTE_NONE},  # quotation marks are text, as in files of GLUE
}
CHECKED = "hf_deberta_checked"
MAX_FILES_IN_MESSAGE = 3
LEFT_OUT, EXPANDED = "(left out)", "(expanded)"  # among the names of files in `info.download_checksums`

logger = logging.get_logger(__name__)


# 1. Read files


def read_table(file: str | Path, kinds: Sequence[str] = TABLES, rows_field: str | None = None) -> Dataset:
    """Read the rows of a file, gzipped or not.

    Args:
        kinds: file types to accept.
        rows_field: the field of a JSON object that holds the rows.
    """
    if file_kind(file) not in kinds and not Path(file).is_dir():
        raise InputError(f"{file} is none of {', '.join(kinds)}")
    field: dict[str, Any] = {} if rows_field is None else {"field": rows_field, "encoding": "utf-8-sig"}
    rows = load_files(file_kind(file), [str(file)], **field)
    return with_numbers(rows) if is_csv(rows) else rows


def with_numbers(rows: Dataset) -> Dataset:
    """Make numbers of the fields of a csv file, column by column, where that loses nothing: 0012 and 3.50 stay text."""
    features = rows.features.copy()
    for column in rows.column_names:
        for kind, number in (("int64", np.int64), ("float64", float)):
            with suppress(ValueError, OverflowError):  # no number, or a large one
                if all(str(number(text)) == text for text in rows[column] if text is not None):
                    features[column] = datasets.Value(kind)
                    break
    return rows if features == rows.features else rows.cast(features)


def load_files(
    kind: str, files: Sequence[str], streaming: bool = False, cache_dir: str | None = None, **options: Any
) -> Any:
    """Return the rows of files of one type as a Dataset, or as an IterableDataset if `streaming`.

    Files are checked before they are read for the first time; afterwards `datasets` has a copy of their rows. Its name
    begins with `CHECKED`, so a copy that other code has made without our check is never used. Of several files, some
    may be empty, as parts that Spark writes.
    """
    options = {"cache_dir": cache_dir, **OPTIONS.get(kind, {}), **options}
    options["data_files"] = [glob.escape(file) for file in files]  # `datasets` takes names for patterns
    checked = [file for file in files if len(files) == 1 or not Path(file).is_file() or Path(file).stat().st_size]
    with input_errors(list_files(files), Exception), _quiet_datasets():
        try:
            if BUILDERS[kind] == "csv":
                names = next(iter([read_header(file, kind) for file in checked]), [])
                options["features"] = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
            if streaming:
                rows = datasets.load_dataset(BUILDERS[kind], split="train", streaming=True, **options)
                return set_source(rows, files)
            builder = datasets.load_dataset_builder(BUILDERS[kind], CHECKED, **options)
            if not Path(builder.cache_dir).exists():
                for file in checked:
                    check_file(file)
            builder.download_and_prepare()
        except Exception:
            raise_fault(checked)
            raise
        if builder.info.splits is None or not builder.info.splits["train"].num_examples:
            raise InputError(f"{list_files(files)} has no rows")
        rows = builder.as_dataset(split="train")
    return set_source(rows, files, [len(rows)] if len(files) == 1 else ())


def read_header(file: str | Path, kind: str) -> list[str]:
    """Return the names of the columns of a csv or tsv file, as pandas gives them."""
    csv.field_size_limit(2**31 - 1)  # as large as Windows allows
    dialect = OPTIONS[kind]
    lines = csv.reader(
        map("{}\n".format, read_lines(file)), delimiter=dialect.get("sep", ","), quoting=dialect.get("quoting", 0)
    )
    header, *row = [*islice(filter(None, lines), 2)] or [[]]
    if len(set(header)) < len(header):
        raise InputError(f"{file}: the header has the column {max(header, key=header.count)!r} more than once")
    if row and len(row[0]) > len(header):
        raise InputError(f"{file}: the rows have more fields than the header")
    return [name or f"Unnamed: {number}" for number, name in enumerate(header)]


def warn_of_shared_files(files: Mapping[str, Sequence[str | Path]]) -> None:
    """Warn if a file that is trained on is also evaluated; `files` are those of each split, `train` among them."""
    train = {Path(file).resolve() for file in files.get("train", ())}
    for split, paths in files.items():
        shared = [file for file in paths if split != "train" and Path(file).resolve() in train]
        if shared:
            logger.warning(f"{list_files(shared)} is a training and a {split} file: its scores will be too high")


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Silence the logger of `datasets`, which logs the exceptions that it raises."""
    level = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)


def list_files(files: Sequence[str | Path]) -> str:
    """Return the names of the first files, for messages."""
    shown = ", ".join(map(str, files[:MAX_FILES_IN_MESSAGE]))
    return shown if len(files) <= MAX_FILES_IN_MESSAGE else f"{shown} and {len(files) - MAX_FILES_IN_MESSAGE} more"


# 2. Name the file and number of a row


def set_source(
    rows: Dataset, files: Sequence[str | Path], counts: Sequence[int] = (), expanded: bool = False
) -> Dataset:
    """Record the files that rows come from; rows made by `map`, `select` and so on keep them.

    Args:
        counts: the number of rows of each file, if the rows are those of the files, one after the other.
        expanded: several rows may be made of a row in a file.
    """
    known = dict(zip(map(str, files), counts, strict=False))
    rows.info.download_checksums = {str(file): {"rows": known.get(str(file))} for file in files}
    if expanded:
        rows.info.download_checksums[EXPANDED] = {}
    return rows


def source_files(rows: Dataset) -> list[str]:
    """Return the files, or the name of the dataset, that `set_source` recorded."""
    return list(row_counts(rows))


def row_counts(rows: Dataset) -> dict[str, int | None]:
    """Return the number of rows of each source file, None where rows of the dataset are not rows of the file."""
    sources = rows.info.download_checksums or {}  # `datasets` may have put other fields there
    return {name: source["rows"] for name, source in sources.items() if "rows" in (source or {})}


@dataclass(frozen=True)
class Source:
    """Names rows of a split for `input_errors`, as `place_of_rows` does."""

    rows: Dataset
    split: str

    def __call__(self, numbers: Sequence[int] = ()) -> str:
        return place_of_rows(self.rows, self.split, numbers)


def source_of(rows: Dataset, split: str) -> Source:
    """Return the place of rows, or of some of them, for `input_errors`."""
    return Source(rows, f"expanded {split}" if EXPANDED in (rows.info.download_checksums or {}) else split)


def place_of_rows(rows: Dataset, split: str, numbers: Sequence[int] = ()) -> str:
    """Return the file and the numbers of rows in it, counted from 1; without numbers, the files.

    Args:
        numbers: of rows of the dataset, counted from 0. If they are in several files, those in the first are named.
    """
    files = list_files(source_files(rows))
    if not numbers:
        return files
    total, numbers = len(numbers), [_number_in_files(rows, number) for number in numbers]
    before = 0
    for file, count in row_counts(rows).items():
        if count is None:
            break
        if numbers[0] < before + count:
            in_file = [number - before + 1 for number in numbers if number < before + count]
            return f"{file}, {name_rows(in_file, total)}"
        before += count
    return f"{files}, {split} {name_rows([number + 1 for number in numbers])}".removeprefix(", ")


def leave_out(rows: Dataset, numbers: Collection[int]) -> Dataset:
    """Return the other rows, which messages still number as in their files."""
    kept = rows.select([number for number in range(len(rows)) if number not in numbers])
    gone = sorted({_number_in_files(rows, number) for number in numbers} | set(left_out_rows(rows)))
    kept.info.download_checksums = {**(rows.info.download_checksums or {}), LEFT_OUT: {"numbers": gone}}
    return kept


def left_out_rows(rows: Dataset) -> list[int]:
    """Return the numbers in the files of the rows that `leave_out` has left out."""
    return (rows.info.download_checksums or {}).get(LEFT_OUT, {}).get("numbers", [])


def _number_in_files(rows: Dataset, number: int) -> int:
    for gone in left_out_rows(rows):
        number += gone <= number
    return number


def is_csv(rows: Dataset) -> bool:
    """True if the rows come from csv or tsv files."""
    files = source_files(rows)
    return bool(files) and all(file_kind(file) in ("csv", "tsv") for file in files)


# 3. Requirements on rows


def require_columns(rows: Dataset, columns: Sequence[str], split: str, hint: str = "") -> None:
    """Raise an InputError that names the missing columns, if any, and ends with a hint."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"the {split} rows have no column {', '.join(map(repr, missing))}; they have "
            f"{', '.join(rows.column_names)}{hint}"
        )


def require_texts(rows: Dataset, columns: Sequence[str], split: str) -> None:
    """Require a text in each row, and warn of empty ones.

    In csv and tsv files a number is text, and an empty field, which is read as None, is an empty text.
    """
    from_csv = is_csv(rows)
    for column in columns:
        values = rows[column][:]

        def require_text(value: Any, name: str = column) -> None:
            if not isinstance(value, str) and not (from_csv and not isinstance(value, list | dict)):
                raise InputError(f"the {name} must be text, not {describe(value)}")

        check_rows(values, require_text)
        if empty := [row for row, value in enumerate(values) if not csv_text(value).strip()]:
            logger.warning(
                f"{len(empty):,} of {len(rows):,} {split} rows have an empty {column}: "
                f"{place_of_rows(rows, split, empty)}"
            )


def check_rows(rows: Iterable[Any], check: Callable[[Any], object]) -> None:
    """Call `check` with each row; raise its InputErrors as one RowError."""
    problems = {}
    for number, row in enumerate(rows):
        try:
            check(row)
        except InputError as error:
            problems[number] = str(error)
    if problems:
        raise RowError(problems)


def csv_text(value: Any) -> str:
    """Return a text that `require_texts` has checked: in csv files an empty one is None, and digits are a number."""
    return "" if value is None else str(value)
