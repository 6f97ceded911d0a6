"""A run that is killed and started again ends with the weights of an uninterrupted run, to the last bit."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
WORDS = "the old man walked slowly down to a quiet harbour where small boats wait for wind and his friends"
pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
FLAGS = ["--config_preset", "tiny", "--train_tokenizer", 300, "--tokenizer_type", "bpe", "--max_seq_length", 32]
FLAGS += ["--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", 4, "--learning_rate", 1e-3]
FLAGS += ["--max_steps", 11, "--save_steps", 3, "--gradient_accumulation_steps", 2, "--do_eval", "false"]
FLAGS += ["--save_total_limit", 9]


SCRIPTS = {"run_mlm.py": [], "run_rtd.py": ["--decoupled"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of both scripts, uninterrupted and killed, each in a folder of its own."""
    folder, rng = tmp_path_factory.mktemp("runs"), random.Random(0)
    lines = (" ".join(rng.choices(WORDS.split(), k=rng.randrange(3, 60))) for _ in range(150))
    (folder / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    specification = []
    for script, flags in SCRIPTS.items():
        (folder / script).mkdir()
        data = ["--train_file", folder / "corpus.txt", "--tokens_dir", folder / script / "tokens"]
        words = list(map(str, [*FLAGS, *data, *flags]))
        specification.append({"script": str(ROOT / script), "folder": str(folder / script), "flags": words})
    (folder / "runs.json").write_text(json.dumps(specification))
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "kill_and_resume.py", "checkpoint-6"]
    done = subprocess.run([*command, folder / "runs.json"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize(("script", "models"), [("run_mlm.py", ["."]), ("run_rtd.py", ["generator", "discriminator"])])
def test_killed_and_resumed(runs, script, models):
    """In the middle of an epoch, with packing, dropout, sampling and accumulation."""
    after_kill = (runs / script / "after_kill.txt").read_text().split()
    assert "checkpoint-6" in after_kill
    assert not {"checkpoint-11", "model.safetensors", "generator", "discriminator"} & set(after_kill)
    before_the_kill = (runs / script / "after_kill.txt").stat().st_mtime_ns
    for name in ("checkpoint-3", "checkpoint-6"):  # otherwise the second run started over
        assert (runs / script / "killed" / name / "trainer_state.json").stat().st_mtime_ns < before_the_kill
    for model in models:
        whole, resumed = (load_file(runs / script / run / model / "model.safetensors") for run in ("whole", "killed"))
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name
