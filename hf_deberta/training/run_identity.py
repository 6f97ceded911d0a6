"""Refuse to resume in a folder that belongs to a different run. run.json records what identifies the run in a folder.

>>> record_run(arguments, {"batch": 32}, same_run=False)
>>> compare_with_recorded_run(arguments, {"batch": 32})
{}
>>> compare_with_recorded_run(arguments, {"batch": 64})
InputError: out holds a run with other settings: batch 32, now 64; take another --output_dir, or ...
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from hf_deberta.training.checkpoints import ARCHIVE, archive_checkpoints, checkpoints_by_step, resume_choice
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import read_json_object, write_json

STARTING_CHECKPOINTS = (
    "model_name_or_path", "intermediate", "generator_name_or_path", "discriminator_name_or_path",
)  # fmt: skip
# Flags of Trainer that identify a run: with another value, it is another run. Ours do, but for a `free_flag`.
TRAINER_FLAGS = (
    # objective, optimizer, schedule and length
    "label_smoothing_factor", "neftune_noise_alpha", "optim", "optim_args", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "num_train_epochs", "max_steps", "data_seed", "train_sampling_strategy", "bf16", "fp16",
    # which checkpoint is kept in the end
    "load_best_model_at_end",
)  # fmt: skip
# These identify a run only with --load_best_model_at_end: they decide which checkpoint is the best one.
BEST_MODEL_FLAGS = (
    "validation_file", "max_eval_samples", "metric_for_best_model", "greater_is_better",
    "eval_strategy", "eval_steps", "save_strategy", "save_steps",
)  # fmt: skip
# Metrics of a run, which would be mixed with those of a new one in the model card.
RESULTS = (
    "all_results.json", "train_results.json", "eval_results.json", "test_results.json", "predict_results.json",
    "predict_*_results.json", "ax?_results.json",
)  # fmt: skip

logger = logging.get_logger(__name__)


@dataclass
class RunArguments(TrainingArguments):
    """The run.

    `TrainingArguments` that carry the flags which identify the run, with the optimizer's settings of the papers.
    """

    logging_nan_inf_filter: bool = False
    restore_callback_states_from_checkpoint: bool = True  # the patience of early stopping
    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01
    per_device_eval_batch_size: int = 32
    output_dir: str | None = flag(
        None,
        "Folder for the model, its card, checkpoints and metrics. Repeat the command to resume there. "
        "(default: trainer_output)",
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "By default the last checkpoint of OUTPUT_DIR, if there is one. false: start over. A path: resume "
        "from that checkpoint each time the command is run.",
    )
    save_format: Literal["hf_deberta", "transformers"] = flag(
        "hf_deberta",
        "Format of the final model of a DeBERTa. transformers: that of Transformers' own class, which needs no "
        "trust_remote_code. Checkpoints stay in ours.",
    )
    cuda_graphs: Literal["auto", "true", "false"] = free_flag(
        "auto",
        "Replay the steps of one GPU as CUDA graphs, which do not wait for Python. auto: no, since no GPU has been "
        "measured yet.",
    )
    # with other values than Trainer's defaults, evaluation has no metrics, or fails
    fixed_flags: ClassVar[tuple[str, ...]] = ("batch_eval_metrics", "eval_do_concat_batches", "prediction_loss_only")

    def __post_init__(self) -> None:
        self.identifying_flags: dict[str, Any] = {}  # see the function of this name
        self.recipe_message = ""  # for the model card
        if self.use_cpu or not torch.accelerator.is_available() or torch.backends.mps.is_available():
            self.dataloader_pin_memory = False  # no effect; copies to mps that do not wait could be wrong
        elif self.dataloader_pin_memory and self.accelerator_config is None:
            self.accelerator_config = {"non_blocking": True}  # otherwise each copy waits until the GPU is idle
        super().__post_init__()
        # read by accelerate: it compiles each layer, so that padding can be left out around them
        if self.torch_compile:
            for name in ("USE_REGIONAL_COMPILATION", "USE_DYNAMIC"):
                os.environ.setdefault(f"ACCELERATE_DYNAMO_{name}", "true")
        for name in self.fixed_flags:
            if (value := getattr(self, name)) != getattr(RunArguments, name):
                raise InputError(f"--{name} {value} is not supported in this script: leave it out")
        if self.do_train and self.max_steps < 1 and not (self.max_steps == -1 and self.num_train_epochs > 0):
            raise InputError(
                f"--max_steps {self.max_steps} with --num_train_epochs {self.num_train_epochs} trains nothing: "
                "one must be above 0"
            )
        started = int(os.environ.get("WORLD_SIZE", 1))
        if started > 1 and self.world_size == 1:  # each would train alone
            raise InputError(
                f"{started} processes were started, but they cannot find each other, because there is no GPU: add "
                "--use_cpu, or start one process"
            )

    @property
    def output_folder(self) -> Path:
        return Path(self.output_dir or "trainer_output")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}  # training_args.bin is pushed to the Hub

    def run_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what identifies the run: its flags, its seed, the weights it starts from, and these settings."""
        flags = self.identifying_flags
        return {**flags, **weight_hashes(flags), "seed": self.seed, **settings}

    @property
    def total_batch(self) -> int:
        """Rows per optimizer step, over all processes."""
        return self.train_batch_size * self.world_size * self.gradient_accumulation_steps


