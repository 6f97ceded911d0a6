"""One run at a time works in a folder; a lock is released however its process ends."""

import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock

from hf_deberta.training.errors import InputError
from hf_deberta.training.run_lock import LOCK, lock_folder


@pytest.fixture
def other_run(tmp_path):
    """The id of another process that holds the lock of tmp_path/out, and has a data worker that outlives it."""
    ready, locked = os.pipe()
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
        try:
            with lock_folder(tmp_path / "out"):
                if os.fork():
                    os.write(locked, b"x")
                time.sleep(60)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"x"
    yield process
    os.killpg(process, signal.SIGKILL)
    for handle in (ready, locked):
        os.close(handle)


def test_a_folder_is_locked_while_a_run_is_at_work(tmp_path):
    folder = tmp_path / "new" / "out"
    with lock_folder(folder):
        assert f"process {os.getpid()}," in (folder / LOCK).read_text()
        with lock_folder(folder.parent / "x" / ".." / "out"):  # run_seeds inside of run_script
            assert (folder / LOCK).exists()
        assert (folder / LOCK).exists()
    assert not list(folder.iterdir())
    with pytest.raises(RuntimeError), lock_folder(folder):
        (folder / "result.txt").touch()
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["result.txt"]


def test_another_run_is_refused_and_a_killed_one_is_not(tmp_path, other_run):
    message = rf"a run is at work in .*out \(host .+, process {other_run}, since .*if that host has crashed, delete"
    with pytest.raises(InputError, match=message), lock_folder(tmp_path / "out"):
        pytest.fail("two runs at once")
    for content in (b"", b"\xff"):  # the holder cannot be read
        (tmp_path / "out" / LOCK).write_bytes(content)
        with pytest.raises(InputError, match=r"work in .*out \(unknown\)"), lock_folder(tmp_path / "out"):
            pytest.fail("two runs at once")
    with lock_folder(tmp_path / "elsewhere"):
        pass
    os.kill(other_run, signal.SIGKILL)
    os.waitpid(other_run, 0)
    with lock_folder(tmp_path / "out"):  # at once, though the worker is alive
        assert f"process {os.getpid()}," in (tmp_path / "out" / LOCK).read_text()


def test_a_child_does_not_release_the_lock(tmp_path):
    with lock_folder(tmp_path):
        child = os.fork()
        if child == 0:
            FileLock(tmp_path / LOCK, is_singleton=True, thread_local=False, timeout=0).release()
            os._exit(0)
        os.waitpid(child, 0)
        other = os.fork()
        if other == 0:
            with suppress(InputError), lock_folder(tmp_path):
                os._exit(1)
            os._exit(0)
        assert os.waitpid(other, 0)[1] == 0 and (tmp_path / LOCK).exists()


def test_file_systems_without_locks(tmp_path, monkeypatch, caplog):
    def fail(lock):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(FileLock, "acquire", fail)
    with lock_folder(tmp_path / "out"):
        pass
    assert f"cannot be locked ({os.strerror(errno.ENOLCK)}): a second run there would not be noticed" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        message = f"--output_dir {folder} cannot be used: .*'{folder}'"
        with pytest.raises(InputError, match=message), lock_folder(folder):
            pass
