"""Checkpoints are complete or absent: interruptions while saving, limits, the best checkpoint, and finished runs."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from numerics import assert_same_by_name
from safetensors.torch import load_file
from tiny_trainers import checkpointing_trainer as trainer
from tiny_trainers import language_model_trainer
from transformers import EarlyStoppingCallback, TrainingArguments

from hf_deberta import HfDebertaForMaskedLM, HfDebertaForSequenceClassification
from hf_deberta.training.checkpoints import (
    checkpoints_by_step,
    delete_old_checkpoints,
    find_damage_of_finished_run,
    last_checkpoint,
)
from hf_deberta.training.errors import InputError
from hf_deberta.training.run_identity import RunArguments


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
    run.save_model()
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "_unfinished").exists()


@pytest.mark.parametrize("where", ["_save_rng_state", "_save_optimizer_and_scheduler"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), RuntimeError("shape")], ids=repr)
def test_stopped_while_saving(tmp_path, monkeypatch, where, error):
    """The earlier checkpoint stays; an error is raised unchanged, and frees the space of the unfinished one."""
    run = trainer(tmp_path, save_total_limit=1)
    save = getattr(run, where)

    def save_or_stop(folder):
        if run.state.global_step == 4:
            raise error
        save(folder)

    monkeypatch.setattr(run, where, save_or_stop)
    with pytest.raises(type(error)) as raised:
        run.train()
    assert raised.value is error and names(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "_unfinished").exists() == isinstance(error, KeyboardInterrupt)
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=last_checkpoint(again.args))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def scored_trainer(folder, scores: list[float], patience: int | None = None, **fields):
    """A trainer whose evaluation after each second step has the next of these scores; the highest is the best."""
    fields = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", **fields}
    fields |= {"load_best_model_at_end": True, "greater_is_better": True, "max_steps": 2 * len(scores)}
    run = trainer(folder, arguments_class=RunArguments, **fields)
    run.compute_metrics = lambda _: {"score": scores[max(0, run.state.global_step // 2 - 1)]}
    if patience is not None:
        run.add_callback(EarlyStoppingCallback(patience))
    return run


@pytest.mark.parametrize("move", [os.rename, shutil.copytree])
def test_a_run_folder_that_was_moved_or_copied(tmp_path, move):
    """The best model is that of the folder in use, also if another one has the old name."""
    saved = {"save_steps": 4, "scores": [3, 4, 5, 2]}  # the best score, at step 6, has no checkpoint
    scored_trainer(tmp_path / "a", **saved).train()
    move(tmp_path / "a", tmp_path / "b")
    if move is shutil.copytree:
        (tmp_path / "a" / "checkpoint-4" / "model.safetensors").write_bytes(b"damaged")
    best = load_file(tmp_path / "b" / "checkpoint-4" / "model.safetensors")
    run = scored_trainer(tmp_path / "b", save_total_limit=1, **saved)
    run.train(resume_from_checkpoint=last_checkpoint(run.args))
    assert run.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-4")
    assert all(weight.equal(best[name]) for name, weight in run.model.state_dict().items() if name in best)
    assert names(tmp_path / "b") == ["checkpoint-4"]


@pytest.mark.parametrize("step", [6, 8])
@pytest.mark.parametrize("fields", [{}, {"eval_on_start": True}], ids=str)
def test_early_stopping_is_exact_over_a_resume(tmp_path, step, fields):
    """At step 8, two evaluations after the best one, also if the run resumes from there."""
    scores = [1, 3, 2, 2, 2, 5]
    whole = scored_trainer(tmp_path, scores, 2, **fields)
    whole.train()
    resumed = scored_trainer(tmp_path, scores, 2, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert resumed.state.global_step == whole.state.global_step == 8
    logged = [[entry for entry in run.state.log_history if "eval_score" in entry] for run in (whole, resumed)]
    assert [entry["step"] for entry in logged[0]] == [entry["step"] for entry in logged[1]]


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


def test_gathered_weights_that_are_tied_are_saved_once(tmp_path, monkeypatch):
    """FSDP2 gathers each of them, as a tensor of its own."""
    run = language_model_trainer(tmp_path, "mlm")
    monkeypatch.setattr(run.accelerator.state, "fsdp_plugin", FsdpPlugin(), raising=False)
    gathered = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    monkeypatch.setattr(run.accelerator, "get_state_dict", lambda model: gathered)
    run.is_fsdp_enabled = True
    run.save_model()
    assert gathered.keys() - load_file(tmp_path / "model.safetensors").keys() == {
        "lm_predictions.lm_head.decoder.weight"
    }
    assert_same_by_name(HfDebertaForMaskedLM.from_pretrained(tmp_path).state_dict(), gathered)


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
    chosen = last_checkpoint(TrainingArguments(str(folder), resume_from_checkpoint=value, use_cpu=True, **fields))
    return None if chosen is None else os.path.relpath(chosen, folder)


def test_checkpoint_to_resume_from(run_folder, tmp_path):
    assert resumed_from(tmp_path / "empty") is None
    shutil.copytree(run_folder / "checkpoint-6", run_folder / "_unfinished" / "checkpoint-8")
    shutil.copytree(run_folder / "checkpoint-6", run_folder / "checkpoint-6-copy")
    assert resumed_from(run_folder) == resumed_from(run_folder, "true") == "checkpoint-6"
    assert resumed_from(run_folder, "false") is resumed_from(run_folder, False) is None
    assert resumed_from(run_folder, str(run_folder / "checkpoint-4")) == "checkpoint-4"


def test_a_requested_folder_that_is_no_checkpoint(run_folder):
    (run_folder / "notes").mkdir()
    for path in ("elsewhere", str(run_folder / "notes"), str(run_folder)):
        with pytest.raises(InputError, match=f"{path}: no model weights, no trainer_state.json, .*false"):
            resumed_from(run_folder, path)


def test_checkpoints_without_optimizer(tmp_path, caplog):
    trainer(tmp_path, max_steps=2, save_only_model=True).train()
    assert resumed_from(tmp_path, save_only_model=True) == "checkpoint-2"
    assert "holds the model only (--save_only_model)" in caplog.text
    with pytest.raises(InputError, match="checkpoint-2: no optimizer.pt, no scheduler.pt, no rng_state.pth"):
        resumed_from(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_checkpoint_that_lacks_a_part(run_folder, caplog, name):
    """A file of it was cut short or deleted: it is named, and the newest whole one taken."""
    path, part = run_folder / "checkpoint-6" / name, "model weights" if name == "model.safetensors" else name
    os.truncate(path, path.stat().st_size // 2)
    assert resumed_from(run_folder) == "checkpoint-4"
    assert f"this checkpoint is not whole, and not used: {path.parent}: {name} is " in caplog.text
    path.unlink()
    assert resumed_from(run_folder) == "checkpoint-4"
    for step in (2, 4):
        (run_folder / f"checkpoint-{step}" / name).unlink()
    with pytest.raises(InputError, match=f"no whole checkpoint .*checkpoint-6: no {part}; .*checkpoint-2: no {part}"):
        resumed_from(run_folder)


def test_the_clock_deletes_no_new_checkpoint(tmp_path):
    """Random modification times, limits and best checkpoints; the checkpoint just written is the one of most steps."""
    for seed in range(100):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        steps = rng.sample(range(1, 2000), rng.randrange(1, 7))
        for step in steps:
            (folder / f"checkpoint-{step}").mkdir(parents=True)
            os.utime(folder / f"checkpoint-{step}", (rng.randrange(2**33),) * 2)
        limit, kept = rng.choice((None, 0, 1, 2, 3)), {max(steps), rng.choice(steps)}
        delete_old_checkpoints(folder, limit, {f"checkpoint-{step}" for step in kept})
        others = sorted(set(steps) - kept, reverse=True)
        number = max(0, (limit or len(steps)) - len(kept))
        assert set(checkpoints_by_step(folder)) == kept | set(others[:number]), f"seed {seed}"


@pytest.mark.parametrize(("limit", "first"), [(None, None), (1, None), (2, "checkpoint-2"), (None, "checkpoint-2")])
def test_checkpoints_past_the_step_of_the_run_are_archived(run_folder, caplog, limit, first):
    """Of a run that resumes from an earlier checkpoint, or starts anew: the next command continues this run."""
    last = (run_folder / "checkpoint-6" / "trainer_state.json").read_text()
    run = trainer(run_folder, save_steps=3, max_steps=3, save_total_limit=limit)
    run.train(resume_from_checkpoint=first and str(run_folder / first))
    assert names(run_folder) == ["checkpoint-2", "checkpoint-3"][-(limit or 2) :]
    assert names(run_folder / "_before") == ["checkpoint-4", "checkpoint-6"]
    assert (run_folder / "_before" / "checkpoint-6" / "trainer_state.json").read_text() == last
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
    for _ in range(2):
        run.save_model()
        assert not (tmp_path / "manifest.json").exists()  # not of an earlier model
        run.save_state()
        assert find_damage_of_finished_run(tmp_path) == []
    (tmp_path / "config.json").write_text("{}")  # may be edited
    assert find_damage_of_finished_run(tmp_path) == []
    (tmp_path / "trainer_state.json").write_text("")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1] + b"x")
    damage = find_damage_of_finished_run(tmp_path)
    assert sorted(problem.split()[0] for problem in damage) == ["model.safetensors", "trainer_state.json"]
    (tmp_path / "model.safetensors").unlink()
    assert find_damage_of_finished_run(tmp_path) == ["no model weights"]


def test_metrics_are_combined(tmp_path):
    """Those of a split replace its earlier ones."""
    run, path = trainer(tmp_path / "out"), tmp_path / "out" / "all_results.json"
    run.save_metrics("train", {"train_loss": 1.0})
    run.save_metrics("eval", {"eval_loss": 2.0, "epoch": 3.0})
    assert json.loads(path.read_text()) == {"epoch": 3.0, "eval_loss": 2.0, "train_loss": 1.0}
    run.save_metrics("eval", {"eval_f1": 2.5})  # another task
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text()) == {"eval_f1": 2.5}
    assert json.loads(path.read_text()) == {"eval_f1": 2.5, "train_loss": 1.0, "epoch": 3.0}


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").touch()
    trainer(tmp_path, max_steps=2).train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    assert not (tmp_path / "checkpoint-2" / "old").exists()


def test_a_checkpoint_of_fsdp_without_it_is_one_sentence(run_folder):
    (run_folder / "checkpoint-6" / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(InputError, match=r"--resume_from_checkpoint false: .*checkpoint-6 .* PyTorch FSDP"):
        trainer(run_folder).train(resume_from_checkpoint=str(run_folder / "checkpoint-6"))
