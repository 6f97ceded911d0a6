"""One run at a time works in a folder; a lock is released however its process ends."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from hf_deberta.runs import run_lock
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.run_lock import LOCK, lock_folder


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
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        with lock_folder(folder.parent / "x" / ".." / "out"):  # run_seeds inside of run_script
            assert (folder / LOCK).exists()
        assert (folder / LOCK).exists()
    assert not folder.exists()
    with pytest.raises(RuntimeError), lock_folder(folder):
        raise RuntimeError
    assert not folder.exists()


def test_another_run_is_refused_and_a_killed_one_is_not(tmp_path, other_run):
    message = (
        f"a run is at work in .*out: host .+, process {other_run}, since {time.strftime('%Y')}-.*; wait for it, "
        r"stop it, or take another --output_dir \(if that host has crashed, delete .*_run.lock\)"
    )
    with pytest.raises(InputError, match=message), lock_folder(tmp_path / "out"):
        pytest.fail("two runs at once")
    assert not run_lock._handles
    with lock_folder(tmp_path / "elsewhere"):
        pass
    os.kill(other_run, signal.SIGKILL)
    os.waitpid(other_run, 0)
    assert json.loads((tmp_path / "out" / LOCK).read_text())["process"] == other_run
    with lock_folder(tmp_path / "out"):  # at once, though the worker is alive
        assert json.loads((tmp_path / "out" / LOCK).read_text())["process"] == os.getpid()


def test_a_child_does_not_release_the_lock(tmp_path):
    with lock_folder(tmp_path):
        child = os.fork()
        if child == 0:
            run_lock.release_lock(tmp_path / LOCK)
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / LOCK).exists()


def test_a_deleted_lock_does_not_lock(tmp_path, other_run):
    """The way out if a network file system keeps the lock of a crashed host."""
    (tmp_path / "out" / LOCK).unlink()
    with lock_folder(tmp_path / "out"):
        os.kill(other_run, signal.SIGINT)
        os.waitpid(other_run, 0)
        assert (tmp_path / "out" / LOCK).exists()  # the other run does not delete the lock of this one


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_holder_that_cannot_be_read(tmp_path, other_run, content):
    (tmp_path / "out" / LOCK).write_bytes(content)
    with pytest.raises(InputError, match="a run is at work in .*out; wait"), lock_folder(tmp_path / "out"):
        pass


def test_a_lock_that_is_released_meanwhile(tmp_path, monkeypatch):
    """Its file is deleted after this run has opened it and before it locks it."""
    lock, path = run_lock.lock_file, tmp_path / LOCK
    monkeypatch.setattr(run_lock, "lock_file", lambda handle: (path.unlink(), lock(handle), monkeypatch.undo()))
    with lock_folder(tmp_path):
        assert run_lock.is_at(run_lock._handles[path], path)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks(tmp_path, monkeypatch, caplog, error):
    def fail(handle):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(run_lock, "lock_file", fail)
    with lock_folder(tmp_path):
        assert not list(tmp_path.iterdir())
    assert f"cannot be locked ({os.strerror(error)}): a second run there would not be noticed" in caplog.text


def test_a_new_folder_goes_if_nothing_is_written(tmp_path):
    (tmp_path / "old").mkdir()
    for name, written in (("new", False), ("used", True), ("old", False)):
        with lock_folder(tmp_path / name):
            if written:
                (tmp_path / name / "result.txt").write_text("done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "used"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    is_file = f"{tmp_path / 'file'} is a file; name a folder"
    reasons = {tmp_path / "file": is_file, tmp_path / "file" / "out": is_file, Path("/proc/out"): "cannot be written"}
    for folder, reason in reasons.items():
        with pytest.raises(InputError, match=f"--output_dir {folder} cannot be used: .*{reason}"), lock_folder(folder):
            pass
