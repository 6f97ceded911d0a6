"""Rows of files as a Dataset: json lines, csv, tsv or parquet, also gzipped; name the file and row of a mistake.

A function that checks rows raises `RowError`, and `input_errors` names the file:

>>> with input_errors(source):
...     require_texts(rows, ["question"], source)
InputError: train.jsonl, row 7: the question must be text, not null
"""

import glob
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable
from transformers.utils import logging

from hf_deberta.training.errors import InputError, RowError, describe, input_errors, name_rows, short_repr
from hf_deberta.training.text_files import DIALECTS, file_kind, hash_file, read_rows

TABLES = ("jsonl", "json", "csv", "tsv", "parquet")
ROWS_PER_BATCH = 1000  # in memory while rows are written
MIXED = pyarrow.json_()  # the type of a column whose values have several
WRITING_ERRORS = (pyarrow.ArrowException, ValueError, OverflowError, RecursionError)
MAX_FILES_IN_MESSAGE = 3

logger = logging.get_logger(__name__)


# 1. Read files


def read_table(file: str | Path) -> Dataset:
    """Read the rows of a file, gzipped or not."""
    if file_kind(file) not in TABLES and not Path(file).is_dir():
        raise InputError(f"{file} is none of {', '.join(TABLES)}")
    return read_parquet([file]) if file_kind(file) == "parquet" else cache_rows([file], partial(read_rows, file))


def cache_rows(
    files: Sequence[str | Path],
    make_rows: Callable[[], Iterable[dict[str, Any]]],
    features: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
    **options: Any,
) -> Dataset:
    """Return rows that are made of files. They are written to a cache, once for each content of the files.

    Args:
        make_rows: is called again if the types of columns become others.
        features: the types of the columns; by default those of their values.
        options: what the rows depend on besides the files.
    """
    with input_errors(list_files(files), OSError):
        contents = [("".join(Path(file).suffixes[-2:]), hash_file(file)) for file in files]
    key = Hasher.hash([contents, features, options, code_hash()])
    path = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "hf_deberta" / key / "rows.arrow"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = datasets.Features(features).arrow_schema if features else None
        with TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
            unfinished = Path(folder) / path.name
            with input_errors(list_files(files), *WRITING_ERRORS):
                _write_rows(unfinished, make_rows, schema)
            os.replace(unfinished, path)
    return Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=key)


def _write_rows(path: Path, make_rows: Callable[[], Iterable[dict[str, Any]]], schema: pyarrow.Schema | None) -> None:
    """Write rows in batches; without a schema, again if a later batch adds a column or changes the type of one."""
    is_given, is_whole = schema is not None, False
    while not is_whole:
        rows, writer, is_whole = iter(make_rows()), None, True
        with pyarrow.OSFile(str(path), "wb") as file:
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                table = pyarrow.Table.from_pylist(batch, schema) if is_given else _as_table(batch, schema)
                is_whole &= writer is None or table.schema == schema
                schema = table.schema
                if is_whole and schema.names:
                    writer = writer or pyarrow.ipc.new_stream(file, schema)
                    writer.write_table(table)
            if writer is None:
                raise InputError("there are no rows")
            writer.close()


def _as_table(rows: list[dict[str, Any]], schema: pyarrow.Schema | None) -> pyarrow.Table:
    """Return rows with the columns and types of earlier ones, as far as these rows fit, and their own."""
    types = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    names = dict.fromkeys(chain(types, *rows))
    return pyarrow.table({name: _as_array([row.get(name) for row in rows], types.get(name)) for name in names})


def _as_array(values: list[Any], before: pyarrow.DataType | None) -> pyarrow.Array:
    """Return the values of a column, of the type of earlier ones or, if they do not fit, one for all."""
    if before != MIXED:
        with suppress(pyarrow.ArrowException, OverflowError):
            array = pyarrow.array(values)
            fields = [pyarrow.schema([("", kind)]) for kind in (before or pyarrow.null(), array.type)]
            kind = pyarrow.unify_schemas(fields, promote_options="permissive").types[0]
            if not mix_truth_and_numbers(values):  # Arrow takes true for 1.0
                return array if array.type == kind else pyarrow.array(values, kind)
    texts = [None if value is None else json.dumps(value) for value in values]
    for text in filter(None, texts):
        try:
            datasets.Json().decode_example(text)
        except ValueError as error:
            raise InputError(f"{short_repr(text)} has a number beyond 64 bits: write it as text") from error
    return pyarrow.array(texts, MIXED)


