"""Extractive question answering as in SQuAD 1.1 and 2.0: rows, windows, answers and their files.

A long context is cut into windows that overlap, `[CLS] question [SEP] part of the context [SEP]`. An answer is a span
of one window, and its text a piece of the context, character by character. [CLS] stands for "no answer here".

    >>> rows = squad_rows(read_squad("dev-v2.0.json"), "validation")
    >>> features = Windows(tokenizer).evaluation(rows)
    >>> answers = find_answers(rows, features, start_logits, end_logits, version_2=True)
    >>> answers.write("output")
"""

import gzip
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.tasks.submission import write_lines
from hf_deberta.runs.data_files import read_table

ANSWERS = {"text": datasets.List(datasets.Value("string")), "answer_start": datasets.List(datasets.Value("int32"))}
COLUMNS = {name: datasets.Value("string") for name in ("id", "context", "question")}
CLS = 0  # the token that stands for "no answer"
NO_SPAN = 1e6  # the null odds of a context in which there is nothing to point at

logger = logging.get_logger(__name__)


# Rows


def read_squad(file: str | Path) -> Dataset:
    """Questions from an official SQuAD file (nested JSON), or from a table, one row each: json, jsonl, parquet.

    Each may be gzipped.
    """
    path = Path(file)
    document = None
    if path.name.removesuffix(".gz").endswith(".json") and path.is_file():
        with suppress(json.JSONDecodeError):  # a row per line, or what read_table will complain of
            document = json.loads(_read_text(path))
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, list) and (not data or "paragraphs" in data[0]):
        return _from_articles(path, data)
    return read_table(path, ("json", "jsonl", "parquet"), rows_field=None if data is None else "data")


def _from_articles(path: Path, articles: list[dict]) -> Dataset:
    try:
        questions = [qa for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    except KeyError as error:
        raise ValueError(f"{path} is not laid out as an official SQuAD file: {error} is missing in it") from error
    if not questions:
        raise ValueError(f"there is no question in {path}")
    answered = any("answers" in qa for qa in questions)
    stat = path.stat()
    return Dataset.from_generator(
        _questions,
        features=datasets.Features(COLUMNS | ({"answers": ANSWERS} if answered else {})),
        gen_kwargs={"path": str(path), "answered": answered, "changed": (stat.st_size, stat.st_mtime_ns)},
    )


def _read_text(path: Path) -> str:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return file.read()


def _questions(path: str, answered: bool, changed: tuple[int, int]) -> Iterator[dict]:
    """Each question of an official file; `changed` tells a cache that the file did."""
    for article in json.loads(_read_text(Path(path)))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                row = {"id": qa["id"], "context": paragraph["context"], "question": qa["question"]}
                if answered:
                    row["answers"] = _by_column([] if qa.get("is_impossible") else qa.get("answers"), qa["id"])
                yield row


def squad_rows(rows: Dataset, name: str, with_answers: bool = True) -> Dataset:
    """The columns id, context, question and answers, checked; `name` is that of the split, for messages."""
    needed = [*COLUMNS, *(["answers"] if with_answers else [])]
    missing = [column for column in needed if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"the {name} rows have no column {', '.join(missing)} but {', '.join(rows.column_names)}: rename yours to "
            "id, context, question and answers, which holds text and answer_start"
        )
    if not len(rows):
        raise ValueError(f"the {name} split is empty: there is no question in it")
    kept = [*COLUMNS, *(["answers"] if "answers" in rows.column_names else [])]
    features = datasets.Features(COLUMNS | ({"answers": ANSWERS} if "answers" in kept else {}))
    rows = rows.select_columns(kept).map(
        _checked, batched=True, features=features, fn_kwargs={"name": name}, desc=f"checking {name}"
    )
    ((most, times),) = Counter(rows["id"][:]).most_common(1)
    if times > 1 and name != "train":
        raise ValueError(
            f"the id {most!r} stands at {times} {name} rows; answers are filed by id, so give each its own"
        )
    return rows


def _checked(batch: dict[str, list], name: str) -> dict[str, list]:
    batch = {column: list(values) for column, values in batch.items()}
    batch["id"] = [str(identifier) for identifier in batch["id"]]
    for column in ("context", "question"):
        for identifier, text in zip(batch["id"], batch[column], strict=True):
            if not isinstance(text, str):
                raise ValueError(f"the {column} of {name} row {identifier!r} must be text, not {text!r}")
    if "answers" in batch:
        batch["answers"] = list(map(_by_column, batch["answers"], batch["id"]))
    return batch


def _by_column(answers: dict | list[dict] | None, row_id: str) -> dict[str, list]:
    """Answers as {text: [...], answer_start: [...]}, from that or from [{text, answer_start}, ...]; no empty ones."""
    try:
        if isinstance(answers, dict):
            pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            pairs = [(answer["text"], answer["answer_start"]) for answer in answers or []]
    except (KeyError, TypeError, ValueError):
        rule = "as many text as answer_start"
        raise ValueError(f"the answers of row {row_id!r} must hold {rule}, and are {answers!r}") from None
    pairs = [(text, start) for text, start in pairs if text]
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}


