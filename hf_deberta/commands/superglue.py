r"""Fine-tune on SuperGLUE with the published settings for the checkpoint.

ReCoRD:

    hf-deberta superglue --model_name_or_path microsoft/deberta-v3-large --task_name record --output_dir record

COPA from the official files, from a model fine-tuned on MNLI as in the paper, on several GPUs:

    accelerate launch -m hf_deberta.commands.superglue \
        --intermediate my-mnli --task_name copa --data_dir SuperGLUE/COPA --bf16 \
        --output_dir copa

A demonstration on made-up rows, offline:

    hf-deberta superglue --demo

A model fine-tuned on RTE predicts the diagnostics AX-b and AX-g too. To zip the files of a submission:
python -m hf_deberta.fine_tuning.tasks.superglue.

Repeat the command to resume an interrupted run; --demo starts over. The flags are those of Transformers'
run_glue.py, and the groups below.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from scipy.special import softmax
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    set_seed,
)
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice, HfDebertaForMultipleChoice, HfDebertaForSequenceClassification
from hf_deberta.demos.superglue import write_superglue_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_script
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores, label_logits, label_scores
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, hash_rows, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    label_fields,
    labels_in_checkpoint_order,
    load_model,
    load_tokenizer,
    max_input_length,
)
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.fine_tuning.tasks.race import ChoiceCollator
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    logits_of,
    over_seeds,
    save_prediction_metrics,
    scored_splits,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.metrics import compute_metric
from hf_deberta.runs.data_files import read_table
from hf_deberta.runs.errors import InputError, input_errors

HUB_NAME = "aps/super_glue"
DIAGNOSTICS = ("axb", "axg")
HEADS: dict[str, tuple[Any, Any, Any]] = {  # our class, the class for other models, the data collator
    "sequence": (HfDebertaForSequenceClassification, AutoModelForSequenceClassification, DataCollatorWithPadding),
    "choice": (HfDebertaForMultipleChoice, AutoModelForMultipleChoice, ChoiceCollator),
    "entity": (HfDebertaForEntityChoice, None, superglue.EntityCollator),
}

logger = logging.get_logger(__name__)


@dataclass
class SuperGlueArguments(DataArguments):
    """Which task, and the files of the diagnostics."""

    task_name: str = field(default="", metadata={"help": f"One of {', '.join(superglue.TASKS)}."})
    axb_file: str | None = field(default=None, metadata={"help": "AX-b.jsonl, to predict with --task_name rte."})
    axg_file: str | None = field(default=None, metadata={"help": "AX-g.jsonl, to predict with --task_name rte."})
    doc_stride: int = field(
        default=superglue.DEFAULT_STRIDE,
        metadata={"help": "Number of tokens that neighbouring windows of a ReCoRD passage share."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task_name = normalized_name(self.task_name)
        if self.task_name not in superglue.TASKS:
            raise InputError(f"--task_name must be one of {', '.join(superglue.TASKS)}, not {self.task_name!r}")
        if (self.axb_file or self.axg_file) and self.task_name != "rte":
            raise InputError(f"--axb_file and --axg_file need --task_name rte, not {self.task_name}")

    def card_fields(self, checkpoint: str, demo: bool = False) -> dict[str, str | None]:
        data = {} if demo else {"data": f"SuperGLUE {superglue.TASKS[self.task_name].submission_name}"}
        return super().card_fields(checkpoint, demo) | data


def normalized_name(task_name: str) -> str:
    return task_name.lower().replace("-", "")


def recipe_task(flags: Namespace) -> str:
    return normalized_name(flags.task_name) or "own"


def main() -> None:
    argument_classes = (ModelArguments, SuperGlueArguments, SiftArguments, FineTuningArguments)
    run_script(argument_classes, fine_tune, recipe_task, write_superglue_demo)


def fine_tune(
    model_args: ModelArguments, data_args: SuperGlueArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Rows of the task by split, and of the diagnostics by name
    download_options = model_args.download_options()
    splits = read_splits(data_args, (HUB_NAME, data_args.task_name), download_options=download_options)
    args.drop_missing_splits(splits)
    if data_args.task_name == "rte" and args.do_predict:
        splits |= read_diagnostics(data_args, download_options)
    rows = {}
    for key, raw in splits.items():
        name, split = task_and_split(key, data_args)
        rows[key] = superglue.flatten_split(raw, split, name, data_args.map_options(f"reading {key}"))
        logger.warning(f"{superglue.TASKS[name].submission_name} {split}: {len(rows[key]):,} rows")
        if not split.startswith("test"):
            superglue.require_labels(rows[key], split, name)
        if key == "train" and args.do_train:
            superglue.require_two_labels(rows[key], name)
    args.row_hashes = hash_rows(rows, "answers", "label")
    args.set_best_metric(superglue.TASKS[data_args.task_name].metrics)

    # 2. Training, evaluation and predictions, once per seed
    over_seeds(
        args,
        lambda seed_args: run(model_args, data_args, sift_args, seed_args, rows),
        ensemble_task(data_args, args, rows),
    )


def ensemble_task(data_args: SuperGlueArguments, args: FineTuningArguments, rows: dict[str, Dataset]) -> EnsembleTask:
    """How to score and write the predictions of an ensemble."""

    def metrics(key: str, scores: Scores) -> dict[str, float] | None:
        name, split = task_and_split(key, data_args)
        if not superglue.has_labels(rows[key], split, name):
            return None
        if name == "record":
            best = superglue.best_entities(superglue.ranked_scores(scores), rows[key])
            return superglue_scores(name, rows[key], best)
        predicted = label_logits(scores, superglue.TASKS[name].labels).argmax(-1)
        return superglue_scores(name, rows[key], predicted, split)

    def write(folder: Path, key: str, scores: Scores) -> None:
        name, _ = task_and_split(key, data_args)
        ranked = superglue.ranked_scores(scores) if name == "record" else None
        logits = None if name == "record" else label_logits(scores, superglue.TASKS[name].labels)
        superglue.write_superglue_predictions(folder, name, rows[key], logits, ranked)

    return EnsembleTask(scored_splits(rows, args), metrics, write, args.row_hashes)


def read_diagnostics(data_args: SuperGlueArguments, download_options: dict[str, Any]) -> dict[str, Dataset]:
    """Rows of AX-b and AX-g: from the given files; from the Hub if RTE comes from the Hub."""
    files = {"axb": data_args.axb_file, "axg": data_args.axg_file}
    rows = {name: read_table(file) for name, file in files.items() if file}
    local = (data_args.data_dir, data_args.train_file, data_args.validation_file, data_args.test_file)
    if rows or any(local) or data_args.dataset_name:
        return rows
    with input_errors(HUB_NAME, Exception):
        return {name: load_dataset(HUB_NAME, name, split="test", **download_options) for name in DIAGNOSTICS}


def task_and_split(key: str, data_args: SuperGlueArguments) -> tuple[str, str]:
    """The task and the split of rows: ("axb", "test") for the diagnostics axb, ("rte", "train") for train."""
    return (key, "test") if key in DIAGNOSTICS else (data_args.task_name, key)


def run(
    model_args: ModelArguments,
    data_args: SuperGlueArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    rows: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Tokenizer and model
    set_seed(args.seed)
    task = superglue.TASKS[data_args.task_name]
    tokenizer = load_tokenizer(model_args)
    deberta_class, auto_class, collator_class = HEADS[task.head]
    labels, fields = None, {}
    if task.head == "sequence":
        labels = labels_in_checkpoint_order(task.labels, model_args)
        fields = {**label_fields(labels), "problem_type": "single_label_classification"}
    model = load_model(model_args, deberta_class, auto_class, do_train=args.do_train, **fields)

    # 2. Model inputs
    length = max_input_length(data_args.max_seq_length, tokenizer, model.config, default=256)
    with args.main_process_first(desc="tokenizing"):
        inputs = {}
        for key, key_rows in rows.items():
            name, split = task_and_split(key, data_args)
            options = data_args.map_options(f"tokenizing {key}")
            inputs[key] = superglue.encode_split(
                key_rows, split, name, tokenizer, length, labels, data_args.doc_stride, options
            )

    def compute_metrics(key: str, prediction: EvalPrediction) -> dict[str, float]:
        name, split = task_and_split(key, data_args)
        logits = logits_of(prediction.predictions)
        if name == "record":
            ranked = superglue.rank_entities(logits, inputs[key], rows[key])
            return superglue_scores(name, rows[key], superglue.best_entities(ranked, rows[key]))
        # number labels as the task does
        task_number = np.array([task.labels.index(label) for label in labels or task.labels])
        return superglue_scores(name, rows[key], task_number[logits.argmax(-1)], split)

    def row_scores(key: str, predictions: Any) -> Scores:
        logits = logits_of(predictions).astype(np.float64)
        if task_and_split(key, data_args)[0] == "record":
            return superglue.entity_scores(superglue.rank_entities(logits, inputs[key], rows[key]))
        return label_scores(softmax(logits, -1), labels or task.labels)

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        metrics=compute_metrics,
        scores=row_scores,
        processing_class=tokenizer,
        data_collator=collator_class(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = train_and_evaluate(trainer)

    # 4. Predictions for test rows and diagnostics, and their metrics if they have labels
    if args.do_predict:
        for key in rows:
            name, split = task_and_split(key, data_args)
            if split.startswith("test"):
                prefix = key.replace("test", "predict", 1)
                predicted = trainer.predict_split(key, prefix)
                if superglue.has_labels(rows[key], split, name):
                    save_prediction_metrics(trainer, prefix, predicted.metrics)
                if trainer.is_world_process_zero():
                    logits = logits_of(predicted.predictions)
                    ranked = superglue.rank_entities(logits, inputs[key], rows[key]) if name == "record" else None
                    superglue.write_superglue_predictions(
                        args.output_folder, name, rows[key], logits if ranked is None else None, ranked, labels
                    )
    write_card_and_push(trainer)
    return metrics


def superglue_scores(name: str, rows: Dataset, predictions: Any, split: str = "validation") -> dict[str, float]:
    """The metrics of a task, from label numbers, or the texts of ReCoRD's entities."""
    return compute_metric("super_glue", name, **superglue.metric_inputs(name, rows, predictions, split))


if __name__ == "__main__":
    main()
