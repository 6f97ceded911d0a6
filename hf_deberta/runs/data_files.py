"""Read a file of rows: json lines, csv, tsv or parquet, also gzipped."""

import csv
from collections.abc import Sequence
from pathlib import Path

import datasets
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError

TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE}  # a quotation mark is a letter, as in the files of GLUE
BUILDERS = {"jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}


def read_table(file: str | Path, kinds: Sequence[str] = tuple(BUILDERS), rows_field: str | None = None) -> Dataset:
    """Rows of a file, also gzipped.

    Args:
        kinds: those that it may be of.
        rows_field: the field of a JSON object that holds the rows.
    """
    path = Path(file)
    kind = Path(path.name.removesuffix(".gz")).suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ValueError(f"{file} is none of {', '.join(kinds)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if path.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    options = dict(TSV) if kind == "tsv" else {}
    if BUILDERS[kind] == "csv":
        options |= {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are words
    if rows_field is not None:
        options["field"] = rows_field
    try:
        rows = datasets.load_dataset(BUILDERS[kind], data_files=str(file), split="train", **options)
    except DatasetGenerationError as error:
        raise ValueError(f"{file} is no table of rows: {error.__cause__ or error}") from error
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise ValueError(f"{file} has no rows") from error
    if kind == "tsv" and any(name.startswith('"') for name in rows.column_names):
        raise ValueError(
            f"{file} has columns in quotation marks ({', '.join(rows.column_names)}), and a tsv is taken literally: "
            "write it without them, or as csv or jsonl"
        )
    return rows


def require_columns(rows: Dataset, columns: list[str], split: str) -> None:
    """Say in a sentence which column is missing."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"the {split} rows have no column {', '.join(map(repr, missing))}; they have {', '.join(rows.column_names)}"
        )
