"""Train and evaluate with the scripts of this package, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_deberta import HfDebertaModel

ROOT = Path(__file__).parents[1]
# Runs a script. It adds the processor time of training to the metrics, which other programs on the machine do not
# change. The scripts load every DeBERTa with our classes; "in-tree" makes them use Transformers' own.
START = """
import runpy, sys, time
import transformers
from hf_deberta.fine_tuning import arguments, task_model  # the first finds the recipe, for both alike
train = transformers.Trainer.train
def timed_train(*args, **kwargs):
    start = time.process_time()
    result = train(*args, **kwargs)
    result.metrics["train_cpu_seconds"] = time.process_time() - start
    return result
transformers.Trainer.train = timed_train
if sys.argv[1] == "in-tree":
    assert hasattr(task_model, "load_deberta_config")
    task_model.load_deberta_config = lambda *_: None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DEFAULTS = {"do_train": True, "do_eval": True, "eval_strategy": "no", "save_strategy": "no"}
DEFAULTS |= {"resume_from_checkpoint": "false", "disable_tqdm": True}


def run_script(script: str, folder: Path, flags: Mapping[str, Any], who: str = "ours") -> dict[str, float]:
    """Train and evaluate once; return the metrics. `flags` are by name, a list has several values."""
    command = [sys.executable, "-W", "ignore", "-c", START, who, str(ROOT / script), "--output_dir", str(folder)]
    for name, value in {**DEFAULTS, **flags}.items():
        command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # packages may lie elsewhere
    variables = {**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    # all_results.json would still hold other metrics of the task before
    files = [folder / f"{name}_results.json" for name in ("train", "eval")]
    return {name: value for file in files if file.exists() for name, value in json.loads(file.read_text()).items()}


def read_evaluations(folder: Path) -> dict[str, dict[str, float]]:
    """Return what each evaluation of a run logged, by its step."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {str(entry["step"]): entry for entry in history if any(name.startswith("eval_") for name in entry)}


def save_encoder(
    source: Path, folder: Path, tokenizer: PreTrainedTokenizerBase, dropout: bool = True
) -> HfDebertaModel:
    """Save the encoder of a checkpoint alone, in float32, so that fine-tuning starts with a new head; return it."""
    model = HfDebertaModel.from_pretrained(source, dtype=torch.float32)
    if not dropout:
        model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
