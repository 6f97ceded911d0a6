r"""Fine-tune on SuperGLUE with the published settings for the checkpoint.

ReCoRD:

    hf-deberta superglue --model_name_or_path microsoft/deberta-v3-large --task_name record --output_dir record

COPA from the official files, from a model fine-tuned on MNLI as in the paper, on several GPUs:

    accelerate launch -m hf_deberta.commands.superglue \
        --intermediate my-mnli --task_name copa --data_dir SuperGLUE/COPA --bf16 \
        --output_dir copa

A model fine-tuned on RTE predicts the diagnostics AX-b and AX-g too.

The flags are those of Transformers' run_glue.py, and the groups below.

Columns: those of the Hub dataset. The official files, where MultiRC, ReCoRD and WSC are nested, are flattened to them.

| task         | input                                                                                              |
|--------------|----------------------------------------------------------------------------------------------------|
| BoolQ        | passage, question                                                                                  |
| CB, RTE, AX  | premise, hypothesis                                                                                |
| COPA         | one input per choice, cause first: (choice, premise) or (premise, choice)                          |
| MultiRC      | paragraph, question and one answer                                                                 |
| ReCoRD       | passage, query with [MASK] for @placeholder; the model scores the mentions of entities             |
| WiC          | "word: sentence", sentence; the word is marked, "we need to * wash * it"                           |
| WSC          | text, noun; the noun and the pronoun are marked, "* the men * fled because # they # feared it"     |

COPA and ReCoRD are encoded as in the official DeBERTa code, which has no recipe for WiC and WSC.

Metrics: those of the SuperGLUE paper, between 0 and 1. Files: predictions_TASK.jsonl and .csv, the columns of the rows,
prediction and probabilities (ReCoRD: the best entities), and the file of a SuperGLUE submission, such as BoolQ.jsonl.

`python -m hf_deberta.fine_tuning.tasks.superglue submission.zip runs/*` zips those files for super.gluebenchmark.com.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, load_dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice, HfDebertaForMultipleChoice, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task import LabelLogits, Scores, Task, logits_of
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.fine_tuning.tasks.expand_rows import expand_rows, read_as
from hf_deberta.fine_tuning.tasks.glue import NLI_COLUMNS, SENTENCE_COLUMNS, TWO_WAY_ENTAILMENT, warn_of_truncation
from hf_deberta.fine_tuning.tasks.race import ChoiceCollator
from hf_deberta.fine_tuning.tasks.submission import submission_command, write_json_lines
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.model.losses import IGNORED
from hf_deberta.training.command_line import flag
from hf_deberta.training.data_files import check_rows, csv_text, read_table, require_columns, require_texts, source_of
from hf_deberta.training.errors import InputError, RowError, input_errors
from hf_deberta.training.file_faults import describe

HUB_NAME = "aps/super_glue"
DIAGNOSTICS = ("axb", "axg")
METRICS = CONFIGURATIONS["super_glue"]
FALSE_TRUE = ("False", "True")
COPA_COLUMNS = ("premise", "choice1", "choice2", "question")
MULTIRC_COLUMNS = ("paragraph", "question", "answer")
WIC_COLUMNS = ("word", "sentence1", "sentence2", "start1", "end1", "start2", "end2")
WSC_COLUMNS = ("text", "span1_text", "span1_index", "span2_text", "span2_index")
DEFAULT_STRIDE = 256  # tokens that neighbouring windows of a ReCoRD passage share in the official code
PLACEHOLDER = "@placeholder"
GENDERED_WORDS = re.compile(r"\b(he|she|his|her|hers|him|himself|herself)\b", re.IGNORECASE)

logger = logging.get_logger(__name__)

RankedEntities = list[list[tuple[str, float]]]  # (text, log probability) of the entities of each row, best first


@dataclass(frozen=True)
class SuperGlueTask:
    """A task of SuperGLUE.

    Args:
        submission_name: the name of its file in a submission, without .jsonl.
        labels: label names in the order of the Hub's numbers.
        metrics: the first selects the best checkpoint.
        submission_labels: the labels as a submission has them, if not by name.
        head: sequence, choice or entity.
    """

    submission_name: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submission_labels: tuple[str | int, ...] = ()
    head: str = "sequence"


TASKS = {
    "boolq": SuperGlueTask("BoolQ", ("question", "passage"), FALSE_TRUE, METRICS["boolq"], ("false", "true")),
    "cb": SuperGlueTask("CB", NLI_COLUMNS, ("entailment", "contradiction", "neutral"), METRICS["cb"]),
    "copa": SuperGlueTask("COPA", COPA_COLUMNS, ("choice1", "choice2"), METRICS["copa"], (0, 1), head="choice"),
    "multirc": SuperGlueTask("MultiRC", MULTIRC_COLUMNS, FALSE_TRUE, METRICS["multirc"], (0, 1)),
    "record": SuperGlueTask("ReCoRD", ("passage", "query", "entity_spans"), (), METRICS["record"], head="entity"),
    "rte": SuperGlueTask("RTE", NLI_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["rte"]),
    "wic": SuperGlueTask("WiC", WIC_COLUMNS, FALSE_TRUE, METRICS["wic"], ("false", "true")),
    "wsc": SuperGlueTask("WSC", WSC_COLUMNS, FALSE_TRUE, METRICS["wsc"]),
    "axb": SuperGlueTask("AX-b", SENTENCE_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["axb"]),
    "axg": SuperGlueTask("AX-g", NLI_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["axg"]),
}
TEXT_COLUMNS = {
    *("question", "passage", "premise", "hypothesis", "choice1", "choice2", "paragraph", "answer", "query", "word"),
    *("sentence1", "sentence2", "text", "span1_text", "span2_text"),
}
SUBMISSION_FILES = [f"{task.submission_name}.jsonl" for task in TASKS.values()]
# Given to datasets, which would infer another type from a test split, where `answers` is empty.
RECORD_FEATURES = {
    "passage": datasets.Value("string"),
    "query": datasets.Value("string"),
    "entity_spans": {
        "text": datasets.List(datasets.Value("string")),
        "start": datasets.List(datasets.Value("int64")),
        "end": datasets.List(datasets.Value("int64")),
    },
    "idx": {"passage": datasets.Value("int64"), "query": datasets.Value("int64")},
    "answers": datasets.List(datasets.Value("string")),
}


# 1. Flags


@dataclass
class SuperGlueArguments(DataArguments):
    """Which task, and the files of the diagnostics."""

    task_names = TASKS
    task_name: str = flag("", f"One of {', '.join(TASKS)}.")
    axb_file: str | None = flag(None, "AX-b.jsonl, to predict with --task_name rte.")
    axg_file: str | None = flag(None, "AX-g.jsonl, to predict with --task_name rte.")
    doc_stride: int = flag(DEFAULT_STRIDE, "Number of tokens that neighbouring windows of a ReCoRD passage share.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.axb_file or self.axg_file) and self.task_name != "rte":
            raise InputError(f"--axb_file and --axg_file need --task_name rte, not {self.task_name}")

    def card_fields(self, checkpoint: str, demo: bool = False) -> dict[str, str | None]:
        data = {} if demo else {"data": f"SuperGLUE {TASKS[self.task_name].submission_name}"}
        return super().card_fields(checkpoint, demo) | data


# 2. Rows


def flatten_split(rows: Dataset, split: str, name: str, map_options: dict[str, Any] | None = None) -> Dataset:
    """Return a split in the format of the Hub: a row per question, answer or sentence, with `idx` and `label`.

    >>> target = {"span1_text": "the men", "span1_index": 0, "span2_text": "they", "span2_index": 4}
    >>> row = {"text": "the men fled because they feared it", "target": target, "idx": 0, "label": True}
    >>> flatten_split(Dataset.from_list([row]), "train", "wsc")[0]["span2_text"]
    'they'
    """
    with input_errors(source_of(rows, split)):
        nested_column, flatten = NESTED_FORMATS.get(name, (None, None))
        if flatten is not None and nested_column in rows.column_names:
            columns = [*TASKS[name].columns, "idx", "answers" if name == "record" else "label"]
            features = datasets.Features(RECORD_FEATURES) if name == "record" else None
            rows = expand_rows(rows, flatten, columns, **{**(map_options or {}), "features": features})
    with input_errors(source_of(rows, split)):
        needs_idx = name == "multirc" and split != "train"
        require_columns(rows, [*TASKS[name].columns, *["idx"] * needs_idx], split)
        require_texts(rows, [column for column in TASKS[name].columns if column in TEXT_COLUMNS], split)
        needs_label = "label" in rows.column_names and name != "record" and not split.startswith("test")

        def check(row: dict[str, Any]) -> None:
            if needs_idx:
                read_as(row["idx"], MULTIRC_IDX, "idx")
            if needs_label and row["label"] in (None, -1):
                raise InputError(f"the label is {describe(row['label'])}; each row needs one")
            _check_positions(row, name)

        check_rows(rows, check)
    return rows


def _check_positions(row: dict[str, Any], name: str) -> None:
    """Require what a row needs besides texts and a label."""
    match name:
        case "copa":
            if row["question"] not in ("cause", "effect"):
                raise InputError(f"the question of COPA is 'cause' or 'effect', not {row['question']!r}")
        case "wic":
            numbers = read_as(row, dict.fromkeys(("start1", "end1", "start2", "end2"), int))
            for side in ("1", "2"):
                text = csv_text(row[f"sentence{side}"])
                _require_span(numbers[f"start{side}"], numbers[f"end{side}"], text, f"sentence{side}")
        case "wsc":
            # two spaces hold an empty word, as in the official counting
            words = len(re.split(r"\s", csv_text(row["text"])))
            for side, index in read_as(row, {"span1_index": int, "span2_index": int}).items():
                if not 0 <= index < words or not csv_text(row["text"]).strip():
                    raise InputError(f"the {side} is {index}, and the words of the text are 0 to {words - 1}")
        case "record":
            entities = row["entity_spans"]
            shape = {"start": [int], "end": [int]} if isinstance(entities, dict) else [{"start": int, "end": int}]
            with input_errors("entity_spans", ValueError):  # not as many start as end
                spans = _mention_spans(read_as(entities, shape, "entity_spans"))
            for start, end in spans:
                _require_span(start, end, row["passage"], "passage")
            read_as(row, {"answers?": [str]})


def _require_span(start: int, end: int, text: str, name: str) -> None:
    if not 0 <= start < end <= len(text):
        raise InputError(f"the characters {start} to {end} are not in the {name}, which has {len(text)}")


def require_labels(rows: Dataset, split: str, name: str) -> None:
    """Require labels, in ReCoRD answers, in each row of a split to train or evaluate on."""
    with input_errors(source_of(rows, split)):
        if not has_labels(rows, split, name):
            raise InputError(f"the {split} rows of {name} have no labels")
        without = [row for row, answers in enumerate(rows["answers"] if name == "record" else ()) if not answers]
        if without:
            raise RowError(dict.fromkeys(without, "the row has no answers"))


# Rows of the official files, for `read_as`
MULTIRC_IDX = {"paragraph": int, "question": int, "answer": int}
MULTIRC_ANSWER = {"text": str, "idx": int, "label?": bool | int | str}
MULTIRC_QUESTION = {"question": str, "idx": int, "answers": [MULTIRC_ANSWER]}
MULTIRC_ROW = {"passage": {"text": str, "questions": [MULTIRC_QUESTION]}, "idx": int}
RECORD_QUESTION = {"query": str, "idx": int, "answers?": [{"text": str}]}
RECORD_PASSAGE = {"text": str, "entities": [{"start": int, "end": int}]}
RECORD_ROW = {"passage": RECORD_PASSAGE, "qas": [RECORD_QUESTION], "idx": int}
WSC_TARGET = {"span1_text": str, "span1_index": int, "span2_text": str, "span2_index": int}


def _flatten_multirc(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    row = read_as(row, MULTIRC_ROW)
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": row["passage"]["text"],
                "question": question["question"],
                "answer": answer["text"],
                "idx": {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]},
                "label": -1 if answer["label"] is None else answer["label"],
            }


def _flatten_record(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    row = read_as(row, RECORD_ROW)
    text = row["passage"]["text"]
    # In the official files `end` is the last character, on the Hub the one after it.
    spans = sorted({(entity["start"], entity["end"] + 1) for entity in row["passage"]["entities"]})
    entities = {
        "text": [text[start:end] for start, end in spans],
        "start": [start for start, _ in spans],
        "end": [end for _, end in spans],
    }
    for question in row["qas"]:
        yield {
            "passage": text,
            "query": question["query"],
            "entity_spans": entities,
            "answers": sorted({answer["text"] for answer in question["answers"] or []}),
            "idx": {"passage": row["idx"], "query": question["idx"]},
        }


def _flatten_wsc(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    flat = read_as(row, {"text": str, "target": WSC_TARGET})
    yield {"text": flat["text"], **flat["target"], "idx": row.get("idx"), "label": row.get("label")}


# The column that only the official format has, and the function that flattens its rows.
NESTED_FORMATS = {
    "multirc": ("passage", _flatten_multirc),
    "record": ("qas", _flatten_record),
    "wsc": ("target", _flatten_wsc),
}


def label_numbers(rows: Dataset, split: str, name: str) -> np.ndarray | None:
    """Return the label numbers of a flat split, -1 for missing ones; None if all are missing."""
    if TASKS[name].head == "entity" or "label" not in rows.column_names:
        return None
    with input_errors(source_of(rows, split)):
        numbers = glue.label_numbers(rows, TASKS[name].labels, split)
    return numbers if (numbers >= 0).any() else None


def has_labels(rows: Dataset, split: str, name: str) -> bool:
    if TASKS[name].head == "entity":
        return "answers" in rows.column_names and any(rows["answers"])
    return label_numbers(rows, split, name) is not None


def read_diagnostics(data_args: SuperGlueArguments, download_options: dict[str, Any]) -> dict[str, Dataset]:
    """Rows of AX-b and AX-g: from the given files; from the Hub if RTE comes from the Hub."""
    files = {"axb": data_args.axb_file, "axg": data_args.axg_file}
    rows = {name: read_table(file) for name, file in files.items() if file}
    local = (data_args.data_dir, data_args.train_file, data_args.validation_file, data_args.test_file)
    if rows or any(local) or data_args.dataset_name:
        return rows
    with input_errors(HUB_NAME, Exception):
        return {name: load_dataset(HUB_NAME, name, split="test", **download_options) for name in DIAGNOSTICS}


# 3. Model inputs


def encode_split(
    rows: Dataset,
    split: str,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    labels: Sequence[str] | None = None,
    stride: int = DEFAULT_STRIDE,
    map_options: dict[str, Any] | None = None,
) -> Dataset:
    """Return the inputs of a sequence classifier, of a multiple choice model (COPA) or of entity choice (ReCoRD).

    Args:
        rows: of `flatten_split`.
        labels: label names in the model's order; by default the task's.
        stride: tokens that neighbouring windows of a ReCoRD passage share.
    """
    task, map_options = TASKS[name], {**(map_options or {}), "batched": True, "remove_columns": rows.column_names}
    if task.head == "entity":
        with input_errors(source_of(rows, split)):
            return _encode_record(rows, split, tokenizer, max_length, stride, map_options)
    numbers = label_numbers(rows, split, name)
    if numbers is not None:
        model_index = np.array([(labels or task.labels).index(label) for label in task.labels])
        numbers = np.where(numbers >= 0, model_index[numbers], IGNORED)

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        columns = (map(csv_text, batch[x]) if x in TEXT_COLUMNS else batch[x] for x in task.columns)
        pairs = [pair for values in zip(*columns, strict=True) for pair in text_pairs(name, *values)]
        texts = [first for first, _ in pairs], [second for _, second in pairs]
        inputs = dict(tokenizer(*texts, truncation=True, max_length=max_length))
        if task.head == "choice":
            inputs = {key: list(zip(values[::2], values[1::2], strict=True)) for key, values in inputs.items()}
        if numbers is not None:
            inputs["labels"] = numbers[indices].tolist()
        return inputs

    inputs = rows.map(encode_batch, with_indices=True, **map_options)
    if task.head == "sequence":
        warn_of_truncation(inputs, split, max_length)
    return inputs


def text_pairs(name: str, *values: Any) -> list[tuple[str, str]]:
    """Return the texts of each input of a row, from the values of the task's columns: two for COPA, otherwise one."""
    match name:
        case "boolq":
            question, passage = values
            return [(passage, question)]
        case "copa":
            premise, *choices, question = values
            return [(choice, premise) if question == "cause" else (premise, choice) for choice in choices]
        case "multirc":
            paragraph, question, answer = values
            return [(paragraph, f"{question} {answer}")]
        case "wic":
            word, first, second, start1, end1, start2, end2 = values
            return [(f"{word}: {mark_span(first, start1, end1, '*')}", mark_span(second, start2, end2, "*"))]
        case "wsc":
            text, noun, noun_index, pronoun, pronoun_index = values
            marks = [(*find_span(text, noun, noun_index), "*"), (*find_span(text, pronoun, pronoun_index), "#")]
            for start, end, mark in sorted(marks, reverse=True):  # from right to left, so that positions stay valid
                text = mark_span(text, start, end, mark)
            return [(text, noun)]
    first, second = values
    return [(first, second)]


