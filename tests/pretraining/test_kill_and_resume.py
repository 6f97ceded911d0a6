"""A run that is killed and started again ends with the weights of an uninterrupted run, to the last bit."""

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
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
FLAGS = ["--config_preset", "tiny", "--train_tokenizer", 300, "--tokenizer_type", "bpe", "--max_seq_length", 32]
FLAGS += ["--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", 4, "--learning_rate", 1e-3]
FLAGS += ["--max_steps", 11, "--save_steps", 3, "--gradient_accumulation_steps", 2, "--do_eval", "false"]


@pytest.mark.parametrize(
    ("script", "flags", "models"),
    [("run_mlm.py", [], ["."]), ("run_rtd.py", ["--decoupled"], ["generator", "discriminator"])],
)
def test_killed_and_resumed(tmp_path, script, flags, models):
    """In the middle of an epoch, with packing, dropout, sampling and accumulation."""
    rng = random.Random(0)
    lines = (" ".join(rng.choices(WORDS.split(), k=rng.randrange(3, 60))) for _ in range(150))
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    data = ["--train_file", tmp_path / "corpus.txt", "--tokens_dir", tmp_path / "tokens"]
    command = [ROOT / "tests" / "kill_and_resume.py", ROOT / script, tmp_path, "checkpoint-6", *FLAGS, *data, *flags]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after_kill = done.stdout.split()
    assert "checkpoint-6" in after_kill
    assert not {"checkpoint-11", "model.safetensors", "generator", "discriminator"} & set(after_kill)
    for model in models:
        whole, resumed = (load_file(tmp_path / run / model / "model.safetensors") for run in ("whole", "killed"))
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name
