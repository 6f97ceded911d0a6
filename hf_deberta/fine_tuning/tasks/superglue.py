"""SuperGLUE: rows, inputs, metrics and submission files of its eight tasks and two diagnostics.

Rows are read in the official form (ReCoRD and MultiRC nested) or in the Hub's, and become the Hub's: one row for each
thing to be said. What the model sees:

BoolQ          passage, question
CB, RTE, AX    premise, hypothesis
COPA           twice a cause and an effect: (choice, premise) if a cause is asked for, else (premise, choice)
MultiRC        paragraph, question with one answer
ReCoRD         passage, query with [MASK] for @placeholder; an entity of the passage is chosen by its mentions
WiC            "word: sentence", sentence; the word stands between stars, "we need to * wash * it"
WSC            text, noun; the noun stands between stars, the pronoun between hashes, "because # they # feared violence"

COPA and ReCoRD are laid out as in the released code, WiC and WSC have no released recipe.

    python -m hf_deberta.fine_tuning.tasks.superglue submission.zip runs/*

makes the zip that super.gluebenchmark.com takes from the files that `run_superglue.py --do_predict` has written.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import PreTrainedTokenizerBase

from hf_deberta.fine_tuning.tasks.glue import numbered_labels, probabilities, warn_of_cut_inputs
from hf_deberta.fine_tuning.tasks.squad_scores import exact_match, f1
from hf_deberta.fine_tuning.tasks.submission import command, write_lines
from hf_deberta.model.batch_loss import IGNORED

PAIR = ("entailment", "not_entailment")
TRUTH = ("False", "True")
STRIDE = 256  # pieces that neighbouring windows of a ReCoRD passage share, as released
PLACEHOLDER = "@placeholder"
SYLLABLES = ("ba", "dor", "fel", "gan", "ki", "lum", "mor", "nes")
GENDERED = re.compile(r"\b(he|she|his|her|hers|him|himself|herself)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """A task; `labels` are in the order of the Hub's numbers, `written` as a submission has them."""

    file: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]  # the first decides which model is best
    written: tuple[str | int, ...] = ()
    head: str = "sequence"  # or choice, or entity


