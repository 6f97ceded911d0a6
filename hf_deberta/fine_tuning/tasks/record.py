"""ReCoRD of SuperGLUE: choose the entity of a passage that fills the gap of a query.

Encoded as in the official DeBERTa code: windows of the passage with the query, in which the model scores the mentions
of entities. `superglue.py` has the command line.
"""

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from hf_deberta.fine_tuning.answer_spans import Window, tokenize_windows
from hf_deberta.fine_tuning.tasks.expand_rows import read_as
from hf_deberta.model.losses import IGNORED
from hf_deberta.training.errors import InputError, input_errors

DEFAULT_STRIDE = 256  # tokens that neighbouring windows of a passage share in the official code
PLACEHOLDER = "@placeholder"
# Given to datasets, which would infer another type from a test split, where `answers` is empty.
FEATURES = {
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

RankedEntities = list[list[tuple[str, float]]]  # (text, log probability) of the entities of each row, best first


# 1. Rows

# Rows of the official files, for `read_as`
QUESTION = {"query": str, "idx": int, "answers?": [{"text": str}]}
PASSAGE = {"text": str, "entities": [{"start": int, "end": int}]}
ROW = {"passage": PASSAGE, "qas": [QUESTION], "idx": int}


def flatten_passage(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of a row of the official files."""
    row = read_as(row, ROW)
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


def check_question(row: dict[str, Any], needs_answers: bool) -> None:
    """Require mentions that are in the passage, and answers that are texts."""
    entities = row["entity_spans"]
    shape = {"start": [int], "end": [int]} if isinstance(entities, dict) else [{"start": int, "end": int}]
    with input_errors("entity_spans", ValueError):  # not as many start as end
        spans = mention_spans(read_as(entities, shape, "entity_spans"))
    for start, end in spans:
        require_span(start, end, row["passage"], "passage")
    if not read_as(row, {"answers?": [str]})["answers"] and needs_answers:
        raise InputError("the row has no answers")


def require_span(start: int, end: int, text: str, name: str) -> None:
    if not 0 <= start < end <= len(text):
        raise InputError(f"the characters {start} to {end} are not in the {name}, which has {len(text)}")


def has_answers(rows: Dataset) -> bool:
    return "answers" in rows.column_names and any(rows["answers"])


# 2. Model inputs


def encode_questions(
    rows: Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int = DEFAULT_STRIDE,
    map_options: dict[str, Any] | None = None,
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
    labelled, shared = has_answers(rows), min(stride, room // 2)

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        texts = batch["passage"], [query.replace(PLACEHOLDER, mask) for query in batch["query"]]
        names = [*tokenizer.model_input_names, "entity_indices", *["labels"] * labelled, "entities", "row"]
        inputs: dict[str, list] = {name: [] for name in names}
        for window in tokenize_windows(tokenizer, texts, "only_first", max_length, shared):
            passage, spans = batch["passage"][window.row], mention_spans(batch["entity_spans"][window.row])
            if tokens := mention_tokens(window, spans):
                columns = {"entity_indices": list(tokens.values()), "entities": list(tokens)}
                columns |= {"row": indices[window.row]}
                if labelled:
                    answers = batch["answers"][window.row]
                    columns |= {"labels": [int(passage[slice(*spans[entity])] in answers) for entity in tokens]}
                for name, value in (window.inputs | columns).items():
                    inputs[name].append(value)
        return inputs

    options = {**(map_options or {}), "batched": True, "remove_columns": rows.column_names}
    inputs = rows.map(encode_batch, with_indices=True, **options)
    if len(inputs) == 0:
        raise InputError(f"none of the {split} passages has an entity to choose")
    return inputs


def mention_spans(entities: dict[str, list] | list[dict]) -> list[tuple[int, int]]:
    """Return the characters [start, end) of each mention, from a list of them or from lists of their fields."""
    if isinstance(entities, dict):
        return list(zip(map(int, entities["start"]), map(int, entities["end"]), strict=True))
    return [(int(entity["start"]), int(entity["end"])) for entity in entities]


def mention_tokens(window: Window, mentions: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the tokens of each mention that is all in the window, by its number."""
    tokens = np.arange(window.first, window.end)
    starts, ends = np.array(window.offsets).T[:, window.first : window.end]
    mention_tokens = {}
    for number, (start, end) in enumerate(mentions):
        if start >= window.start and end <= window.stop:
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


# 3. Predictions


def rank_entities(logits: np.ndarray, features: Dataset, rows: Dataset) -> RankedEntities:
    """Return (text, score) of the entities of each row, best first.

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
        spans = mention_spans(entities)
        means = {mention: float(np.mean(values)) for mention, values in by_mention.items()}
        by_text: dict[str, float] = {}
        for mention, score in sorted(means.items(), key=lambda item: item[1], reverse=True):
            by_text.setdefault(passage[slice(*spans[mention])], score)
        ranked.append(list(by_text.items()))
    return ranked


def best_entities(ranked: RankedEntities, rows: Dataset) -> list[str]:
    """Return the answer to each row: its best entity, or the first if no window holds a mention."""
    answers = []
    for entities, row in zip(ranked, rows, strict=True):
        spans = mention_spans(row["entity_spans"])
        first = row["passage"][slice(*spans[0])] if spans else ""
        answers.append(entities[0][0] if entities else first)
    return answers
