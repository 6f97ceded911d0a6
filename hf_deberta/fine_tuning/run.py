"""One run of any task: read rows; train, evaluate and predict once per seed.

A file of `tasks/` calls `run_task` with its class. docs/fine_tuning.md says what a run writes.
"""

import copy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from pandas import DataFrame
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_deberta.fine_tuning.arguments import READING_FLAGS, RECIPE_FLAGS, FineTuningArguments, choose_flags
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.task import Task, prediction_splits
from hf_deberta.fine_tuning.task_model import load_config, load_model, load_tokenizer, max_input_length
from hf_deberta.fine_tuning.trainer import TIMINGS, FineTuningTrainer
from hf_deberta.training.errors import InputError, RowError, input_errors
from hf_deberta.training.json_files import atomic_write, write_json
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.script import run_script

logger = logging.get_logger(__name__)


def run_task(task_class: type[Task]) -> None:
    """Fine-tune on a task as the command line says. --help begins with the docstring of the task's file."""

    def fine_tune(model_args: Any, data_args: Any, sift_args: SiftArguments, args: FineTuningArguments) -> None:
        identifying = args.identifying_flags.items()
        model_args.reading_flags = {name: value for name, value in identifying if name in READING_FLAGS}
        task = task_class.class_for(data_args)(model_args, data_args, args)
        read_rows(task)
        run_seeds(args, partial(run, task, sift_args))

    classes = (task_class.model_arguments, task_class.arguments, SiftArguments, FineTuningArguments)
    choose = partial(choose_flags, recipe_task=task_class.recipe_name, demo=task_class.demo)
    run_script(classes, fine_tune, choose, sys.modules[task_class.__module__].__doc__, RECIPE_FLAGS)


def read_rows(task: Task) -> None:
    """Read the rows of a task, and set what depends on them: actions, and the best model's metric."""
    splits, task.sources = task.read_splits()
    task.args.choose_actions([source.split for source in task.sources.values()])
    mistakes: list[str] = []
    while True:
        try:
            task.rows = task.read(splits)
            break
        except RowError as error:
            leave_out_bad_rows(task, splits, error)
            mistakes.append(str(error))
    if mistakes and not task.data_args.skip_bad_rows:
        raise InputError(f"{'; '.join(mistakes)}; --skip_bad_rows leaves out such rows")
    task.args.set_best_metric(task.metric_names)


def leave_out_bad_rows(task: Task, splits: dict[str, Dataset], error: RowError) -> None:
    """Leave out the bad rows of a split; an InputError if it is a test split, or no row would be left."""
    source, skips = error.source, task.data_args.skip_bad_rows
    if source is None or source.split.startswith("test"):
        raise InputError(f"{error}; --skip_bad_rows is for training and validation rows") if skips else error
    rows, numbers = splits[source.split], task.sources[source.split].numbers
    bad = {source.numbers[row] for row in error.problems}
    kept = [row for row in range(len(rows)) if numbers[row] not in bad]
    if not kept:
        raise InputError(f"{error}; no row of {len(rows):,} would be left") from error
    splits[source.split] = rows.select(kept)
    task.sources[source.split] = replace(source, numbers=[numbers[row] for row in kept])
    if skips:
        logger.warning(f"{len(bad):,} of {len(rows):,} {source.split} rows are left out: {error}")


def run(task: Task, sift_args: SiftArguments, args: FineTuningArguments) -> dict[str, float]:
    """Train, evaluate and predict with one seed; return the metrics of the validation rows."""
    model_args, data_args = task.model_args, task.data_args
    config = load_config(model_args, task.auto_class, **task.config_fields())
    tokenizer = load_tokenizer(model_args, config, **task.tokenizer_options)
    length = max_input_length(data_args.max_seq_length, tokenizer, config, task.default_length)
    tokenizer.model_max_length = max(tokenizer.model_max_length, length)  # it is saved, and pipelines truncate to it
    with args.main_process_first(desc="tokenizing"):
        inputs = {}
        for split in task.rows:
            forget_truncation(tokenizer)
            with input_errors(task.sources[split]):
                inputs[split] = task.encode(split, tokenizer, length)
    forget_truncation(tokenizer)  # it would be saved
    set_seed(args.seed)
    model = load_model(model_args, config, task.model_class, task.auto_class, args.do_train)
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        task=task,
        processing_class=tokenizer,
        data_collator=task.collator_class(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = trainer.train_and_evaluate()
    if args.do_predict:
        for split in prediction_splits(task):
            trainer.predict_split(split)
    trainer.write_card_and_push()
    return metrics


def forget_truncation(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reset what earlier calls left in a fast tokenizer: `datasets` hashes it to find cached inputs."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


# Several seeds


def run_seeds(args: FineTuningArguments, run: Callable[[FineTuningArguments], dict[str, float]]) -> None:
    """Call `run` once, or with each of --num_seeds seeds.

    Finished seeds are skipped. The best model is copied to --output_dir, next to `seeds.json`.
    """
    if args.num_seeds == 1:
        run(args)
        return
    metrics = {}
    for seed in range(args.seed, args.seed + args.num_seeds):
        seed_args = copy.copy(args)
        seed_args.seed, seed_args.output_dir = seed, str(args.output_folder / f"seed-{seed}")
        with lock_folder(seed_args.output_folder):
            metrics[seed] = run(seed_args)
        clear_device_cache(garbage_collection=True)  # a Trainer is part of a reference cycle, and holds its model
    if args.should_save and args.do_eval:
        keep_best_seed(args.output_folder, metrics, args.best_metric, bool(args.greater_is_better))
    elif args.do_train:
        logger.warning(f"No validation rows say which seed is the best: {args.output_folder} has a folder for each.")


def keep_best_seed(folder: Path, metrics: dict[int, dict[str, float]], metric: str, greater_is_better: bool) -> None:
    """Print the statistics over seeds, write seeds.json, and copy the files of the best model to `folder`."""
    frame = DataFrame.from_dict(metrics, orient="index").filter(regex=f"^eval_(?!.*({'|'.join(TIMINGS)}))")
    summary = frame.agg(["median", "mean", "std", "min", "max"])
    print(f"\n{len(metrics)} seeds", summary.T.to_string(float_format="%.4f"), sep="\n")
    best = (max if greater_is_better else min)(metrics, key=lambda seed: metrics[seed][metric])
    for path in sorted((folder / f"seed-{best}").iterdir()):
        if path.is_file() and not path.name.startswith("_"):
            with atomic_write(folder / path.name) as unfinished:
                shutil.copyfile(path, unfinished)
                if path.name == "README.md":  # the card names its folder
                    text = unfinished.read_text(encoding="utf-8").replace(f"seed-{best}", folder.resolve().name)
                    unfinished.write_text(text, encoding="utf-8")
    write_json(folder / "seeds.json", {"seeds": metrics, **summary.to_dict(), "best_seed": best})
    print(f"The best seed is {best}: its model is kept.")
