"""Checkpoints are complete or absent: interruptions while saving, damage, limits, clocks, and the best checkpoint."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.runs.checkpoints import (
    AtomicCheckpointsMixin,
    RunEnd,
    delete_old_checkpoints,
    flush_to_disk,
    inspect_finished_run,
    last_checkpoint,
)
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.integrity import write_manifest


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


LAYOUTS = {
    "global_step2": "DeepSpeed",
    "pytorch_model_fsdp_0": "FSDP (SHARDED_STATE_DICT)",
    "pytorch_model_fsdp.bin": "FSDP (FULL_STATE_DICT)",
    "model.safetensors": "the whole model in each process",
}


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_a_checkpoint_is_resumed_with_the_layout_it_was_saved_with(tmp_path, monkeypatch, name, layout):
    run, checkpoint = trainer(tmp_path / "run"), tmp_path / "checkpoint-2"
    (checkpoint / name).mkdir(parents=True)
    monkeypatch.setattr(Trainer, "train", lambda self, *_, **__: "trained")
    monkeypatch.setattr(run.accelerator.state, "fsdp_plugin", FsdpPlugin(), raising=False)
    layouts = {"DeepSpeed": (True, False), "FSDP (SHARDED_STATE_DICT)": (False, True)}
    for now in ("DeepSpeed", "FSDP (SHARDED_STATE_DICT)", "the whole model in each process"):
        run.is_deepspeed_enabled, run.is_fsdp_enabled = layouts.get(now, (False, False))
        if now == layout:
            assert run.train(str(checkpoint)) == "trained"
            continue
        with pytest.raises(InputError, match=re.escape(f"was saved with {layout}, and cannot be resumed with {now}:")):
            run.train(str(checkpoint))


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with checkpoints 2, 4 and 6 of a whole run."""
    folder = tmp_path_factory.mktemp("saved")
    trainer(folder).train()
    return folder


@pytest.fixture
def run_folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def resumed_from(folder, value=None, **fields) -> str | None:
    arguments = TrainingArguments(str(folder), resume_from_checkpoint=value, use_cpu=True, **fields)
    chosen = last_checkpoint(arguments)
    return None if chosen is None else os.path.relpath(chosen, folder)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_checkpoint_to_resume_from(run_folder, tmp_path):
    assert resumed_from(tmp_path / "empty") is None
    shutil.copytree(run_folder / "checkpoint-6", run_folder / "_unfinished" / "checkpoint-8")
    shutil.copytree(run_folder / "checkpoint-6", run_folder / "checkpoint-6-copy")
    os.utime(run_folder / "checkpoint-2", (2**33, 2**33))
    assert resumed_from(run_folder) == resumed_from(run_folder, "true") == "checkpoint-6"
    assert resumed_from(run_folder, "false") is None
    assert resumed_from(run_folder, str(run_folder / "checkpoint-4")) == "checkpoint-4"


def test_a_requested_checkpoint_is_not_replaced_by_another(run_folder):
    flip_a_byte(run_folder / "checkpoint-6" / "optimizer.pt")
    with pytest.raises(InputError, match=r"checkpoint-6 is damaged \(optimizer.pt has another checksum"):
        resumed_from(run_folder, str(run_folder / "checkpoint-6"))
    with pytest.raises(InputError, match="--resume_from_checkpoint elsewhere is not a folder"):
        resumed_from(run_folder, "elsewhere")
    with pytest.raises(
        InputError, match="run is not a checkpoint: .* it holds checkpoint-2, checkpoint-4, checkpoint-6"
    ):
        resumed_from(run_folder, str(run_folder))
    (run_folder / "notes").mkdir()
    with pytest.raises(InputError, match="notes is not a checkpoint: it has no trainer_state.json$"):
        resumed_from(run_folder, str(run_folder / "notes"))


