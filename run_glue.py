"""Fine-tune on GLUE, or on sentences and pairs of your own, by the published recipe of the checkpoint.

    python run_glue.py --model_name_or_path microsoft/deberta-v3-base --task_name mnli --output_dir mnli

Your own rows (two columns of text at most, and `label`, which may be a list of labels), on several GPUs, with SiFT:

    accelerate launch run_glue.py --model_name_or_path microsoft/deberta-v3-large --train_file train.csv \
        --validation_file dev.csv --test_file test.csv --bf16 --sift --output_dir mine

See it work, offline: `python run_glue.py --demo`. The same command goes on where it was stopped. Flags
are those of Transformers' `run_glue.py` and ours; --help lists all.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PretrainedConfig,
    set_seed,
)
from transformers.utils import logging

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.demos.glue import write_glue_demo
from hf_deberta.fine_tuning.arguments import SWITCH, FineTuningArguments, run_with_arguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    checkpoint_labels,
    label_fields,
    labels_in_order,
    load_model,
    load_tokenizer,
    longest_input,
)
from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    evaluations_of,
    over_seeds,
    train_and_evaluate,
    write_card_and_push,
)

logger = logging.get_logger("run_glue")


@dataclass
class GlueArguments(DataArguments):
    """Which task, and its data if not those of the Hub."""

    task_name: str | None = field(default=None, metadata={"help": f"One of {', '.join(glue.TASKS)}; else your own."})
    label_column_name: str = field(default="label", metadata={"help": "The column of labels, or of lists of such."})
    text_column_names: list[str] | None = field(
        default=None, metadata={"help": "One or two columns of text; by default the first two that hold text."}
    )
    do_regression: bool | None = field(
        default=None,
        metadata={"help": "Labels are numbers to come near to; by default if they are floats.", **SWITCH},
    )

    def __post_init__(self) -> None:
        self.task_name = self.task_name and self.task_name.lower().replace("-", "")
        if self.task_name is not None and self.task_name not in glue.TASKS:
            raise ValueError(f"--task_name is one of {', '.join(glue.TASKS)}, not {self.task_name!r}")

    @property
    def name(self) -> str:
        return self.task_name or "own"


def main() -> None:
    kinds = (ModelArguments, GlueArguments, SiftArguments, FineTuningArguments)
    run_with_arguments(
        kinds, lambda flags: (flags.task_name or "own").lower().replace("-", ""), write_glue_demo, fine_tune
    )


def fine_tune(
    model_args: ModelArguments, data_args: GlueArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. The task and its rows
    hub = ("nyu-mll/glue", data_args.task_name) if data_args.task_name else None
    loading = model_args.downloads()
    splits = read_splits(data_args, hub, loading=loading)
    args.drop_missing_splits(splits)
    task = glue.TASKS.get(data_args.name) or infer_task(model_args, data_args, args, splits)
    args.set_best_metric(task.metrics)
    labels = "numbers" if task.labels is None else ", ".join(task.labels)
    logger.warning(
        f"inputs: {', '.join(task.columns)}; labels: {labels}; the best model is that of {args.metric_for_best_model}"
    )

    # 2. Fine-tuning, evaluation, predictions: with one seed or several
    over_seeds(args, lambda one: run(model_args, data_args, sift_args, one, task, splits))


def infer_task(
    model_args: ModelArguments, data_args: GlueArguments, args: FineTuningArguments, splits: dict[str, Dataset]
) -> glue.GlueTask:
    """That of the rows to train on; without such, that of the checkpoint."""
    column = data_args.label_column_name
    task = glue.infer_task(splits, column, data_args.do_regression, data_args.text_column_names)
    if not args.do_train:
        labels = checkpoint_labels(model_args)
        fields, _ = PretrainedConfig.get_config_dict(model_args.start, **model_args.loading())
        multi_label = fields.get("problem_type") == "multi_label_classification"
        judges = glue.MULTI_LABEL_METRICS if multi_label else task.metrics if labels else ("pearson", "spearmanr")
        return replace(task, labels=labels, metrics=judges, multi_label=multi_label)
    if task.labels == ():
        raise ValueError(f"the train rows have no labels in a column {column!r}: --label_column_name")
    return task


def run(
    model_args: ModelArguments,
    data_args: GlueArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    task: glue.GlueTask,
    splits: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Model and tokenizer
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    labels = labels_in_order(task.labels, model_args)
    model = load_model(
        model_args, HfDebertaForSequenceClassification, AutoModelForSequenceClassification, **head_of(task, labels)
    )

    # 2. Rows as inputs
    length = longest_input(data_args, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: glue.encode_texts(
                rows,
                split,
                task,
                tokenizer,
                length,
                labels,
                label_column=data_args.label_column_name,
                map_options=data_args.mapping(f"tokenizing {split}"),
            )
            for split, rows in splits.items()
        }
    evaluations = evaluations_of(inputs)

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        train_dataset=inputs.get("train"),
        eval_dataset=evaluations.get(""),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(
            tokenizer,
            padding="max_length" if data_args.pad_to_max_length else "longest",
            max_length=length if data_args.pad_to_max_length else None,
            pad_to_multiple_of=8 if args.fp16 or args.bf16 else None,
        ),
        compute_metrics=lambda found: metrics(task, labels, found),
        about={"data": data_args.source(model_args.demo), "base": model_args.start},
    )
    found = train_and_evaluate(trainer, evaluations)

    # 4. Predictions of the test rows, and scores where they have labels
    if args.do_predict:
        for split in (split for split in inputs if split.startswith("test")):
            told = "labels" in inputs[split].column_names and is_told(inputs[split]["labels"], task)
            rows = inputs[split] if told else inputs[split].select_columns(tokenizer.model_input_names)
            predicted = trainer.predict(rows, metric_key_prefix=split.replace("test", "predict", 1))
            if told:
                trainer.log_metrics("predict", predicted.metrics)
                trainer.save_metrics("predict", predicted.metrics)
            if trainer.is_world_process_zero():
                logits = predictions_of(predicted.predictions, task)
                glue.write_glue_predictions(Path(args.output_dir), task, data_args.name, split, logits, labels)
    write_card_and_push(trainer)
    return found


def head_of(task: glue.GlueTask, labels: tuple[str, ...] | None) -> dict[str, Any]:
    """Fields of the configuration."""
    if labels is None:
        return {"num_labels": 1, "problem_type": "regression"}
    return {**label_fields(labels), "problem_type": f"{'multi' if task.multi_label else 'single'}_label_classification"}


def metrics(task: glue.GlueTask, labels: tuple[str, ...] | None, found: EvalPrediction) -> dict[str, float]:
    """With classes numbered as in the task, since F1 is that of number 1; `labels` are in the model's order."""
    logits = predictions_of(found.predictions, task)
    if task.multi_label:
        return glue.glue_scores(task.metrics, logits > 0, found.label_ids > 0)
    if task.labels is None:
        return glue.glue_scores(task.metrics, logits, found.label_ids)
    in_task, known = np.array([task.labels.index(label) for label in labels]), found.label_ids >= 0
    values, truth = in_task[logits.argmax(-1)[known]], in_task[found.label_ids[known]]
    return glue.glue_scores(task.metrics, values, truth, len(labels))


def is_told(labels: list[float], task: glue.GlueTask) -> bool:
    """Whether test rows have labels: GLUE writes -1 for all that are hidden."""
    return any(label != -1 for label in labels) if task.multi_label or task.labels is None else min(labels) >= 0


def predictions_of(found: Any, task: glue.GlueTask) -> np.ndarray:
    """Logits [rows, labels], or values [rows] of a regression."""
    logits = found[0] if isinstance(found, tuple) else found
    return logits[:, 0] if task.labels is None else logits


if __name__ == "__main__":
    main()