def mark_span(text: str, start: int, end: int, mark: str) -> str:
    """Return the text with marks around [start, end).

    >>> mark_span("we need to wash it.", 11, 15, "*")
    'we need to * wash * it.'
    """
    return f"{text[:start]}{mark} {text[start:end]} {mark}{text[end:]}"


def find_span(text: str, span: str, word: int) -> tuple[int, int]:
    """Return the characters [start, end) of a span of WSC that should begin with the `word`-th word of the text.

    In the official files some spans differ from the text ("The demonstrators", "them."), and some do not begin at their
    word. Returns the nearest occurrence of the span in any case, or else the word.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    start, end = words[min(max(word, 0), len(words) - 1)]
    pattern = r"\s+".join(map(re.escape, span.rstrip(".,;:!?").split()))
    occurrences = [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)] if pattern else []
    return min(occurrences, key=lambda occurrence: abs(occurrence[0] - start), default=(start, end))


def _encode_record(
    rows: Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
    map_options: dict[str, Any],
) -> Dataset:
    """Return windows `[CLS] part of the passage [SEP] query [SEP]` that hold E mentions of entities.

    Besides the model inputs, a window has `entity_indices` [E, S], the tokens of each mention; `entities` [E], the
    numbers of the mentions in the row; `row`; and `labels` [E], 1 for answers. Windows without a mention are left out.
    """
    mask = tokenizer.mask_token or PLACEHOLDER
    queries = [query.replace(PLACEHOLDER, mask) for query in rows["query"]]
    longest = max(map(len, tokenizer(queries, add_special_tokens=False)["input_ids"]))
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - longest
    if room < 2:
        raise InputError(
            f"the longest query of {split} has {longest} tokens, which leaves no room for the passage in "
            f"max_seq_length {max_length}: raise it"
        )
    labelled = has_labels(rows, split, "record")

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        encoded = tokenizer(
            batch["passage"],
            [query.replace(PLACEHOLDER, mask) for query in batch["query"]],
            truncation="only_first",
            max_length=max_length,
            stride=min(stride, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        row_of_window, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        mentions = [_mention_spans(entities) for entities in batch["entity_spans"]]
        names = [*encoded, "entity_indices", *["labels"] * labelled, "entities", "row"]
        inputs: dict[str, list] = {name: [] for name in names}
        for window, row in enumerate(row_of_window):
            is_first = window == 0 or row_of_window[window - 1] != row
            is_last = window + 1 == len(row_of_window) or row_of_window[window + 1] != row
            tokens = _mention_tokens(encoded.sequence_ids(window), offsets[window], mentions[row], is_first, is_last)
            if not tokens:
                continue
            for name in encoded:
                inputs[name].append(encoded[name][window])
            inputs["entity_indices"].append(list(tokens.values()))
            inputs["entities"].append(list(tokens))
            inputs["row"].append(indices[row])
            if labelled:
                passage, answers = batch["passage"][row], batch["answers"][row]
                texts = [passage[slice(*mentions[row][entity])] for entity in tokens]
                inputs["labels"].append([int(text in answers) for text in texts])
        return inputs

    inputs = rows.map(encode_batch, with_indices=True, **map_options)
    if len(inputs) == 0:
        raise InputError(f"none of the {split} passages has an entity to choose")
    return inputs


def _mention_spans(entities: dict[str, list] | list[dict]) -> list[tuple[int, int]]:
    """Return the characters [start, end) of each mention, from a list of them or from lists of their fields."""
    if isinstance(entities, dict):
        return list(zip(map(int, entities["start"]), map(int, entities["end"]), strict=True))
    return [(int(entity["start"]), int(entity["end"])) for entity in entities]


def _mention_tokens(
    sequence_ids: list[int | None],
    offsets: list[tuple[int, int]],
    mentions: list[tuple[int, int]],
    is_first: bool,
    is_last: bool,
) -> dict[int, list[int]]:
    """Return the tokens of each mention that is all in the window, by its number.

    Args:
        is_first: the window is the first of its passage; `is_last` likewise.
    """
    tokens = np.array([token for token, sequence in enumerate(sequence_ids) if sequence == 0], dtype=int)
    if not len(tokens):
        return {}
    starts, ends = np.array([offsets[token] for token in tokens]).T
    window_start, window_end = 0 if is_first else starts[0], np.inf if is_last else ends[-1]
    mention_tokens = {}
    for number, (start, end) in enumerate(mentions):
        if start >= window_start and end <= window_end:
            in_mention = tokens[(starts < end) & (ends > start)]
            if len(in_mention):
                mention_tokens[number] = in_mention.tolist()
    return mention_tokens


class EntityCollator(DataCollatorWithPadding):
    """DataCollatorWithPadding that also pads `entity_indices` [B, E, S] with 0 and `labels` [B, E] with -100."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        names = self.tokenizer.model_input_names
        batch = super().__call__([{key: f[key] for key in names if key in f} for f in features])
        mentions = [[torch.tensor(tokens) for tokens in feature["entity_indices"]] for feature in features]
        tokens = pad_sequence([tokens for row in mentions for tokens in row], batch_first=True)
        batch["entity_indices"] = pad_sequence(tokens.split(list(map(len, mentions))), batch_first=True)
        if "labels" in features[0]:
            labels = [torch.tensor(feature["labels"]) for feature in features]
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        return batch


