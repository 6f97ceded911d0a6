"""The command line of a fine-tuning script: Trainer's flags with our defaults, and the recipe of checkpoint and task.

A flag, also one of a file of flags, overrides the recipe, which overrides the defaults.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import logging

from hf_deberta.fine_tuning.recipes import BASE_WIDTH, STARTED_FROM_MNLI, find_recipe, published_size
from hf_deberta.fine_tuning.splits import find_task_name
from hf_deberta.fine_tuning.task_model import load_deberta_config, read_config
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.processes import number_of_devices
from hf_deberta.training.run_identity import RunArguments
from hf_deberta.training.script import as_words, used_and_changed

OPTIONAL_SWITCH = {"nargs": "?", "const": True}  # add_argument options of a flag that is true, false or None
RECIPE_FLAGS = (
    "num_train_epochs", "learning_rate", "per_device_train_batch_size", "warmup_steps", "cls_dropout", "max_seq_length",
    "bf16", "fp16",
)  # fmt: skip
# Flags that say what the model reads, and whether it may give no answer. A trained model keeps them in its config.json.
READING_FLAGS = (
    "task_name", "text_column_names", "text_column_name", "label_column_name", "max_seq_length", "max_query_length",
    "doc_stride", "version_2_with_negative", "fill_blanks", "document_context",
)  # fmt: skip

METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")  # they follow the best model's metric, by default downwards

logger = logging.get_logger(__name__)


@dataclass
class FineTuningArguments(RunArguments):
    """Training, with an evaluation after each epoch, and the best model in the end."""

    fixed_flags: ClassVar = (*RunArguments.fixed_flags, "label_names", "remove_unused_columns")

    eval_strategy: str | IntervalStrategy = "epoch"
    save_strategy: str | SaveStrategy = "epoch"
    save_total_limit: int | None = 1
    load_best_model_at_end: bool = True
    output_dir: str | None = flag(
        None,
        "Folder for the model, its card, metrics and predictions. Repeat the command to resume there. "
        "(default: trainer_output; with --demo: demo_output/<task>)",
    )
    do_train: bool = flag(
        False,
        "Train. Without --do_train, --do_eval and --do_predict the script does all three: it trains, and "
        "evaluates and predicts if there are validation and test rows.",
    )
    do_eval: bool = flag(False, "Evaluate on the validation rows.")
    do_predict: bool = flag(False, "Write predictions for the test rows.")
    metric_for_best_model: str | None = flag(
        None,
        "Metric that selects the checkpoint to keep: a metric of the task, by default its first. A wrong "
        "name lists them.",
    )
    early_stopping_patience: int | None = flag(None, "Stop after this many evaluations without improvement.")
    num_seeds: int = free_flag(
        1,
        "Train once per seed, from --seed upwards; report median, mean and spread; keep the best model. Finished "
        "seeds are skipped. hf-deberta ensemble averages their predictions.",
    )
    recipe: Literal["auto", "none"] = free_flag(
        "auto",
        "auto: use the published settings for this checkpoint and task, or the nearest ones. none: use "
        "Trainer's defaults. Any flag overrides the recipe.",
    )

    def __post_init__(self) -> None:
        for name in ("num_seeds", "early_stopping_patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, not {value}")
        if self.num_seeds > 1 and self.push_to_hub:
            raise InputError(
                "--push_to_hub pushes one model only: with --num_seeds, push OUTPUT_DIR, the best model, afterwards"
            )
        self.user_chose_metric = self.metric_for_best_model is not None
        self.actions_inferred = not (self.do_train or self.do_eval or self.do_predict)
        if self.actions_inferred:
            self.do_train = self.do_eval = self.do_predict = True
        if not (self.do_train and self.do_eval):
            self.eval_strategy = "no"
        if self.save_strategy == "epoch" and self.save_steps != type(self).save_steps:
            self.save_strategy = "steps"
        if self.eval_strategy == "steps" and self.save_strategy == "epoch":
            self.save_strategy, self.save_steps = "steps", self.eval_steps or self.logging_steps
        elif self.save_strategy == "steps" and self.eval_strategy == "epoch" and self.load_best_model_at_end:
            self.eval_strategy, self.eval_steps = "steps", self.eval_steps or self.save_steps
        if "no" in (self.eval_strategy, self.save_strategy):
            self.load_best_model_at_end = False
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise InputError("--early_stopping_patience needs evaluations during training: --do_train with --do_eval")
        if self.train_sampling_strategy not in ("random", "group_by_length"):
            raise InputError(
                f"--train_sampling_strategy must be random or group_by_length, not {self.train_sampling_strategy}"
            )
        super().__post_init__()

    def set_best_metric(self, metrics: Sequence[str]) -> None:
        """Select the best model by the first of the task's metrics, unless the user chose another."""
        if not self.user_chose_metric:
            self.metric_for_best_model, self.greater_is_better = f"eval_{metrics[0]}", True
        elif self.best_metric.removeprefix("eval_") not in (*metrics, "loss"):
            raise InputError(
                f"--metric_for_best_model must be one of {', '.join(metrics)}, loss for this task, not "
                f"{self.metric_for_best_model}"
            )
        if self.greater_is_better and self.lr_scheduler_type in METRIC_SCHEDULERS:
            kwargs: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = {"mode": "max", **kwargs}

    @property
    def best_metric(self) -> str:
        """Name of the metric that selects the best model, as `evaluate` returns it."""
        return f"eval_{(self.metric_for_best_model or 'loss').removeprefix('eval_')}"

    def choose_actions(self, splits: Iterable[str]) -> None:
        """Evaluate and predict only if there are rows. What a flag requests must have its rows."""
        present = {split.partition("_")[0] for split in splits}
        for action, split in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
            if getattr(self, action) and split not in present:
                if self.actions_inferred and action != "do_train":
                    setattr(self, action, False)
                    continue
                hint = "; to evaluate or predict only, add --do_eval or --do_predict" if self.actions_inferred else ""
                raise InputError(
                    f"--{action} needs {split} rows (--{split}_file); found: {', '.join(sorted(present))}{hint}"
                )
        if not self.do_eval:
            if self.early_stopping_patience is not None:
                raise InputError("--early_stopping_patience needs validation rows (--validation_file)")
            self.eval_strategy, self.load_best_model_at_end = IntervalStrategy.NO, False