def test_checkpoints_without_manifest(run_folder, caplog):
    """Those of other trainers are accepted, and their damage is noticed as far as their files tell."""
    for manifest in run_folder.glob("*/manifest.json"):
        manifest.unlink()
    (run_folder / "checkpoint-6" / "rng_state.pth").unlink()
    os.truncate(run_folder / "checkpoint-4" / "model.safetensors", 3000)
    assert resumed_from(run_folder) == "checkpoint-2"
    assert "checkpoint-6 is not used, because it is damaged: no rng_state.pth" in caplog.text
    assert "checkpoint-4 is not used, because it is damaged: model.safetensors cannot be read (" in caplog.text
    assert "checkpoint-2 has no manifest.json" in caplog.text
    (run_folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(InputError, match=r"checkpoint-2: trainer_state.json is damaged \(it is of step 0\)"):
        resumed_from(run_folder)


def test_checkpoints_without_optimizer(tmp_path, caplog):
    trainer(tmp_path, max_steps=2, save_only_model=True).train()
    assert resumed_from(tmp_path, save_only_model=True) == "checkpoint-2"
    assert "holds the model only (--save_only_model): the optimizer and the learning rate start anew" in caplog.text
    with pytest.raises(InputError, match="checkpoint-2: no optimizer.pt, no scheduler.pt, no rng_state.pth"):
        resumed_from(tmp_path)


def test_the_best_model_must_be_whole(run_folder, caplog):
    """The run loads it in the end. If it is gone, Trainer warns, and the run goes on without it."""
    for step in (4, 6):
        state = run_folder / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "best_global_step": 2}))
        write_manifest(state.parent)
    fields = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    fields |= {"eval_steps": 2, "save_steps": 2}
    flip_a_byte(run_folder / "checkpoint-2" / "optimizer.pt")  # nothing that is loaded
    assert resumed_from(run_folder, **fields) == "checkpoint-6"
    flip_a_byte(run_folder / "checkpoint-2" / "model.safetensors")
    assert resumed_from(run_folder) == "checkpoint-6"
    message = "the best model so far, checkpoint-2, is damaged .*; remove that folder to go on without it"
    with pytest.raises(InputError, match=f"checkpoint-6: {message}"):
        resumed_from(run_folder, **fields)
    with pytest.raises(InputError, match=message):
        resumed_from(run_folder, str(run_folder / "checkpoint-6"), **fields)
    shutil.rmtree(run_folder / "checkpoint-2")
    assert resumed_from(run_folder, **fields) == "checkpoint-6"


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("first", [None, "checkpoint-2"], ids=["anew", "resumed"])
def test_checkpoints_past_the_step_of_the_run_are_archived(run_folder, caplog, limit, first):
    """Of a run that resumes from an earlier checkpoint, or starts anew: the next command continues this run."""
    last = json.loads((run_folder / "checkpoint-6" / "trainer_state.json").read_text())
    run = trainer(run_folder, save_steps=3, max_steps=3, save_total_limit=limit)
    run.train(resume_from_checkpoint=first and str(run_folder / first))
    assert names(run_folder) == ["checkpoint-2", "checkpoint-3"][-(limit or 2) :]
    assert sorted(path.name for path in (run_folder / "_before").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert json.loads((run_folder / "_before" / "checkpoint-6" / "trainer_state.json").read_text()) == last
    assert "checkpoint-4, checkpoint-6 in" in caplog.text and "moved to _before" in caplog.text
    assert resumed_from(run_folder) == "checkpoint-3"


def test_an_interrupted_deletion_leaves_no_half_checkpoint(run_folder, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        delete_old_checkpoints(run_folder, 1, {"checkpoint-6"})
    assert names(run_folder) == ["checkpoint-4", "checkpoint-6"]


def test_a_finished_run_has_a_manifest_of_its_weights_and_state(tmp_path):
    run = trainer(tmp_path, max_steps=1, save_strategy="no")
    run.train()
    run.save_model()
    assert inspect_finished_run(tmp_path)[0] is RunEnd.MISSING
    run.save_state()
    assert inspect_finished_run(tmp_path) == (RunEnd.WHOLE, [])
    (tmp_path / "config.json").write_text("{}")  # may be edited
    assert inspect_finished_run(tmp_path) == (RunEnd.WHOLE, [])
    sources = sorted(path.name for path in tmp_path.glob("*.py"))
    for name in (*sources, "training_args.bin"):
        (tmp_path / name).unlink()
    assert sources and inspect_finished_run(tmp_path)[1] == [f"{name} is missing" for name in sources]
    run.save_model()
    run.save_state()
    flip_a_byte(tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("")
    damage = inspect_finished_run(tmp_path)[1]
    assert sorted(problem.split()[0] for problem in damage) == ["model.safetensors", "trainer_state.json"]
    (tmp_path / "model.safetensors").unlink()
    assert inspect_finished_run(tmp_path)[1] == ["no model weights"]
    run.save_model()
    assert not (tmp_path / "manifest.json").exists()
    run.save_state()
    assert inspect_finished_run(tmp_path) == (RunEnd.WHOLE, [])


def test_metrics_are_combined(tmp_path, caplog):
    run = trainer(tmp_path / "out")
    run.save_metrics("train", {"train_loss": 1.0})
    run.save_metrics("eval", {"eval_loss": 2.0})
    assert json.loads((tmp_path / "out" / "all_results.json").read_text()) == {"eval_loss": 2.0, "train_loss": 1.0}
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text()) == {"eval_loss": 2.0}
    run.save_metrics("eval", {"eval_loss": 2.0, "epoch": 3.0})
    run.save_metrics("eval", {"eval_f1": 2.5})  # another task
    combined = {"eval_f1": 2.5, "train_loss": 1.0, "epoch": 3.0}
    assert json.loads((tmp_path / "out" / "all_results.json").read_text()) == combined
    (tmp_path / "out" / "all_results.json").write_text('{"train')
    run.save_metrics("eval", {"eval_loss": 3.0})
    assert json.loads((tmp_path / "out" / "all_results.json").read_text()) == {"eval_loss": 3.0}
    assert "all_results.json is damaged" in caplog.text


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").touch()
    trainer(tmp_path, max_steps=2).train()
    assert (
        not (tmp_path / "checkpoint-2" / "old").exists() and (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    )