def gold_answers(rows: Dataset) -> dict[str, list[str]]:
    """The answers of each question, by its id; none where there is none."""
    return {row_id: answers["text"] for row_id, answers in zip(rows["id"], rows["answers"], strict=True)}


# Windows


@dataclass(frozen=True)
class Windows:
    """How questions and contexts become inputs; the fields are flags of Transformers' `run_qa.py`.

    Args:
        max_seq_length: tokens of an input, special ones included.
        doc_stride: tokens of the context that two neighbouring windows share.
        max_query_length: cut longer questions to so many tokens. As in `run_qa.py` they are not cut by default;
            one that leaves no room for the context is an error.
    """

    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int = 384
    doc_stride: int = 128
    max_query_length: int | None = None

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not tell which characters its tokens come from, which answers "
                "need: use a tokenizer with offsets, such as HfDebertaTokenizer"
            )
        if self.max_query_length is not None and self.max_query_length < 1:
            raise ValueError(f"max_query_length must be 1 or more, not {self.max_query_length}")
        if not 0 <= self.doc_stride < self.max_seq_length:
            raise ValueError(
                f"doc_stride must lie in [0, max_seq_length), and {self.doc_stride} does not for {self.max_seq_length}"
            )

    def training(self, rows: Dataset, mapping: dict[str, Any] | None = None) -> Dataset:
        """Inputs with start_positions and end_positions, those of [CLS] where a window does not hold the answer.

        Args:
            mapping: options of `Dataset.map`.
        """
        rows = _with_answers_in_place(rows)
        features = self._mapped(rows, mapping, keep_characters=False)
        ends = zip(features["row"][:], features["end_positions"][:], strict=True)
        found = {row for row, end in ends if end != CLS}
        lost = sum(bool(answers["text"]) for answers in rows["answers"]) - len(found)
        if lost:
            logger.warning(
                f"{lost} of {len(rows)} questions have an answer that no window of {self.max_seq_length} tokens holds "
                "whole, and are trained as unanswerable; a longer doc_stride lets windows share more"
            )
        return features.remove_columns("row")

    def evaluation(self, rows: Dataset, mapping: dict[str, Any] | None = None) -> Dataset:
        """Inputs with what `find_answers` needs: `row`, the `first` token of the context, and where its tokens stand in
        it, from `starts` to `ends`. The positions of answers, if there are any, are for the loss.
        """
        return self._mapped(rows, mapping, keep_characters=True)

    def _mapped(self, rows: Dataset, mapping: dict[str, Any] | None, keep_characters: bool) -> Dataset:
        # as the tokenizer was before any other use: its state is part of the name under which features are kept
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        options = {**(mapping or {}), "batched": True, "with_indices": True, "remove_columns": rows.column_names}
        return rows.map(self._windows, fn_kwargs={"keep_characters": keep_characters}, **options)

    def _windows(self, batch: dict[str, list], indices: list[int], keep_characters: bool) -> dict[str, list]:
        encoded = self.tokenizer(
            self._questions_that_fit(batch),
            batch["context"],
            truncation="only_second",
            max_length=self.max_seq_length,
            stride=self.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        rows, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        answers = list(map(first_answer, batch["answers"])) if "answers" in batch else None
        windows = {name: encoded[name] for name in encoded} | {"row": [indices[row] for row in rows]}
        added = ("first", "starts", "ends") if keep_characters else ()
        windows |= {name: [] for name in (*added, *(("start_positions", "end_positions") if answers else ()))}
        for window, row in enumerate(rows):
            tokens = [token for token, sequence in enumerate(encoded.sequence_ids(window)) if sequence == 1]
            first, last = (tokens[0], tokens[-1] + 1) if tokens else (0, 0)
            pieces = encoded.tokens(window)[first:last]
            characters = token_characters(pieces, offsets[window][first:last], batch["context"][row])
            starts, ends = np.array(characters, np.int32)
            found = {"first": first, "starts": starts, "ends": ends}
            if answers:
                span = answer_tokens(answers[row], first, starts, ends) or (CLS, CLS)
                found |= {"start_positions": span[0], "end_positions": span[1]}
            for name, value in found.items():
                if name in windows:
                    windows[name].append(value)
        return windows

    def _questions_that_fit(self, batch: dict[str, list]) -> list[str]:
        """Stripped questions, cut if so asked, that leave room for more of the context than two windows share."""
        questions = [question.strip() for question in batch["question"]]
        plain = {"add_special_tokens": False, "verbose": False}
        if (most := self.max_query_length) is not None:
            offsets = self.tokenizer(questions, return_offsets_mapping=True, **plain)["offset_mapping"]
            ends = [tokens[most - 1][1] if len(tokens) > most else None for tokens in offsets]
            questions = [question[:end] for question, end in zip(questions, ends, strict=True)]
        lengths = [len(ids) for ids in self.tokenizer(questions, **plain)["input_ids"]]
        room = self.max_seq_length - self.doc_stride - self.tokenizer.num_special_tokens_to_add(pair=True) - 1
        longest = int(np.argmax(lengths))
        if lengths[longest] > room:
            raise ValueError(
                f"the question of {batch['id'][longest]!r} has {lengths[longest]} tokens, and a max_seq_length of "
                f"{self.max_seq_length} with a doc_stride of {self.doc_stride} leaves room for {max(room, 0)}: raise "
                "the first, lower the second, or cut questions with max_query_length"
            )
        return questions


def token_characters(
    pieces: Sequence[str], offsets: Sequence[tuple[int, int]], context: str
) -> tuple[list[int], list[int]]:
    """From which to which character of the context each token stands, growing from token to token.

    Tokenizers count the space before a word to its token, and SentencePiece rules that put spaces in count the
    character before, too. Here a token begins where its own text does; one that is only a space is empty.

    >>> token_characters(["▁the", "▁", "東"], [(0, 3), (3, 4), (4, 5)], "the 東")
    ([0, 4, 4], [3, 4, 5])
    """
    starts, ends = [], []
    last_start, last_end, may_combine = 0, 0, not context.isascii()
    for piece, (start, end) in zip(pieces, offsets, strict=True):
        while start < end and context[start].isspace():
            start += 1
        while end > start and context[end - 1].isspace():
            end -= 1
        if not piece.strip("▁"):
            start = end = max(start, last_end)
        elif start < last_end:  # begins inside of the token before, or is a part of the same character
            start = last_end if last_end < end else max(start, last_start)
        while may_combine and start < end < len(context) and unicodedata.combining(context[end]):
            end += 1
        last_start, last_end = start, max(end, last_end)
        starts.append(last_start)
        ends.append(last_end)
    return starts, ends


def first_answer(answers: dict[str, list]) -> tuple[int, int] | None:
    """From which to which character the first answer stands, spaces around it aside."""
    if not answers["text"]:
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    begin = start + len(text) - len(text.lstrip())
    return begin, begin + len(text.strip())


def answer_tokens(
    answer: tuple[int, int] | None, first: int, starts: np.ndarray, ends: np.ndarray
) -> tuple[int, int] | None:
    """The first and last token of an answer given in characters; None if the window does not hold it whole."""
    if answer is None or not len(starts) or answer[0] < starts[0] or answer[1] > ends[-1]:
        return None
    begin, end = np.searchsorted(ends, answer[0], "right"), np.searchsorted(starts, answer[1], "left") - 1
    return (first + int(begin), first + int(end)) if begin <= end else None


def _with_answers_in_place(rows: Dataset) -> Dataset:
    """Without the rows whose answer is not where `answer_start` says."""
    kept, example = [], None
    for index, (context, answers) in enumerate(zip(rows["context"], rows["answers"], strict=True)):
        text, start = (answers["text"][0], answers["answer_start"][0]) if answers["text"] else ("", 0)
        found = context[max(start, 0) :][: len(text)]
        if start >= 0 and found == text:
            kept.append(index)
        elif example is None:
            example = f"{rows[index]['id']!r} has the answer {text!r} at {start}, where {found!r} stands"
    rule = "it counts characters of the context from 0"
    if not kept:
        raise ValueError(f"no answer stands where its answer_start says ({rule}): {example}")
    if example is not None:
        left_out = f"{len(rows) - len(kept)} of {len(rows)} training rows are left out"
        logger.warning(f"{left_out}, since their answer_start is wrong ({rule}): {example}")
    return rows if example is None else rows.select(kept)


# Answers


class Answers(NamedTuple):
    """What a model answers, by question id.

    Args:
        predictions: the text of the answer; empty if there is none, by the null odds.
        nbest: the best spans with their probability among themselves, best first.
        null_odds: score of "no answer" minus that of the best span; empty for SQuAD 1.1.
        texts: the best text whatever the null odds, from which a threshold is searched.
    """

    predictions: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]
    texts: dict[str, str]

    def write(self, folder: str | Path, prefix: str = "") -> None:
        """predictions.json, nbest_predictions.json and, for 2.0, null_odds.json, as the official tools read them."""
        files = {"predictions": self.predictions, "nbest_predictions": self.nbest}
        if self.null_odds:
            files["null_odds"] = self.null_odds
        for name, content in files.items():
            write_lines(Path(folder) / f"{prefix}{name}.json", [json.dumps(content, indent=4)])


