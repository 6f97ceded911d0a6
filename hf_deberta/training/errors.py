"""The error that scripts show as one line instead of a traceback.

>>> with user_errors_in_one_line("run_glue.py"), input_errors("train.csv", OSError):
...     open("train.csv")
run_glue.py: train.csv: [Errno 2] No such file or directory: 'train.csv'
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HFValidationError
from transformers.utils import logging

FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Errors whose message is that of their cause: of `datasets`, and of a configuration that breaks a rule.
WRAPPERS = ("DatasetGenerationError", "StrictDataclassClassValidationError", "StrictDataclassFieldValidationError")


class InputError(ValueError):
    """A mistake in flags, files or data that the user can fix.

    Its message names the rule, the value and the way out. Any other exception is a bug and keeps its traceback.

    >>> raise InputError("--num_seeds must be at least 1, not 0")
    """

    names_place = False  # the message begins with the place of the mistake


class RowError(InputError):
    """A mistake in the row with this number, counted from 0; `input_errors` names its file."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(row, problem)
        self.row, self.problem = row, problem

    def __str__(self) -> str:
        return f"row {self.row + 1}: {self.problem}"


@contextmanager
def input_errors(place: str | Callable[[int | None], str] = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise exceptions of these types as InputError, which begins with the file, folder or dataset that was read.

    Args:
        place: its name, or a function that returns it for a row, see `data_files.source_of`.
    """
    caught: tuple[type[Exception], ...] = (InputError, *kinds)
    try:
        yield
    except caught as error:
        is_clear = isinstance(error, InputError) and (error.names_place or place == "")
        if is_clear or isinstance(error, MemoryError):
            raise
        cause = error.__cause__ if type(error).__name__ in WRAPPERS and error.__cause__ else error
        row, problem = (cause.row, cause.problem) if isinstance(cause, RowError) else (None, str(cause))
        message = " ".join(problem.split()) or type(cause).__name__
        where = place if isinstance(place, str) else place(row)
        # a path that is not there was taken for a name on the Hub
        if any(isinstance(step, HFValidationError) for step in (cause, cause.__cause__, cause.__context__)):
            message = f"there is no folder {where}"
        # Transformers' message names the argument of from_pretrained
        message = message.replace("pass the argument `trust_remote_code=True`", "add --trust_remote_code")
        located = InputError(message if where in message else f"{where}: {message}")
        located.names_place = bool(where)
        raise located from error


@contextmanager
def user_errors_in_one_line(script: str) -> Iterator[None]:
    """Exit with the message of an InputError, of a full disk, or of Ctrl-C; other exceptions propagate.

    TRANSFORMERS_VERBOSITY=debug shows the traceback of these too.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if logging.get_verbosity() <= logging.DEBUG:
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{script}: {str(interrupt) or 'Stopped'}", file=sys.stderr)  # a progress bar has the line
        raise SystemExit(130) from interrupt
    except Exception as error:
        message = full_disk_message(error) or (str(error) if isinstance(error, InputError) else None)
        if message is None or logging.get_verbosity() <= logging.DEBUG:
            raise
        raise SystemExit(f"{script}: {message}") from error


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def full_disk_message(error: BaseException) -> str | None:
    """Return what to do if an exception, or one that it follows from, says that a file could not be written in full.

    safetensors, tokenizers and torch.save raise exceptions of their own, without the number of the error.
    """
    cause: BaseException | None = error
    while cause is not None:
        from_rust = type(cause).__name__ in ("SafetensorError", "Exception")  # tokenizers raises plain Exceptions
        errors = re.findall(r"os error (\d+)", str(cause)) if from_rust else ()
        number = cause.errno if isinstance(cause, OSError) else next(map(int, errors), None)
        written_in_part = "unexpected pos" in str(cause) or "PytorchStreamWriter failed" in str(cause)
        if number in FULL_DISK or (isinstance(cause, RuntimeError) and written_in_part):
            reason = os.strerror(number) if number else "no space left"
            file = getattr(cause, "filename", None) or "a file"
            return (
                f"{file} could not be written ({reason}): make room in --output_dir and in the cache folders, and "
                "repeat the command; it resumes from the last checkpoint"
            )
        cause = cause.__cause__ or cause.__context__
    return None