def choose_flags(
    flags: Namespace, parse: Callable[[dict[str, Any]], Namespace], recipe_task: Callable[[Namespace], str], demo: str
) -> Namespace:
    """Parse the command line again with the defaults of --demo, of the recipe and of the checkpoint's training.

    Args:
        recipe_task: returns the name of the task in the table of recipes.
        demo: the name of the demonstration in hf_deberta/demos.py.
    """
    if flags.demo and not demo:
        raise InputError("--demo: this task has no demonstration")
    if flags.demo:
        return parse(demo_flags(flags.output_dir, demo))
    if not (flags.intermediate or flags.model_name_or_path):
        return flags
    if flags.recipe == "auto":
        recipe, source = recipe_flags(flags, recipe_task(flags))
        flags = parse(recipe)
        flags.recipe_message = describe_recipe(recipe, source, flags)
        if not is_without_training(flags):
            logger.info(f"{flags.recipe_message} Disable with --recipe none.")
    if is_without_training(flags):
        trained = flags_of_training(flags)
        flags = parse(trained)
        if "doc_stride" in trained and flags.max_seq_length != trained.get("max_seq_length"):
            del trained["doc_stride"]  # it may be too long
            flags = parse({"doc_stride": None})
        used, changed = used_and_changed(trained, flags)
        if same := [as_words(name, value) for name, value in used.items() if value not in (None, False)]:
            logger.info(f"As the checkpoint was trained: {', '.join(same)}.")
        if changed:
            words = ", ".join(as_words(name, getattr(flags, name)) for name in changed)
            logger.info(f"Not as the checkpoint was trained: {words}.")
    return flags