class Span(NamedTuple):
    """A candidate: its characters in the context, and the logits of its first and last token."""

    start: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def find_answers(
    rows: Dataset,
    features: Dataset,
    start_logits: np.ndarray,  # [windows, N]
    end_logits: np.ndarray,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    version_2: bool = False,
    null_score_diff_threshold: float = 0.0,
) -> Answers:
    """Answers of the questions `rows`, from the logits of their windows `features`.

    A span has at most `max_answer_length` tokens. All of them compete, not only those of the best starts and ends.
    With `version_2`, "no answer" wins where the null odds exceed `null_score_diff_threshold`.
    """
    if not len(features) == len(start_logits) == len(end_logits):
        raise ValueError(f"{len(features)} windows have {len(start_logits)} start and {len(end_logits)} end logits")
    for name, value in {"n_best_size": n_best_size, "max_answer_length": max_answer_length}.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    spans: list[dict[tuple[int, int], Span]] = [{} for _ in range(len(rows))]
    nulls: list[Span | None] = [None] * len(rows)
    columns = (features[name] for name in ("row", "first", "starts", "ends"))
    for window, (row, first, starts, ends) in enumerate(zip(*columns, strict=True)):
        logits = start_logits[window], end_logits[window]
        null = Span(0, 0, *(float(values[CLS]) for values in logits))
        if nulls[row] is None or null.score < nulls[row].score:
            nulls[row] = null
        inside = (values[first : first + len(starts)] for values in logits)
        for span in best_spans(*inside, np.array(starts), np.array(ends), n_best_size, max_answer_length):
            known = spans[row].get(span[:2])
            if known is None or span.score > known.score:
                spans[row][span[:2]] = span

    answers = Answers({}, {}, {}, {})
    for row_id, context, found, null in zip(rows["id"], rows["context"], spans, nulls, strict=True):
        ranked = sorted(found.values(), key=lambda span: span.score, reverse=True)[:n_best_size]
        best = text = context[ranked[0].start : ranked[0].end] if ranked else ""
        if version_2:
            odds = null.score - ranked[0].score if ranked else NO_SPAN
            answers.null_odds[row_id] = odds
            text = "" if odds > null_score_diff_threshold else best
            ranked = sorted([*ranked, null], key=lambda span: span.score, reverse=True)
        answers.texts[row_id], answers.predictions[row_id] = best, text
        answers.nbest[row_id] = _with_probabilities(ranked, context)
    return answers


