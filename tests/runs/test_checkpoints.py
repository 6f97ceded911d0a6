"""Checkpoints are complete or absent: interruptions and full disks while saving, limits, and the best checkpoint."""

import errno
import json
import os

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.runs.checkpoints import (
    AtomicCheckpointsMixin,
    atomic_write,
    flush_to_disk,
    last_checkpoint,
)
from hf_deberta.runs.errors import InputError


class AtomicTrainer(AtomicCheckpointsMixin, Trainer):
    pass


def trainer(folder, **arguments) -> AtomicTrainer:
    torch.manual_seed(0)
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    ids = torch.randint(5, 100, (8, 6)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": [0, 1] * 4})
    defaults = {
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return AtomicTrainer(
        model, TrainingArguments(str(folder), **{**defaults, **arguments}), train_dataset=rows, eval_dataset=rows
    )


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_limit_and_best(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(tmp_path, save_total_limit=1, **best)
    run.train()
    assert "checkpoint-6" in names(tmp_path) and len(names(tmp_path)) <= 2
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{state['best_global_step']}")
    assert os.path.isdir(state["best_model_checkpoint"])
    assert not (tmp_path / "_unfinished").exists() or not list((tmp_path / "_unfinished").iterdir())
    run.save_model()
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "_unfinished").exists()


@pytest.mark.parametrize("where", ["_save_rng_state", "_save_optimizer_and_scheduler"])
def test_interrupted_while_saving(tmp_path, monkeypatch, where):
    run = trainer(tmp_path)
    save = getattr(run, where)

    def stop(folder):
        if run.state.global_step == 4:
            raise KeyboardInterrupt
        save(folder)

    monkeypatch.setattr(run, where, stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert names(tmp_path) == ["checkpoint-2"] and (tmp_path / "_unfinished" / "checkpoint-4").exists()
    again = trainer(tmp_path)
    assert last_checkpoint(again.args) == str(tmp_path / "checkpoint-2")
    again.train(resume_from_checkpoint=last_checkpoint(again.args))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("shape")], ids=str)
def test_errors_while_saving_are_raised_unchanged(tmp_path, monkeypatch, error):
    """They leave the earlier checkpoint, and free the space of the unfinished one."""
    run = trainer(tmp_path, save_total_limit=1)
    save = run._save_optimizer_and_scheduler

    def full(folder):
        if run.state.global_step == 4:
            raise error
        save(folder)

    monkeypatch.setattr(run, "_save_optimizer_and_scheduler", full)
    with pytest.raises(type(error)) as raised:
        run.train()
    assert raised.value is error
    assert names(tmp_path) == ["checkpoint-2"] and not (tmp_path / "_unfinished").exists()


class FsdpPlugin:
    """Stands in for accelerate's plugin, which works on accelerators only."""

    def __init__(self):
        self.state_dict_type, self.history = "SHARDED_STATE_DICT", []

    def set_state_dict_type(self, kind):
        self.state_dict_type = kind
        self.history.append(kind)


def test_fsdp_shards_are_gathered_into_the_final_model(tmp_path, monkeypatch):
    run, plugin = trainer(tmp_path / "run"), FsdpPlugin()
    monkeypatch.setattr(run.accelerator.state, "fsdp_plugin", plugin, raising=False)
    run.is_fsdp_enabled = True
    run.save_model()
    run.save_model(str(tmp_path / "pushed"), _internal_call=True)  # as push_to_hub does
    for folder in ("run", "pushed"):
        HfDebertaForSequenceClassification.from_pretrained(tmp_path / folder)
    assert plugin.history == ["FULL_STATE_DICT", "SHARDED_STATE_DICT"] * 2
    run._writing_checkpoint = True  # its shards are saved elsewhere
    run.save_model(str(tmp_path / "checkpoint"), _internal_call=True)
    assert len(plugin.history) == 4 and not (tmp_path / "checkpoint").exists()


def test_flush_skips_folders_that_cannot_be_opened(tmp_path, monkeypatch):
    """As on Windows. A file that cannot be opened is an error."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").touch()
    opens, opened = os.open, []

    def windows(path, flags):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "denied")
        opened.append(path.name)
        return opens(path, flags)

    monkeypatch.setattr(os, "open", windows)
    flush_to_disk(tmp_path)
    assert opened == ["file"]
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "denied")))
    with pytest.raises(PermissionError):
        flush_to_disk(tmp_path)


def test_checkpoint_to_resume_from(tmp_path):
    def resumed_from(value):
        return last_checkpoint(TrainingArguments(str(tmp_path / "run"), resume_from_checkpoint=value))

    assert resumed_from(None) is None
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-12").mkdir()
    (tmp_path / "run" / "_unfinished" / "checkpoint-20").mkdir(parents=True)
    assert resumed_from(None) == resumed_from("true") == str(tmp_path / "run" / "checkpoint-12")
    assert resumed_from("false") is None
    assert resumed_from(str(tmp_path / "run" / "checkpoint-5")) == str(tmp_path / "run" / "checkpoint-5")
    with pytest.raises(InputError, match="--resume_from_checkpoint elsewhere is not a folder"):
        resumed_from("elsewhere")


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").touch()
    trainer(tmp_path, max_steps=2).train()
    assert (
        not (tmp_path / "checkpoint-2" / "old").exists() and (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    )


def test_a_file_is_complete_or_unchanged(tmp_path):
    path = tmp_path / "seeds.json"
    path.write_text("old")
    with pytest.raises(OSError), atomic_write(path) as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == "old"
        raise OSError(errno.ENOSPC, "no space left")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