# 4. Predictions


def rank_entities(logits: np.ndarray, features: Dataset, rows: Dataset) -> RankedEntities:
    """Return (text, score) of the entities of each ReCoRD row, best first.

    The score of a mention is its mean log probability over the windows, that of an entity the best of its mentions.

    Args:
        logits: [windows, E]
    """
    log_probabilities = -np.logaddexp(0, -logits.astype(np.float64))
    scores: list[dict[int, list[float]]] = [{} for _ in range(len(rows))]
    for values, entities, row in zip(log_probabilities, features["entities"], features["row"], strict=True):
        for entity, value in zip(entities, values, strict=False):  # the rest is padding
            scores[row].setdefault(entity, []).append(value)
    ranked = []
    for passage, entities, by_mention in zip(rows["passage"], rows["entity_spans"], scores, strict=True):
        spans = _mention_spans(entities)
        means = {mention: float(np.mean(values)) for mention, values in by_mention.items()}
        by_text: dict[str, float] = {}
        for mention, score in sorted(means.items(), key=lambda item: item[1], reverse=True):
            by_text.setdefault(passage[slice(*spans[mention])], score)
        ranked.append(list(by_text.items()))
    return ranked


def best_entities(ranked: RankedEntities, rows: Dataset) -> list[str]:
    """Return the answer to each ReCoRD row: its best entity, or the first if no window holds a mention."""
    answers = []
    for entities, row in zip(ranked, rows, strict=True):
        spans = _mention_spans(row["entity_spans"])
        first = row["passage"][slice(*spans[0])] if spans else ""
        answers.append(entities[0][0] if entities else first)
    return answers


