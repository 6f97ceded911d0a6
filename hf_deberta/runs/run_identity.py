"""Whether a folder holds this run or another: the settings that make a run another run are kept in its run.json.

>>> same_run(arguments, {"batch": 32})  # a folder with nothing in it
False
>>> same_run(arguments, {"batch": 64})
ValueError: out holds a run with other settings: batch 32, now 64; take another --output_dir, or ...
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import TrainingArguments
from transformers.utils import logging

from hf_deberta.runs.checkpoints import atomic_write

WITHOUT_EFFECT = {  # on the model that a run gives
    "output_dir", "do_train", "do_eval", "do_predict", "num_seeds", "recipe", "demo", "resume_from_checkpoint",
    "test_file", "axb_file", "axg_file", "max_predict_samples", "overwrite_cache", "preprocessing_num_workers",
    "cache_dir", "token", "report_to", "run_name", "project", "trackio_space_id", "disable_tqdm", "logging_dir",
    "logging_first_step", "logging_steps", "logging_strategy", "log_level", "log_level_replica", "log_on_each_node",
    "per_device_eval_batch_size", "eval_accumulation_steps", "save_total_limit", "save_on_each_node", "seed",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "ddp_timeout",
}  # fmt: skip
STARTS = ("model_name_or_path", "intermediate", "generator_name_or_path", "discriminator_name_or_path")
BEFORE = "_before"  # push_to_hub leaves out what begins so

logger = logging.get_logger(__name__)


@dataclass
class RunArguments(TrainingArguments):
    """Trainer's, and which of the flags make a run another run."""

    def __post_init__(self) -> None:
        self.decisive: dict[str, Any] = {}  # see the function
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}  # training_args.bin is pushed

    @property
    def total_batch(self) -> int:
        """Rows of a step, of all processes."""
        return self.train_batch_size * self.world_size * self.gradient_accumulation_steps


def decisive(flags: dict[str, Any], without_effect: Collection[str] = WITHOUT_EFFECT) -> dict[str, Any]:
    """The flags that make a run another run."""
    known = {name: value for name, value in flags.items() if name not in without_effect and "hub" not in name}
    return json.loads(json.dumps(known, default=str))


def check_same_run(args: RunArguments, settings: dict[str, Any], may_grow: Collection[str] = ()) -> bool:
    """Whether `output_dir` holds this run, which is then gone on with. Another is refused, and a new one written down.

    With `--resume_from_checkpoint false` a run begins anew, and checkpoints of one before are set aside in _before.

    Args:
        settings: that make a run another run, besides flags, the seed, and the weights it starts from.
        may_grow: those of them that may be more than they were.
    """
    folder, state = Path(args.output_dir), PartialState()
    path, anew = folder / "run.json", str(args.resume_from_checkpoint).lower() == "false"
    settings = {**args.decisive, **weights_of(args.decisive), "seed": args.seed, **settings}
    found = path.exists() and not anew
    if found:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in settings.items() if before.get(name, value) != value]
        grown = [name for name in changed if name in may_grow and settings[name] > before[name]]
        said = ", ".join(f"{name} {before[name]}, now {settings[name]}" for name in changed)
        if changed != grown:
            raise ValueError(
                f"{folder} holds a run with other settings: {said}; take another --output_dir, or start anew with "
                "--resume_from_checkpoint false"
            )
        if grown:
            logger.warning(
                f"the run in {folder} is to be longer than it was ({said}): it goes on, and its learning rate is that "
                "of the longer schedule from here on"
            )
    state.wait_for_everyone()
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        if anew:
            archive_checkpoints(folder)
        write_json(path, settings)
    state.wait_for_everyone()
    return found


def archive_checkpoints(folder: Path) -> None:
    """Checkpoints, so that a new run in their folder does not go on from them."""
    checkpoints = list(folder.glob("checkpoint-*"))
    if checkpoints:
        shutil.rmtree(folder / BEFORE, ignore_errors=True)
        (folder / BEFORE).mkdir()
    for checkpoint in checkpoints:
        os.replace(checkpoint, folder / BEFORE / checkpoint.name)


def weights_of(flags: dict[str, Any]) -> dict[str, str]:
    """What the checkpoints hold that a run starts from, of those that are folders."""
    folders = {name: Path(flags[name]) for name in STARTS if flags.get(name) and Path(flags[name]).is_dir()}
    found = {}
    for name, folder in folders.items():
        digest = hashlib.sha256()
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
            if path.name != "training_args.bin":
                with open(path, "rb") as file:
                    while part := file.read(2**24):
                        digest.update(part)
        found[f"weights of {name}"] = digest.hexdigest()[:16]
    return found


def content_of(rows: Dataset) -> str:
    """Of rows a hash, which does not depend on the file that they are kept in."""
    digest = hashlib.sha256("".join(rows.column_names).encode())
    for table in rows.with_format("arrow").iter(1000):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")
