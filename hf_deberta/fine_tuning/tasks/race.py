r"""Fine-tune on multiple choice: RACE, SWAG, aNLI (abductive), or your own questions in the format of any of them.

RACE, from a model fine-tuned on MNLI as in the paper:

    hf-deberta race --intermediate my-deberta-mnli --task_name race --output_dir race

The official release of RACE, or your own rows (article, question, options, answer; or sent1, sent2, ending0, ending1,
..., label), on several GPUs, with SiFT:

    accelerate launch -m hf_deberta race \
        --model_name_or_path microsoft/deberta-v3-large --data_dir RACE --bf16 --sift \
        --output_dir race

aNLI, from the official files train.jsonl, train-labels.lst, dev.jsonl and so on; the submission is anli.lst:

    hf-deberta race --intermediate my-deberta-mnli --task_name anli --data_dir alphanli --output_dir anli

Flags are named as in Transformers' run_swag.py.

Columns: article, question, options (list), answer (letter or number), as RACE; sent1, sent2, ending0, ending1, ...,
label, as SWAG; or observation_1, observation_2, hypothesis_1, hypothesis_2, label (1 or 2), as aNLI.

Each choice becomes an input `[CLS] article [SEP] question choice [SEP]`; the choice with the highest logit is the
prediction. Articles that do not fit are truncated at the end; questions and choices never are.

Metrics: accuracy, and for RACE the accuracy on middle and high school articles. Files: predict_results.txt (index and
letter), predictions.jsonl and .csv (the columns of the rows, prediction, probabilities), and for aNLI its submission
anli.lst.
"""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForMultipleChoice, DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from hf_deberta import HfDebertaForMultipleChoice
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments, require_plain_splits
from hf_deberta.fine_tuning.task import LabelPredictions, Task, logits_of
from hf_deberta.fine_tuning.tasks.expand_rows import all_bad_rows, expand_rows, read_as, with_numbers
from hf_deberta.fine_tuning.tasks.labels import read_targets
from hf_deberta.fine_tuning.tasks.submission import write_lines, write_prediction_table
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.training.command_line import flag
from hf_deberta.training.data_files import Source, cache_rows, read_table, require_columns, require_texts
from hf_deberta.training.errors import InputError, RowError, input_errors
from hf_deberta.training.text_files import read_json

HUB_NAMES = {
    "race": ("ehovy/race", "all"),
    "race_middle": ("ehovy/race", "middle"),
    "race_high": ("ehovy/race", "high"),
    "swag": ("allenai/swag", "regular"),
    "anli": ("allenai/art", "anli"),
}
RELEASE_FOLDERS = {"train": "train", "validation": "dev", "test": "test"}  # of RACE, each with middle/ and high/
TEXT, TEXTS = datasets.Value("string"), datasets.List(datasets.Value("string"))
ROW_FEATURES = {"id": TEXT, "context": TEXT, "choices": TEXTS}
ARTICLE = {"article": str, "questions": [str], "options": [[str]], "answers": [str]}  # for `read_as`
FLAT_FEATURES = {"id": TEXT, "article": TEXT, "question": TEXT, "options": TEXTS, "answer": TEXT}
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class RowFormat(NamedTuple):
    """The columns of a row, those of them that must hold text, and the column and the names of the answers."""

    columns: tuple[str, ...]
    texts: tuple[str, ...]
    answer: str = "label"
    answers: tuple[str, ...] = LETTERS


ANLI_COLUMNS = ("observation_1", "observation_2", "hypothesis_1", "hypothesis_2")
ANLI_NAMES = dict(zip(("obs1", "obs2", "hyp1", "hyp2"), ANLI_COLUMNS, strict=True))  # of the official files
RACE = RowFormat(("article", "question", "options"), ("article", "question"), "answer")
SWAG = RowFormat(("sent1", "sent2", "ending0", "ending1"), ("sent1",))
ANLI = RowFormat(ANLI_COLUMNS, ANLI_COLUMNS, answers=("1", "2"))
FORMATS = (
    ". Multiple choice needs article, question, options, answer (as RACE), sent1, sent2, ending0, ending1, ..., label "
    f"(as SWAG), or {', '.join(ANLI_COLUMNS)}, label (as aNLI)"
)


# 1. Flags


@dataclass
class ChoiceArguments(DataArguments):
    """Which questions, and how a question and an option are joined."""

    task_names = HUB_NAMES
    task_name: str | None = flag(None, f"One of {', '.join(HUB_NAMES)}. Leave it out for your own rows.")
    fill_blanks: bool = flag(False, "Put each option into the blank (_) of its question, not behind the question.")

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = Path(self.data_dir or ".")
        if self.data_dir and all((folder / name).is_dir() for name in RELEASE_FOLDERS.values()):
            level = (self.task_name or "").partition("_")[2]
            for split, name in RELEASE_FOLDERS.items():
                if getattr(self, f"{split}_file") is None:
                    setattr(self, f"{split}_file", str(folder / name / level))
            self.data_dir = None


