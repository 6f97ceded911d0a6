"""Random damage to the checkpoints of a run: the newest whole one is taken with a warning, or a sentence names it.

A case damages some files in one way each, and gives all of them random modification times.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fault_cases import seeds
from tiny_trainers import AtomicTrainer, checkpointing_trainer
from transformers import TrainingArguments

from hf_deberta.training.checkpoints import checkpoints_by_step, delete_old_checkpoints, last_checkpoint
from hf_deberta.training.errors import InputError


def weights(trainer: AtomicTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a finished run of eight steps, and its weights."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = checkpointing_trainer(folder, max_steps=8)
    trainer.train()
    return folder, weights(trainer)


@pytest.fixture
def run_folder(whole_run, tmp_path) -> Path:
    """A copy of its folder without its last checkpoint, as of a run that was killed."""
    folder = shutil.copytree(whole_run[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-8")
    return folder


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def make_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


Kinds = dict[str, Callable[[Path, random.Random], object]]
ABSENT: Kinds = {"delete": lambda path, _: path.unlink(), "make a folder of": make_folder}
SHORT: Kinds = {
    "empty": lambda path, _: path.write_bytes(b""),
    "truncate": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "replace": lambda path, rng: path.write_bytes(rng.randbytes(rng.randrange(1, 10_000))),
}
CHANGED: Kinds = {
    "flip a bit of": flip,
    "overwrite": lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "grow": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100))),
}


class Damage:
    """Damages files, says what it did, and repairs them."""

    def __init__(self, seed: int):
        self.rng, self.seed, self.files = random.Random(seed), seed, {}
        self.story: list[str] = []

    def do(self, path: Path, kinds: Kinds, by_value: bool = False) -> bool:
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


def test_damaged_files(run_folder, tally, caplog):
    attack = "damaged checkpoint"
    for seed in seeds(60, 2000):
        with Damage(seed) as damage:
            damaged = {}  # a phrase that must be said about each damaged checkpoint
            for checkpoint in newest_first(run_folder)[: damage.rng.choice((1, 1, 2, 3))]:
                for path in damage.rng.sample(sorted(checkpoint.iterdir()), damage.rng.choice((1, 1, 2))):
                    is_manifest = path.name == "manifest.json"  # without it, less is noticed
                    kinds = {**SHORT, **CHANGED, **({} if is_manifest else ABSENT)}
                    if damage.do(path, kinds, by_value=is_manifest):
                        damaged[checkpoint] = "" if is_manifest or damaged.get(checkpoint) == "" else path.name
            damage.set_random_times(run_folder)
            is_resumed = check_choice(run_folder, damaged, caplog)
            if is_resumed:
                tally.held(f"{attack}: the newest whole one is taken")
            else:
                tally.refused(f"{attack}: no whole one is left")


def check_choice(folder: Path, damaged: dict[Path, str], caplog: pytest.LogCaptureFixture) -> bool:
    """Check which checkpoint is resumed from, and return whether there is a whole one."""
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


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_a_run_with_damaged_checkpoints_ends_with_the_same_weights(run_folder, whole_run, tally, seed):
    with Damage(seed) as damage:
        for checkpoint in newest_first(run_folder)[: damage.rng.choice((1, 2))]:
            path = damage.rng.choice([path for path in checkpoint.iterdir() if path.name != "manifest.json"])
            damage.do(path, {**ABSENT, **SHORT, **CHANGED})
        damage.set_random_times(run_folder)
        checkpoint = str(chosen(run_folder))
        trainer = checkpointing_trainer(run_folder, max_steps=8)
        trainer.train(resume_from_checkpoint=checkpoint)
        resumed = weights(trainer)
        assert all(torch.equal(resumed[name], value) for name, value in whole_run[1].items())
        damage.files.clear()  # written again
    tally.held("damaged checkpoint: the run ends with the same weights")


def test_the_clock_deletes_no_new_checkpoint(tmp_path, tally):
    """Random modification times, limits and best checkpoints; the checkpoint just written is the one of most steps."""
    for seed in seeds(30, 1000):
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
        tally.held("clock set anywhere: rotation by step")
