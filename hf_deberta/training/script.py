"""The entry of a training script: from the command line to a run in a locked folder.

>>> run_script((ModelArguments, PretrainingArguments), train)
"""

import gc
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.training.command_line import ScriptParser, make_dataclasses, read_command_line
from hf_deberta.training.errors import InputError, one_line, user_errors_in_one_line
from hf_deberta.training.model_card import describe_output
from hf_deberta.training.processes import is_main_process
from hf_deberta.training.run_identity import identifying_flags
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.run_trainer import RunTrainer

Parse = Callable[[dict[str, Any]], Namespace]

logger = logging.getLogger(__name__)


def run_script(
    argument_classes: tuple[type, ...],
    run: Callable[..., Any],
    choose_flags: Callable[[Namespace, Parse], Namespace] = lambda flags, parse: flags,
    description: str | None = None,
    set_by_recipe: Collection[str] = (),
) -> Any:
    """Call `run` with one instance per dataclass, made from the command line and a file of flags.

    User mistakes are reported in one line. Meanwhile the folder of the last instance, `RunArguments`, is locked.

    Args:
        choose_flags: gets the flags, and a function that parses the command line again with other defaults, which keeps
            the user's values; returns the flags to use.
        description: the beginning of --help.
        set_by_recipe: see `ScriptParser`.
    """
    show_notices()
    transformers_logging.disable_progress_bar()  # of loading and saving; those of training and of downloads stay
    if HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()
    parser = ScriptParser(argument_classes, set_by_recipe, description)
    with user_errors_in_one_line(Path(sys.argv[0]).name):
        words = read_command_line()

        def parse(defaults: dict[str, Any]) -> Namespace:
            parser.set_defaults(**defaults)
            return parser.parse_args(words)

        flags = choose_flags(parse({}), parse)
        recipe_message = vars(flags).pop("recipe_message", "")
        check_flags(parser, flags)
        *_, args = instances = make_dataclasses(parser, flags)
        if flags.output_dir is None:
            logger.info(f"No --output_dir is given: everything is written to {args.output_folder}.")
        args.identifying_flags = identifying_flags(vars(flags), argument_classes)
        args.recipe_message = recipe_message
        with lock_folder(args.output_folder):
            result = run(*instances)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                gc.collect()  # what uses the process group is freed before the group ends
                PartialState().wait_for_everyone()
                PartialState().destroy_process_group()
            if last_line := describe_output(args.output_folder, Path(sys.argv[0]).name):
                logger.info(f"\n{last_line}")
            return result


def check_flags(parser: ScriptParser, flags: Namespace) -> None:
    """Rehearse the training before anything is read. An InputError names the flags without which it would not fail."""
    error, wrong = rehearse(parser, flags), []
    *_, kind = parser.dataclass_types
    for name, value in vars(flags).items() if error else ():
        default = value if name.startswith("do_") else getattr(kind, name, value)
        with suppress(InputError):  # without this flag others do not fit
            if value != default and rehearse(parser, Namespace(**{**vars(flags), name: default})) != error:
                wrong.append(as_words(name, value))
    if wrong:
        raise InputError(f"{' '.join(wrong)}: {error}")


def rehearse(parser: ScriptParser, flags: Namespace) -> str | None:
    """Make what `Trainer` makes of its arguments, for a tiny model. Return why that fails."""
    try:
        args, rows = make_dataclasses(parser, flags)[-1], range(2**40)
        args.push_to_hub = args.enable_jit_checkpoint = False  # they act at once
        args.output_dir = gettempdir()  # Trainer would make it
        args.optim_target_modules = args.optim_target_modules and "all-linear"  # the tiny model may not have them
        model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
        trainer = RunTrainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.get_eval_dataloader()
        if args.do_train:
            *_, steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
            trainer.create_optimizer_and_scheduler(steps)
            for rate in getattr(trainer.lr_scheduler, "lr_lambdas", ()):
                rate(steps)
    except InputError:
        raise
    except (ArithmeticError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        return one_line(error)
    return None


def show_notices() -> None:
    """Show what our modules log from INFO on, once for all processes, unless the caller has set up logging.

    The root logger gets no handler: libraries that have their own would print each line twice.
    """
    ours = logging.getLogger("hf_deberta")
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    logging.getLogger("hf_deberta.engines").setLevel(logging.WARNING)  # in every process, which has a device of its own


def used_and_changed(settings: dict[str, Any], flags: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the flags have, and the names of those that the user changed."""
    used = {name: value for name, value in settings.items() if getattr(flags, name) == value}
    return used, [name for name in settings if name not in used]


def as_words(name: str, value: Any) -> str:
    """Return a flag as it stands in a command line.

    >>> as_words("learning_rate", 1e-05), as_words("bf16", True)
    ('--learning_rate 1e-05', '--bf16')
    """
    if value is True:
        return f"--{name}"
    values = value if isinstance(value, list) else [value]
    words = [f"{word:g}" if isinstance(word, float) else str(word) for word in values]
    return " ".join([f"--{name}", *words])