def metric_inputs(
    name: str, rows: Dataset, predictions: np.ndarray | list[str], split: str = "validation"
) -> dict[str, Any]:
    """Return the inputs of hf_deberta/metrics/super_glue.py for a flat split; rows without a label are left out.

    Args:
        predictions: label numbers; for ReCoRD, the texts of the predicted entities.
    """
    if name == "record":
        queries = [{"passage": 0, "query": row} for row in range(len(rows))]
        texts = [{"idx": idx, "prediction_text": text} for idx, text in zip(queries, predictions, strict=True)]
        golds = [{"idx": idx, "answers": answers} for idx, answers in zip(queries, rows["answers"], strict=True)]
        return {"predictions": texts, "references": golds}
    numbers = label_numbers(rows, split, name)
    if numbers is None:
        raise InputError(f"the {split} rows of {name} have no labels")
    labelled = np.flatnonzero(numbers >= 0)
    rows, labels, predicted = rows.select(labelled), numbers[labelled], np.asarray(predictions)[labelled].tolist()
    if name == "multirc":
        predicted = [{"idx": idx, "prediction": number} for idx, number in zip(rows["idx"], predicted, strict=True)]
    pairs = {"pairs": _gender_pairs(rows)} if name == "axg" else {}
    return {"predictions": predicted, "references": labels.tolist(), **pairs}


