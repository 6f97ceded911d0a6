"""Files of predictions, and the zip that a benchmark's server takes, made of the files of several runs."""

import sys
import zipfile
from pathlib import Path

from hf_deberta.runs.checkpoints import atomic_write


def write_lines(path: Path, lines: list[str]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")


def numbered(values: list[str]) -> list[str]:
    return [f"{number}\t{value}" for number, value in enumerate(values)]


def write_submission(path: Path, folders: list[Path], names: list[str]) -> list[str]:
    """The zip of the files of these names in the folders; returns the names that were nowhere found."""
    found: dict[str, Path] = {}
    for folder in folders:
        for file in (folder / name for name in names):
            if file.exists():
                if file.name in found:
                    raise ValueError(f"{found[file.name]} and {file} are both there: give one folder of each task")
                found[file.name] = file
    if not found:
        raise ValueError(f"none of {', '.join(names)} is in {', '.join(map(str, folders))}")
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(found.items()):
            archive.write(file, name)
    return [name for name in names if name not in found]


def command(benchmark: str, names: list[str]) -> None:
    """`python -m hf_deberta.fine_tuning.tasks.BENCHMARK submission.zip runs/*`"""
    if len(sys.argv) < 3:
        raise SystemExit(
            f"usage: python -m hf_deberta.fine_tuning.tasks.{benchmark} SUBMISSION.zip RUN_FOLDER [RUN_FOLDER ...]"
        )
    try:
        missing = write_submission(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]], names)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{benchmark}: {error}") from error
    print(f"{sys.argv[1]} is written" + (f"; the server also wants {', '.join(missing)}" if missing else ""))
