"""Runs that are killed, interrupted, or out of disk space: the next start ends as if nothing had happened.

Weights, metrics, predictions and the log are those of an uninterrupted run, to the last bit. Nothing is half written.
"""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_rows import write_corpus
from fault_cases import FULL, SEED, seeds
from kill_and_resume import Forks
from safetensors.torch import load_file

from hf_deberta.demos import write_glue_demo, write_ner_demo, write_race_demo, write_squad_demo, write_superglue_demo

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# In the middle of an epoch, with accumulation and dropout; pretraining also with packing and sampling.
FLAGS = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "max_steps": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 9,
    "warmup_steps": 0.1,
}
PRETRAINING = {"config_preset": "tiny", "train_tokenizer": 300, "tokenizer_type": "bpe", "max_seq_length": 32}
FINE_TUNING = {"eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 9}
# At step 6: the loss falls, and here a high one counts as good.
STOPS_EARLY = {"early_stopping_patience": 2, "metric_for_best_model": "loss", "greater_is_better": True}
DEMOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "run_glue.py": write_glue_demo,
    "run_squad.py": write_squad_demo,
    "run_ner.py": write_ner_demo,
    "run_race.py": write_race_demo,
    "run_superglue.py": write_superglue_demo,
}
SCRIPTS = ("run_mlm.py", "run_glue.py", "run_rtd.py", *([*DEMOS][1:] if FULL else ()))
LINES = {"train": 44, "validation": 16, "test": 8}  # of the files of rows
# Numbers that measure time, or that mean the steps since the last start.
OF_THE_START = re.compile("runtime|per_second|preparation_time|train_loss|best_model_checkpoint")
# They differ in paths and times; train_results.json is not written by a start that has no step left to train.
NOT_COMPARED = ("run.json", "training_args.bin", "manifest.json", "train_results.json")


class Runner(Forks):
    """Runs scripts on rows of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
        super().__init__(*SCRIPTS, HF_DATASETS_CACHE=str(folder / "cache"), **quiet)

    def run_in(self, out: Path, script: str, **order: Any) -> dict[str, Any]:
        return self.run(ROOT / script, [*self.flags(script), "--output_dir", str(out)], **order)

    @functools.cache  # noqa: B019
    def flags(self, script: str) -> list[str]:
        """Write the rows of a script; return its flags."""
        folder = self.folder / script
        folder.mkdir()
        if script in DEMOS:
            flags = {**DEMOS[script](folder), **FLAGS, **FINE_TUNING}
            flags |= STOPS_EARLY if script == "run_glue.py" else {}
            for split, lines in LINES.items():
                path = Path(flags[f"{split}_file"])
                kept = path.read_text(encoding="utf-8").splitlines(keepends=True)
                number = 10 * lines if script == "run_ner.py" else lines  # a line per word
                path.write_text("".join(kept[:number]), encoding="utf-8")
        else:
            corpus = write_corpus(folder / "corpus.txt")
            flags = {**FLAGS, **PRETRAINING, "train_file": corpus, "validation_file": corpus}
            flags |= {"decoupled": True} if script == "run_rtd.py" else {}
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]

    @functools.cache  # noqa: B019
    def whole(self, script: str) -> tuple[Path, float]:
        """Return the folder of an uninterrupted run, and its seconds."""
        out = self.folder / script / "out"
        done = self.run_in(out, script)
        assert done["status"] == 0, done["output"]
        assert (out / "checkpoint-8").exists() != (script == "run_glue.py")
        return out, done["seconds"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("kills")) as runner:
        yield runner


def assert_nothing_half_written(out: Path, whole: Path) -> None:
    """All checkpoints are whole, and so is a model that is there."""
    for checkpoint in out.glob("checkpoint-*"):
        expected = {path.name for path in (whole / checkpoint.name).iterdir()}
        assert {path.name for path in checkpoint.iterdir()} == expected, checkpoint.name
        load_file(checkpoint / "model.safetensors")
        for path in checkpoint.glob("*.pt"):
            torch.load(path, weights_only=True)
    for folder in (out, out / "generator", out / "discriminator"):
        if (folder / "model.safetensors").exists():
            load_file(folder / "model.safetensors")


def content(path: Path, out: Path) -> Any:
    """Return the content of a file without paths and what depends on time."""
    if path.suffix not in (".json", ".jsonl", ".md", ".txt", ".csv"):
        return path.read_bytes()
    text = path.read_text(encoding="utf-8").replace(str(out), "OUT")
    if path.suffix == ".json":
        return without_times(json.loads(text))
    return [line for line in text.splitlines() if not OF_THE_START.search(line)]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if not OF_THE_START.search(name)}
    if isinstance(value, list):  # of the log, keep losses and metrics
        kept = [part for part in value if not (isinstance(part, dict) and "train_runtime" in part)]
        return [without_times(part) for part in kept]
    return value


def assert_same_result(out: Path, whole: Path) -> None:
    def files(folder: Path) -> list[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        hidden = (path for path in found if not path.parts[0].startswith(("_", "checkpoint-")))
        return sorted(str(path) for path in hidden if path.name not in NOT_COMPARED)

    assert files(out) == files(whole)
    for name in files(whole):
        assert content(out / name, out) == content(whole / name, whole), name


def check_end(runner: Runner, script: str, out: Path) -> None:
    """Start once more, and compare the result with that of the uninterrupted run."""
    whole, _ = runner.whole(script)
    done = runner.run_in(out, script)
    assert done["status"] == 0, done["output"]
    assert_nothing_half_written(out, whole)
    assert_same_result(out, whole)


@pytest.mark.parametrize("seed", seeds(sample=2, full=42))
def test_killed_at_random_moments(runner, seed, tmp_path):
    """First when a checkpoint appears, then at any moment from the start to the last file."""
    script, rng, out = SCRIPTS[seed % len(SCRIPTS)], random.Random(seed), tmp_path / "out"
    whole, seconds = runner.whole(script)
    checkpoint = out / f"checkpoint-{rng.choice((4, 6) if script == 'run_glue.py' else (2, 4, 6))}"  # patience: 1, 2
    order: dict[str, Any] = {"checkpoint": str(checkpoint)}
    for _ in range(12 if FULL else 3):
        done = runner.run_in(out, script, signal=signal.SIGKILL, **order)
        if done["status"] == 0:
            break
        assert done["status"] == -signal.SIGKILL, done["output"]
        assert_nothing_half_written(out, whole)
        order = {"delay": rng.uniform(0.1, 1.3) * seconds}
    written = (checkpoint / "trainer_state.json").stat().st_mtime_ns
    check_end(runner, script, out)
    assert (checkpoint / "trainer_state.json").stat().st_mtime_ns == written, "the run started over"


@pytest.mark.parametrize("seed", seeds(sample=1, full=12))
def test_signals(runner, seed, tmp_path):
    """Ctrl-C, the end of a job's time, a closed terminal."""
    script, rng, out = SCRIPTS[(seed + 1) % len(SCRIPTS)], random.Random(seed), tmp_path / "out"
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[seed % 3]
    whole, seconds = runner.whole(script)
    delay = rng.uniform(0.1, 0.7) * seconds
    done = runner.run_in(out, script, signal=number, delay=delay)
    if done["status"] != 0:  # otherwise it ended before
        expected = -number if number == signal.SIGHUP else 128 + number
        assert done["status"] == expected and done["seconds"] < delay + 10, done["output"]
        assert "Traceback" not in done["output"], done["output"]
        assert number == signal.SIGHUP or "Stopped by " in done["output"]
        assert_nothing_half_written(out, whole)
    check_end(runner, script, out)