def _gender_pairs(rows: Dataset) -> list[str]:
    """Return a text that rows share which differ only in the gender of a pronoun."""
    if "pair_id" in rows.column_names:
        return list(map(str, rows["pair_id"]))
    texts = zip(rows["premise"], rows["hypothesis"], strict=True)
    return [GENDERED_WORDS.sub("_", "\n".join(pair)).lower() for pair in texts]


# 5. Prediction files


def write_superglue_predictions(
    folder: Path, name: str, rows: Dataset, predicted: LabelLogits | RankedEntities
) -> None:
    """Write the file of a submission, from the ranked entities of ReCoRD or from logits."""
    idx = list(rows["idx"]) if "idx" in rows.column_names else list(range(len(rows)))
    task = TASKS[name]
    if isinstance(predicted, LabelLogits):
        submitted = dict(zip(task.labels, task.submission_labels or task.labels, strict=True))
        answers: list[Any] = [submitted[label] for label in predicted.best()]
    else:
        idx = [number["query"] if isinstance(number, dict) else number for number in idx]
        answers = best_entities(predicted, rows)
    submission = [{"idx": number, "label": answer} for number, answer in zip(idx, answers, strict=True)]
    if name == "multirc":
        submission = list(_nest_multirc_answers(submission))
    write_json_lines(folder / f"{task.submission_name}.jsonl", submission)


