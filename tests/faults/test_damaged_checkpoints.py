"""Random damage to the files of runs: the newest whole checkpoint is taken with a warning, or a sentence names it.

A case damages some files of a run's checkpoints in one way each, and gives all of them random modification times.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from fault_cases import number_of_cases, seeds
from transformers import Trainer, TrainingArguments

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.pretraining.token_file import TokenFile, write_token_file
from hf_deberta.runs.checkpoints import (
    AtomicCheckpointsMixin,
    RunEnd,
    checkpoints_by_step,
    delete_old_checkpoints,
    inspect_finished_run,
    last_checkpoint,
)
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.run_identity import RunArguments, compare_with_recorded_run, record_run

STEPS = 8
NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


class AtomicTrainer(AtomicCheckpointsMixin, Trainer):
    pass


def make_trainer(folder: Path) -> AtomicTrainer:
    """Eight steps with dropout, and a checkpoint after every second one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 100}
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", **sizes))
    rows = Dataset.from_dict({"input_ids": torch.randint(5, 100, (8, 6)).tolist(), "labels": [0, 1] * 4})
    fields: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": STEPS, "save_steps": 2}
    fields |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": True}
    return AtomicTrainer(model, TrainingArguments(str(folder), report_to="none", **fields), train_dataset=rows)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a finished run, and its weights."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = make_trainer(folder)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return folder, weights(trainer)


@pytest.fixture
def run_folder(whole_run, tmp_path) -> Path:
    """A copy of its folder without its last checkpoint, as of a run that was killed."""
    folder = shutil.copytree(whole_run[0], tmp_path / "run")
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    return folder


Kind = Callable[[Path, random.Random], object]


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def replace(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((path.stat().st_size, rng.randrange(1, 10_000)))))


