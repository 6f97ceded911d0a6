"""Write prediction files, and zip those of several runs into the submission of a benchmark.

zip_submission(Path("glue.zip"), [Path("runs/cola"), Path("runs/rte")], ["CoLA.tsv", "RTE.tsv"])
"""

import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import atomic_write


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_lines(path, (json.dumps(row, ensure_ascii=False) for row in rows))


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