def is_without_training(flags: Namespace) -> bool:
    return (flags.do_eval or flags.do_predict) and not flags.do_train


def flags_of_training(flags: Namespace) -> dict[str, Any]:
    """What the checkpoint read when it was trained, as flags; none if --task_name is another task than then."""
    name = flags.intermediate or flags.model_name_or_path
    trained = read_config(name, flags).get("fine_tuning_flags")
    trained = trained if isinstance(trained, dict) else {}
    task_name = getattr(flags, "task_name", None)
    if task_name and find_task_name(task_name, [trained.get("task_name") or ""]) is None:
        return {}
    names = [name for name in READING_FLAGS if name in trained and name in flags and name != "task_name"]
    return {name: trained[name] for name in names}


def demo_flags(output_dir: str | None, name: str) -> dict[str, Any]:
    """Write the model and the rows of a demonstration to OUTPUT_DIR/inputs; return its flags."""
    # by name: the demos train a tokenizer with code that only pretraining needs otherwise
    write_demo = getattr(import_module("hf_deberta.demos"), f"write_{name}_demo")
    folder = Path(output_dir or f"demo_output/{name}") / "inputs"
    with input_errors("--output_dir", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    flags = {
        "output_dir": str(folder.parent),
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 32,
        "warmup_steps": 0.1,
        "resume_from_checkpoint": "false",
        "save_strategy": "no",
    }
    return {**flags, **write_demo(folder)}


def recipe_flags(flags: Namespace, task: str) -> tuple[dict[str, Any], str]:
    """The recipe of this checkpoint and task as flags, and where it comes from."""
    config = load_deberta_config(flags)
    size, width = (None, BASE_WIDTH) if config is None else (published_size(config), config.hidden_size)
    recipe, source = find_recipe(task, size, width, getattr(flags, "sift", False))
    devices = number_of_devices(flags.use_cpu)
    precision = None if flags.bf16 or flags.fp16 or is_without_training(flags) else half_precision_flag(flags.use_cpu)
    recipe_as_flags = recipe.flags(devices, flags.gradient_accumulation_steps, precision)
    batch = recipe_as_flags["per_device_train_batch_size"] * devices * flags.gradient_accumulation_steps
    if batch != recipe.batch:
        source += f" (batch size {batch} instead of {recipe.batch} on {devices} device{'s' * (devices > 1)})"
    if config is None or task.startswith("squad"):  # heads without dropout
        del recipe_as_flags["cls_dropout"]
    if task in STARTED_FROM_MNLI and flags.intermediate is None and size and size.startswith(("v1", "v2")):
        source += "; the paper starts this task from an MNLI model (--intermediate CHECKPOINT)"
    return {name: value for name, value in recipe_as_flags.items() if hasattr(flags, name)}, source


def half_precision_flag(use_cpu: bool) -> Literal["bf16", "fp16"] | None:
    """The flag of half precision on the GPUs of this machine: bf16 if they compute in it; None without a GPU."""
    if use_cpu or not torch.cuda.is_available() or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        return None  # also if `accelerate launch --mixed_precision` has decided
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def describe_recipe(recipe: dict[str, Any], source: str, flags: Namespace) -> str:
    """Return the settings of the recipe, and the flags that override them."""
    if flags.max_steps > 0:  # epochs are not used then
        recipe = {name: value for name, value in recipe.items() if name != "num_train_epochs"}
    used, overridden = used_and_changed(recipe, flags)
    words = ", ".join(as_words(name, value) for name, value in used.items())
    message = f"Recipe: {source}. Used: {words or 'nothing'}."
    if overridden:
        message += f" Overridden by you: {', '.join(f'--{name}' for name in overridden)}."
    return message
