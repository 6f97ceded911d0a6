"""Read a file of rows: json lines, csv, tsv or parquet, also gzipped; name file and line of a row that is wrong.

A function that checks rows raises `RowError`, and names the file by `locate_errors`:

>>> with locate_errors(rows, "train"):
...     require_texts(rows, ["question"], "train")
InputError: train.jsonl, line 7: the question must be text, not null
"""

import csv
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging

from hf_deberta.runs.errors import InputError
from hf_deberta.runs.file_faults import (
    check_file,
    check_header,
    count_rows,
    explain_failure,
    file_kind,
    line_of_row,
    one_line,
    require_file,
    shorten,
    type_name,
)

BUILDERS = {"jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet", "txt": "text"}
TABLES = ("jsonl", "json", "csv", "tsv", "parquet")
CSV_OPTIONS = {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are words
OPTIONS: dict[str, dict[str, Any]] = {
    "csv": CSV_OPTIONS,
    "tsv": {**CSV_OPTIONS, "sep": "\t", "quoting": csv.QUOTE_NONE},  # quotation marks are text, as in files of GLUE
}
IMPLICIT_INDEX = "__index_level_0__"  # pandas: every row of a csv has more fields than the header
CHECKED = "hf_deberta_checked"
MAX_FILES_IN_MESSAGE = 3

logger = logging.get_logger(__name__)


class RowError(InputError):
    """A mistake in the row with this number, counted from 0; `locate_errors` tells its file and line."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(row, problem)
        self.row, self.problem = row, problem

    def __str__(self) -> str:
        return f"row {self.row + 1}: {self.problem}"


# 1. Read files


def read_table(file: str | Path, kinds: Sequence[str] = TABLES, rows_field: str | None = None) -> Dataset:
    """Read the rows of a file, gzipped or not.

    Args:
        kinds: file types to accept.
        rows_field: the field of a JSON object that holds the rows.
    """
    kind = file_kind(file)
    if kind not in kinds and not Path(file).is_dir():
        raise InputError(f"{file} is none of {', '.join(kinds)}")
    require_file(file)
    field: dict[str, Any] = {} if rows_field is None else {"field": rows_field, "encoding": "utf-8-sig"}
    rows = load_files(kind, [str(file)], **field)
    if not len(rows):
        raise InputError(f"{file} has no rows")
    if kind in ("csv", "tsv"):
        check_header(file, rows.column_names)
    if kind == "tsv" and any(name.startswith('"') for name in rows.column_names):
        raise InputError(
            f"{file} has columns in quotation marks ({', '.join(rows.column_names)}), and a tsv is read literally: "
            "remove them, or write the file as csv or jsonl"
        )
    return rows


def load_files(
    kind: str, files: Sequence[str], streaming: bool = False, cache_dir: str | None = None, **options: Any
) -> Any:
    """Return the rows of files of one type as a Dataset, or as an IterableDataset if `streaming`.

    Files are checked before they are read for the first time; afterwards `datasets` has a copy of their rows. Its name
    begins with `CHECKED`, so a copy that other code has made without our check is never used.
    """
    options = {"cache_dir": cache_dir, **OPTIONS.get(kind, {}), **options}
    options["data_files"] = [glob.escape(file) for file in files]  # `datasets` takes names for patterns
    with explain_bad_files(files), _quiet_datasets():
        if streaming:
            return datasets.load_dataset(BUILDERS[kind], split="train", streaming=True, **options)
        builder = datasets.load_dataset_builder(BUILDERS[kind], CHECKED, **options)
        if not Path(builder.cache_dir).exists():
            for file in without_empty_parts(files):
                check_file(file)
        builder.download_and_prepare()
        if builder.info.splits is None or not builder.info.splits["train"].num_examples:
            raise InputError(f"{list_files(files)} has no rows")
        rows = builder.as_dataset(split="train")
        names = rows.column_names
        if kind in ("csv", "tsv") and (IMPLICIT_INDEX in names or any(re.search(r"\.\d+$", name) for name in names)):
            for file in files:
                if (fault := explain_failure(file)) is not None:
                    raise fault
    return set_source(rows, files)


def warn_of_shared_files(files: Mapping[str, Sequence[str | Path]]) -> None:
    """Warn if a file that is trained on is also evaluated; `files` are those of each split, `train` among them."""
    train = {Path(file).resolve() for file in files.get("train", ())}
    for split, paths in files.items():
        shared = [file for file in paths if split != "train" and Path(file).resolve() in train]
        if shared:
            logger.warning(f"also trained on, so the scores are too good: {list_files(shared)} ({split})")


@contextmanager
def explain_bad_files(files: Sequence[str | Path]) -> Iterator[None]:
    """Raise whatever fails while files are read as an InputError, with the line at fault where the text tells it.

    `datasets`, pyarrow, pandas and gzip raise exceptions of many types for a damaged file.
    """
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        if isinstance(cause, InputError):
            raise cause from None
        for file in without_empty_parts(files):
            if (fault := explain_failure(file)) is not None:
                raise fault from error
        raise InputError(f"cannot read {list_files(files)}: {one_line(cause)}") from error


def without_empty_parts(files: Sequence[str | Path]) -> list[str | Path]:
    """Return the files that have content, if there are several: of many parts that Spark writes, some are empty."""
    return [file for file in files if len(files) == 1 or not Path(file).is_file() or Path(file).stat().st_size]


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


# 2. Name the file and line of a row


def set_source(rows: Dataset, files: Sequence[str | Path], in_order: bool = True) -> Dataset:
    """Record the files that rows come from; rows made by `map`, `select` and so on keep them.

    Args:
        in_order: row i of the dataset is row i of the files, one after the other.
    """
    rows.info.download_checksums = {str(file): {"in_order": in_order} for file in files}
    return rows


def source_files(rows: Dataset) -> list[str]:
    """Return the files, or the name of the dataset, that `set_source` recorded."""
    return list(_sources(rows))


def _sources(rows: Dataset) -> dict[str, dict[str, bool]]:
    sources = rows.info.download_checksums or {}  # `datasets` may have put other fields there
    return {name: source for name, source in sources.items() if "in_order" in (source or {})}


def is_in_order(rows: Dataset) -> bool:
    """Return whether row i is known to be row i of the source files."""
    sources = _sources(rows).values()
    return bool(sources) and all(source["in_order"] for source in sources)


def place_of_row(rows: Dataset, row: int, split: str) -> str:
    """Return the file and line of a row, as far as they are known."""
    files = source_files(rows)
    if not is_in_order(rows) or not all(Path(file).is_file() for file in files):
        return f"{list_files(files)}, {split} row {row + 1}".removeprefix(", ")
    for file in files[:-1]:
        count = count_rows(file)
        if count is None:
            return list_files(files)
        if row < count:
            return f"{file}, {line_of_row(file, row)}"
        row -= count
    return f"{files[-1]}, {line_of_row(files[-1], row)}"


@contextmanager
def locate_errors(rows: Dataset, split: str) -> Iterator[None]:
    """Put the file and line of `rows` in front of the message of an InputError."""
    try:
        yield
    except RowError as error:
        raise InputError(f"{place_of_row(rows, error.row, split)}: {error.problem}") from error
    except InputError as error:
        files = source_files(rows)
        if not files or any(file in str(error) for file in files):
            raise
        raise InputError(f"{list_files(files)}: {error}") from error


# 3. Requirements on rows


def require_columns(rows: Dataset, columns: list[str], split: str) -> None:
    """Raise an InputError that names the missing columns, if any."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        files = source_files(rows)
        source = f" ({list_files(files)})" if files else ""
        raise InputError(
            f"the {split} rows{source} have no column {', '.join(map(repr, missing))}; they have "
            f"{', '.join(rows.column_names)}"
        )


def require_texts(rows: Dataset, columns: Sequence[str], split: str) -> None:
    """Require a text in each row, and warn of empty ones.

    In csv and tsv files a number is text, and an empty field, which is read as None, is an empty text.
    """
    from_csv = bool(source_files(rows)) and all(file_kind(file) in ("csv", "tsv") for file in source_files(rows))
    for column in columns:
        empty = []
        for row, value in enumerate(rows[column][:]):
            if not isinstance(value, str) and not (from_csv and not isinstance(value, list | dict)):
                raise RowError(row, f"the {column} must be text, not {describe(value)}")
            if not csv_text(value).strip():
                empty.append(row)
        if empty:
            logger.warning(
                f"{len(empty):,} of {len(rows):,} {split} rows have an empty {column}, the first of them "
                f"{place_of_row(rows, empty[0], split)}"
            )


def csv_text(value: Any) -> str:
    """Return a text that `require_texts` has checked: in csv files an empty one is None, and digits are a number."""
    return "" if value is None else str(value)


def describe(value: Any) -> str:
    """Return the value and its type, for a message: "a number, 5"."""
    return "null" if value is None else f"{type_name(value)}, {shorten(value)}"
