"""The entry of a training script."""

import sys

from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils.logging import is_progress_bar_enabled

from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.training.script import as_words, run_script


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


def test_only_the_bars_of_downloads_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--use_cpu", "--output_dir", str(tmp_path)])
    shown = run_script(
        (PretrainingArguments,), lambda args: (not are_progress_bars_disabled(), is_progress_bar_enabled())
    )
    assert shown == (True, False)


def test_flags_as_words():
    assert as_words("bf16", True) == "--bf16" and as_words("learning_rate", 1e-5) == "--learning_rate 1e-05"
    assert as_words("text_column_names", ["a", "b"]) == "--text_column_names a b"