def best_spans(
    start_logits: np.ndarray,  # [tokens of the context]
    end_logits: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    number: int,
    max_tokens: int,
) -> list[Span]:
    """The `number` best spans of at most `max_tokens` tokens, from a token with a text to another, in no order."""
    if not len(starts):
        return []
    width = min(max_tokens, len(starts))
    begin, end = (np.where(starts < ends, logits.astype(np.float64), -np.inf) for logits in (start_logits, end_logits))
    end = np.concatenate([end, np.full(width - 1, -np.inf)])
    scores = begin[:, None] + np.lib.stride_tricks.sliding_window_view(end, width)  # [tokens, width]: from i, j more
    best = np.argpartition(scores, -number, axis=None)[-number:] if number < scores.size else np.arange(scores.size)
    found = []
    for first, more in zip(*np.unravel_index(best, scores.shape), strict=True):
        if np.isfinite(scores[first, more]):
            logits = float(start_logits[first]), float(end_logits[first + more])
            found.append(Span(int(starts[first]), int(ends[first + more]), *logits))
    return found


def _with_probabilities(ranked: list[Span], context: str) -> list[dict[str, Any]]:
    scores = np.array([span.score for span in ranked])
    weights = np.exp(scores - scores.max(initial=-np.inf))
    return [
        {
            "text": context[span.start : span.end],
            "probability": float(weight / weights.sum()),
            "start_logit": span.start_logit,
            "end_logit": span.end_logit,
        }
        for span, weight in zip(ranked, weights, strict=True)
    ]


# A demonstration

MADE_UP = {  # question: what a notice says, and of what
    "where ?": ("it is in {} .", ("rome", "paris", "old london", "new york", "oslo", "lima")),
    "which colour ?": ("walls are {} .", ("red", "dark green", "blue", "white", "light grey", "yellow")),
    "who ?": ("home of {} .", ("a baker", "an old sailor", "a teacher", "nobody", "a tall painter")),
}


def made_up_rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Notices of houses that say two of three things, and a question after one of the three."""
    rng, rows = random.Random(seed), []
    for index in range(number):
        said, question = rng.sample(list(MADE_UP), 2), rng.choice(list(MADE_UP))
        found = {x: rng.choice(MADE_UP[x][1]) for x in said}
        context = " ".join(MADE_UP[x][0].format(found[x]) for x in said)
        texts = [found[question]] if question in found else []
        answers = {"text": texts, "answer_start": [context.index(f" {text} ") + 1 for text in texts]}
        rows.append({"id": f"{seed}-{index}", "context": context, "question": question, "answers": answers})
    return rows
