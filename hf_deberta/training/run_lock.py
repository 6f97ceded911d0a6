"""Let one run at a time work in a folder.

>>> with lock_folder(Path("out")):
...     train()

The operating system releases the lock of `_run.lock` however the process ends: after a kill the next run starts at
once. The file says who holds it.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging

from hf_deberta.training.errors import InputError
from hf_deberta.training.processes import in_main_process, is_main_process

LOCK = "_run.lock"  # push_to_hub ignores names that start with an underscore

logger = logging.get_logger(__name__)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if needed; raise an InputError if another run holds it.

    Of several processes, the main one takes the lock for all. Inside the block the folder can be locked again.
    """
    path = folder.resolve() / LOCK
    lock = FileLock(path, timeout=0, thread_local=False, is_singleton=True)
    is_first = not lock.is_locked
    in_main_process(lambda: take_lock(lock, path))
    try:
        yield
    finally:
        if is_first and is_main_process():
            with suppress(OSError):
                if lock.is_locked:  # not in a child of the process that holds it
                    path.unlink()  # while it is held: nobody can have locked this file meanwhile
        lock.release()


def take_lock(lock: FileLock, path: Path) -> None:
    """Lock the file, and write who holds it into it; only warn if the file system has no locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise InputError(f"--output_dir {path.parent} cannot be used: {error}") from error
    try:
        lock.acquire()
    except Timeout as error:
        holder = ""
        with suppress(OSError, UnicodeDecodeError):
            holder = path.read_text(encoding="utf-8")
        raise InputError(
            f"a run is at work in {path.parent} ({holder or 'unknown'}); wait for it, stop it, or take another "
            f"--output_dir (if that host has crashed, delete {path})"
        ) from error
    except OSError as error:
        logger.warning(f"{path} cannot be locked ({error.strerror}): a second run there would not be noticed")
        return
    with suppress(OSError):  # Windows does not let a locked file be written
        path.write_text(f"host {socket.gethostname()}, process {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
