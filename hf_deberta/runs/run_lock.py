"""Let one run at a time work in a folder.

>>> with lock_folder(Path("out")):
...     train()

`_run.lock` is locked by the operating system, which releases the lock however the process ends: after a kill the next
run starts at once. The file also says who holds it. A lock of lockf belongs to one process: data workers that outlive
their killed parent do not hold it, as they would hold one of flock.
"""

import errno
import json
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from transformers.utils import logging

from hf_deberta.runs.errors import InputError
from hf_deberta.runs.json_files import DamagedFileError, read_json_object
from hf_deberta.runs.processes import in_main_process

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = "_run.lock"  # push_to_hub ignores names that start with an underscore
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)

logger = logging.get_logger(__name__)
_handles: dict[Path, int] = {}  # file descriptors of the locks that this process holds
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_handles.clear)  # a child does not hold them


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if needed; raise an InputError if another run holds it.

    Of several processes, the main one takes the lock for all. Inside the block the folder can be locked again.
    """
    path = folder.resolve() / LOCK
    is_new = not path.parent.exists()
    is_first = in_main_process(lambda: take_lock(path))
    try:
        yield
    finally:
        if is_first:
            release_lock(path)
            if is_new:  # remove the folder if nothing was written, because of a mistake in the flags or the data
                with suppress(OSError):
                    path.parent.rmdir()


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
    if existing is not None and not existing.is_dir():
        raise InputError(f"{flag} {folder} cannot be used: {existing} is a file; name a folder")


def take_lock(path: Path) -> bool:
    """Lock the file, and return True; return False if this process holds the lock already, or cannot lock there."""
    if path in _handles:
        return False
    require_folder(path.parent)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(
                f"--output_dir {path.parent} cannot be used: {path} cannot be written ({error.strerror})"
            ) from error
        try:
            lock_file(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in TAKEN:
                raise InputError(describe_holder(path)) from error
            path.unlink(missing_ok=True)
            logger.warning(f"{path} cannot be locked ({error.strerror}): a second run there would not be noticed")
            return False
        if is_at(handle, path):
            break
        os.close(handle)  # the run that held it ended just now, and deleted the file
    _handles[path] = handle
    holder = {"host": socket.gethostname(), "process": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(holder).encode())
    return True


def lock_file(handle: int) -> None:
    """Lock an open file for this process, or raise OSError."""
    if sys.platform == "win32":
        os.lseek(handle, 2**30, os.SEEK_SET)  # behind the content: nobody else can read a locked byte
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_at(handle: int, path: Path) -> bool:
    """Return whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def describe_holder(path: Path) -> str:
    try:
        holder = read_json_object(path)
        who = f": host {holder['host']}, process {holder['process']}, since {holder['since']}"
    except (DamagedFileError, KeyError):  # it is just being written
        who = ""
    return (
        f"a run is at work in {path.parent}{who}; wait for it, stop it, or take another --output_dir (if that host has "
        f"crashed, delete {path})"
    )


def release_lock(path: Path) -> None:
    """Delete the file, and unlock it."""
    handle = _handles.pop(path, None)
    if handle is None:  # not the main process
        return
    ours = is_at(handle, path)
    if sys.platform == "win32":
        os.close(handle)  # an open file cannot be deleted, nor one that another run has opened since
    with suppress(OSError):
        if ours:
            path.unlink()
    if sys.platform != "win32":
        os.close(handle)
