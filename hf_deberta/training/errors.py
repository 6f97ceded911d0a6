"""The error that scripts show as one line instead of a traceback.

>>> with user_errors_in_one_line("run_glue.py"), input_errors("train.csv", OSError):
...     open("train.csv")
run_glue.py: train.csv: [Errno 2] No such file or directory: 'train.csv'
"""

import os
import re
import signal
import sys
from _thread import interrupt_main
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer
from traceback import walk_stack
from types import FrameType
from typing import Any

from huggingface_hub.errors import HFValidationError
from transformers.utils import logging

ROWS_SHOWN = 10  # numbers of rows in a message
# of the system, and of torch.save, which does not give the system's reason
NOT_WRITTEN = re.compile(
    "No space left on device|Disk quota exceeded|File too large|unexpected pos|PytorchStreamWriter failed"
)
WRITERS = ("SafetensorError", "Exception")  # exceptions of safetensors and of tokenizers
# Errors whose message is that of their cause: of `datasets`, and of a configuration that breaks a rule.
WRAPPERS = ("DatasetGenerationError", "StrictDataclassClassValidationError", "StrictDataclassFieldValidationError")


class InputError(ValueError):
    """A mistake in flags, files or data that the user can fix.

    Its message names the rule, the value and the way out. Any other exception is a bug and keeps its traceback.

    >>> raise InputError("--num_seeds must be at least 1, not 0")
    """

    is_located = False  # the message begins with the place of the mistake


class RowError(InputError):
    """What is wrong with each bad row, by its number, counted from 0; `input_errors` names the file.

    The message lists the rows with the mistake of the first one, counted from 1.

    >>> str(RowError({6: "no text", 18: "no text", 30: "no label"}))
    'rows 7, 19: no text; 1 more row has another mistake'
    """

    source: Any = None  # of the rows, a `data_files.Source`, see `input_errors`

    def __init__(self, problems: dict[int, str], place: str = "") -> None:
        super().__init__(problems, place)
        self.problems, self.place = problems, place
        first = problems[min(problems)]
        self.rows = sorted(row for row, problem in problems.items() if problem == first)
        others = len(problems) - len(self.rows)
        more = f"; {others:,} more rows have other mistakes" if others > 1 else "; 1 more row has another mistake"
        self.problem = " ".join(first.split()) + more * (others > 0)

    def __str__(self) -> str:
        return f"{self.place or name_rows([row + 1 for row in self.rows])}: {self.problem}"


def name_rows(numbers: Sequence[int], total: int = 0) -> str:
    """Return the first numbers in words, and how many rows there are: "rows 3, 4, ... (12 in all)"."""
    total = total or len(numbers)
    shown = ", ".join(map(str, numbers[:ROWS_SHOWN]))
    more = f", ... ({total:,} in all)" if total > min(len(numbers), ROWS_SHOWN) else ""
    return f"row{'s' * (total > 1)} {shown}{more}"


@contextmanager
def input_errors(place: str | Callable[..., str] = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise exceptions of these types as InputError, which begins with the file, folder or dataset that was read.

    Args:
        place: its name, or a `data_files.Source`, which also names the rows.
    """
    caught: tuple[type[Exception], ...] = (InputError, *kinds)
    try:
        yield
    except caught as error:
        is_clear = isinstance(error, InputError) and (error.is_located or place == "")
        if is_clear or isinstance(error, MemoryError):
            raise
        cause = error.__cause__ if type(error).__name__ in WRAPPERS and error.__cause__ else error
        if isinstance(cause, RowError) and not isinstance(place, str):
            in_file = RowError(cause.problems, place(cause.rows))
            in_file.is_located, in_file.source = True, place
            raise in_file from error
        message = " ".join(str(cause).split()) or type(cause).__name__
        where = place if isinstance(place, str) else place()
        # a path that is not there was taken for a name on the Hub
        if any(isinstance(step, HFValidationError) for step in (cause, cause.__cause__, cause.__context__)):
            message = f"there is no folder {where}"
        if where and Path(where, "discriminator", "config.json").exists() and not Path(where, "config.json").exists():
            message = (
                f"{where} holds two models of RTD: name {where}/discriminator, the one to fine-tune, or its generator"
            )
        # Transformers' message names the argument of from_pretrained
        way_out = "add --trust_remote_code, which fine-tuning has"
        message = message.replace("pass the argument `trust_remote_code=True`", way_out)
        located = InputError(message if where in message else f"{where}: {message}")
        located.is_located = bool(where)
        raise located from error


@contextmanager
def user_errors_in_one_line(script: str) -> Iterator[None]:
    """Exit with the message of an InputError, of a full disk, or of Ctrl-C and SIGTERM; other exceptions propagate.

    TRANSFORMERS_VERBOSITY=debug shows the traceback of these too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            with suppress(ValueError):  # in a thread
                signal.signal(number, partial(on_signal, os.getpid()))
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if logging.get_verbosity() <= logging.DEBUG:
            raise
        number = next((arg for arg in interrupt.args if isinstance(arg, signal.Signals)), signal.SIGINT)
        reason = "Ctrl-C" if number == signal.SIGINT else number.name
        if os.environ.get("RANK", "0") == "0":  # a progress bar has the line
            print(f"\n{script}: Stopped by {reason}.", *getattr(interrupt, "__notes__", ()), file=sys.stderr)
        raise SystemExit(128 + number) from interrupt
    except Exception as error:
        message = full_disk_message(error) or (str(error) if isinstance(error, InputError) else None)
        if message is None or logging.get_verbosity() <= logging.DEBUG:
            raise
        raise SystemExit(f"{script}: {message}") from error


def on_signal(process: int, number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; a moment later while `datasets` hashes a function, where it catches any exception.

    SIGTERM ends a fork of this process at once: so a pool of processes stops its workers.
    """
    if number == signal.SIGTERM and os.getpid() != process:
        os._exit(128 + number)
    if any(step.f_code.co_name == "update_fingerprint" for step, _ in walk_stack(frame)):
        Timer(0.1, interrupt_main, (number,)).start()
    else:
        raise KeyboardInterrupt(signal.Signals(number))


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def full_disk_message(error: BaseException | None) -> str | None:
    """Return what to do if an exception, or one that it follows from, says that a file could not be written in full."""
    while error is not None:
        may_be_of_writing = isinstance(error, OSError | RuntimeError) or type(error).__name__ in WRITERS
        if may_be_of_writing and NOT_WRITTEN.search(str(error)):
            return (
                f"a file could not be written ({one_line(error)}): make room in --output_dir and in the cache folders, "
                "and repeat the command; it resumes from the last checkpoint"
            )
        error = error.__cause__ or error.__context__
    return None


# Values in messages

TYPE_NAMES = {
    str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def short_repr(value: object) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def describe(value: object) -> str:
    """Return the value and its type, for a message: "a number, 5"."""
    return "null" if value is None else f"{TYPE_NAMES.get(type(value), type(value).__name__)}, {short_repr(value)}"