def grow(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def make_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


ABSENT: dict[str, Kind] = {"delete": lambda path, _: path.unlink(), "make a folder of": make_folder}
SHORT: dict[str, Kind] = {"empty": lambda path, _: path.write_bytes(b""), "truncate": truncate}
CHANGED: dict[str, Kind] = {"replace": replace, "flip a bit of": flip, "grow": grow}


class Damage:
    """Damages files, says what it did, and repairs them."""

    def __init__(self, seed: int):
        self.rng, self.seed, self.files = random.Random(seed), seed, {}
        self.story: list[str] = []

    def do(self, path: Path, kinds: dict[str, Kind], by_value: bool = False) -> bool:
        """Damage the file, and return whether it changed; `by_value`, whether it is other JSON."""
        kind = self.rng.choice(list(kinds))
        self.files[path] = before = path.read_bytes()
        self.story.append(f"{kind} {path.parent.name}/{path.name}")
        kinds[kind](path, self.rng)
        after = path.read_bytes() if path.is_file() else None
        return after != before and not (by_value and same_json(before, after))

    def set_random_times(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (self.rng.randrange(2**33),) * 2)

    def __enter__(self) -> "Damage":
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        if error is not None:
            print(f"FAULTS_SEED={self.seed}: {'; '.join(self.story)}")
        for path, content in self.files.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(content)


def same_json(before: bytes, after: bytes | None) -> bool:
    try:
        return json.loads(before) == json.loads(after or b"")
    except (ValueError, RecursionError):
        return False


def chosen(folder: Path, requested: Path | None = None) -> Path:
    arguments = TrainingArguments(str(folder), resume_from_checkpoint=requested and str(requested), use_cpu=True)
    return Path(str(last_checkpoint(arguments)))


def newest_first(folder: Path) -> list[Path]:
    return list(reversed(checkpoints_by_step(folder).values()))


def check_choice(folder: Path, damaged: dict[Path, str], caplog: pytest.LogCaptureFixture) -> bool:
    """Check which checkpoint is resumed from, and return whether there is a whole one.

    Args:
        damaged: a phrase that must be said about each damaged checkpoint.
    """
    caplog.clear()
    checkpoints = newest_first(folder)
    whole = next((checkpoint for checkpoint in checkpoints if checkpoint not in damaged), None)
    try:
        assert chosen(folder) == whole
        messages = caplog.text
    except InputError as error:
        assert whole is None, error
        messages = str(error)
    for checkpoint in checkpoints[: checkpoints.index(whole) if whole else None]:
        assert checkpoint.name in messages and damaged[checkpoint] in messages
    for checkpoint in checkpoints:
        if checkpoint in damaged:
            with pytest.raises(InputError, match=checkpoint.name):
                chosen(folder, checkpoint)
        else:
            assert chosen(folder, checkpoint) == checkpoint
    return whole is not None


def test_damaged_files(run_folder, tally, caplog):
    """One or two files of each of some checkpoints, the newest among them."""
    for seed in seeds(60, 2000):
        with Damage(seed) as damage:
            damaged = {}
            for checkpoint in newest_first(run_folder)[: damage.rng.choice((1, 1, 2, 3))]:
                for path in damage.rng.sample(sorted(checkpoint.iterdir()), damage.rng.choice((1, 1, 2))):
                    is_manifest = path.name == "manifest.json"  # without it, less is noticed: see the next test
                    kinds = {"empty": SHORT["empty"], "truncate": truncate, **CHANGED}
                    if damage.do(path, kinds if is_manifest else {**kinds, **ABSENT}, by_value=is_manifest):
                        damaged[checkpoint] = "" if is_manifest or damaged.get(checkpoint) == "" else path.name
            damage.set_random_times(run_folder)
            if check_choice(run_folder, damaged, caplog):
                tally.held("damaged checkpoint: the newest whole one is taken")
            else:
                tally.refused("damaged checkpoint: no whole one is left")


def test_damaged_files_of_checkpoints_without_manifest(run_folder, tally, caplog):
    """A file that is needed is missing, too short, or something else."""
    for manifest in run_folder.glob("*/manifest.json"):
        manifest.unlink()
    for seed in seeds(40, 1000):
        with Damage(seed) as damage:
            damaged = {}
            for checkpoint in newest_first(run_folder)[: damage.rng.choice((1, 1, 2, 3))]:
                name = damage.rng.choice(NEEDED)
                kinds = {**ABSENT, **SHORT, "replace": replace}
                if damage.do(checkpoint / name, kinds, by_value=name == "trainer_state.json"):
                    damaged[checkpoint] = "model" if name == "model.safetensors" else name
            damage.set_random_times(run_folder)
            if check_choice(run_folder, damaged, caplog):
                tally.held("damaged checkpoint without manifest: the newest whole one is taken")
            else:
                tally.refused("damaged checkpoint without manifest: no whole one is left")


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_a_run_with_damaged_checkpoints_ends_with_the_same_weights(run_folder, whole_run, tally, seed):
    with Damage(seed) as damage:
        for checkpoint in newest_first(run_folder)[: damage.rng.choice((1, 2))]:
            path = damage.rng.choice([path for path in checkpoint.iterdir() if path.name != "manifest.json"])
            damage.do(path, {**ABSENT, **SHORT, **CHANGED})
        damage.set_random_times(run_folder)
        checkpoint = str(chosen(run_folder))
        trainer = make_trainer(run_folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        resumed = weights(trainer)
        assert all(torch.equal(resumed[name], value) for name, value in whole_run[1].items())
        damage.files.clear()  # written again
    tally.held("damaged checkpoint: the run ends with the same weights")


def test_a_damaged_finished_run_is_noticed(whole_run, tally):
    folder = whole_run[0]
    for seed in seeds(20, 1000):
        with Damage(seed) as damage:
            path = folder / damage.rng.choice(("model.safetensors", "trainer_state.json"))
            damage.do(path, {**ABSENT, **SHORT, **CHANGED})
            end, damaged = inspect_finished_run(folder)
            if path.exists() or path.suffix != ".json":
                assert end is RunEnd.DAMAGED and (path.name in damaged[0] or damaged == ["no model weights"])
            else:  # its deletion leaves a run that has not finished
                assert end is RunEnd.MISSING
        assert inspect_finished_run(folder)[0] is RunEnd.WHOLE
    tally.held("damaged finished run is noticed", number_of_cases(20, 1000))


def test_the_clock_deletes_no_new_checkpoint(tmp_path, tally):
    """Random modification times, limits and best checkpoints; the checkpoint just written is the one of most steps."""
    for seed in seeds(30, 1000):
        rng = random.Random(seed)
        steps = rng.sample(range(1, 2000), rng.randrange(1, 7))
        for step in steps:
            (tmp_path / f"checkpoint-{step}").mkdir()
            os.utime(tmp_path / f"checkpoint-{step}", (rng.randrange(2**33),) * 2)
        limit, best = rng.choice((None, 0, 1, 2, 3)), rng.choice(steps)
        delete_old_checkpoints(tmp_path, limit, {f"checkpoint-{step}" for step in (max(steps), best)})
        number = len({max(steps), best}) if limit == 1 else limit or len(steps)
        first = {best, max(steps)}
        others = sorted(set(steps) - first, reverse=True)
        assert set(checkpoints_by_step(tmp_path)) == first | set(others[: max(0, number - len(first))]), f"seed {seed}"
        for checkpoint in tmp_path.iterdir():
            shutil.rmtree(checkpoint)
        tally.held("clock set anywhere: rotation by step")


def test_damaged_run_json(tmp_path, tally):
    """It is named, or the run is another one, or it still says the same about what is compared."""
    arguments = RunArguments(str(tmp_path), use_cpu=True)
    arguments.identifying_flags = {"learning_rate": 1e-3, "train_file": "rows.csv", "max_grad_norm": None}
    settings = arguments.run_settings({"steps": 4, "batch": 8})
    record_run(arguments, settings, same_run=False)
    for seed in seeds(60, 1500):
        with Damage(seed) as damage:
            damage.do(tmp_path / "run.json", {**SHORT, **CHANGED})
            try:
                assert compare_with_recorded_run(arguments, settings, may_grow=("steps",)) is not None
                tally.held("damaged run.json")
            except InputError as error:
                assert str(tmp_path) in str(error) and "--resume_from_checkpoint false" in str(error)
                tally.refused("damaged run.json")


def test_damaged_token_files(tmp_path, tally):
    """Each is named, or the text is tokenized again because the fingerprint differs."""
    documents = [[1, 2, 3], [4], [5, 6]]
    folder = tmp_path / "tokens"
    write_token_file(folder, documents, 10, "fingerprint")
    for seed in seeds(60, 1500):
        with Damage(seed) as damage:
            name = damage.rng.choice(("about.json", "tokens.bin", "ends.bin"))
            kinds = (
                {**SHORT, "grow": grow, "delete": ABSENT["delete"]} if name == "tokens.bin" else {**SHORT, **CHANGED}
            )
            damage.do(folder / name, kinds)
            try:
                tokens = TokenFile.read_if_same(folder, "fingerprint")
                assert tokens is None or name == "ends.bin" or tokens.tokens.tolist() == [1, 2, 3, 4, 5, 6]
                tally.held("damaged token file")
            except InputError as error:
                assert str(folder) in str(error)
                tally.refused("damaged token file")