def identifying_flags(flags: dict[str, Any], argument_classes: Iterable[type]) -> dict[str, Any]:
    """Select the flags that identify a run, as JSON values.

    The batch of all devices, the seed, and hashes of starting weights and training rows are compared too, see
    `RunArguments.run_settings`. All other flags may change when a run resumes.
    """
    free_by_default = {field.name for field in fields(TrainingArguments)}.difference(TRAINER_FLAGS)
    of_best_model = BEST_MODEL_FLAGS if flags.get("load_best_model_at_end") else ()
    selected = {
        field.name: flags[field.name]
        for field in chain(*map(fields, argument_classes))
        if field.init
        and (field.metadata.get("identifies", field.name not in free_by_default) or field.name in of_best_model)
    }
    return json.loads(json.dumps(selected, default=str))


def record_run(args: RunArguments, settings: dict[str, Any], same_run: bool) -> None:
    """Write run.json with the settings of `RunArguments.run_settings`.

    A new run deletes the state and the metrics of the previous one. With `--resume_from_checkpoint false` the previous
    checkpoints are moved to `_before`.

    Args:
        same_run: whether `compare_with_recorded_run` has found this run there.
    """
    folder, processes = args.output_folder, PartialState()
    processes.wait_for_everyone()
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        if resume_choice(args) == "false" and (checkpoints := checkpoints_by_step(folder).values()):
            shutil.rmtree(folder / ARCHIVE, ignore_errors=True)
            archive_checkpoints(checkpoints)
        if not same_run:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # it says that another run has finished
            is_ours = (folder / "run.json").exists()  # in other folders the results are not
            results = [path for pattern in RESULTS for path in folder.glob(pattern) if is_ours]
            if results:
                logger.warning(f"Deleted results of the previous run: {', '.join(path.name for path in results)}.")
            for path in results:
                path.unlink(missing_ok=True)  # another machine may have been faster
        write_json(folder / "run.json", settings)
    processes.wait_for_everyone()


def compare_with_recorded_run(
    args: RunArguments, settings: dict[str, Any], may_grow: Collection[str] = ()
) -> dict[str, str] | None:
    """Return which settings have grown since `output_dir` recorded this run; None if it records no run to continue.

    A run with other settings is an InputError. Writes nothing.

    Args:
        settings: of `RunArguments.run_settings`, or some of them.
        may_grow: names of settings that may be larger than before.
    """
    path = args.output_folder / "run.json"
    if resume_choice(args) == "false" or not path.exists():
        return None
    try:
        before = read_json_object(path)
    except InputError as error:
        raise InputError(f"{path} is damaged; restore it, or start over with --resume_from_checkpoint false") from error
    changed = {
        name: f"{name} {before[name]}, now {value}"
        for name, value in settings.items()
        if before.get(name, value) != value
    }
    may_have_grown = (name for name in changed if name in may_grow and isinstance(before[name], int))
    grown = {name: changed[name] for name in may_have_grown if settings[name] > before[name]}
    if changed != grown:
        raise InputError(
            f"{args.output_folder} holds a run with other settings: {', '.join(changed.values())}; take another "
            "--output_dir, or start over with --resume_from_checkpoint false"
        )
    return grown


def weight_hashes(flags: dict[str, Any]) -> dict[str, str]:
    """Hash the weight files of the starting checkpoints that are local folders."""
    folders = {name: Path(flags[name]) for name in STARTING_CHECKPOINTS if flags.get(name)}
    hashes = {}
    for name, folder in folders.items():
        if not folder.is_dir():  # a repository of the Hub, which its name and revision identify
            continue
        digest = hashlib.sha256()
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
            if path.name != "training_args.bin":
                with open(path, "rb") as file:
                    while part := file.read(2**24):
                        digest.update(part)
        hashes[f"weights of {name}"] = digest.hexdigest()[:16]
    return hashes


def content_hash(rows: Dataset) -> str:
    """Hash the values of rows, independent of how they are stored."""
    digest = hashlib.sha256("".join(rows.column_names).encode())
    for table in rows.with_format("arrow").iter(1000):
        # copied: a part of a larger table is stored with other bytes behind its values
        for batch in table.take(pyarrow.array(range(len(table)))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]