def _nest_multirc_answers(submission: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the predictions by paragraph and question, as a submission has them."""
    paragraphs: dict[int, dict[int, list]] = {}
    for line in submission:
        idx = line["idx"]
        answers = paragraphs.setdefault(idx["paragraph"], {}).setdefault(idx["question"], [])
        answers.append({"idx": idx["answer"], "label": line["label"]})
    for paragraph, questions in paragraphs.items():
        nested = [{"idx": question, "answers": answers} for question, answers in questions.items()]
        yield {"idx": paragraph, "passage": {"questions": nested}}


# 6. The task

HEADS: dict[str, tuple[Any, Any, Any]] = {  # our class, the class for other models, the data collator
    "sequence": (HfDebertaForSequenceClassification, AutoModelForSequenceClassification, DataCollatorWithPadding),
    "choice": (HfDebertaForMultipleChoice, AutoModelForMultipleChoice, ChoiceCollator),
    "entity": (HfDebertaForEntityChoice, None, EntityCollator),
}


class SuperGlue(Task):
    """A task of SuperGLUE. Besides its splits, `rows` has the diagnostics of RTE: axb and axg."""

    demo = "superglue"
    arguments = SuperGlueArguments
    hub_names = {name: (HUB_NAME, name) for name in TASKS}
    label_columns = ("answers", "label")
    default_length = 256

    def __init__(self, model_args: ModelArguments, data_args: SuperGlueArguments, args: FineTuningArguments) -> None:
        super().__init__(model_args, data_args, args)
        self.task = TASKS[data_args.task_name]
        self.model_class, self.auto_class, self.collator_class = HEADS[self.task.head]
        self.labels, self.metric_names = self.task.labels, self.task.metrics
        if self.task.head == "entity":
            self.tokenizer_options = {"padding_side": "right"}  # entity_indices count from the first token
        self.more_splits = ("test",) if data_args.axb_file or data_args.axg_file else ()

    def task_and_split(self, key: str) -> tuple[str, str]:
        """Return ("axb", "test") for the diagnostics axb, and ("rte", "train") for the split train."""
        return (key, "test") if key in DIAGNOSTICS else (self.data_args.task_name, key)

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        if self.data_args.task_name == "rte" and self.args.do_predict:
            splits = splits | read_diagnostics(self.data_args, self.download_options())
        rows = {}
        for key, raw in splits.items():
            name, split = self.task_and_split(key)
            rows[key] = flatten_split(raw, split, name, self.data_args.map_options(f"reading {key}"))
            logger.info(f"{TASKS[name].submission_name} {split}: {len(rows[key]):,} rows")
            if not split.startswith("test"):
                require_labels(rows[key], split, name)
        return rows

    def has_labels(self, split: str) -> bool:
        name, part = self.task_and_split(split)
        return has_labels(self.rows[split], part, name)

    def config_fields(self) -> dict[str, Any]:
        return super().config_fields() if self.task.head == "sequence" else {}

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        name, part = self.task_and_split(split)
        labels = self.model_labels if self.task.head == "sequence" else None
        options = self.data_args.map_options(f"tokenizing {split}")
        return encode_split(self.rows[split], part, name, tokenizer, length, labels, self.data_args.doc_stride, options)

    def predicted(self, split: str, outputs: Any, inputs: Dataset) -> LabelLogits | RankedEntities:
        if self.task.head == "entity":
            return rank_entities(logits_of(outputs), inputs, self.rows[split])
        return LabelLogits(logits_of(outputs), self.model_labels if self.task.head == "sequence" else self.labels)

    def scores(self, predicted: LabelLogits | RankedEntities) -> Scores:
        if isinstance(predicted, LabelLogits):
            return predicted.scores()
        return [{text: float(np.exp(score)) for text, score in entities} for entities in predicted]

    def from_scores(self, split: str, scores: Scores) -> LabelLogits | RankedEntities:
        if self.task.head != "entity":
            return super().from_scores(split, scores)
        ranked = [sorted(row.items(), key=lambda item: item[1], reverse=True) for row in scores]
        return [[(text, float(np.log(probability))) for text, probability in row] for row in ranked]

    def metrics(self, split: str, predicted: LabelLogits | RankedEntities) -> dict[str, float]:
        (name, part), rows = self.task_and_split(split), self.rows[split]
        best: Any
        if isinstance(predicted, LabelLogits):
            best = predicted.numbers(self.task.labels)
        else:
            best = best_entities(predicted, rows)
        return compute_metric("super_glue", name, **metric_inputs(name, rows, best, part))

    def predicted_columns(self, split: str, predicted: LabelLogits | RankedEntities) -> dict[str, list]:
        """Return predictions and probabilities; for ReCoRD the best entity, and up to five with their scores."""
        if isinstance(predicted, LabelLogits):
            return predicted.columns()
        top = [[{"text": text, "log_probability": score} for text, score in entities[:5]] for entities in predicted]
        return {"prediction": best_entities(predicted, self.rows[split]), "best_entities": top}

    def predictions_name(self, split: str) -> str:
        return f"predictions_{self.task_and_split(split)[0]}"

    def write(self, folder: Path, split: str, predicted: LabelLogits | RankedEntities) -> None:
        write_superglue_predictions(folder, self.task_and_split(split)[0], self.rows[split], predicted)


def main() -> None:
    run_task(SuperGlue)


if __name__ == "__main__":
    submission_command("superglue", SUBMISSION_FILES)
