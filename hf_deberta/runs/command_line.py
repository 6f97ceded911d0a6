"""What a script says of a command line, or of a JSON file of flags, that cannot be run: a sentence, no traceback."""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser
from transformers.utils import logging


@contextmanager
def errors_as_sentences(script: str) -> Iterator[None]:
    """End with the sentence of an error that a user can mend; TRANSFORMERS_VERBOSITY=debug tells where it came from."""
    try:
        yield
    except (StrictDataclassError, ValueError, OSError) as error:
        if logging.get_verbosity() <= logging.DEBUG or (isinstance(error, ValueError) and is_of_training(error)):
            raise
        # what we say of a configuration is the cause of the error that its class raises
        said = error.__cause__ if isinstance(error, StrictDataclassError) else None
        raise SystemExit(f"{script}: {said or error}") from error


def is_of_training(error: Exception) -> bool:
    """Whether it was raised when Trainer was at work, so not by what a user has written."""
    return any(Path(frame.filename).name == "trainer.py" for frame in traceback.extract_tb(error.__traceback__))


def words_and_flags(parser: HfArgumentParser) -> tuple[list[str], dict[str, Any]]:
    """The words of the command line; or the flags of the JSON file that it names, which become defaults."""
    words = sys.argv[1:]
    if len(words) != 1 or not words[0].endswith(".json"):
        return words, {}
    flags = read_flags(words[0])
    if unknown := set(flags) - {action.dest for action in parser._actions}:
        raise ValueError(f"{words[0]} has fields that are no flags: {', '.join(sorted(unknown))}")
    parser.set_defaults(**flags)
    return [], flags


def read_flags(file: str | Path) -> dict[str, Any]:
    """Flags by name, for want of a command line: {"learning_rate": 1e-5, ...}."""
    try:
        flags = json.loads(Path(file).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(flags, dict):
        raise ValueError(f'{file} must hold flags by name, {{"learning_rate": 1e-5, ...}}')
    return flags
