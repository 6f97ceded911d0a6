r"""Fine-tune on GLUE, or on your own texts or text pairs, with the published settings for the checkpoint.

A GLUE task:

    hf-deberta glue --model_name_or_path microsoft/deberta-v3-base --task_name mnli --output_dir mnli

Your own rows (one or two text columns, and `label`, which may hold lists of labels) on several GPUs, with SiFT:

    accelerate launch -m hf_deberta.commands.glue \
        --model_name_or_path microsoft/deberta-v3-large --train_file train.csv \
        --validation_file dev.csv --test_file test.csv --bf16 --sift --output_dir mine

Predictions of the trained model for a new file; its columns, labels and input length are those of the training:

    hf-deberta glue --model_name_or_path mine --do_predict --test_file new.csv --output_dir predictions

A demonstration on made-up rows, offline:

    hf-deberta glue --demo

Repeat the command to resume an interrupted run; --demo starts over. The flags are those of Transformers'
run_glue.py, and the groups below.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.special import expit, softmax
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.demos.glue import write_glue_demo
from hf_deberta.fine_tuning.arguments import OPTIONAL_SWITCH, FineTuningArguments, run_script
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores, label_logits, label_scores, number_scores, numbers
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, hash_rows, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    checkpoint_fields,
    checkpoint_labels,
    label_fields,
    labels_in_checkpoint_order,
    load_model,
    load_tokenizer,
    max_input_length,
)
from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    logits_of,
    over_seeds,
    prediction_splits,
    save_prediction_metrics,
    scored_splits,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.metrics import compute_metric
from hf_deberta.runs.data_files import source_of
from hf_deberta.runs.errors import InputError, input_errors

logger = logging.get_logger(__name__)


@dataclass
class GlueArguments(DataArguments):
    """Which task; columns and kind of labels of the user's own rows."""

    task_name: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(glue.TASKS)}. Leave it out for your own rows."}
    )
    label_column_name: str = field(
        default="label",
        metadata={
            "help": "Column of labels, or of lists of labels (multi-label classification). Of two class names, the "
            "second in alphabetical order is the positive class of f1."
        },
    )
    text_column_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "One or two text columns. By default those of the checkpoint, if it is not trained; in training, "
            "sentence1 and sentence2, or the columns of text without identifiers, of which there may be two."
        },
    )
    do_regression: bool | None = field(
        default=None,
        metadata={"help": "Treat labels as regression targets; by default, if they are floats.", **OPTIONAL_SWITCH},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task_name = normalized_name(self.task_name)
        if self.task_name is not None and self.task_name not in glue.TASKS:
            raise InputError(f"--task_name must be one of {', '.join(glue.TASKS)}, not {self.task_name!r}")
        columns = self.text_column_names
        if columns and self.task_name and tuple(columns) != glue.TASKS[self.task_name].columns:
            raise InputError(
                f"--task_name {self.task_name} reads {', '.join(glue.TASKS[self.task_name].columns)}, not "
                f"{', '.join(columns)}: leave out --text_column_names, or for your own rows --task_name"
            )
        if columns and (len(columns) > 2 or len(set(columns)) < len(columns) or self.label_column_name in columns):
            raise InputError(
                f"--text_column_names takes one column or two, without the column of labels "
                f"({self.label_column_name}), not {' '.join(columns)}"
            )

    @property
    def name(self) -> str:
        """Name of the task in the table of recipes and in file names."""
        return self.task_name or "own"


def normalized_name(task_name: str | None) -> str | None:
    return None if task_name is None else task_name.lower().replace("-", "")


def recipe_task(flags: Namespace) -> str:
    return normalized_name(flags.task_name) or "own"


def main() -> None:
    argument_classes = (ModelArguments, GlueArguments, SiftArguments, FineTuningArguments)
    run_script(argument_classes, fine_tune, recipe_task, write_glue_demo)


def fine_tune(
    model_args: ModelArguments, data_args: GlueArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Rows and task
    hub = ("nyu-mll/glue", data_args.task_name) if data_args.task_name else None
    rows = read_splits(data_args, hub, download_options=model_args.download_options())
    args.drop_missing_splits(rows)
    args.row_hashes = hash_rows(rows, data_args.label_column_name)
    task = glue.TASKS.get(data_args.name) or infer_task(model_args, data_args, args, rows)
    args.set_best_metric(task.metrics)
    labels = "regression targets" if task.labels is None else glue.listed(task.labels)
    if task.labels and len(task.labels) == 2 and "f1" in task.metrics:
        labels += f" (f1 of class {task.labels[1]!r})"
    logger.warning(f"Text columns: {', '.join(task.columns)}. Labels: {labels}.")
    model_args.input_flags["text_column_names"] = list(task.columns)

    # 2. Training, evaluation and predictions, once per seed
    over_seeds(
        args,
        lambda seed_args: run(model_args, data_args, sift_args, seed_args, task, rows),
        ensemble_task(data_args, args, task, rows),
    )


def ensemble_task(
    data_args: GlueArguments, args: FineTuningArguments, task: glue.GlueTask, rows: dict[str, Dataset]
) -> EnsembleTask:
    """How to score and write the predictions of an ensemble."""

    def logits_of_scores(scores: Scores) -> np.ndarray:
        return numbers(scores) if task.labels is None else label_logits(scores, task.labels, task.multi_label)

    def metrics(split: str, scores: Scores) -> dict[str, float] | None:
        column = data_args.label_column_name
        encode = glue.make_target_encoder(rows[split], split, task, task.labels, column)
        targets = None if encode is None else [encode(label) for label in rows[split][column]]
        if targets is None or not has_test_labels(targets, task):
            return None
        logits = logits_of_scores(scores)
        predictions = logits[:, None] if task.labels is None else logits
        return compute_metrics(task, task.labels, EvalPrediction(predictions, np.array(targets)))

    def write(folder: Path, split: str, scores: Scores) -> None:
        glue.write_glue_predictions(folder, task, data_args.name, split, logits_of_scores(scores), task.labels)

    return EnsembleTask(scored_splits(rows, args), metrics, write, args.row_hashes)


def infer_task(
    model_args: ModelArguments, data_args: GlueArguments, args: FineTuningArguments, rows: dict[str, Dataset]
) -> glue.GlueTask:
    """The task of the user's own rows; without training, the labels are the checkpoint's."""
    label_column = data_args.label_column_name
    if args.do_train:
        with input_errors(source_of(rows["train"], "train")):
            return glue.infer_task(rows, label_column, data_args.do_regression, data_args.text_column_names)
    split = next(split for split in rows if split != "train")
    with input_errors(source_of(rows[split], split)):
        columns = tuple(data_args.text_column_names or glue.choose_text_columns(rows[split], split, label_column))
    labels = checkpoint_labels(model_args)
    if checkpoint_fields(model_args).get("problem_type") == "multi_label_classification":
        return glue.GlueTask(columns, labels, glue.MULTI_LABEL_METRICS, multi_label=True)
    return glue.GlueTask(columns, labels, glue.CLASS_METRICS if labels else glue.REGRESSION_METRICS)


def run(
    model_args: ModelArguments,
    data_args: GlueArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    task: glue.GlueTask,
    rows: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Tokenizer and model
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    labels = None if task.labels is None else labels_in_checkpoint_order(task.labels, model_args)
    model = load_model(
        model_args,
        HfDebertaForSequenceClassification,
        AutoModelForSequenceClassification,
        do_train=args.do_train,
        **head_fields(task, labels),
    )

    # 2. Model inputs
    length = max_input_length(data_args.max_seq_length, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: glue.encode_texts(
                split_rows,
                split,
                task,
                tokenizer,
                length,
                labels,
                label_column=data_args.label_column_name,
                map_options=data_args.map_options(f"tokenizing {split}"),
            )
            for split, split_rows in rows.items()
        }

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        metrics=lambda split, prediction: compute_metrics(task, labels, prediction),
        scores=lambda split, predictions: row_scores(task, labels, predictions),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = train_and_evaluate(trainer)

    # 4. Predictions for the test rows, and their metrics if they have labels
    if args.do_predict:
        for split in prediction_splits(inputs):
            labelled = "labels" in inputs[split].column_names and has_test_labels(inputs[split]["labels"], task)
            prefix = split.replace("test", "predict", 1)
            predicted = trainer.predict_split(split, prefix, without=() if labelled else ["labels"])
            if labelled:
                save_prediction_metrics(trainer, prefix, predicted.metrics)
            if trainer.is_world_process_zero():
                logits = task_logits(predicted.predictions, task)
                glue.write_glue_predictions(args.output_folder, task, data_args.name, split, logits, labels)
    write_card_and_push(trainer)
    return metrics


def head_fields(task: glue.GlueTask, labels: tuple[str, ...] | None) -> dict[str, Any]:
    """Configuration fields of the classification head."""
    if labels is None:
        return {"num_labels": 1, "problem_type": "regression"}
    kind = "multi_label" if task.multi_label else "single_label"
    return {**label_fields(labels), "problem_type": f"{kind}_classification"}


def compute_metrics(
    task: glue.GlueTask, labels: tuple[str, ...] | None, prediction: EvalPrediction
) -> dict[str, float]:
    """The task's metrics; `labels` are in the model's order."""
    logits, targets = task_logits(prediction.predictions, task), np.asarray(prediction.label_ids)
    compute = partial(compute_metric, "glue", glue.metric_configuration(task))
    if task.multi_label:
        return compute(predictions=(logits > 0).astype(int), references=(targets > 0).astype(int))
    if task.labels is None or labels is None:
        return compute(predictions=logits, references=targets)
    # number classes as the task does, because F1 is that of class 1
    task_number = np.array([task.labels.index(label) for label in labels])
    labelled = targets >= 0
    predicted = task_number[logits.argmax(-1)[labelled]]
    return compute(predictions=predicted, references=task_number[targets[labelled]], num_labels=len(labels))


def row_scores(task: glue.GlueTask, labels: tuple[str, ...] | None, predictions: Any) -> Scores:
    """What an ensemble averages: probabilities of labels, or regression values."""
    logits = task_logits(predictions, task).astype(np.float64)
    if labels is None:
        return number_scores(logits)
    return label_scores(expit(logits) if task.multi_label else softmax(logits, -1), labels)


def task_logits(predictions: Any, task: glue.GlueTask) -> np.ndarray:
    """Logits [rows, labels], or regression values [rows]."""
    logits = logits_of(predictions)
    return logits[:, 0] if task.labels is None else logits


def has_test_labels(labels: Any, task: glue.GlueTask) -> bool:
    """False if the labels are hidden, which GLUE marks with -1."""
    if task.multi_label or task.labels is None:
        return any(label != -1 for label in labels)
    return min(labels) >= 0


if __name__ == "__main__":
    main()
