"""The main process decides for all: results and errors, checkpoints, and the lock of a folder."""

import os
from pathlib import Path

import pytest
from accelerate import PartialState
from transformers import TrainingArguments
from two_processes import fork_two, run_script

from hf_deberta.training.checkpoints import last_checkpoint
from hf_deberta.training.errors import InputError
from hf_deberta.training.processes import in_main_process
from hf_deberta.training.run_lock import LOCK, lock_folder


def fail() -> None:
    raise InputError("a mistake")


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The script ends with an error if a check fails in one of the two processes."""
    (tmp_path / "file").touch()
    run_script(__file__, tmp_path)


def one_of_two(rank: int, folder: Path) -> None:
    arguments = TrainingArguments(str(folder / "run"), use_cpu=True)
    state = PartialState()
    assert state.num_processes == 2
    assert in_main_process(lambda: [rank]) == [0]
    with pytest.raises(InputError, match="a mistake"):
        in_main_process(fail)
    with lock_folder(folder / "run"):
        state.wait_for_everyone()
        assert f"process {in_main_process(os.getpid)}," in (folder / "run" / LOCK).read_text()
        state.wait_for_everyone()
    state.wait_for_everyone()
    assert not (folder / "run" / LOCK).exists()
    with pytest.raises(InputError, match="cannot be used"), lock_folder(folder / "file"):
        pass
    assert last_checkpoint(arguments) is None
    state.wait_for_everyone()
    if rank == 0:
        (folder / "run" / "checkpoint-3").mkdir(parents=True)
    state.wait_for_everyone()
    with pytest.raises(InputError, match="no whole checkpoint to resume from .*checkpoint-3: no model weights"):
        last_checkpoint(arguments)
    state.destroy_process_group()


if __name__ == "__main__":
    fork_two(one_of_two)
