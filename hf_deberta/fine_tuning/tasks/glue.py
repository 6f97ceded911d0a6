r"""Fine-tune on GLUE, or on your own texts or text pairs, with the published settings for the checkpoint.

A GLUE task:

    hf-deberta glue --model_name_or_path microsoft/deberta-v3-base --task_name mnli --output_dir mnli

Your own rows (one or two text columns, and `label`, which may hold lists of labels) on several GPUs, with SiFT:

    accelerate launch -m hf_deberta glue \
        --model_name_or_path microsoft/deberta-v3-large --train_file train.csv \
        --validation_file dev.csv --test_file test.csv --bf16 --sift --output_dir mine

Predictions of the trained model for a new file; its columns, labels and input length are those of the training:

    hf-deberta glue --model_name_or_path mine --do_predict --test_file new.csv --output_dir predictions

Flags are named as in Transformers' run_glue.py.

Columns of your own rows: one or two text columns, and `label`: a class number or name, a float (regression), or a list
of class numbers or names (multi-label).

Metrics: those of each GLUE task; for your own rows accuracy and F1 (classes), Pearson and Spearman correlation
(regression), or micro F1, macro F1 and accuracy (multi-label).

Files, for each test split:

    predict_results_NAME.txt    index and prediction, as in Transformers' run_glue.py
    predictions_NAME.jsonl      the columns of the rows, prediction and probabilities; as predictions_NAME.csv, too
    CoLA.tsv, MNLI-m.tsv, ...   the file of a GLUE submission

`python -m hf_deberta.fine_tuning.tasks.glue submission.zip runs/*` zips those files for gluebenchmark.com.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.arguments import OPTIONAL_SWITCH
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task import LabelPredictions, Task, logits_of
from hf_deberta.fine_tuning.task_model import checkpoint_labels, read_config
from hf_deberta.fine_tuning.tasks.expand_rows import number_type, with_numbers
from hf_deberta.fine_tuning.tasks.labels import (
    as_number,
    is_empty,
    is_label_list,
    listed,
    read_targets,
    require_label_format,
    require_no_missing_labels,
)
from hf_deberta.fine_tuning.tasks.submission import submission_command, write_prediction_table
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.training.command_line import flag
from hf_deberta.training.data_files import Source, csv_text, require_columns
from hf_deberta.training.errors import InputError, RowError, input_errors, name_rows, short_repr

TWO_WAY_ENTAILMENT = ("entailment", "not_entailment")
THREE_WAY_ENTAILMENT = ("entailment", "neutral", "contradiction")
SENTENCE_COLUMNS, QUESTION_COLUMNS = ("sentence1", "sentence2"), ("question1", "question2")
NLI_COLUMNS, QNLI_COLUMNS = ("premise", "hypothesis"), ("question", "sentence")
PAIRS = (SENTENCE_COLUMNS, QUESTION_COLUMNS, NLI_COLUMNS, QNLI_COLUMNS)
IDENTIFIER = re.compile(r"id|idx|guid|.*_id", re.IGNORECASE)  # name of a column
MNLI_FILES = {"test": "MNLI-m.tsv", "test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}
MAX_SHARE_OF_ODD_LABELS = 0.1  # of labels that are no numbers, in a column of numbers
LABEL_FLAG = "--label_column_name"
TEXT_HINT = ": rename columns, or name the text columns of your own rows with --text_column_names"

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class GlueTask:
    """A classification or regression of texts or text pairs.

    Args:
        metric: its configuration in hf_deberta/metrics/glue.py, the name of the task or "classification", "regression"
            or "multi_label" (each row has a list of labels, which may be empty).
        columns: the text columns.
        labels: label names; None for regression.
        submission_files: the file name in a GLUE submission, by test split.
        submits_names: a submission holds label names, not numbers.
    """

    metric: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] | None
    submission_files: dict[str, str] = field(default_factory=dict)
    submits_names: bool = False

    @property
    def multi_label(self) -> bool:
        return self.metric == "multi_label"


TASKS = {
    task.metric: task
    for task in (
        GlueTask("cola", ("sentence",), ("unacceptable", "acceptable"), {"test": "CoLA.tsv"}),
        GlueTask("sst2", ("sentence",), ("negative", "positive"), {"test": "SST-2.tsv"}),
        GlueTask("mrpc", SENTENCE_COLUMNS, ("not_equivalent", "equivalent"), {"test": "MRPC.tsv"}),
        GlueTask("stsb", SENTENCE_COLUMNS, None, {"test": "STS-B.tsv"}),
        GlueTask("qqp", QUESTION_COLUMNS, ("not_duplicate", "duplicate"), {"test": "QQP.tsv"}),
        GlueTask("mnli", NLI_COLUMNS, THREE_WAY_ENTAILMENT, MNLI_FILES, submits_names=True),
        GlueTask("qnli", QNLI_COLUMNS, TWO_WAY_ENTAILMENT, {"test": "QNLI.tsv"}, submits_names=True),
        GlueTask("rte", SENTENCE_COLUMNS, TWO_WAY_ENTAILMENT, {"test": "RTE.tsv"}, submits_names=True),
        GlueTask("wnli", SENTENCE_COLUMNS, ("not_entailment", "entailment"), {"test": "WNLI.tsv"}),
        GlueTask("ax", NLI_COLUMNS, THREE_WAY_ENTAILMENT, {"test": "AX.tsv"}, submits_names=True),
    )
}
SUBMISSION_FILES = [
    file for task in TASKS.values() for split, file in task.submission_files.items() if split != "test_matched"
]


# 1. Flags


@dataclass
class GlueArguments(DataArguments):
    """Which task; columns and kind of labels of the user's own rows."""

    task_names = TASKS
    task_name: str | None = flag(None, f"One of {', '.join(TASKS)}. Leave it out for your own rows.")
    label_column_name: str = flag(
        "label",
        "Column of labels, or of lists of labels (multi-label classification). Of two class names, the "
        "second in alphabetical order is the positive class of f1.",
    )
    text_column_names: list[str] | None = flag(
        None,
        "One or two text columns. By default those of the checkpoint, if it is not trained; in training, a pair with "
        f"names of GLUE ({'; '.join(map(', '.join, PAIRS))}), or the only column of text.",
    )
    do_regression: bool | None = flag(
        None, "Treat labels as regression targets; by default, if they are floats.", **OPTIONAL_SWITCH
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.text_column_names
        if columns and self.task_name and tuple(columns) != TASKS[self.task_name].columns:
            raise InputError(
                f"--task_name {self.task_name} reads {', '.join(TASKS[self.task_name].columns)}, not "
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


# 2. The task of your own rows


def infer_task(
    rows: Dataset,
    source: Source,
    label_column: str = "label",
    regression: bool | None = None,
    columns: Sequence[str] | None = None,
) -> GlueTask:
    """Return the task of the user's own rows, inferred from the columns and labels of the training rows.

    Args:
        regression: treat labels as regression targets; by default, if they are floats.
        columns: text columns; by default those of `choose_text_columns`.

    >>> rows = Dataset.from_dict({"text": ["good", "bad", "fine"], "label": ["pos", "neg", "pos"]})
    >>> task = infer_task(rows, Source("train"))
    >>> task.columns, task.labels, task.metric
    (('text',), ('neg', 'pos'), 'classification')
    """
    require_columns(rows, [label_column], "train", f": name the column of labels with {LABEL_FLAG}")
    texts = tuple(columns or choose_text_columns(rows, source, label_column))
    feature = rows.features[label_column]
    if is_label_list(feature) and not regression:
        labels = _label_names(feature.feature, _flatten_label_lists(rows, label_column))
        if not labels:
            raise InputError(f"no row has labels in the column {label_column!r}, only empty lists")
        return GlueTask("multi_label", texts, labels)
    require_label_format(rows, label_column, "train")
    require_no_missing_labels([is_empty(value) for value in rows[label_column][:]], source, label_column)
    if regression is None and _is_text(feature):
        require_names_or_numbers(rows, label_column)
    if regression or (regression is None and feature.dtype.startswith("float")):
        if regression is None and all(as_number(value).is_integer() for value in rows[label_column][:]):
            logger.warning(
                f"The column {label_column!r} holds whole numbers written as decimals, such as "
                f"{rows[label_column][0]}. They are regression targets; if they are classes, add --do_regression false."
            )
        return GlueTask("regression", texts, None)
    labels = _label_names(feature, rows[label_column][:])
    if len(labels) < 2:
        raise InputError(f"the {len(rows)} train rows have only the label {labels[0]!r} in the column {label_column!r}")
    return GlueTask("classification", texts, labels)


def choose_text_columns(rows: Dataset, source: Source, label_column: str) -> tuple[str, ...]:
    """Return two text columns with names of GLUE, or else the only one; columns of identifiers are not read."""
    others = [name for name in rows.column_names if name != label_column and not IDENTIFIER.fullmatch(name)]
    texts = [name for name in others if _is_text(rows.features[name])]
    if source.is_csv:
        texts = [name for name in texts if number_type(rows, name) is None]
    if pair := next((pair for pair in PAIRS if set(pair) <= set(texts)), None):
        return pair
    if len(texts) != 1:
        raise InputError(
            f"the {source.split} rows have {len(texts)} columns of text ({listed(texts)}), of "
            f"{listed(rows.column_names)}; name the one or two to read with --text_column_names"
        )
    return tuple(texts)


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string", "string_view")


def _label_names(feature: Any, values: Iterable) -> tuple[str, ...]:
    """Return the sorted label names; whole numbers that count from 0 become LABEL_0, LABEL_1, ..."""
    if hasattr(feature, "names"):
        return tuple(feature.names)
    labels = sorted(value for value in set(values) if value is not None)
    labels = [int(label) if isinstance(label, float) and label.is_integer() else label for label in labels]
    counts_from_zero = all(type(label) is int for label in labels) and labels == list(range(len(labels)))
    return tuple(f"LABEL_{label}" if counts_from_zero else str(label) for label in labels)


def _flatten_label_lists(rows: Dataset, column: str) -> list:
    """Return the labels of all rows. Lists such as [0, 1, 0] look like multi-hot vectors and are an error."""
    lists = [row for row in rows[column][:] if row]
    if empty := [row for row, values in enumerate(rows[column][:]) if any(map(is_empty, values or ()))]:
        text = f"an empty label in the column {column!r}: remove it; an empty list means no label"
        raise RowError(dict.fromkeys(empty, text))
    labels = [label for row in lists for label in row]
    pairs = all(len(row) == 2 for row in lists)  # [0, 1] or [1, 0] in each row: no row would lack a label
    if set(labels) == {0, 1} and (vectors := [row for row in lists if pairs or len(set(row)) < len(row)]):
        raise InputError(
            f"the train rows have {vectors[0]!r} in the column {column!r}, which looks like a 0 or 1 for each label: "
            "put the names or numbers of the row's labels there"
        )
    return labels


# 3. Requirements on columns


def require_text_columns(rows: Dataset, columns: Sequence[str], source: Source, require_texts: bool = False) -> None:
    """Require that the columns hold texts, or numbers.

    Args:
        require_texts: a row without text is an error. Otherwise it is an empty text, with a warning.
    """
    require_columns(rows, columns, source.split, TEXT_HINT)
    for name in columns:
        feature = rows.features[name]
        if not isinstance(feature, Value | ClassLabel) or "binary" in feature.dtype:
            raise InputError(
                f"the {source.split} rows have {short_repr(rows[0][name])} in row 1 of the column {name!r}, which must "
                "hold text"
            )
        blank = [row for row, text in enumerate(rows[name][:]) if text is None or not str(text).strip()]
        if blank and require_texts:
            raise RowError(dict.fromkeys(blank, f"no text in the column {name!r}"))
        if blank:
            logger.warning(f"{source(blank)}: no text in the column {name!r}; read as an empty text")


def require_names_or_numbers(rows: Dataset, column: str) -> None:
    """Refuse texts that would make a class of each number or list: "1,5", "[2, 3]", a few words among numbers."""
    labels = rows[column][:]
    if all(re.fullmatch(r"\[.*\]|-?\d+,\d+", label) for label in labels):
        raise InputError(
            f"the labels in the column {column!r} are such as {labels[0]!r}: write lists to jsonl or parquet, and "
            "numbers with a point; if these are names of classes, add --do_regression false"
        )
    odd = {row: label for row, label in enumerate(labels) if not isfinite(as_number(label))}
    if 0 < len(odd) <= MAX_SHARE_OF_ODD_LABELS * len(labels):
        values = listed(sorted(set(map(short_repr, odd.values()))))
        raise InputError(  # no RowError: without these rows, numbers would still be names
            f"{name_rows([row + 1 for row in odd])}: {values} in the column {column!r}, and all others are numbers: "
            "correct it, or remove these rows; if numbers are classes, add --do_regression false"
        )


# 4. The task


class Classification(Task):
    demo = "glue"
    arguments = GlueArguments
    hub_names = {name: ("nyu-mll/glue", name) for name in TASKS}
    task: GlueTask  # set by `read`

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        column = self.data_args.label_column_name
        splits = {split: with_numbers(rows, [column], self.sources[split]) for split, rows in splits.items()}
        self.task = task = TASKS.get(self.data_args.name) or self.own_task(splits)
        self.labels, self.metric_names = task.labels, CONFIGURATIONS["glue"][task.metric]
        self.model_args.reading_flags["text_column_names"] = list(task.columns)
        for split, rows in splits.items():
            source = self.sources[split]
            with input_errors(source):
                skips = self.data_args.skip_bad_rows and not split.startswith("test")
                require_text_columns(rows, task.columns, source, require_texts=skips)
                targets = read_targets(rows, source, task.labels, column, task.multi_label, LABEL_FLAG)
            self.targets_of_split[split] = targets
            if targets is not None and task.metric == "classification" and self.has_labels(split):
                absent = [label for number, label in enumerate(task.labels or ()) if number not in targets]
                if absent and len(task.labels or ()) > 2:
                    text = f"No {split} row has these labels: {listed(absent)}"
                    logger.warning(f"{text}; f1 leaves them out, or counts 0 for one that is predicted.")
        description = "regression targets" if task.labels is None else listed(task.labels)
        if task.labels and len(task.labels) == 2 and "f1" in self.metric_names:
            description += f" (f1 of class {task.labels[1]!r})"
        logger.info(f"Text columns: {', '.join(task.columns)}. Labels: {description}.")
        return splits

    def own_task(self, splits: dict[str, Dataset]) -> GlueTask:
        """Return the task of the user's own rows; without training, the labels are the checkpoint's."""
        data_args, label_column = self.data_args, self.data_args.label_column_name
        if self.args.do_train:
            rows, source = splits["train"], self.sources["train"]
            with input_errors(source):
                return infer_task(rows, source, label_column, data_args.do_regression, data_args.text_column_names)
        split = next(split for split in splits if split != "train")
        with input_errors(source := self.sources[split]):
            columns = tuple(data_args.text_column_names or choose_text_columns(splits[split], source, label_column))
        labels = checkpoint_labels(self.model_args)
        fields = read_config(self.model_args.checkpoint, self.model_args)
        if fields.get("problem_type") == "multi_label_classification":
            return GlueTask("multi_label", columns, labels)
        return GlueTask("classification" if labels else "regression", columns, labels)

    def config_fields(self) -> dict[str, Any]:
        kind = {"problem_type": "multi_label_classification"} if self.task.multi_label else {}
        return super().config_fields() | kind

    def model_targets(self, split: str) -> Any:
        targets = self.targets(split)
        if targets is None or not self.task.multi_label:
            return super().model_targets(split)
        return targets[:, [*map((self.labels or ()).index, self.model_labels or ())]]

    def batch_encoder(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Callable[[Any], Any]:
        columns = self.task.columns

        def encode_batch(batch: dict[str, list]) -> Any:
            texts = [[csv_text(text) for text in batch[name]] for name in columns]
            return tokenizer(*texts, truncation=True, max_length=length)

        return encode_batch

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> LabelPredictions:
        logits = logits_of(outputs)
        values = logits[:, 0] if self.labels is None else logits
        return LabelPredictions.from_logits(values, self.model_labels, self.task.multi_label)

    def metrics(self, split: str, predictions: LabelPredictions) -> dict[str, float]:
        """Return the task's metrics. Classes are numbered as the task does, because F1 is that of class 1."""
        targets, compute = self.targets(split), partial(compute_metric, "glue", self.task.metric)
        if self.labels is None or predictions.labels is None:
            return compute(predictions=predictions.values, references=targets)
        if self.task.multi_label:
            return compute(predictions=predictions.chosen(), references=self.model_targets(split).astype(int))
        return compute(predictions=predictions.numbers(self.labels), references=targets, num_labels=len(self.labels))

    def write(self, folder: Path, split: str, predictions: LabelPredictions) -> None:
        """Write predict_results_NAME.txt and the file of a submission, in the order of the rows."""
        best, task = predictions.best(), self.task
        if task.labels is None:
            printed = [f"{value:.3f}" for value in best]
            submitted = [f"{min(5.0, max(0.0, value)):.3f}" for value in best]
        elif task.multi_label:
            submitted = printed = [", ".join(names) for names in best]
        else:
            printed = best
            submitted = best if task.submits_names else [str(task.labels.index(label)) for label in best]
        write_prediction_table(folder / f"predict_results_{self.name_of(split)}.txt", printed)
        if split in task.submission_files:
            write_prediction_table(folder / task.submission_files[split], submitted)

    def name_of(self, split: str) -> str:
        """Return the part of file names that stands for a test split: mnli, mnli_mismatched, own."""
        return self.data_args.name + split.removeprefix("test")


def main() -> None:
    run_task(Classification)


if __name__ == "__main__":
    submission_command("glue", SUBMISSION_FILES)
