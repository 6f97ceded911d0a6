"""The command line of a fine-tuning script: Trainer's flags with our defaults, and the recipe of checkpoint and task.

A flag wins over a JSON file of flags, that over the recipe, that over the defaults.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from hf_deberta.fine_tuning.recipes import FROM_MNLI, find_recipe, size_of
from hf_deberta.fine_tuning.task_model import deberta_config
from hf_deberta.runs.command_line import (
    ScriptParser,
    parse_into_dataclasses,
    read_command_line,
    show_input_errors_in_one_line,
)
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.run_identity import RunArguments, identifying_flags

SWITCH = {"nargs": "?", "const": True}  # of a flag that is yes, no, or left open

logger = logging.get_logger(__name__)


@dataclass
class FineTuningArguments(RunArguments):
    """Trainer's, with defaults as the papers and practitioners have them.

    Adam's epsilon 1e-6, weight decay 0.01; evaluation after each epoch, the best model is kept. Without --do_train,
    --do_eval and --do_predict a script does all three, as far as there is data.
    """

    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01
    per_device_eval_batch_size: int = 32
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    load_best_model_at_end: bool = True
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without improvement."}
    )
    num_seeds: int = field(
        default=1, metadata={"help": "Train with so many seeds, from --seed on, and report median, mean and spread."}
    )

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise InputError(f"--num_seeds is 1 or more, not {self.num_seeds}")
        if self.num_seeds > 1 and self.push_to_hub:
            raise InputError(
                "--push_to_hub knows one model: without it, push OUTPUT_DIR, which holds the best, afterwards"
            )
        self.best_metric_from_user = self.metric_for_best_model is not None
        self.does_all = not (self.do_train or self.do_eval or self.do_predict)
        if self.does_all:
            self.do_train = self.do_eval = self.do_predict = True
        if not (self.do_train and self.do_eval):
            self.eval_strategy = "no"
        if self.eval_strategy == "steps" and self.save_strategy == "epoch":
            self.save_strategy, self.save_steps = "steps", self.eval_steps or self.logging_steps
        if "no" in (self.eval_strategy, self.save_strategy):
            self.load_best_model_at_end = False
        if self.use_cpu or not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # or torch warns that it has no use
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise InputError("--early_stopping_patience needs evaluations along the way: --do_train with --do_eval")
        if self.train_sampling_strategy not in ("random", "group_by_length"):
            raise InputError(
                f"--train_sampling_strategy is random or group_by_length here, not {self.train_sampling_strategy}"
            )
        super().__post_init__()

    def set_best_metric(self, metrics: Sequence[str]) -> None:
        """Keep the model that is best by the first of a task's metrics, unless the user has named another."""
        if not self.best_metric_from_user:
            self.metric_for_best_model, self.greater_is_better = f"eval_{metrics[0]}", True
        elif self.metric_for_best_model.removeprefix("eval_") not in (*metrics, "loss"):
            raise InputError(
                f"--metric_for_best_model is one of {', '.join(metrics)}, loss for this task, not "
                f"{self.metric_for_best_model}"
            )

    def drop_missing_splits(self, splits: Iterable[str]) -> None:
        """Do what there is data for; what was asked for by name must have its split."""
        found = {split.partition("_")[0] for split in splits}
        for flag, split in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
            if getattr(self, flag) and split not in found:
                if not self.does_all or flag == "do_train":
                    alone = "; to evaluate or predict alone, say --do_eval or --do_predict" if self.does_all else ""
                    there = ", ".join(sorted(found))
                    raise InputError(f"--{flag} needs {split} rows (--{split}_file), and there are {there}{alone}")
                setattr(self, flag, False)
        if not self.do_eval:
            if self.early_stopping_patience is not None:
                raise InputError("--early_stopping_patience needs validation rows (--validation_file)")
            self.eval_strategy, self.load_best_model_at_end = IntervalStrategy.NO, False


def run_with_arguments(
    kinds: tuple[type, ...], task_of: Callable[[Namespace], str], demo: Callable[[Path], dict[str, Any]], run: Callable
) -> Any:
    """`run` with the arguments of the command line, or of a JSON file. What a user can mend is said in a sentence.

    Args:
        task_of: the task's name in the table of recipes, by the flags.
        demo: writes made-up data and a tiny model into a folder, and gives the flags that use them.
    """
    parser = ScriptParser(kinds)
    with show_input_errors_in_one_line(Path(sys.argv[0]).name):
        given, from_file = read_command_line(parser)
        flags = parser.parse_args(given)
        parser.set_defaults(**({**demo_flags(flags.output_dir, demo), **from_file} if flags.demo else {}))
        flags = parser.parse_args(given)
        if flags.recipe == "auto" and not flags.demo and (flags.intermediate or flags.model_name_or_path):
            chosen, origin = recipe_flags(flags, task_of(flags))
            parser.set_defaults(**{**chosen, **from_file})
            say_recipe(chosen, origin, parser.parse_args(given))
        parts = parse_into_dataclasses(parser, given)
        parts[-1].identifying_flags = identifying_flags(vars(parser.parse_args(given)))
        return run(*parts)


def demo_flags(output_dir: str | None, demo: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Flags of a demonstration, of which `demo` writes the files and gives those that use them."""
    folder = Path(output_dir or "demo_output") / "made_up"
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {
        "output_dir": str(folder.parent),
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 32,
        "warmup_steps": 0.1,
        "logging_steps": 20,
        "resume_from_checkpoint": "false",
        "save_strategy": "no",
    }
    return {**defaults, **demo(folder)}


def say_recipe(chosen: dict[str, Any], origin: str, flags: Namespace) -> None:
    """Which settings hold because of the recipe, and which because of the user."""
    if int(os.environ.get("RANK", 0)) > 0 or not (flags.do_train or not (flags.do_eval or flags.do_predict)):
        return
    kept = {name: value for name, value in chosen.items() if getattr(flags, name) == value}
    yours = [name for name in chosen if name not in kept]
    said = ", ".join(f"--{name} {value:g}" for name, value in kept.items())
    logger.warning(
        f"recipe ({origin}): {said}"
        + (f"; yours: --{', --'.join(yours)}" if yours else "")
        + " (--recipe none: no such)"
    )


def recipe_flags(flags: Namespace, task: str) -> tuple[dict[str, Any], str]:
    """The recipe for this checkpoint and task, and where it is from."""
    config = deberta_config(flags.intermediate or flags.model_name_or_path, flags)
    size, width = (None, 768) if config is None else (size_of(config), config.hidden_size)
    recipe, origin = find_recipe(task, size, width, getattr(flags, "sift", False))
    devices = int(os.environ.get("WORLD_SIZE", 0)) or max(1, 0 if flags.use_cpu else torch.cuda.device_count())
    chosen = recipe.flags(devices, flags.gradient_accumulation_steps)
    batch = chosen["per_device_train_batch_size"] * devices * flags.gradient_accumulation_steps
    if batch != recipe.batch:
        origin += f"; its batch of {recipe.batch} becomes {batch} on {devices} device{'s' * (devices > 1)}"
    if config is None or task.startswith("squad"):  # whose head has none
        chosen.pop("cls_dropout")
    chosen = {name: value for name, value in chosen.items() if hasattr(flags, name)}
    if task in FROM_MNLI and flags.intermediate is None and size and size.startswith(("v1", "v2")):
        logger.warning("the paper starts this task from a checkpoint fine-tuned on MNLI: --intermediate CHECKPOINT")
    return chosen, origin