# 2. Rows


def read_choices(file: str | Path) -> Dataset:
    """Return the rows of a table, or the questions of a folder of the RACE release."""
    path = Path(file)
    if path.is_dir():
        return _read_release(path)
    rows = read_table(path)
    is_anli = set(ANLI_NAMES) <= set(rows.column_names)
    return _with_label_file(rows.rename_columns(ANLI_NAMES), path) if is_anli else rows


def _with_label_file(rows: Dataset, path: Path) -> Dataset:
    """Return rows of an official file of aNLI with the labels beside it, if there are any: train-labels.lst."""
    labels = path.with_name(f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}-labels.lst")
    if "label" in rows.column_names or not labels.exists():
        return rows
    lines = labels.read_text(encoding="utf-8").split()
    if len(lines) != len(rows):
        raise InputError(f"{labels} has {len(lines)} labels for the {len(rows)} rows of {path}")
    return rows.add_column("label", lines)


def _read_release(folder: Path) -> Dataset:
    """Return the questions of the articles below a folder: one JSON object per .txt file."""
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        raise InputError(f"there is no article of RACE, such as high/1.txt, in the folder {folder}")
    with input_errors(str(folder)):
        return cache_rows(paths, partial(_questions_of_files, paths), FLAT_FEATURES)


def _questions_of_files(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with input_errors(str(path)):
            yield from _questions_of_article(read_json(path))


def _questions_of_article(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    article, questions, options, answers = read_as(row, ARTICLE).values()
    if not len(questions) == len(options) == len(answers):
        raise InputError(
            f"there are {len(questions)} questions, {len(options)} lists of options and {len(answers)} answers, and "
            "each question needs one of both"
        )
    row_id = None if row.get("id") is None else str(row["id"])
    for question, choices, answer in zip(questions, options, answers, strict=True):
        yield {"id": row_id, "article": article, "question": question, "options": choices, "answer": answer}


def flatten_articles(rows: Dataset, source: Source) -> tuple[Dataset, Source]:
    """Return a row for each question and their source, also of rows as in the release, one for each article."""
    if not set(ARTICLE) <= set(rows.column_names):
        return rows, source
    features = datasets.Features(FLAT_FEATURES)
    return expand_rows(rows, source, _questions_of_article, [*FLAT_FEATURES], features=features)


def read_choice_rows(rows: Dataset, source: Source, fill_blanks: bool = False) -> tuple[Dataset, np.ndarray | None]:
    """Return rows with the columns id, context and choices (each with its question), and the index of each answer.

    Args:
        fill_blanks: put an option into the blank (_) of its question; by default it follows the question, as in the
            official DeBERTa code.
    """
    columns = rows.column_names
    row_format = RACE if "article" in columns or "options" in columns else ANLI if ANLI_COLUMNS[0] in columns else SWAG

    def make_choice_row(row: dict[str, Any], index: int = 0) -> dict[str, Any]:
        row_id = row["id"] if "id" in columns else row.get("example_id")
        if row_format is ANLI:
            first, second, *choices = (_one_line(row[column]) for column in ANLI_COLUMNS)
            context = f"{first} {second}"
        elif row_format is RACE:
            context, question = _one_line(row["article"]), _one_line(row["question"])
            options = map(_one_line, read_as(row["options"], [str], "options"))
            choices = [join_question_and_option(question, option, fill_blanks) for option in options]
        else:
            context, choices = _one_line(row["sent1"]), _swag_choices(row)
        if not 2 <= len(choices) <= len(LETTERS):
            raise InputError(f"a question needs 2 to {len(LETTERS)} choices, not {len(choices)}")
        return {"id": str(index if row_id is None else row_id), "context": context, "choices": choices}

    with input_errors(source):
        needed = [*row_format.columns, *[row_format.answer] * (source.split != "test")]
        require_columns(rows, needed, source.split, FORMATS)
        require_texts(rows, row_format.texts, source)
        options = {"remove_columns": columns, "features": datasets.Features(ROW_FEATURES)}
        with all_bad_rows(rows, make_choice_row):
            choices = rows.map(make_choice_row, with_indices=True, desc=f"checking {source.split}", **options)
        counts = [len(of_row) for of_row in choices["choices"]]
        ((usual, _),) = Counter(counts).most_common(1)
        if odd := {row: count for row, count in enumerate(counts) if count != usual}:
            raise RowError({row: f"{count} choices, but most rows have {usual}" for row, count in odd.items()})
        answers = with_numbers(rows, [row_format.answer], source)
        return choices, read_targets(answers, source, row_format.answers[:usual], row_format.answer)


def _swag_choices(row: dict[str, Any]) -> list[str]:
    endings = sorted((x for x in row if re.fullmatch(r"ending\d+", x)), key=lambda x: int(x.removeprefix("ending")))
    cells = read_as(dict(row), {f"{column}?": str | int | float | bool for column in ("sent2", *endings)})
    return [f"{_one_line(cells['sent2'])} {_one_line(cells[x])}".strip() for x in endings if cells[x] is not None]


def _one_line(text: str | float | None) -> str:
    """Return the text with single spaces, as the official code does."""
    return " ".join(("" if text is None else str(text)).split())


def join_question_and_option(question: str, option: str, fill_blanks: bool = False) -> str:
    """Return the question followed by the option, or with the option in its blank.

    As in the official code, blanks at either end of the result are removed.

    >>> join_question_and_option("She felt _ .", "tired"), join_question_and_option("She felt _ .", "tired", True)
    ('She felt _ . tired', 'She felt tired .')
    """
    if fill_blanks and "_" in question:
        return re.sub("_+", lambda _: option, question)
    return f"{question} {option}".strip(" _")


# 3. Model inputs


def group_choices(inputs: Mapping[str, list], number: int) -> dict[str, list]:
    """Return the inputs of choices, `number` for each row, as a list for each row."""
    return {
        name: [values[start : start + number] for start in range(0, len(values), number)]
        for name, values in inputs.items()
    }


class ChoiceCollator(DataCollatorForMultipleChoice):
    """DataCollatorForMultipleChoice that also collates rows without labels, where that of Transformers fails."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "labels" in examples[0]:
            return super().torch_call(examples)
        batch = super().torch_call([{**example, "labels": 0} for example in examples])
        del batch["labels"]
        return batch


# 4. The task


class ChoiceTask(Task):
    """A task whose labels are choices, each an input of the model, which does not know their names."""

    model_class, auto_class = HfDebertaForMultipleChoice, AutoModelForMultipleChoice
    collator_class = ChoiceCollator

    @cached_property
    def model_labels(self) -> tuple[str, ...] | None:
        return self.labels

    def config_fields(self) -> dict[str, Any]:
        return {}


class MultipleChoice(ChoiceTask):
    demo = "race"
    arguments = ChoiceArguments
    read_file = staticmethod(read_choices)
    hub_names = HUB_NAMES
    default_length = 256
    metric_names = CONFIGURATIONS["multiple_choice"]["default"]

    @classmethod
    def recipe_name(cls, flags: Namespace) -> str:
        return super().recipe_name(flags).partition("_")[0]

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        rows = {}
        for split, raw in require_plain_splits(splits).items():
            self.original_rows[split], source = flatten_articles(raw, self.sources[split])
            original, fill_blanks = self.original_rows[split], self.data_args.fill_blanks
            rows[split], self.targets_of_split[split] = read_choice_rows(original, source, fill_blanks)
        self.labels = LETTERS
        return rows

    def batch_encoder(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Callable[[Any], Any]:
        """Return a function that returns inputs [choices, N] of each row."""
        room = length - tokenizer.num_special_tokens_to_add(pair=True) - 1

        def encode_batch(batch: dict[str, list]) -> dict[str, list]:
            num_choices = len(batch["choices"][0])
            choices = [choice for choices in batch["choices"] for choice in choices]
            lengths = list(map(len, tokenizer(choices, add_special_tokens=False, verbose=False)["input_ids"]))
            longest = int(np.argmax(lengths))
            if lengths[longest] > room:
                raise InputError(
                    f"a choice of {batch['id'][longest // num_choices]!r} has {lengths[longest]} tokens with its "
                    f"question, and a max_seq_length of {length} leaves room for {max(room, 0)}: raise it, or shorten "
                    "the choice"
                )
            contexts = [context for context in batch["context"] for _ in range(num_choices)]
            inputs = tokenizer(contexts, choices, truncation="only_first", max_length=length)
            return group_choices(inputs, num_choices)

        return encode_batch

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> LabelPredictions:
        logits = logits_of(outputs)
        return LabelPredictions.from_logits(logits, LETTERS[: logits.shape[-1]])

    def metrics(self, split: str, predictions: LabelPredictions) -> dict[str, float]:
        """Return the accuracy, also by level of RACE."""
        best, targets, ids = predictions.values.argmax(-1), self.targets(split), self.rows[split]["id"][:]
        return compute_metric("multiple_choice", "race", predictions=best, references=targets, ids=ids)

    def predictions_name(self, split: str) -> str:
        return "predictions"

    def write(self, folder: Path, split: str, predictions: LabelPredictions) -> None:
        """Write predict_results.txt and the submission of aNLI, in the order of the rows."""
        write_prediction_table(folder / "predict_results.txt", predictions.best())
        if self.data_args.task_name == "anli":
            write_lines(folder / "anli.lst", [str(number + 1) for number in predictions.values.argmax(-1).tolist()])


def main() -> None:
    run_task(MultipleChoice)