TASKS = {
    "boolq": Task("BoolQ", ("question", "passage"), TRUTH, ("accuracy",), ("false", "true")),
    "cb": Task("CB", ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"), ("f1", "accuracy")),
    "copa": Task(
        "COPA", ("premise", "choice1", "choice2", "question"), ("choice1", "choice2"), ("accuracy",), (0, 1), "choice"
    ),
    "multirc": Task("MultiRC", ("paragraph", "question", "answer"), TRUTH, ("f1_a", "exact_match"), (0, 1)),
    "record": Task("ReCoRD", ("passage", "query", "entity_spans"), (), ("f1", "exact_match"), head="entity"),
    "rte": Task("RTE", ("premise", "hypothesis"), PAIR, ("accuracy",)),
    "wic": Task(
        "WiC",
        ("word", "sentence1", "sentence2", "start1", "end1", "start2", "end2"),
        TRUTH,
        ("accuracy",),
        ("false", "true"),
    ),
    "wsc": Task("WSC", ("text", "span1_text", "span1_index", "span2_text", "span2_index"), TRUTH, ("accuracy",), TRUTH),
    "axb": Task("AX-b", ("sentence1", "sentence2"), PAIR, ("matthews_correlation",)),
    "axg": Task("AX-g", ("premise", "hypothesis"), PAIR, ("accuracy", "gender_parity")),
}
SUBMISSION = [f"{task.file}.jsonl" for task in TASKS.values()]


# 1. Rows


def flat_rows(rows: Dataset, split: str, name: str, mapping: dict[str, Any] | None = None) -> Dataset:
    """Rows in the Hub's form: a row for each question, answer or sentence, with `idx` and, if it is known, `label`.

    Args:
        mapping: options of `Dataset.map`.
    """
    nested = {"multirc": ("passage", _multirc), "record": ("qas", _record), "wsc": ("target", _wsc)}
    if len(rows) == 0:
        raise ValueError(f"the {split} split of {name} is empty")
    if name in nested and nested[name][0] in rows.column_names:
        features = _nested_features(name)
        flatten, options = nested[name][1], {"remove_columns": rows.column_names, "features": features}
        try:
            rows = rows.map(flatten, **{**(mapping or {}), "batched": True}, **options)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the {split} rows are not those of the official {TASKS[name].file}: {error}") from error
    missing = [column for column in TASKS[name].columns if column not in rows.column_names]
    if missing:
        official = f" (nor {nested[name][0]!r}, as in the official file)" if name in nested else ""
        raise ValueError(
            f"the {split} rows of {name} have no column {', '.join(map(repr, missing))}{official}; they have "
            f"{', '.join(rows.column_names)}"
        )
    return rows


def _nested_features(name: str) -> datasets.Features:
    text, number, truth = datasets.Value("string"), datasets.Value("int64"), datasets.ClassLabel(names=list(TRUTH))
    if name == "multirc":
        idx = {"paragraph": number, "question": number, "answer": number}
        return datasets.Features({"paragraph": text, "question": text, "answer": text, "idx": idx, "label": truth})
    if name == "record":
        spans = {"text": datasets.List(text), "start": datasets.List(number), "end": datasets.List(number)}
        given = {"passage": text, "query": text, "entity_spans": spans, "answers": datasets.List(text)}
        return datasets.Features({**given, "idx": {"passage": number, "query": number}})
    spans = {"span1_text": text, "span1_index": number, "span2_text": text, "span2_index": number}
    return datasets.Features({"text": text, **spans, "idx": number, "label": truth})


def _multirc(batch: dict[str, list]) -> dict[str, list]:
    found = {column: [] for column in ("paragraph", "question", "answer", "idx", "label")}
    for number, passage in zip(batch["idx"], batch["passage"], strict=True):
        for question in passage["questions"]:
            for answer in question["answers"]:
                label = answer.get("label")
                idx = {"paragraph": number, "question": question["idx"], "answer": answer["idx"]}
                values = (passage["text"], question["question"], answer["text"], idx, -1 if label is None else label)
                for column, value in zip(found, values, strict=True):
                    found[column].append(value)
    return found


def _record(batch: dict[str, list]) -> dict[str, list]:
    """The official ends are the last characters; here, as the Hub has it, those behind them."""
    found = {column: [] for column in ("passage", "query", "entity_spans", "answers", "idx")}
    for number, passage, questions in zip(batch["idx"], batch["passage"], batch["qas"], strict=True):
        spans = sorted({(entity["start"], entity["end"] + 1) for entity in passage["entities"]})
        texts = [passage["text"][start:end] for start, end in spans]
        entities = {"text": texts, "start": [start for start, _ in spans], "end": [end for _, end in spans]}
        for question in questions:
            answers = sorted({answer["text"] for answer in question.get("answers") or ()})
            idx = {"passage": number, "query": question["idx"]}
            for column, value in zip(found, (passage["text"], question["query"], entities, answers, idx), strict=True):
                found[column].append(value)
    return found


def _wsc(batch: dict[str, list]) -> dict[str, list]:
    spans = {column: [target[column] for target in batch["target"]] for column in batch["target"][0]}
    labels = [-1 if label is None else int(label) for label in batch.get("label", [None] * len(batch["text"]))]
    return {"text": batch["text"], **spans, "idx": batch["idx"], "label": labels}


def labels_of(rows: Dataset, split: str, name: str) -> np.ndarray | None:
    """Numbers of the labels of a flat split, -1 where there is none; None if there are none at all."""
    if TASKS[name].head == "entity" or "label" not in rows.column_names:
        return None
    number = numbered_labels(rows, TASKS[name].labels, split)
    found = np.array([number(value) for value in rows["label"]])
    return found if (found >= 0).any() else None


def is_labelled(rows: Dataset, split: str, name: str) -> bool:
    if TASKS[name].head == "entity":
        return "answers" in rows.column_names and any(rows["answers"])
    return labels_of(rows, split, name) is not None


# 2. Inputs


def encode(
    rows: Dataset,
    split: str,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    labels: Sequence[str] | None = None,
    stride: int = STRIDE,
    mapping: dict[str, Any] | None = None,
) -> Dataset:
    """Flat rows as inputs of the model: of a sequence classifier, of multiple choice (COPA), of entity choice (ReCoRD).

    Args:
        labels: in the model's order, if that is another.
        stride: pieces that windows of a ReCoRD passage share; each feature knows its `row` and its `entities`.
        mapping: options of `Dataset.map`.
    """
    task, mapping = TASKS[name], {**(mapping or {}), "batched": True, "remove_columns": rows.column_names}
    if task.head == "entity":
        passages = Passages(tokenizer, length, stride, is_labelled(rows, split, name)).fitted(rows, split)
        found = rows.map(passages, with_indices=True, **mapping)
        if len(found) == 0:
            raise ValueError(f"none of the {split} passages has an entity to choose")
        return found
    known = labels_of(rows, split, name)
    order = np.array([(labels or task.labels).index(label) for label in task.labels])
    known = None if known is None else np.where(known >= 0, order[known], IGNORED)

    def encoded(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        options = {"truncation": True, "max_length": length}
        if task.head == "choice":
            found = tokenizer(*_choices(batch), **options)
            found = {column: list(zip(values[::2], values[1::2], strict=True)) for column, values in found.items()}
        else:
            found = dict(tokenizer(*LAYOUTS.get(name, _pair)(batch, task.columns), **options))
        if known is not None:
            found["labels"] = known[indices].tolist()
        return found

    found = rows.map(encoded, with_indices=True, **mapping)
    if task.head == "sequence":
        warn_of_cut_inputs(found, split, length)
    return found


def _pair(batch: dict[str, list], columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    first, second = columns
    return batch[first], batch[second]


def _boolq(batch: dict[str, list], columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    return batch["passage"], batch["question"]


def _multirc_pair(batch: dict[str, list], columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    asked = zip(batch["question"], batch["answer"], strict=True)
    return batch["paragraph"], [f"{question} {answer}" for question, answer in asked]


def _wic(batch: dict[str, list], columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    marked = [
        [marked_span(text, start, end, "*") for text, start, end in zip(*(batch[c] for c in of), strict=True)]
        for of in (("sentence1", "start1", "end1"), ("sentence2", "start2", "end2"))
    ]
    return [f"{word}: {text}" for word, text in zip(batch["word"], marked[0], strict=True)], marked[1]


def _wsc_pair(batch: dict[str, list], columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    texts = []
    for text, noun, noun_word, pronoun, pronoun_word in zip(*(batch[column] for column in columns), strict=True):
        spans = [(*find_span(text, noun, noun_word), "*"), (*find_span(text, pronoun, pronoun_word), "#")]
        for start, end, mark in sorted(spans, reverse=True):  # from the right, so that the places stay
            text = marked_span(text, start, end, mark)
        texts.append(text)
    return texts, batch["span1_text"]


LAYOUTS = {"boolq": _boolq, "multirc": _multirc_pair, "wic": _wic, "wsc": _wsc_pair}


def marked_span(text: str, start: int, end: int, mark: str) -> str:
    """The text with marks around [start, end).

    >>> marked_span("we need to wash it.", 11, 15, "*")
    'we need to * wash * it.'
    """
    return f"{text[:start]}{mark} {text[start:end]} {mark}{text[end:]}"


def find_span(text: str, span: str, word: int) -> tuple[int, int]:
    """Where a span of WSC stands, that should begin with the `word`-th word of the text.

    Some spans of the official files are written otherwise than in the text ("The demonstrators", "them."), and some
    do not begin at their word: the nearest place that has the span counts, whatever its case, or else the word.
    """
    words = [found.span() for found in re.finditer(r"\S+", text)]
    start, end = words[min(max(word, 0), len(words) - 1)]
    wanted = r"\s+".join(map(re.escape, span.rstrip(".,;:!?").split()))
    places = [found.span() for found in re.finditer(wanted, text, re.IGNORECASE)] if wanted else []
    return min(places, key=lambda place: abs(place[0] - start), default=(start, end))


def _choices(batch: dict[str, list]) -> tuple[list[str], list[str]]:
    """Two pairs for each row, what happened first in front."""
    firsts, seconds = [], []
    for premise, *choices, question in zip(*(batch[column] for column in TASKS["copa"].columns), strict=True):
        if question not in ("cause", "effect"):
            raise ValueError(f"the question of COPA is 'cause' or 'effect', not {question!r}")
        for choice in choices:
            first, second = (choice, premise) if question == "cause" else (premise, choice)
            firsts.append(first)
            seconds.append(second)
    return firsts, seconds


@dataclass(frozen=True)
class Passages:
    """From ReCoRD's rows to windows `[CLS] part of the passage [SEP] query [SEP]` with the places of its entities.

    `entity_indices` [E, S] are the tokens of each mention that lies within the window, `entities` [E] the numbers of
    these mentions among the row's, `labels` [E] whether they are answers. Windows without a mention are left out.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    stride: int = STRIDE
    labelled: bool = True

    def fitted(self, rows: Dataset, split: str) -> "Passages":
        """With a stride that leaves room beside the longest query."""
        if not self.tokenizer.is_fast:
            kind = type(self.tokenizer).__name__
            raise ValueError(f"{kind} does not say where in a text a token stands: use a fast tokenizer")
        longest = 0
        for batch in rows.select_columns(["query"]).iter(1000):
            sizes = [len(ids) for ids in self.tokenizer(self._queries(batch), add_special_tokens=False)["input_ids"]]
            longest = max(longest, *sizes)
        room = self.length - self.tokenizer.num_special_tokens_to_add(pair=True) - longest
        if room < 2:
            raise ValueError(
                f"the longest query of {split} has {longest} pieces, which leaves no room for the passage in "
                f"max_seq_length {self.length}: make it larger"
            )
        return replace(self, stride=min(self.stride, room // 2))

    def _queries(self, batch: dict[str, list]) -> list[str]:
        mask = self.tokenizer.mask_token or PLACEHOLDER
        return [query.replace(PLACEHOLDER, mask) for query in batch["query"]]

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        encoded = self.tokenizer(
            batch["passage"],
            self._queries(batch),
            truncation="only_first",
            max_length=self.length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        spans = [_spans(entities) for entities in batch["entity_spans"]]
        labels = self._labels(batch) if self.labelled else None
        names = [*encoded, "entity_indices", *["labels"] * self.labelled, "entities", "row"]
        found = {column: [] for column in names}
        for window, owner in enumerate(owners):
            first = window == 0 or owners[window - 1] != owner
            last = window + 1 == len(owners) or owners[window + 1] != owner
            places = _places(encoded.sequence_ids(window), offsets[window], spans[owner], first, last)
            if not places:
                continue
            for column in encoded:
                found[column].append(encoded[column][window])
            found["entity_indices"].append(list(places.values()))
            found["entities"].append(list(places))
            found["row"].append(indices[owner])
            if labels is not None:
                found["labels"].append([labels[owner][entity] for entity in places])
        return found

    def _labels(self, batch: dict[str, list]) -> list[list[int]]:
        """1 for a mention whose text is an answer's, of each row."""
        rows = zip(batch["passage"], batch["entity_spans"], batch["answers"], strict=True)
        return [[int(text[start:end] in answers) for start, end in _spans(of)] for text, of, answers in rows]


def _spans(entities: dict[str, list] | list[dict]) -> list[tuple[int, int]]:
    """[start, end) of each mention; the Hub has a list of them, or lists of their fields."""
    if isinstance(entities, dict):
        return list(zip(entities["start"], entities["end"], strict=True))
    return [(entity["start"], entity["end"]) for entity in entities]


def _places(
    sequence_ids: list[int | None],
    offsets: list[tuple[int, int]],
    spans: list[tuple[int, int]],
    first: bool,
    last: bool,
) -> dict[int, list[int]]:
    """The tokens of each mention that lies within the window, by its number."""
    tokens = [token for token, sequence in enumerate(sequence_ids) if sequence == 0]
    if not tokens:
        return {}
    starts = np.array([offsets[token][0] for token in tokens])
    ends = np.array([offsets[token][1] for token in tokens])
    from_, to = 0 if first else starts[0], np.inf if last else ends[-1]
    found = {}
    for number, (start, end) in enumerate(spans):
        if start >= from_ and end <= to:
            of = np.flatnonzero((starts < end) & (ends > start))
            if len(of):
                found[number] = [tokens[place] for place in of]
    return found


@dataclass(frozen=True)
class EntityCollator:
    """Pads mentions [B, E, S] with 0, their labels [B, E] with -100; texts to the longest of the batch, or `length`."""

    tokenizer: PreTrainedTokenizerBase
    length: int | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts = [{key: f[key] for key in self.tokenizer.model_input_names if key in f} for f in features]
        padding = {"padding": "max_length" if self.length else "longest", "max_length": self.length}
        padding |= {"pad_to_multiple_of": self.pad_to_multiple_of, "return_tensors": "pt"}
        batch = dict(self.tokenizer.pad(texts, **padding))
        mentions = [feature["entity_indices"] for feature in features]
        entities, width = max(map(len, mentions)), max(len(tokens) for of in mentions for tokens in of)
        indices = torch.zeros(len(features), entities, width, dtype=torch.long)
        for row, of in zip(indices, mentions, strict=True):
            for place, tokens in zip(row, of, strict=False):
                place[: len(tokens)] = torch.tensor(tokens)
        batch["entity_indices"] = indices
        if "labels" in features[0]:
            labels = torch.full((len(features), entities), IGNORED)
            for row, feature in zip(labels, features, strict=True):
                row[: len(feature["labels"])] = torch.tensor(feature["labels"])
            batch["labels"] = labels
        return batch


# 3. Predictions and scores


def ranked_entities(logits: np.ndarray, features: Dataset, rows: Dataset) -> list[list[tuple[str, float]]]:
    """(text, score) of the entities of each ReCoRD row, best first.

    A mention's score is the mean log probability over its windows, an entity's that of its best mention.

    Args:
        logits: [windows, E]
    """
    log_probabilities = -np.logaddexp(0, -logits.astype(np.float64))
    found: list[dict[int, list[float]]] = [{} for _ in range(len(rows))]
    for values, entities, row in zip(log_probabilities, features["entities"], features["row"], strict=True):
        for entity, value in zip(entities, values, strict=False):
            found[row].setdefault(entity, []).append(value)
    ranked = []
    for passage, entities, of in zip(rows["passage"], rows["entity_spans"], found, strict=True):
        texts = [passage[start:end] for start, end in _spans(entities)]
        means = {entity: float(np.mean(values)) for entity, values in of.items()}
        by_text: dict[str, float] = {}
        for entity in sorted(means, key=means.get, reverse=True):
            by_text.setdefault(texts[entity], means[entity])
        ranked.append(list(by_text.items()))
    return ranked


def best_entities(ranked: list[list[tuple[str, float]]], rows: Dataset) -> list[str]:
    """The answer to each ReCoRD row; a guess where no mention was found among the tokens."""
    return [of[0][0] if of else _any_entity(row) for of, row in zip(ranked, rows, strict=True)]


def _any_entity(row: dict[str, Any]) -> str:
    return next((row["passage"][start:end] for start, end in _spans(row["entity_spans"])), "")


def scores(
    name: str, rows: Dataset, predictions: np.ndarray | list[str], split: str = "validation"
) -> dict[str, float]:
    """The task's metrics on a labelled flat split, as its paper defines them, between 0 and 1.

    Args:
        predictions: numbers of labels; the chosen texts for ReCoRD.
    """
    if name == "record":
        return _record_scores(rows["answers"], predictions)
    labels = labels_of(rows, split, name)
    if labels is None:
        raise ValueError(f"the {split} rows of {name} have no labels to score against")
    known = np.flatnonzero(labels >= 0)
    rows, labels, predictions = rows.select(known), labels[known], np.asarray(predictions)[known]
    found = {
        "accuracy": lambda: (predictions == labels).mean(),
        "f1": lambda: f1_score(labels, predictions, average="macro", zero_division=0),
        "f1_a": lambda: f1_score(labels, predictions, zero_division=0),
        "exact_match": lambda: _all_right(rows["idx"], predictions == labels),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "gender_parity": lambda: gender_parity(rows, predictions),
    }
    return {metric: float(found[metric]()) for metric in TASKS[name].metrics}


def _record_scores(golds: list[list[str]], predictions: list[str]) -> dict[str, float]:
    """The best over the answers, with SQuAD's normalisation, averaged over the queries."""
    pairs = list(zip(predictions, golds, strict=True))
    kinds = {"f1": f1, "exact_match": exact_match}
    found = {
        n: [max((kind(p, gold) for gold in answers), default=0.0) for p, answers in pairs] for n, kind in kinds.items()
    }
    return {metric: float(np.mean(values)) for metric, values in found.items()}


def _all_right(idx: list[dict[str, int]], right: np.ndarray) -> float:
    """The share of MultiRC's questions whose answers are all told right."""
    questions: dict[tuple, bool] = {}
    for number, is_right in zip(idx, right, strict=True):
        key = number["paragraph"], number["question"]
        questions[key] = questions.get(key, True) and bool(is_right)
    return float(np.mean(list(questions.values())))


def gender_parity(rows: Dataset, predictions: np.ndarray) -> float:
    """The share of AX-g's pairs, which differ in the gender of a pronoun, that are told the same of."""
    if "pair_id" in rows.column_names:
        keys = rows["pair_id"]
    else:
        texts = zip(rows["premise"], rows["hypothesis"], strict=True)
        keys = [tuple(GENDERED.sub("_", text).lower() for text in pair) for pair in texts]
    said: dict[Any, list[int]] = {}
    for key, prediction in zip(keys, predictions, strict=True):
        said.setdefault(key, []).append(int(prediction))
    pairs = [of for of in said.values() if len(of) > 1]
    return float(np.mean([len(set(of)) == 1 for of in pairs])) if pairs else 1.0


# 4. Files


def write_predictions(
    folder: Path,
    name: str,
    rows: Dataset,
    logits: np.ndarray | None = None,
    ranked: list[list[tuple[str, float]]] | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """The file of a submission, and `predictions_NAME.jsonl` with the probabilities of labels or the ranked entities.

    Args:
        logits: [rows, labels]
        ranked: of ReCoRD, see `ranked_entities`.
        labels: in the model's order, if that is another.
    """
    idx = rows["idx"] if "idx" in rows.column_names else list(range(len(rows)))
    if name == "record":
        said = best_entities(ranked, rows)
        submitted = [{"idx": _query(number), "label": text} for number, text in zip(idx, said, strict=True)]
        answers = [[{"text": text, "log_probability": score} for text, score in of[:5]] for of in ranked]
        told = [{"idx": _query(number), "answers": of} for number, of in zip(idx, answers, strict=True)]
    else:
        task, names = TASKS[name], labels or TASKS[name].labels
        shares = probabilities(logits.astype(np.float64))
        said = [names[number] for number in logits.argmax(-1)]
        written = dict(zip(task.labels, task.written or task.labels, strict=True))
        submitted = [{"idx": number, "label": written[label]} for number, label in zip(idx, said, strict=True)]
        if name == "multirc":
            submitted = list(_nested_answers(submitted))
        told = [
            {"idx": number, "prediction": label, "probabilities": dict(zip(names, map(float, share), strict=True))}
            for number, label, share in zip(idx, said, shares, strict=True)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in ((f"predictions_{name}.jsonl", told), (f"{TASKS[name].file}.jsonl", submitted)):
        write_lines(folder / file, [json.dumps(line, ensure_ascii=False) for line in lines])


def _query(idx: dict[str, int] | int) -> int:
    return idx["query"] if isinstance(idx, dict) else idx


def _nested_answers(submitted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    paragraphs: dict[int, dict[int, list]] = {}
    for line in submitted:
        idx = line["idx"]
        answers = paragraphs.setdefault(idx["paragraph"], {}).setdefault(idx["question"], [])
        answers.append({"idx": idx["answer"], "label": line["label"]})
    for paragraph, questions in paragraphs.items():
        nested = [{"idx": question, "answers": answers} for question, answers in questions.items()]
        yield {"idx": paragraph, "passage": {"questions": nested}}


def made_up_rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Official rows of ReCoRD about made-up matches: who won, or who lost?"""
    rng, rows = random.Random(seed), []
    for idx in range(number):
        winner, loser = rng.sample(["".join(pair).title() for pair in itertools.permutations(SYLLABLES, 2)], 2)
        sentences = [f"{winner} beat {loser} .", f"it rained in {rng.choice(('spring', 'autumn'))} ."]
        text = " ".join(rng.sample(sentences, 2))
        places = {
            name: {"start": text.index(name), "end": text.index(name) + len(name) - 1} for name in (winner, loser)
        }
        asked, answer = rng.choice((("won", winner), ("lost", loser)))
        question = {"query": f"{PLACEHOLDER} {asked} .", "idx": idx, "answers": [{**places[answer], "text": answer}]}
        rows.append({"idx": idx, "passage": {"text": text, "entities": list(places.values())}, "qas": [question]})
    return rows


if __name__ == "__main__":
    command("superglue", SUBMISSION)
