"""Windows of a context as model inputs, and answers as spans of them: for run_squad.py and `QuestionAnswerer`.

A context is split into overlapping windows, each an input `[CLS] question [SEP] part of the context [SEP]`. A predicted
answer is a span of one window; its text is copied from the context. [CLS] stands for "no answer in this window".

    features = SquadEncoder(tokenizer).evaluation_features(rows)
    answers = find_answers(rows, features, start_logits, end_logits, version_2=True)
    answers.write("output")
"""

import json
import math
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from datasets import Dataset
from scipy.special import softmax
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.tasks.submission import write_lines
from hf_deberta.training.errors import InputError

CLS_POSITION = 0
DEFAULT_STRIDE = 128  # tokens that neighbouring windows share, if the windows are long enough
NO_SPAN_NULL_ODDS = 1e6  # the null odds of a context without any candidate span

logger = logging.get_logger(__name__)


# 1. Windows


@dataclass(frozen=True)
class SquadEncoder:
    """Turns questions and contexts into model inputs. The fields are flags of Transformers' `run_qa.py`.

    Args:
        max_seq_length: tokens of an input, including special tokens.
        doc_stride: tokens of the context that neighbouring windows share; by default 128, or half of what the row's
            question leaves for the context if that is less.
        max_query_length: truncate questions to this number of tokens. By default, as in `run_qa.py`, they are not
            truncated, and a question that leaves no room for the context is an error.
    """

    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int = 384
    doc_stride: int | None = None
    max_query_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_query_length is not None and self.max_query_length < 1:
            raise InputError(f"max_query_length must be at least 1, not {self.max_query_length}")
        if self.doc_stride is not None and not 0 <= self.doc_stride < self.max_seq_length:
            raise InputError(
                f"doc_stride must be in [0, {self.max_seq_length}), below the tokens of a window, not {self.doc_stride}"
            )

    def training_features(self, rows: Dataset, map_options: dict[str, Any] | None = None) -> Dataset:
        """Return inputs with start_positions and end_positions; [CLS] if a window does not hold the whole answer."""
        rows = _drop_misplaced_answers(rows)
        features = self._map(rows, self._encode_for_training, map_options)
        ends = zip(features["row"][:], features["end_positions"][:], strict=True)
        answered = {row for row, end in ends if end != CLS_POSITION}
        lost = sum(bool(answers["text"]) for answers in rows["answers"]) - len(answered)
        if lost:
            logger.warning(
                f"{lost} of {len(rows)} questions have an answer that no window of {self.max_seq_length} tokens holds "
                "completely, and are trained as unanswerable; a larger doc_stride lets windows share more tokens"
            )
        return features.remove_columns("row")

    def evaluation_features(self, rows: Dataset, map_options: dict[str, Any] | None = None) -> Dataset:
        """Return inputs with the columns that `find_answers` needs.

        These are `row`, `first` (the position of the first context token), and `starts` and `ends` (the characters of
        each context token). If the rows have answers, start_positions and end_positions are there for the loss.
        """
        return self._map(rows, self._encode_batch, map_options)

    def _map(self, rows: Dataset, encode: Callable[..., Any], map_options: dict[str, Any] | None) -> Dataset:
        options = {**(map_options or {}), "batched": True, "with_indices": True, "remove_columns": rows.column_names}
        return rows.map(encode, **options)

    def windows(self, questions: list[str], contexts: list[str]) -> dict[str, list]:
        """Return the columns of `evaluation_features` for questions without answers, without files of a Dataset."""
        batch = {"id": list(map(str, range(len(questions)))), "question": questions, "context": contexts}
        return self._encode_batch(batch, list(range(len(questions))))

    def _encode_for_training(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        """Leave out the characters of tokens, which would double the cache."""
        features = self._encode_batch(batch, indices)
        return {name: values for name, values in features.items() if name not in ("first", "starts", "ends")}

    def _encode_batch(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        """Encode the rows with the same stride together, as a call of the tokenizer has one for all its rows."""
        questions, contexts = self._truncate_questions(batch["question"]), batch["context"]
        lengths, limit = self._token_counts(questions), self.max_question_length
        longest = max(lengths, default=0)
        if longest > limit:
            raise InputError(
                f"the question of {batch['id'][lengths.index(longest)]!r} has {longest} tokens, and a max_seq_length "
                f"of {self.max_seq_length} with a doc_stride of {self.doc_stride or 0} leaves room for "
                f"{max(limit, 0)}: raise the first, lower the second, or truncate questions with max_query_length"
            )
        rows_of_stride: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):  # a stride leaves room for more tokens of the context
            default = min(DEFAULT_STRIDE, (limit + 1 - length) // 2)
            rows_of_stride[default if self.doc_stride is None else self.doc_stride].append(row)
        features: dict[str, list] = defaultdict(list)
        for stride, rows in sorted(rows_of_stride.items()):
            texts = [questions[row] for row in rows], [contexts[row] for row in rows]
            for window in tokenize_windows(self.tokenizer, texts, "only_second", self.max_seq_length, stride):
                row, part = rows[window.row], slice(window.first, window.end)
                spans = token_character_spans(window.tokens[part], window.offsets[part], contexts[row])
                starts, ends = np.array(spans, np.int32)
                columns = {"row": indices[row], "first": window.first, "starts": starts, "ends": ends}
                if "answers" in batch:
                    answer = first_answer_span(batch["answers"][row])
                    span = answer_token_span(answer, window, starts, ends) or (CLS_POSITION, CLS_POSITION)
                    columns |= dict(zip(("start_positions", "end_positions"), span, strict=True))
                for name, value in (window.inputs | columns).items():
                    features[name].append(value)
        return features

    def _truncate_questions(self, questions: list[str]) -> list[str]:
        """Return the questions, truncated to max_query_length."""
        questions = [question.strip() for question in questions]
        if (limit := self.max_query_length) is not None:
            encoded = self.tokenizer(questions, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
            ends = [tokens[limit - 1][1] if len(tokens) > limit else None for tokens in encoded["offset_mapping"]]
            questions = [question[:end] for question, end in zip(questions, ends, strict=True)]
        return questions

    def question_lengths(self, questions: list[str]) -> list[int]:
        """Return the number of tokens of each question, after its truncation."""
        return self._token_counts(self._truncate_questions(questions))

    def _token_counts(self, texts: list[str]) -> list[int]:
        return (
            list(map(len, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])) if texts else []
        )

    @property
    def max_question_length(self) -> int:
        """The most tokens of a question that leaves room for more tokens of the context than windows share."""
        return self.max_seq_length - (self.doc_stride or 0) - self.tokenizer.num_special_tokens_to_add(pair=True) - 1


@dataclass
class Window:
    """An input with a part of a text: its tokens [first, end), and the characters [start, stop) that are all in it.

    Args:
        row: the number of the text.
        offsets: the characters of each token.
    """

    inputs: dict[str, list]
    row: int
    tokens: list[str]
    offsets: list[tuple[int, int]]
    first: int
    end: int
    start: int = 0
    stop: float = math.inf


def tokenize_windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: tuple[list[str], list[str]],
    truncation: Literal["only_first", "only_second"],
    max_length: int,
    stride: int,
) -> list[Window]:
    """Return the windows of pairs of texts, one of which is split. A window may begin or end within a character.

    Args:
        stride: tokens that neighbouring windows of a text share.
    """
    encoded = tokenizer(
        *texts,
        truncation=truncation,
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    rows, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    windows: list[Window] = []
    for number, row in enumerate(rows):
        inputs = {name: values[number] for name, values in encoded.items()}
        sequence = int(truncation == "only_second")
        places = [token for token, place in enumerate(encoded.sequence_ids(number)) if place == sequence]
        first, end = (places[0], places[-1] + 1) if places else (0, 0)
        windows.append(Window(inputs, row, encoded.tokens(number), offsets[number], first, end))
        if number and windows[-2].row == row:
            left, right = sorted(windows[-2:], key=lambda window: window.offsets[window.first])
            next_token, last_token = right.first + stride, left.end - 1
            left.stop, right.start = right.offsets[next_token][0], left.offsets[last_token - stride][1]
            if right.tokens[next_token].startswith("▁"):  # its offsets may include the character before it
                left.stop = max(left.stop, left.offsets[last_token][1])
    return windows


def token_character_spans(
    pieces: Sequence[str], offsets: Sequence[tuple[int, int]], context: str
) -> tuple[list[int], list[int]]:
    """Return the first character of each token in the context, and the one after its last; both never decrease.

    The offsets of a tokenizer include the space before a word, and those of SentencePiece may include the character
    before it. Here a token starts with its own text, and a token that is only a space is empty.

    >>> token_character_spans(["▁the", "▁", "東"], [(0, 3), (3, 4), (4, 5)], "the 東")
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
        elif start < last_end:  # overlaps the token before, or is a part of the same character
            start = last_end if last_end < end else max(start, last_start)
        while may_combine and start < end < len(context) and unicodedata.combining(context[end]):
            end += 1
        last_start, last_end = start, max(end, last_end)
        starts.append(last_start)
        ends.append(last_end)
    return starts, ends


def first_answer_span(answers: dict[str, list]) -> tuple[int, int] | None:
    """Return the characters [start, end) of the first answer, without surrounding spaces."""
    if not answers["text"]:
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    begin = start + len(text) - len(text.lstrip())
    return begin, begin + len(text.strip())


def answer_token_span(
    answer: tuple[int, int] | None, window: Window, starts: np.ndarray, ends: np.ndarray
) -> tuple[int, int] | None:
    """Return the first and last token of an answer given in characters; None if it is not all in the window."""
    if answer is None or answer[0] < window.start or answer[1] > window.stop:
        return None
    begin, end = np.searchsorted(ends, answer[0], "right"), np.searchsorted(starts, answer[1], "left") - 1
    return (window.first + int(begin), window.first + int(end)) if begin <= end else None


def _drop_misplaced_answers(rows: Dataset) -> Dataset:
    """Return the rows whose answer is where `answer_start` says, with a warning about the others."""
    misplaced = {}
    for index, (context, answers) in enumerate(zip(rows["context"], rows["answers"], strict=True)):
        for text, start in [*zip(answers["text"], answers["answer_start"], strict=True)][:1]:
            actual = context[max(start, 0) :][: len(text)]
            if start < 0 or actual != text:
                misplaced[index] = f"has the answer {text!r} at {start}, where the context has {actual!r}"
    if not misplaced:
        return rows
    first = next(iter(misplaced))
    example = f"(it counts characters of the context from 0): question {rows[first]['id']!r} {misplaced[first]}"
    if len(misplaced) == len(rows):
        raise InputError(f"no answer is where its answer_start says {example}")
    dropped = f"{len(misplaced)} of {len(rows)} training rows"
    logger.warning(f"{dropped} are dropped, because their answer_start is wrong {example}")
    return rows.select([index for index in range(len(rows)) if index not in misplaced])


# 2. Predicted answers and their files


class PredictedAnswers(NamedTuple):
    """Predictions by question id.

    Args:
        predictions: the text of the answer; empty if the null odds exceed the threshold.
        nbest: the best spans with their probability among themselves, best first.
        null_odds: the score of "no answer" minus that of the best span; empty for SQuAD 1.1.
        texts: the text of the best span, whatever the null odds; for the search of the best threshold.
    """

    predictions: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]
    texts: dict[str, str]

    def probabilities(self) -> list[float]:
        """Return the probability of each predicted answer, the sum over the spans with its text."""
        return [
            sum(entry["probability"] for entry in self.nbest[row_id] if entry["text"] == answer)
            for row_id, answer in self.predictions.items()
        ]

    def write(self, folder: str | Path, prefix: str = "") -> None:
        """Write predictions.json, nbest_predictions.json and, for SQuAD 2.0, null_odds.json."""
        files = {"predictions": self.predictions, "nbest_predictions": self.nbest}
        if self.null_odds:
            files["null_odds"] = self.null_odds
        for name, content in files.items():
            write_lines(Path(folder) / f"{prefix}{name}.json", [json.dumps(content, indent=4)])


class AnswerSpan(NamedTuple):
    """A candidate: its characters [start, end) in the context, and the logits of its first and last token."""

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
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    version_2: bool = False,
    null_score_diff_threshold: float = 0.0,
) -> PredictedAnswers:
    """Return the predicted answers to the questions `rows`.

    All spans of at most `max_answer_length` tokens compete, not only those of the best start and end tokens.

    Args:
        features: of `SquadEncoder.evaluation_features`.
        start_logits: [windows, N], like `end_logits`.
        version_2: predict "no answer" where the null odds exceed `null_score_diff_threshold`.
    """
    candidates = rank_spans(features, len(rows), start_logits, end_logits, n_best_size, max_answer_length)
    answers = PredictedAnswers({}, {}, {}, {})
    for row_id, context, (ranked, null) in zip(rows["id"], rows["context"], candidates, strict=True):
        best = context[ranked[0].start : ranked[0].end] if ranked else ""
        answers.texts[row_id] = answers.predictions[row_id] = best
        if version_2:
            answers.null_odds[row_id] = null.score - ranked[0].score if ranked else NO_SPAN_NULL_ODDS
            if answers.null_odds[row_id] > null_score_diff_threshold:
                answers.predictions[row_id] = ""
            ranked = sorted([*ranked, null], key=lambda span: span.score, reverse=True)
        answers.nbest[row_id] = [
            {
                "text": context[span.start : span.end],
                "probability": probability,
                "start_logit": span.start_logit,
                "end_logit": span.end_logit,
            }
            for span, probability in zip(ranked, span_probabilities(ranked), strict=True)
        ]
    return answers


def rank_spans(
    features: Mapping[str, Sequence] | Dataset,
    questions: int,
    start_logits: Sequence[np.ndarray] | np.ndarray,
    end_logits: Sequence[np.ndarray] | np.ndarray,
    n_best_size: int = 20,
    max_answer_length: int = 30,
) -> list[tuple[list[AnswerSpan], AnswerSpan]]:
    """Return the best spans of each question, best first, and its "no answer", from the arguments of `find_answers`."""
    if max_answer_length < 1:
        raise InputError(f"max_answer_length must be at least 1, not {max_answer_length}")
    spans: list[dict[tuple[int, int], AnswerSpan]] = [{} for _ in range(questions)]
    nulls: dict[int, AnswerSpan] = {}
    columns = (features[name] for name in ("row", "first", "starts", "ends"))
    for row, first, starts, ends, *both_logits in zip(*columns, start_logits, end_logits, strict=True):
        logits = np.stack(both_logits)
        null = AnswerSpan(0, 0, *map(float, logits[:, CLS_POSITION]))
        if row not in nulls or null.score < nulls[row].score:
            nulls[row] = null
        context_logits = logits[:, first : first + len(starts)]
        for span in best_spans(context_logits, np.array(starts), np.array(ends), n_best_size, max_answer_length):
            characters = (span.start, span.end)
            if characters not in spans[row] or span.score > spans[row][characters].score:
                spans[row][characters] = span
    ranked = (
        sorted(row_spans.values(), key=lambda span: span.score, reverse=True)[:n_best_size] for row_spans in spans
    )
    return [(best, nulls[row]) for row, best in enumerate(ranked)]


def best_spans(
    logits: np.ndarray, starts: np.ndarray, ends: np.ndarray, count: int, max_tokens: int
) -> list[AnswerSpan]:
    """Return the best `count` spans of at most `max_tokens` tokens, best first.

    Args:
        logits: [2, T], start and end logits of the T context tokens.
        starts: [T], the characters of each token, as `ends`. Empty tokens neither start nor end a span.
    """
    if not len(starts):
        return []
    width = min(max_tokens, len(starts))
    start_logits, end_logits = np.where(starts < ends, logits.astype(np.float64), -np.inf)
    end_logits = np.concatenate([end_logits, np.full(width - 1, -np.inf)])
    # [T, width]: the score of the span from token i to token i + j
    scores = start_logits[:, None] + np.lib.stride_tricks.sliding_window_view(end_logits, width)
    spans: dict[tuple[int, int], AnswerSpan] = {}  # several tokens may stand for one character
    for place in np.argsort(np.where(np.isfinite(scores), -scores, np.inf), axis=None):
        first, offset = divmod(int(place), width)
        if len(spans) == count or not np.isfinite(scores[first, offset]):
            break
        last = first + offset
        characters = int(starts[first]), int(ends[last])
        spans.setdefault(characters, AnswerSpan(*characters, float(logits[0, first]), float(logits[1, last])))
    return list(spans.values())


def span_probabilities(spans: list[AnswerSpan]) -> list[float]:
    """Return the probability of each span among them."""
    return softmax([span.score for span in spans]).tolist() if spans else []
