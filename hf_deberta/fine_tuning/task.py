"""What a fine-tuning script knows of its task: rows, labels, model inputs, metrics and files of predictions.

`run.py` trains, evaluates and predicts with any `Task`; a task knows no Trainer. The defaults are those of a
classification with one label for each row. docs/fine_tuning.md shows how to write a new task.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from datasets import Dataset
from scipy.special import expit, softmax
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.splits import DataArguments, find_task_name, read_splits
from hf_deberta.fine_tuning.task_model import ModelArguments, label_fields, labels_in_checkpoint_order
from hf_deberta.fine_tuning.tasks.submission import write_predicted_rows
from hf_deberta.model.losses import IGNORED
from hf_deberta.training.data_files import Source, read_table

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LabelPredictions:
    """Probabilities [rows, labels] with the names of the labels in their order; numbers [rows] of a regression.

    Args:
        labels: None for a regression.
        multi_label: a row may have any number of labels, each with a probability of its own.
    """

    values: np.ndarray
    labels: tuple[str, ...] | None
    multi_label: bool = False

    @classmethod
    def from_logits(cls, logits: np.ndarray, labels: tuple[str, ...] | None, multi_label: bool = False) -> Self:
        if labels is None:
            return cls(logits, None)
        logits = logits.astype(np.float64)
        return cls(expit(logits) if multi_label else softmax(logits, axis=-1), labels, multi_label)

    def chosen(self) -> np.ndarray:
        """Return 1 for the best label of each row, or for all above 0.5 of several labels; otherwise 0."""
        if self.multi_label:
            return (self.values > 0.5).astype(int)
        return np.eye(self.values.shape[1], dtype=int)[self.values.argmax(-1)]

    def best(self) -> list[Any]:
        """Return the label of each row, or its labels; numbers of a regression."""
        if self.labels is None:
            return self.values.tolist()
        names = [[self.labels[number] for number in np.flatnonzero(row)] for row in self.chosen()]
        return names if self.multi_label else [name for (name,) in names]

    def numbers(self, labels: Sequence[str]) -> np.ndarray:
        """Return the number of the best label of each row in the order `labels`."""
        return np.array([labels.index(label) for label in self.labels or ()])[self.values.argmax(-1)]

    def columns(self) -> dict[str, list[Any]]:
        """Return what the files of predictions add to each row."""
        if self.labels is None:
            return {"prediction": self.best()}
        rows = [dict(zip(self.labels, row, strict=True)) for row in self.values.tolist()]
        return {"prediction": self.best(), "probabilities": rows}


class Task:
    """A kind of fine-tuning.

    Attributes:
        sources: where the rows of each split come from; `read` names them in errors, see `data_files.Source`.
        rows: what `read` returned, by split: `train`, `validation`, `test`, or with suffixes (`test_matched`).
        original_rows: the rows before `read`, one for each prediction, if `rows` are others.
        labels: names of the labels in the order of the task; None for a regression.
        targets_of_split: what `targets` returns, if it is not in the column `label`.
        metric_names: the first selects the best checkpoint.
    """

    demo = ""  # hf_deberta/demos.py has the function write_DEMO_demo
    arguments: type[DataArguments] = DataArguments  # flags about the rows
    model_arguments: type[ModelArguments] = ModelArguments
    read_file: Callable[[str], Dataset] = staticmethod(read_table)
    hub_names: Mapping[str, tuple[str, str | None]] = {}  # dataset and configuration, by --task_name
    hub_options: dict[str, Any] = {}  # of `load_dataset` for these
    model_class: Any = HfDebertaForSequenceClassification
    auto_class: Any = AutoModelForSequenceClassification  # for other models than DeBERTa; None if there is none
    collator_class: Any = DataCollatorWithPadding
    tokenizer_options: dict[str, Any] = {}
    default_length = 128  # of inputs, without recipe and --max_seq_length
    preprocess_logits: Callable[[Any, Any], Any] | None = None  # Trainer's preprocess_logits_for_metrics
    metric_names: Sequence[str] = ("accuracy",)
    writes_evaluations = False  # files of predictions for validation rows, too

    def __init__(self, model_args: ModelArguments, data_args: Any, args: FineTuningArguments) -> None:
        self.model_args, self.data_args, self.args = model_args, data_args, args
        self.sources: dict[str, Source] = {}
        self.rows: dict[str, Any] = {}
        self.original_rows: dict[str, Dataset] = {}
        self.labels: tuple[str, ...] | None = None
        self.targets_of_split: dict[str, np.ndarray | None] = {}

    @classmethod
    def class_for(cls, data_args: Any) -> type["Task"]:
        """Return the class that runs with these flags, if a script is for several."""
        return cls

    # 1. Rows

    @classmethod
    def recipe_name(cls, flags: Namespace) -> str:
        """Return the name of the task in the table of recipes."""
        return find_task_name(getattr(flags, "task_name", None) or "", cls.arguments.task_names) or "own"

    def read_splits(self) -> tuple[dict[str, Dataset], dict[str, Source]]:
        """Return the rows of each split as they are, and where they come from."""
        hub = self.hub_names.get(getattr(self.data_args, "task_name", None) or "")
        options = self.model_args.download_options() | ({} if self.data_args.dataset_name else self.hub_options)
        return read_splits(self.data_args, hub, self.read_file, options)

    def read(self, splits: dict[str, Dataset]) -> dict[str, Any]:
        """Return the rows after checking them, and set what depends on them: `labels`, `metric_names`."""
        return splits

    def targets(self, split: str) -> Any:
        """Return an array of label numbers in the order of `labels`, -1 where hidden; None without labels."""
        if split in self.targets_of_split:
            return self.targets_of_split[split]
        rows = self.rows[split]
        return np.array(rows["label"][:]) if "label" in rows.column_names else None

    def has_labels(self, split: str) -> bool:
        """Return whether every row has a label, so that there are metrics; -1 is a missing class."""
        targets = self.targets(split)
        return targets is not None and (self.labels is None or bool((targets >= 0).all()))

    # 2. Model and its inputs

    @cached_property
    def model_labels(self) -> tuple[str, ...] | None:
        """The labels in the model's order, which is that of the checkpoint if it has the same ones."""
        if self.labels is None:
            return None
        return labels_in_checkpoint_order(self.labels, self.model_args, self.args.do_train)

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the model's configuration that the head needs."""
        if self.model_labels is None:
            return {"num_labels": 1, "problem_type": "regression"}
        return {**label_fields(self.model_labels), "problem_type": "single_label_classification"}

    def batch_encoder(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Callable[[Any], Any]:
        """Return a function that returns the inputs of a batch of rows, one for each row, without labels.

        `datasets` hashes the function and all that it uses, to find cached inputs: it should not use the task.
        """
        raise NotImplementedError

    def model_targets(self, split: str) -> Any:
        """Return the targets of a split in the order of `model_labels`, -100 where hidden; None without labels."""
        targets = self.targets(split)
        if targets is None or self.labels is None:
            return targets
        return np.array([*map((self.model_labels or ()).index, self.labels), IGNORED])[targets]  # -1 is the last

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        """Return the model inputs of a split, with `labels` in the order of `model_labels` if it has labels."""
        rows, targets = self.rows[split], self.model_targets(split)
        encode = self.batch_encoder(split, tokenizer, length)

        def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
            inputs = dict(encode(batch))
            return inputs if targets is None else inputs | {"labels": targets[indices].tolist()}

        options = self.data_args.map_options(f"tokenizing {split}")
        inputs = rows.map(encode_batch, with_indices=True, remove_columns=rows.column_names, **options)
        if full := sum(tokens >= length for tokens in input_lengths(inputs)):
            logger.warning(
                f"{split}: {full:,} of {len(inputs):,} inputs fill --max_seq_length {length}; longer ones are truncated"
            )
        return inputs

    # 3. Predictions

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> Any:
        """Return the predictions of a split from the model's outputs for its inputs."""
        return LabelPredictions.from_logits(logits_of(outputs), self.model_labels)

    def metrics(self, split: str, predictions: Any) -> dict[str, float]:
        """Return the metrics of a split with labels."""
        return {"accuracy": float((predictions.numbers(self.labels or ()) == self.targets(split)).mean())}

    def prediction_columns(self, split: str, predictions: Any) -> dict[str, list[Any]]:
        """Return what the files of predictions add to each of the original rows."""
        return predictions.columns()

    def name_of(self, split: str) -> str:
        """Return the part of file names that stands for a split."""
        return split

    def predictions_name(self, split: str) -> str:
        """Return the name of these files, without its ending."""
        return f"predictions_{self.name_of(split)}"

    def write_predictions(self, folder: Path, split: str, predictions: Any) -> None:
        """Write all files of predictions of a split; without the inputs if the folder is pushed to the Hub."""
        rows = self.original_rows[split] if split in self.original_rows else self.rows[split]
        columns = self.prediction_columns(split, predictions)
        if self.args.push_to_hub:
            rows = Dataset.from_dict({"index": range(len(rows))})
        write_predicted_rows(folder / self.predictions_name(split), rows, columns)
        self.write(folder, split, predictions)

    def write(self, folder: Path, split: str, predictions: Any) -> None:
        """Write further files, such as that of a benchmark's submission."""


def input_lengths(inputs: Dataset) -> list[int]:
    """Return the number of tokens of each input; of several choices, that of the longest."""
    return [max(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in inputs["input_ids"]]


def logits_of(outputs: Any) -> Any:
    """Return the logits of a model that may return other outputs after them."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def is_validation(split: str) -> bool:
    return split.startswith("validation")


def prediction_splits(task: Task) -> list[str]:
    """Return the splits that --do_predict is for: test splits, and diagnostics."""
    return [split for split in task.rows if split != "train" and not is_validation(split)]
