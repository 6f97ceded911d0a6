"""Which errors are raised as InputError, and shown as one line."""

import errno
import os
import signal
import time

import pytest
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.commands.any_checkpoint import load_checkpoint
from hf_deberta.pretraining.arguments import NewModelArguments
from hf_deberta.training.errors import InputError, full_disk_message, input_errors, user_errors_in_one_line


@pytest.fixture
def ctrl_c_is_heard():
    """A process that a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_input_errors_are_one_line_and_bugs_keep_their_traceback():
    with pytest.raises(SystemExit, match=r"^x\.py: --rate must be"), user_errors_in_one_line("x.py"):
        raise InputError("--rate must be positive")
    for bug in (ValueError, OSError, TypeError):
        with pytest.raises(bug), user_errors_in_one_line("x.py"):
            raise bug("a bug")


NOT_WRITTEN = [  # by open files, safetensors, tokenizers and torch.save
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/state.json"),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    Exception("No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 248960 vs 248848"),
]


@pytest.mark.parametrize("error", NOT_WRITTEN, ids=str)
def test_a_full_disk_is_one_line(error):
    """Also behind the error of another library."""
    with pytest.raises(SystemExit) as stopped, user_errors_in_one_line("x.py"):
        raise ValueError("An error occurred while generating the dataset") from error
    assert str(stopped.value).startswith(f"x.py: a file could not be written ({error}): make room in --output_dir")


def test_debug_verbosity_shows_tracebacks_of_input_errors():
    before = logging.get_verbosity()
    logging.set_verbosity_debug()
    try:
        with pytest.raises(InputError), user_errors_in_one_line("x.py"):
            raise InputError("wrong")
    finally:
        logging.set_verbosity(before)


def test_an_invalid_configuration_is_shown_by_the_rule_that_it_breaks():
    with pytest.raises(InputError) as raised, input_errors("", StrictDataclassError):
        HfDebertaConfig(hidden_size=10, num_attention_heads=3)
    assert str(raised.value).startswith("num_attention_heads must divide hidden_size")


def test_an_error_names_the_place_but_not_twice_and_bugs_and_memory_errors_pass():
    with pytest.raises(InputError, match="^a.csv: no columns at all$"), input_errors("a.csv", Exception):
        raise AttributeError("no columns\nat all")
    with pytest.raises(InputError, match="^no a.csv$"), input_errors("a.csv", OSError):
        raise OSError("no a.csv")
    for bug, caught in ((ValueError("a bug"), OSError), (MemoryError(), Exception)):
        with pytest.raises(type(bug)) as raised, input_errors("a.csv", caught):
            raise bug
        assert raised.value is bug


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_signal_is_one_line_of_the_main_process(number, name, capsys, monkeypatch):
    for rank, line in (("0", f"\nx.py: Stopped by {name}.\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped, user_errors_in_one_line("x.py"):
            signal.raise_signal(number)
        assert stopped.value.code == 128 + number and capsys.readouterr().err == line


class Interrupted:
    """A function during whose hashing Ctrl-C arrives: `datasets` catches any exception there."""

    def __call__(self, row: dict) -> dict:
        return row

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return (Interrupted, ())


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_while_a_function_is_hashed_stops_the_script():
    with pytest.raises(SystemExit) as stopped, user_errors_in_one_line("x.py"):
        Dataset.from_dict({"a": [1]}).map(Interrupted())
        for _ in range(600):
            time.sleep(0.1)  # interrupt_main, unlike a signal, does not end a longer one
    assert stopped.value.code == 130


def test_the_folder_of_a_pair_is_answered_with_the_model_to_fine_tune(tmp_path):
    (tmp_path / "discriminator").mkdir()
    (tmp_path / "discriminator" / "config.json").write_text("{}")
    for read in (load_checkpoint, NewModelArguments().load_config):
        with pytest.raises(InputError, match=f"two models of RTD: name {tmp_path}/discriminator"):
            read(str(tmp_path))


def test_rows_about_a_full_disk_are_no_full_disk():
    assert full_disk_message(InputError("unknown labels: No space left on device")) is None
    assert "make room" in str(full_disk_message(OSError(28, "No space left on device")))
