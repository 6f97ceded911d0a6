"""Let one run at a time work in a folder.

>>> with lock_folder(Path("out")):
...     train()

The operating system releases the lock of `_run.lock` however the process ends: after a kill the next run starts at
once. The file says who holds it.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging

from hf_deberta.training.errors import InputError
from hf_deberta.training.processes import in_main_process, is_main_process

LOCK = "_run.lock"  # push_to_hub ignores names that start with an underscore
ATTEMPTS = 100  # to lock a folder that other runs remove

logger = logging.get_logger(__name__)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if needed; raise an InputError if another run holds it.

    Of several processes, the main one takes the lock for all. Inside the block the folder can be locked again.
    """
    path = folder.resolve() / LOCK
    is_new = not path.parent.exists()
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
        if is_first and is_new:  # remove the folder if nothing was written, because of a mistake in flags or data
            with suppress(OSError):
                path.parent.rmdir()


def take_lock(lock: FileLock, path: Path) -> None:
    """Lock the file, and write who holds it into it; only warn if the file system has no locks."""
    require_folder(path.parent)

    def create() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def acquire() -> None:
        create()
        lock.acquire()

    try:
        repeat_if_removed(create)
    except OSError as error:
        raise InputError(
            f"--output_dir {path.parent} cannot be used: {path} cannot be written ({error.strerror})"
        ) from error
    try:
        repeat_if_removed(acquire)
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


def repeat_if_removed(call: Callable[[], None]) -> None:
    """Call again if the folder has gone: a run that ends removes an empty one, and another may be starting there."""
    for _ in range(ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            return call()
    call()


def require_folders(flags: Namespace) -> None:
    """Raise an InputError if a flag that names a folder to write to names a file."""
    for name in ("output_dir", "tokens_dir", "cache_dir"):
        if (folder := getattr(flags, name, None)) is not None:
            require_folder(folder, f"--{name}")


def require_folder(folder: str | Path, flag: str = "--output_dir") -> None:
    """Raise an InputError if the folder, or one that it lies in, is a file or cannot be reached."""
    try:
        existing = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), None)
    except OSError as error:  # a name that is too long, or no permission
        raise InputError(f"{flag} {folder} cannot be used: {error.strerror}; name another folder") from None
    if existing is not None and not existing.is_dir() and existing.exists():  # it may have been removed meanwhile
        raise InputError(f"{flag} {folder} cannot be used: {existing} is a file; name a folder")