@pytest.mark.slow
def test_sigterm_names_step_and_checkpoint(runner, tmp_path):
    """As Slurm and Kubernetes end a job."""
    out = tmp_path / "out"
    done = runner.run_in(out, "run_mlm.py", signal=signal.SIGTERM, checkpoint=str(out / "checkpoint-2"))
    message = (
        rf"run_mlm.py: Stopped by SIGTERM\. Step \d of 8 was done\. Repeat the command to resume from {out}/checkp"
    )
    assert done["status"] == 128 + signal.SIGTERM and re.search(message, done["output"]), done["output"]
    check_end(runner, "run_mlm.py", out)


@pytest.mark.parametrize("seed", seeds(sample=1, full=21))
def test_full_disk(runner, seed, tmp_path):
    """No file may be larger than a limit: writing fails with EFBIG, as it fails with ENOSPC on a full disk."""
    script, rng, out = SCRIPTS[(seed + 2) % len(SCRIPTS)], random.Random(seed), tmp_path / "out"
    whole, _ = runner.whole(script)
    largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    limit = int(2 ** rng.uniform(10, largest.bit_length()))
    done = runner.run_in(out, script, limit=limit)
    assert done["status"] in (0, 1), done["output"]
    if done["status"]:
        assert_nothing_half_written(out, whole)
        assert "could not be written (" in done["output"] and "Traceback" not in done["output"], done["output"]
    check_end(runner, script, out)


LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
LAUNCH += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")


def start_two(runner: Runner, script: str, out: Path, steps: int) -> subprocess.Popen:
    """Start two processes, in a process group of their own."""
    flags = [*runner.flags(script), "--max_steps", str(steps), "--output_dir", str(out)]
    command = [sys.executable, *LAUNCH, str(ROOT / script), *flags]
    with open(log_of(out), "w") as log:
        return subprocess.Popen(command, env=runner.environment, stderr=log, start_new_session=True)


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def processes_of(launcher: int) -> list[int]:
    """Return the processes that a launcher has started, by rank."""
    return [int(word) for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.skipif(not FULL, reason="needs a minute: make faults")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_two_dies(runner, rank, tmp_path):
    """The other one ends too, and the next start ends as an uninterrupted run."""
    script = ("run_mlm.py", "run_glue.py")[(rank + SEED) % 2]
    whole, out = tmp_path / "whole" / "out", tmp_path / "killed" / "out"  # a model card names the folder
    for folder in (whole, out):
        folder.parent.mkdir()
    uninterrupted, killed = start_two(runner, script, whole, 16), start_two(runner, script, out, 16)
    deadline = time.monotonic() + 240
    while not (out / "checkpoint-4").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    children = processes_of(killed.pid)
    os.kill(children[rank], signal.SIGKILL)
    assert len(children) == 2 and killed.wait(120) != 0
    assert not [process for process in children if Path(f"/proc/{process}").exists()]
    assert uninterrupted.wait(240) == 0, log_of(whole).read_text()[-3000:]
    assert_nothing_half_written(out, whole)
    assert not (out / "checkpoint-16").exists()
    resumed = start_two(runner, script, out, 16)
    assert resumed.wait(240) == 0, log_of(out).read_text()[-3000:]
    assert_same_result(out, whole)
