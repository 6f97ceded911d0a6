"""Write prediction files, and zip those of several runs into the submission of a benchmark.

zip_submission(Path("glue.zip"), [Path("runs/cola"), Path("runs/rte")], ["CoLA.tsv", "RTE.tsv"])
"""

import csv
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import atomic_write


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_lines(path, map(as_json, rows))


def as_json(value: Any) -> str:
    """Return JSON, with null for a number that is not finite."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # NaN or Infinity, which are no JSON
        without = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        return json.dumps(without, ensure_ascii=False)


def write_predicted_rows(path: Path, rows: Dataset, predictions: Mapping[str, Sequence[Any]]) -> None:
    """Write PATH.jsonl and PATH.csv: the columns of each row, then what was predicted for it.

    In the csv, `probabilities` is a column `probability_LABEL` for each label, and other lists and objects are JSON. A
    column of the rows that has the name of one of ours is `input_NAME` in both files.
    """
    labels = list(predictions["probabilities"][0]) if "probabilities" in predictions else []
    of_labels = [f"probability_{label}" for label in labels]
    rows = rows.rename_columns(input_names(rows.column_names, {*predictions, *of_labels}))
    columns = [name for name in (*rows.column_names, *predictions) if not labels or name != "probabilities"]

    def lines() -> Iterable[dict[str, Any]]:
        for row, *values in zip(rows, *predictions.values(), strict=True):
            yield {**row, **dict(zip(predictions, values, strict=True))}

    write_json_lines(path.with_name(f"{path.name}.jsonl"), lines())
    with (
        atomic_write(path.with_name(f"{path.name}.csv")) as unfinished,
        open(unfinished, "w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow([*columns, *of_labels])
        for line in lines():
            cells = [as_json(line[name]) if isinstance(line[name], list | dict) else line[name] for name in columns]
            writer.writerow([*cells, *(line["probabilities"][label] for label in labels)])


def input_names(columns: Sequence[str], reserved: set[str]) -> dict[str, str]:
    """Return new names for the columns that have a name of `reserved`: input_NAME, or input_input_NAME, ..."""
    names = {}
    for column in columns:
        if column in reserved:
            name = f"input_{column}"
            while name in reserved or name in columns:
                name = f"input_{name}"
            names[column] = name
    return names


def write_prediction_table(path: Path, predictions: Iterable[str]) -> None:
    """Write a TSV file with the columns index and prediction."""
    write_lines(path, ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(predictions))])


def zip_submission(path: Path, folders: list[Path], names: list[str]) -> list[str]:
    """Zip the files called `names` in `folders`; return the names that no folder holds."""
    files: dict[str, Path] = {}
    for file in (folder / name for folder in folders for name in names):
        if file.exists():
            if file.name in files:
                raise InputError(f"{files[file.name]} and {file} both exist: name one folder for each task")
            files[file.name] = file
    if not files:
        raise InputError(f"none of {', '.join(names)} is in {', '.join(map(str, folders))}")
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(files.items()):
            archive.write(file, name)
    return [name for name in names if name not in files]


def submission_command(benchmark: str, names: list[str]) -> None:
    """Run `python -m hf_deberta.fine_tuning.tasks.BENCHMARK SUBMISSION.zip RUN_FOLDER ...`."""
    if len(sys.argv) < 3:
        raise SystemExit(
            f"usage: python -m hf_deberta.fine_tuning.tasks.{benchmark} SUBMISSION.zip RUN_FOLDER [RUN_FOLDER ...]"
        )
    try:
        missing = zip_submission(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]], names)
    except (InputError, OSError) as error:
        raise SystemExit(f"{benchmark}: {error}") from error
    print(f"wrote {sys.argv[1]}" + (f"; the benchmark also requires {', '.join(missing)}" if missing else ""))
