"""Read and write small JSON files; a damaged one is named.

>>> write_json(Path("run.json"), {"seed": 42})
>>> read_json_object(Path("run.json"))
{'seed': 42}
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_deberta.training.errors import InputError
from hf_deberta.training.text_files import read_json


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise an InputError if the file cannot be read or holds something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: it is not a JSON object")
    return content


def read_fields(*paths: Path) -> dict[str, Any]:
    """Read the fields of JSON objects, of the last one that has a field; files that do not exist have none."""
    return {name: value for path in paths if path.exists() for name, value in read_json_object(path).items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it is renamed to `path` when the block ends without an error.

    It is on the disk by then: if the power fails, `path` is not there or complete.

    >>> with atomic_write(Path("seeds.json")) as unfinished:
    ...     unfinished.write_text("{}")
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
