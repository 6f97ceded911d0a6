"""Multiple choice: RACE, SWAG, and own data in the form of either.

Each choice is an input of its own, `[CLS] article [SEP] question choice [SEP]`; the choice with the highest score is
the answer. The article is cut at its end if all is too long, question and choice never are.

    >>> rows = choice_rows(read_choices("RACE/dev/high"), "validation")
    >>> rows[0]
    {'id': 'high1.txt', 'context': 'Last week ...', 'choices': ['Who came? His aunt.', ...], 'label': 3}
    >>> features = choice_features(rows, tokenizer, max_seq_length=512)
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.tasks.glue import probabilities
from hf_deberta.fine_tuning.tasks.submission import numbered, write_lines
from hf_deberta.runs.data_files import read_table

TEXT, TEXTS = datasets.Value("string"), datasets.List(datasets.Value("string"))
ROW = {"id": TEXT, "context": TEXT, "choices": TEXTS}
ARTICLE = {"id": TEXT, "article": TEXT, "questions": TEXTS, "options": datasets.List(TEXTS), "answers": TEXTS}
RACE = ("article", "question", "options")
SWAG = ("sent1", "sent2", "ending0", "ending1")
UNKNOWN = {None, "", -1}  # instead of an answer
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEVELS = ("middle", "high")  # an id of RACE begins with its level

logger = logging.get_logger(__name__)


# Rows


def read_choices(file: str | Path) -> Dataset:
    """Rows as they are written: a folder of the RACE release, such as RACE/train/high, or a table."""
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return _read_release(path) if path.is_dir() else _one_question_a_row(read_table(path))


def _read_release(folder: Path) -> Dataset:
    """The articles below a folder, one per file, whose content is JSON."""
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        raise ValueError(f"there is no article of RACE, as high/1.txt, in the folder {folder}")
    files = {"paths": [str(path) for path in paths], "changed": sum(path.stat().st_mtime_ns for path in paths)}
    features = datasets.Features(ARTICLE)
    try:
        return _one_question_a_row(Dataset.from_generator(_articles, features=features, gen_kwargs=files))
    except DatasetGenerationError as error:
        raise error.__cause__ from None


def _articles(paths: list[str], changed: int) -> Iterator[dict[str, Any]]:
    """What each file holds; `changed` tells a cache that one of them did."""
    for path in paths:
        try:
            article = json.loads(Path(path).read_text(encoding="utf-8"))
            yield {column: article[column] for column in ARTICLE}
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path} is not an article of RACE ({type(error).__name__}: {error})") from error


def _one_question_a_row(rows: Dataset) -> Dataset:
    """Articles with several questions, as released, become rows as the Hub has them."""
    if not set(ARTICLE) - {"id"} <= set(rows.column_names):
        return rows
    return rows.map(_flattened, batched=True, batch_size=100, remove_columns=rows.column_names)


def _flattened(batch: dict[str, list]) -> dict[str, list]:
    found = {column: [] for column in ("id", "article", "question", "options", "answer")}
    ids = batch.get("id") or [None] * len(batch["article"])
    for row_id, article, *questions in zip(ids, *(batch[x] for x in list(ARTICLE)[1:]), strict=True):
        for question in zip(*questions, strict=True):
            for column, value in zip(found, (row_id, article, *question), strict=True):
                found[column].append(value)
    return found


def choice_rows(rows: Dataset, name: str, with_labels: bool = True, fill_blanks: bool = False) -> Dataset:
    """Rows with id, context, choices (question included) and label; `name` is that of the split, for messages.

    Args:
        with_labels: each row must have its answer; else there is a column label only if each has one.
        fill_blanks: put an option into the blank (_) of its question; else behind the question, as the released code
            of DeBERTa does.
    """
    if not len(rows):
        raise ValueError(f"the {name} split is empty: there is no question in it")
    columns = rows.column_names
    form = RACE if "article" in columns or "options" in columns else SWAG
    answer = "answer" if form is RACE else "label"
    missing = [column for column in (*form, *([answer] if with_labels else [])) if column not in columns]
    if missing:
        raise ValueError(
            f"the {name} rows have no column {', '.join(missing)} but {', '.join(columns)}: multiple choice takes "
            "article, question, options, answer (as RACE) or sent1, sent2, ending0, ending1, ..., label (as SWAG)"
        )
    labelled = with_labels or (answer in columns and not UNKNOWN & set(rows[answer]))
    given = {"name": name, "answer": answer if labelled else None}
    if form is RACE:
        given["fill_blanks"] = fill_blanks
    features = datasets.Features(ROW | ({"label": datasets.Value("int64")} if labelled else {}))
    rows = rows.map(
        _race_rows if form is RACE else _swag_rows,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        features=features,
        fn_kwargs=given,
        desc=f"checking {name}",
    )
    numbers = {len(choices): row_id for row_id, choices in zip(rows["id"], rows["choices"], strict=True)}
    if len(numbers) > 1 or min(numbers) < 2:
        said = ", ".join(f"{number} (row {row_id!r})" for number, row_id in sorted(numbers.items()))
        raise ValueError(f"all {name} rows must have the same number of choices, two or more, and they have {said}")
    return rows


def _race_rows(
    batch: dict[str, list], indices: list[int], name: str, answer: str | None, fill_blanks: bool
) -> dict[str, list]:
    ids = _ids(batch, indices)
    for row_id, options in zip(ids, batch["options"], strict=True):
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            raise ValueError(f"the options of {name} row {row_id!r} must be a list of texts, not {options!r}")
    choices = [
        [with_option(_text(question), _text(option), fill_blanks) for option in options]
        for question, options in zip(batch["question"], batch["options"], strict=True)
    ]
    return _rows(ids, batch["article"], choices, batch[answer] if answer else None, name)


def _swag_rows(batch: dict[str, list], indices: list[int], name: str, answer: str | None) -> dict[str, list]:
    endings = sorted((x for x in batch if re.fullmatch(r"ending\d+", x)), key=lambda x: int(x.removeprefix("ending")))
    choices = [
        [f"{_text(beginning)} {_text(ending)}".strip() for ending in given if ending is not None]
        for beginning, *given in zip(batch["sent2"], *(batch[x] for x in endings), strict=True)
    ]
    return _rows(_ids(batch, indices), batch["sent1"], choices, batch[answer] if answer else None, name)


def _rows(
    ids: list[str], contexts: list[str], choices: list[list[str]], answers: list | None, name: str
) -> dict[str, list]:
    rows = {"id": ids, "context": [_text(context) for context in contexts], "choices": choices}
    if answers is not None:
        places = zip(answers, choices, ids, strict=True)
        rows["label"] = [label_of(found, len(given), f"{name} row {row_id!r}") for found, given, row_id in places]
    return rows


def _ids(batch: dict[str, list], indices: list[int]) -> list[str]:
    column = next((batch[x] for x in ("id", "example_id") if x in batch), indices)
    return [str(index if row_id is None else row_id) for row_id, index in zip(column, indices, strict=True)]


def _text(text: str | float | None) -> str:
    """On one line, with single spaces, as in the released code; a csv column of numbers alone is read as numbers."""
    return " ".join(("" if text is None else str(text)).split())


def with_option(question: str, option: str, fill_blanks: bool = False) -> str:
    """The option behind the question, without a blank at either end, as the released code has it; or in its blank.

    >>> with_option("She felt _ .", "tired"), with_option("She felt _ .", "tired", fill_blanks=True)
    ('She felt _ . tired', 'She felt tired .')
    """
    if fill_blanks and "_" in question:
        return re.sub("_+", lambda _: option, question)
    return f"{question} {option}".strip(" _")


def label_of(answer: str | int | None, choices: int, row: str) -> int:
    """The place of the answer, from a letter or a number."""
    label = answer
    if isinstance(answer, str):
        letter = answer.strip()
        label = int(letter) if letter.isdecimal() else LETTERS.find(letter) if len(letter) == 1 else -1
    if not isinstance(label, int) or not 0 <= label < choices:
        letters = f"a letter from A to {LETTERS[choices - 1]}"
        raise ValueError(f"the answer of {row} must be {letters} or a number from 0 to {choices - 1}, not {answer!r}")
    return label


# Features


def choice_features(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int = 512,
    mapping: dict[str, Any] | None = None,
) -> Dataset:
    """Inputs of each choice, [choices, N] per row, with labels if there are any.

    Args:
        mapping: options of `Dataset.map`.
    """
    given = {"tokenizer": tokenizer, "max_seq_length": max_seq_length}
    if tokenizer.is_fast:
        # as it was before any other use: its state is part of the name under which features are kept
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    options = {**(mapping or {}), "batched": True, "remove_columns": rows.column_names}
    features = rows.map(_inputs, fn_kwargs=given, **options)
    cut = sum(features["cut"])
    if cut:
        logger.warning(f"{cut} of {len(rows)} articles are cut to fit into {max_seq_length} tokens with their choices")
    return features.remove_columns("cut")


def _inputs(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> dict[str, list]:
    number = len(batch["choices"][0])
    choices = [choice for choices in batch["choices"] for choice in choices]
    plain = {"add_special_tokens": False, "verbose": False}
    lengths = [len(ids) for ids in tokenizer(choices, **plain)["input_ids"]]
    room = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True) - 1
    longest = int(np.argmax(lengths))
    if lengths[longest] > room:
        raise ValueError(
            f"a choice of {batch['id'][longest // number]!r} has {lengths[longest]} tokens with its question, and a "
            f"max_seq_length of {max_seq_length} leaves room for {max(room, 0)}: raise it, or shorten the choice"
        )
    contexts = [len(ids) for ids in tokenizer(batch["context"], **plain)["input_ids"]]
    pairs = [context for context in batch["context"] for _ in range(number)], choices
    encoded = tokenizer(*pairs, truncation="only_first", max_length=max_seq_length)
    rows = range(0, len(choices), number)
    features = {name: [values[row : row + number] for row in rows] for name, values in encoded.items()}
    features["cut"] = [
        context + max(lengths[row : row + number]) > room + 1 for context, row in zip(contexts, rows, strict=True)
    ]
    if "label" in batch:
        features["labels"] = batch["label"]
    return features


@dataclass(frozen=True)
class ChoiceCollator:
    """Rows to tensors [B, choices, N], padded to the longest input of the batch; or to `length`, if it is given."""

    tokenizer: PreTrainedTokenizerBase
    length: int | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        number = len(rows[0]["input_ids"])
        names = [name for name in self.tokenizer.model_input_names if name in rows[0]]
        inputs = [{name: row[name][choice] for name in names} for row in rows for choice in range(number)]
        padding = {"padding": "max_length" if self.length else "longest", "max_length": self.length}
        padding |= {"pad_to_multiple_of": self.pad_to_multiple_of, "return_tensors": "pt"}
        padded = self.tokenizer.pad(inputs, **padding)
        batch = {name: values.view(len(rows), number, -1) for name, values in padded.items()}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


# Scores


def choice_scores(logits: np.ndarray, labels: np.ndarray, ids: Sequence[str]) -> dict[str, float]:
    """Accuracy; where the ids are those of RACE, for middle and high school apart, too. Logits are [rows, choices]."""
    right = np.asarray(logits).argmax(-1) == np.asarray(labels)
    scores = {"accuracy": float(right.mean())}
    for level in LEVELS:
        of_level = np.array([row_id.startswith(level) for row_id in ids])
        if of_level.any():
            scores[f"accuracy_{level}"] = float(right[of_level].mean())
    return scores


def write_predictions(folder: Path, rows: Dataset, logits: np.ndarray) -> None:
    """predict_results.txt and, with probabilities, predictions.jsonl, in the order of the rows."""
    best, shares = logits.argmax(-1), probabilities(logits.astype(np.float64))
    letters = [LETTERS[choice] for choice in best]
    found = [
        {"id": row_id, "prediction": letter, "label": int(choice), "probabilities": share.tolist()}
        for row_id, letter, choice, share in zip(rows["id"], letters, best, shares, strict=True)
    ]
    write_lines(folder / "predict_results.txt", ["index\tprediction", *numbered(letters)])
    write_lines(folder / "predictions.jsonl", [json.dumps(row) for row in found])


# A demonstration

PLACES = {
    "kitchen": ("pan", "stove", "knife", "oven"),
    "harbour": ("boat", "sail", "anchor", "rope"),
    "school": ("desk", "chalk", "pupil", "lesson"),
    "farm": ("cow", "barn", "tractor", "hay"),
}


def made_up_rows(number: int, seed: int) -> list[dict[str, Any]]:
    """What Ann sees, and where she is: rows with the columns of RACE."""
    rng, rows = random.Random(seed), []
    for index in range(number):
        place, places = rng.choice(list(PLACES)), list(PLACES)
        rng.shuffle(places)
        first, second = rng.sample(PLACES[place], 2)
        row = {"example_id": f"{rng.choice(LEVELS)}{index}.txt", "article": f"ann sees a {first} beside a {second} ."}
        row |= {"question": "where is she ?", "options": [f"at the {name}" for name in places]}
        rows.append({**row, "answer": LETTERS[places.index(place)]})
    return rows
