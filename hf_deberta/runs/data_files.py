"""Read a file of rows: json lines, csv, tsv or parquet, also gzipped."""

import csv
from collections.abc import Sequence
from pathlib import Path

import datasets
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError

from hf_deberta.runs.errors import InputError

TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE}  # quotation marks are text, as in the files of GLUE
BUILDERS = {"jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}


def read_table(file: str | Path, kinds: Sequence[str] = tuple(BUILDERS), rows_field: str | None = None) -> Dataset:
    """Read the rows of a file, gzipped or not.

    Args:
        kinds: file types to accept.
        rows_field: the field of a JSON object that holds the rows.
    """
    path = Path(file)
    kind = Path(path.name.removesuffix(".gz")).suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise InputError(f"{file} is none of {', '.join(kinds)}")
    if not path.is_file():
        raise InputError(f"there is no file {file}")
    if path.stat().st_size == 0:
        raise InputError(f"{file} is empty")
    options: dict[str, object] = dict(TSV) if kind == "tsv" else {}
    if BUILDERS[kind] == "csv":
        options |= {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are words
    if rows_field is not None:
        options["field"] = rows_field
    builder = datasets.load_dataset_builder(BUILDERS[kind], data_files=str(file), **options)
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        raise InputError(f"{file} is no table of rows: {error.__cause__ or error}") from error
    if builder.info.splits is None or not builder.info.splits["train"].num_examples:
        raise InputError(f"{file} has no rows")
    rows = builder.as_dataset(split="train")
    if kind == "tsv" and any(name.startswith('"') for name in rows.column_names):
        raise InputError(
            f"{file} has columns in quotation marks ({', '.join(rows.column_names)}), and a tsv is read literally: "
            "remove them, or write the file as csv or jsonl"
        )
    return rows


def require_columns(rows: Dataset, columns: list[str], split: str) -> None:
    """Raise an InputError that names the missing columns, if any."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"the {split} rows have no column {', '.join(map(repr, missing))}; they have {', '.join(rows.column_names)}"
        )
