"""The entry of a training script."""

import logging
import re
import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils.logging import is_progress_bar_enabled

from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.training.script import as_words, run_script, show_notices


def test_a_default_output_folder_is_named_before_the_script_starts(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    classes = (CorpusArguments, PretrainingArguments)
    for words in ([], ["--output_dir", "mine"]):
        monkeypatch.setattr(sys, "argv", ["script", "--train_file", "a", "--use_cpu", *words])
        caplog.clear()
        run_script(classes, lambda *_: None)
        message = "No --output_dir is given: everything is written to trainer_output"
        assert (message in caplog.text) == (not words)


def test_a_script_locks_its_folder(tmp_path, monkeypatch):
    """Before it tokenizes, and not once it has ended."""
    monkeypatch.setattr(sys, "argv", ["script", "--use_cpu", "--output_dir", str(tmp_path / "out")])
    locked = run_script((PretrainingArguments,), lambda args: list((tmp_path / "out").iterdir()))
    assert locked == [tmp_path / "out" / "_run.lock"] and not list((tmp_path / "out").iterdir())


def test_notices_are_shown_once(monkeypatch, capsys):
    """By our logger, as the root logger would repeat the lines of libraries; of several processes by the main one."""
    ours = logging.getLogger("hf_deberta")
    for logger in (logging.root, ours):
        monkeypatch.setattr(logger, "handlers", [])
    shown = {"0": "notice\nwarning\nengine\n", "1": "engine\n"}
    for rank, lines in shown.items():
        monkeypatch.setenv("RANK", rank)
        show_notices()
        show_notices()
        ours.getChild("training").info("notice")
        ours.getChild("training").warning("warning")
        ours.getChild("engines.onednn").warning("engine")
        assert capsys.readouterr().err == lines and not logging.root.handlers
    monkeypatch.delenv("RANK")
    show_notices()


REFUSED = """--seed -1; --data_seed -1; --per_device_eval_batch_size 0; --gradient_accumulation_steps 0
--learning_rate nan; --optim adamw_bnb_8bit; --torch_compile_backend nope; --accelerator_config nope.json
--lr_scheduler_kwargs {"foo":1}; --dataloader_num_workers -1; --eval_do_concat_batches False
--report_to trackio; --max_steps 5 --lr_scheduler_type polynomial --warmup_steps 5"""


@pytest.mark.parametrize("words", re.split("; |\n", REFUSED))
def test_a_value_that_trainer_refuses_is_one_line_with_its_flag(words, tmp_path, monkeypatch):
    """Before the script starts. Flags that have nothing to do with the error are not named."""
    others = ["--use_cpu", "--adam_beta1", "0.8", "--label_smoothing_factor", "0", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["script", *others, *words.split()])
    with pytest.raises(SystemExit, match=rf"^script: {re.escape(words)}:? .") as stopped:
        run_script((PretrainingArguments,), lambda args: pytest.fail("started"))
    assert "\n" not in stopped.value.code and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--lr_scheduler_type polynomial --warmup_steps 300", "--do_train 0 --adam_beta1 2"])
def test_flags_that_may_be_right_are_not_refused(words, tmp_path, monkeypatch):
    """The number of steps is not known yet; nothing is trained."""
    monkeypatch.setattr(sys, "argv", ["script", "--use_cpu", "--output_dir", str(tmp_path), *words.split()])
    assert run_script((PretrainingArguments,), lambda args: args.push_to_hub) is False


def test_only_the_bars_of_downloads_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--use_cpu", "--output_dir", str(tmp_path)])
    shown = run_script(
        (PretrainingArguments,), lambda args: (not are_progress_bars_disabled(), is_progress_bar_enabled())
    )
    assert shown == (True, False)


def test_flags_as_words():
    assert as_words("bf16", True) == "--bf16" and as_words("learning_rate", 1e-5) == "--learning_rate 1e-05"
    assert as_words("text_column_names", ["a", "b"]) == "--text_column_names a b"