def mix_truth_and_numbers(values: Iterable[Any]) -> bool:
    """Return whether true or false and a float stand at the same place in values of JSON."""
    parts: dict[Any, list[Any]] = {}
    for value in values:
        for name, part in value.items() if isinstance(value, dict) else ():
            parts.setdefault(name, []).append(part)
        if isinstance(value, list):
            parts.setdefault(None, []).extend(value)
        elif isinstance(value, bool | float):
            parts.setdefault(bool, []).append(type(value))
    return len(set(parts.pop(bool, ()))) > 1 or any(map(mix_truth_and_numbers, parts.values()))


def read_parquet(files: Sequence[str | Path], cache_dir: str | None = None, **options: Any) -> Any:
    """Return the rows of parquet files; `options` are those of `datasets.load_dataset`."""
    with input_errors(list_files(files), Exception):
        # the name keeps `datasets` from taking its copy of another content with the same time for these files
        name = None if options.get("streaming") else Hasher.hash([*map(hash_file, files)])
        names = [glob.escape(str(file)) for file in files]
        return datasets.load_dataset("parquet", name, data_files=names, split="train", cache_dir=cache_dir, **options)


@cache
def code_hash() -> str:
    """Return a hash of this package: `datasets` would take cached rows and inputs for those of other code."""
    return Hasher.hash([file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py"))])


def warn_of_shared_files(files: Mapping[str, Sequence[str | Path]]) -> None:
    """Warn if a file that is trained on is also evaluated; `files` are those of each split, `train` among them."""
    train = {Path(file).resolve() for file in files.get("train", ())}
    for split, paths in files.items():
        shared = [file for file in paths if split != "train" and Path(file).resolve() in train]
        if shared:
            logger.warning(f"{list_files(shared)} is a training and a {split} file: its scores will be too high")


def list_files(files: Sequence[str | Path]) -> str:
    """Return the names of the first files, for messages."""
    shown = ", ".join(map(str, files[:MAX_FILES_IN_MESSAGE]))
    return shown if len(files) <= MAX_FILES_IN_MESSAGE else f"{shown} and {len(files) - MAX_FILES_IN_MESSAGE} more"


# 2. Name the file and number of a row


@dataclass(frozen=True)
class Source:
    """Where the rows of a split come from; as the place of `input_errors` it names the file and the rows.

    Attributes:
        files: the number of rows of each file.
        numbers: of each row among those of all files, from 0. Of rows that are made of one in a file, it is the same.

    >>> Source("train", {"a.csv": 10, "b.csv": 10})([10, 12])
    'b.csv, rows 1, 3'
    """

    split: str
    files: Mapping[str, int] = field(default_factory=dict)
    numbers: Sequence[int] = range(sys.maxsize)

    def __call__(self, rows: Sequence[int] = ()) -> str:
        """Return the file and the numbers of rows in it, counted from 1; without rows, the files.

        If the rows are in several files, those in the first are named.
        """
        if not rows:
            return list_files([*self.files])
        numbers, before = sorted({self.numbers[row] for row in rows}), 0
        for file, count in self.files.items():
            if numbers[0] < before + count:
                in_file = [number - before + 1 for number in numbers if number < before + count]
                return f"{file}, {name_rows(in_file, len(numbers))}"
            before += count
        return f"{self.split} {name_rows([number + 1 for number in numbers])}"

    @cached_property
    def is_csv(self) -> bool:
        return bool(self.files) and all(file_kind(file) in DIALECTS for file in self.files)


# 3. Requirements on rows


def require_columns(rows: Dataset, columns: Sequence[str], split: str, hint: str = "") -> None:
    """Raise an InputError that names the missing columns, if any, and ends with a hint."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"the {split} rows have no column {', '.join(map(repr, missing))}; they have "
            f"{', '.join(rows.column_names)}{hint}"
        )


def require_texts(rows: Dataset, columns: Sequence[str], source: Source) -> None:
    """Require a text in each row, and warn of empty ones.

    In csv and tsv files a number is text, and an empty field, which is read as None, is an empty text.
    """
    for column in columns:
        values = rows[column][:]

        def require_text(value: Any, name: str = column) -> None:
            if not isinstance(value, str) and not (source.is_csv and not isinstance(value, list | dict)):
                raise InputError(f"the {name} must be text, not {describe(value)}")

        check_rows(values, require_text)
        if empty := [row for row, value in enumerate(values) if not csv_text(value).strip()]:
            logger.warning(
                f"{len(empty):,} of {len(rows):,} {source.split} rows have an empty {column}: {source(empty)}"
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
