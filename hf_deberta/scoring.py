"""Classify the texts of a file: its rows with label and score, in a file of its own.

>>> settings = ScoreSettings(model="cross-encoder/nli-deberta-v3-base", text="premise", text_pair="hypothesis")
>>> score_file(TextClassifier(settings), Path("in/a.parquet"), Path("out/a.parquet"))
Counter({'tokens': 52317, 'rows': 1000, 'bad_rows': 0, 'full_rows': 0})

A file is read in windows. The texts of a window are sorted by length and packed into rows of whole texts, so that no
padding is computed. On CPUs each core computes such a row at a time; meanwhile a thread reads and tokenizes the next
window.
"""

import csv
import gzip
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import IO, Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import pyarrow
import torch
from pyarrow.parquet import ParquetFile, ParquetWriter
from transformers.tokenization_utils_base import LARGE_INTEGER

from hf_deberta.model.modeling_heads import HfDebertaForSequenceClassification
from hf_deberta.serving.optimize import optimize
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.errors import InputError, describe, input_errors
from hf_deberta.training.text_files import (
    BYTE_ORDER_MARK,
    CARRIAGE_RETURN,
    DAMAGED,
    DIALECTS,
    csv_records,
    file_kind,
    parse_json,
    require_object,
)

WINDOW_ROWS = 4096
MAX_COUNTED_ROWS = 1_000_000  # before scoring starts; the number of others is estimated from the size of their files
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}
UNFINISHED = "_*.unfinished"  # names of files that a stopped run leaves behind
READING_ERRORS = (UnicodeDecodeError, pyarrow.ArrowException, OSError, *DAMAGED)
Item = TypeVar("Item")


@dataclass(frozen=True)
class ScoreSettings:
    """What a worker needs to know.

    `text` and `text_pair` are names of columns. The names of new columns begin with `prefix`.
    """

    model: str
    text: str = "text"
    text_pair: str | None = None
    max_length: int | None = None
    tokens_per_batch: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    cores: int = 1
    all_scores: bool = False
    skip_bad_rows: bool = False
    prefix: str = ""

    @property
    def columns(self) -> list[str]:
        return [self.text] if self.text_pair is None else [self.text, self.text_pair]

    def new_columns(self) -> list[str]:
        return [self.prefix + name for name in ("label", "score", *(["scores"] if self.all_scores else []))]


# 1. The model


class TextClassifier:
    """A sequence classifier and its tokenizer: on CPUs prepared by `optimize`, on a GPU in bfloat16."""

    def __init__(self, settings: ScoreSettings):
        self.settings = settings
        os.environ["RAYON_NUM_THREADS"] = str(settings.cores)  # of the tokenizer
        on_cpu, dtype = settings.device == "cpu", getattr(torch, settings.dtype)
        with input_errors(settings.model, OSError, ValueError):
            self.tokenizer = load_tokenizer(settings.model, trust_remote_code=False)
            loaded: Any = HfDebertaForSequenceClassification.from_pretrained(
                settings.model,
                dtype=torch.float32 if on_cpu else dtype,
                output_loading_info=True,
                trust_remote_code=False,
            )
        model, info = loaded
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise InputError(f"{settings.model} is no sequence classifier: it has no weights for {missing}")
        self.config = model.config
        self.labels = [self.config.id2label[number] for number in range(self.config.num_labels)]
        if settings.all_scores and len(set(self.labels)) < len(self.labels):
            labels = ", ".join(self.labels)
            raise InputError(
                f"--all_scores needs labels of different names, not {labels}: change id2label in config.json"
            )
        limit = self.tokenizer.model_max_length
        if self.config.position_biased_input or limit > LARGE_INTEGER:  # the tokenizer has no limit
            limit = min(limit, self.config.max_position_embeddings)
        self.max_length = settings.max_length or limit
        special = self.tokenizer.num_special_tokens_to_add(pair=settings.text_pair is not None)
        if self.max_length <= special:  # the tokenizer would not cut texts
            raise InputError(f"--max_length must be more than the {special} special tokens, not {self.max_length}")
        self.max_tokens = settings.tokens_per_batch or TOKENS_PER_BATCH[settings.device]
        self.num_threads = settings.cores if on_cpu else 1
        self.threads = single_core_threads(self.num_threads)
        prepare = partial(optimize, model, dtype) if on_cpu else partial(model.to, "cuda")
        self.model = self.threads.submit(prepare).result()  # there, since it measures what is faster

    def tokenize(self, texts: Sequence[Sequence[str]]) -> list[dict[str, list[int]]]:
        """Return the inputs of each text or pair, from one list of texts or two; longer ones are cut."""
        if not texts[0]:
            return []
        names = ["input_ids", *(["token_type_ids"] if self.config.type_vocab_size > 0 else [])]
        options = {"truncation": True, "max_length": self.max_length, "verbose": False}
        encoded = self.tokenizer(*map(list, texts), return_attention_mask=False, **options)
        columns = [encoded[name] for name in names if name in encoded]
        return [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]

    def probabilities(
        self, rows: Sequence[dict[str, list[int]]], report: Callable[[int], None] = lambda rows: None
    ) -> np.ndarray:
        """Return a probability for each row and label, as the pipeline of Transformers does; regressions keep theirs.

        Softmax over labels, but sigmoid for multi-label classifiers and those with one label. `report` is called with
        the number of rows of each batch that is done.
        """
        result = np.empty((len(rows), len(self.labels)), np.float32)
        lengths = [len(row["input_ids"]) for row in rows]
        rounds = math.ceil(sum(lengths) / self.max_tokens / self.num_threads)
        limit = math.ceil(sum(lengths) / max(1, rounds * self.num_threads))  # equal shares for all threads
        batches = list(pack_by_tokens(lengths, limit))
        random.Random(0).shuffle(batches)  # short and long texts by turns, so that the time left is right
        done = self.threads.map(self._compute, [[rows[index] for index in batch] for batch in batches])
        for batch, values in zip(batches, done, strict=True):
            result[batch] = values
            report(len(batch))
        if not np.isfinite(result).all():
            raise InputError(f"{self.settings.model} returns scores that are not finite: try --dtype float32")
        return result

    @torch.inference_mode()
    def _compute(self, rows: list[dict[str, list[int]]]) -> np.ndarray:
        """Compute rows as one row of whole texts, which do not see each other."""
        packed = {name: np.concatenate([row[name] for row in rows])[None] for name in rows[0]}
        lengths = [len(row["input_ids"]) for row in rows]
        packed["cu_seq_lens_q"] = np.cumsum([0, *lengths], dtype=np.int32)
        inputs: dict[str, Any] = {name: torch.from_numpy(ids).to(self.model.device) for name, ids in packed.items()}
        logits = self.model(**inputs, max_length_q=max(lengths)).logits.float()
        problem = self.config.problem_type
        if problem != "regression":
            independent = problem == "multi_label_classification" or logits.shape[1] == 1
            logits = logits.sigmoid() if independent else logits.softmax(-1)
        return logits.cpu().numpy()


def single_core_threads(count: int) -> ThreadPoolExecutor:
    """Return threads in which PyTorch computes on one core; other threads of the process keep their number of cores."""
    cores, barrier, threads = torch.get_num_threads(), Barrier(count), ThreadPoolExecutor(count)

    def use_one_core(_: int) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # else the thread's first operation would take the number that is set below
        barrier.wait()  # for the others, so that all of them start

    list(threads.map(use_one_core, range(count)))
    torch.set_num_threads(cores)
    return threads


def pack_by_tokens(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield the indices of texts, longest first, in batches of at most `limit` tokens, or of one longer text."""
    batch: list[int] = []
    tokens = 0
    for index in np.argsort(np.negative(lengths), kind="stable").tolist():
        if batch and tokens + lengths[index] > limit:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


# 2. Files


class ParquetRows:
    """Rows of a parquet file, and the file they are written to."""

    def __init__(self, source: Path, settings: ScoreSettings):
        self.path, self.settings = source, settings
        with input_errors(str(source), *READING_ERRORS):
            # nanoseconds, the default, end in 2262; Spark writes microseconds as INT96
            self.source = ParquetFile(source, coerce_int96_timestamp_unit="us")
        self.schema = self.source.schema_arrow
        check_columns(self.schema.names, settings, source)

    def count(self) -> int:
        return self.source.metadata.num_rows

    def windows(self) -> Iterator[Any]:
        with input_errors(str(self.path), *READING_ERRORS):
            yield from self.source.iter_batches(WINDOW_ROWS)

    def texts(self, window: Any) -> list[list[Any]]:
        return [window.column(column).to_pylist() for column in self.settings.columns]

    def open_output(self, target: IO[bytes], labels: Sequence[str]) -> None:
        scores = pyarrow.struct([(label, pyarrow.float32()) for label in labels])
        self.types = [pyarrow.string(), pyarrow.float32(), scores]
        for name, kind in zip(self.settings.new_columns(), self.types, strict=False):
            self.schema = self.schema.append(pyarrow.field(name, kind))
        self.writer = ParquetWriter(target, self.schema, compression="zstd")

    def write(self, window: Any, added: list[dict[str, Any]]) -> None:
        names = self.settings.new_columns()
        new = [pyarrow.array([row[n] for row in added], kind) for n, kind in zip(names, self.types, strict=False)]
        self.writer.write_batch(pyarrow.RecordBatch.from_arrays([*window.columns, *new], schema=self.schema))

    def close(self) -> None:
        self.writer.close()


class TextRows:
    """Rows of a text file, gzipped or not; subclasses read them from its lines."""

    def __init__(self, source: Path, settings: ScoreSettings):
        self.path, self.settings, self.is_zipped = source, settings, source.suffix == ".gz"

    def records(self) -> Iterator[Any]:
        raise NotImplementedError

    def lines(self) -> Iterator[bytes]:
        with open(self.path, "rb") as self.raw, gzip.open(self.raw) if self.is_zipped else self.raw as file:
            yield from cast(IO[bytes], file)

    def windows(self) -> Iterator[list[Any]]:
        with input_errors(str(self.path), *READING_ERRORS):
            records = self.records()
            while window := list(islice(records, WINDOW_ROWS)):
                yield window

    def count(self) -> int:
        """Return the number of rows; of a long file, an estimate from those counted and their share of its size."""
        count = 0
        for window in self.windows():
            count += len(window)
            if count >= MAX_COUNTED_ROWS:
                return round(count * self.path.stat().st_size / self.raw.tell())
        return count

    def open_output(self, target: IO[bytes], labels: Sequence[str]) -> None:
        self.target = cast(IO[bytes], gzip.GzipFile(fileobj=target, mode="wb")) if self.is_zipped else target

    def close(self) -> None:
        if self.is_zipped:
            self.target.close()


class JsonRows(TextRows):
    """Rows of json lines and the numbers of these. What a line holds is written as it is, and new fields behind it."""

    def records(self) -> Iterator[tuple[int, bytes]]:
        return ((number, line.strip()) for number, line in enumerate(self.lines(), 1) if line.strip())

    def texts(self, window: list[tuple[int, bytes]]) -> list[list[Any]]:
        rows = []
        for number, line in window:
            row, place = parse_json(line, self.path, number), f"{self.path}, line {number}"
            require_object(row, place)
            check_new_columns(row, self.settings, place)
            rows.append([row.get(column) for column in self.settings.columns])
        return [list(column) for column in zip(*rows, strict=True)]

    def write(self, window: list[tuple[int, bytes]], added: list[dict[str, Any]]) -> None:
        for (_, line), new in zip(window, added, strict=True):
            body = line[:-1].rstrip()  # without the closing bracket
            separator = b"" if body == b"{" else b", "
            self.target.write(body + separator + json.dumps(new, ensure_ascii=False).encode()[1:] + b"\n")


class PlainTextRows(JsonRows):
    """Lines of text, read as json lines with this field."""

    def records(self) -> Iterator[tuple[int, bytes]]:
        for number, text in enumerate(decoded(self.lines()), 1):
            yield number, json.dumps({self.settings.text: text.rstrip("\r\n")}, ensure_ascii=False).encode()


class CsvRows(TextRows):
    """Rows of a csv or tsv file with a header. Fields keep their text; a field of all scores is a JSON object."""

    def __init__(self, source: Path, settings: ScoreSettings):
        super().__init__(source, settings)
        self.is_tsv = file_kind(source) == "tsv"
        with input_errors(str(source), *READING_ERRORS):
            self.header = next(self.records_with_header(), [])
        check_columns(self.header, settings, source)

    def records_with_header(self) -> Iterator[list[str]]:
        return (fields for _, fields in csv_records(decoded(self.lines()), self.path))

    def records(self) -> Iterator[list[str]]:
        for number, row in enumerate(self.records_with_header()):
            if len(row) != len(self.header):
                raise InputError(f"{self.path}, row {number} has {len(row)} fields, the header {len(self.header)}")
            if number > 0:
                yield row

    def texts(self, window: list[list[str]]) -> list[list[Any]]:
        return [[row[self.header.index(column)] for row in window] for column in self.settings.columns]

    def open_output(self, target: IO[bytes], labels: Sequence[str]) -> None:
        super().open_output(target, labels)
        encoded = SimpleNamespace(
            write=lambda line: self.target.write(f"{line[:-2].replace(CARRIAGE_RETURN, chr(13))}\n".encode())
        )
        self.writer = csv.writer(encoded, **DIALECTS[file_kind(self.path)])
        self.write_row([*self.header, *self.settings.new_columns()])

    def write(self, window: list[list[str]], added: list[dict[str, Any]]) -> None:
        for row, new in zip(window, added, strict=True):
            values = [json.dumps(value) if isinstance(value, dict) else value for value in new.values()]
            self.write_row([*row, *values])

    def write_row(self, values: list[Any]) -> None:
        if self.is_tsv:  # without quotation marks csv.writer refuses carriage returns
            values = [value.replace("\r", CARRIAGE_RETURN) if isinstance(value, str) else value for value in values]
        self.writer.writerow(values)


FORMATS: dict[str, Any] = {
    "parquet": ParquetRows, "jsonl": JsonRows, "csv": CsvRows, "tsv": CsvRows, "txt": PlainTextRows
}  # fmt: skip


def decoded(lines: Iterator[bytes]) -> Iterator[str]:
    """Yield lines of UTF-8 as text, without a byte order mark."""
    for number, line in enumerate(lines):
        yield (line.removeprefix(BYTE_ORDER_MARK) if number == 0 else line).decode()


def check_columns(columns: list[str], settings: ScoreSettings, source: Path) -> None:
    for column in settings.columns:
        if column not in columns:
            raise InputError(f"{source} has no column {column!r}; it has {', '.join(columns)}")
        if columns.count(column) > 1:
            raise InputError(f"{source} has the column {column!r} more than once")
    check_new_columns(columns, settings, str(source))


def check_new_columns(columns: Iterable[str], settings: ScoreSettings, what: str) -> None:
    taken = sorted(set(columns) & set(settings.new_columns()))
    if taken:
        raise InputError(f"{what} has a column {taken[0]!r} already: add --prefix, such as --prefix predicted_")


# 3. A file


def count_rows(source: Path, settings: ScoreSettings) -> int:
    """Check the first rows of a file, which needs no model; return the number of all rows, see `TextRows.count`."""
    rows = FORMATS[file_kind(source)](source, settings)
    for window in islice(rows.windows(), 1):
        good_rows(rows, rows.texts(window), 1)
    return rows.count()


def score_file(
    classifier: TextClassifier, source: Path, target: Path, report: Callable[[int], None] = lambda rows: None
) -> Counter[str]:
    """Write the rows of `source` with label and score to `target`, which appears when it is complete.

    `report` is called with numbers of rows that are done. Full rows have the maximum length: nearly all of them were
    cut.
    """
    counts = Counter(rows=0, tokens=0, bad_rows=0, full_rows=0)
    try:
        with unique_unfinished_file(target) as file:
            rows = FORMATS[file_kind(source)](source, classifier.settings)
            rows.open_output(file, classifier.labels)
            with closing(rows), closing(one_ahead(tokenized_windows(classifier, rows))) as windows:
                for window, encoded, good in windows:
                    rows.write(window, new_values(classifier, encoded, good, report))
                    lengths = [len(row["input_ids"]) for row in encoded]
                    counts.update(rows=len(good), tokens=sum(lengths), bad_rows=len(good) - len(encoded))
                    counts["full_rows"] += sum(length >= classifier.max_length for length in lengths)
    except torch.OutOfMemoryError as error:
        raise InputError(f"{source} needs more memory than the GPU has: lower --tokens_per_batch") from error
    except OSError as error:
        raise InputError(f"{target} could not be written: {error}") from error
    return counts


@contextmanager
def unique_unfinished_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that becomes `target` at the end. Its name is unique: a worker given up for dead may still write."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(UNFINISHED.replace("*", f"{target.name}.{uuid4().hex[:8]}"))
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, target)
    finally:
        path.unlink(missing_ok=True)


def tokenized_windows(classifier: TextClassifier, rows: Any) -> Iterator[tuple[Any, list, list[bool]]]:
    """Yield windows, the inputs of their good rows, and which rows are good."""
    first = 1
    for window in rows.windows():
        texts = rows.texts(window)
        good = good_rows(rows, texts, first)
        kept = [[text for text, is_good in zip(column, good, strict=True) if is_good] for column in texts]
        yield window, classifier.tokenize(kept), good
        first += len(good)


def good_rows(rows: Any, texts: list[list[Any]], first: int) -> list[bool]:
    """Return which rows of a window can be scored; a bad one is an InputError, unless bad rows are skipped."""
    problems = [problem_of(values, rows.settings.columns) for values in zip(*texts, strict=True)]
    bad = next((number for number, problem in enumerate(problems) if problem), None)
    if bad is not None and not rows.settings.skip_bad_rows:
        raise InputError(
            f"{rows.path}, row {first + bad} has a bad text: {problems[bad]}; --skip_bad_rows gives such rows "
            "a null label"
        )
    return [problem is None for problem in problems]


def problem_of(values: Sequence[Any], columns: Sequence[str]) -> str | None:
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, str):
            return f"the {column} must be text, not {describe(value)}"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"the {column} has half of a surrogate pair"
    return None


def new_values(
    classifier: TextClassifier, encoded: list, good: list[bool], report: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Return the new columns of each row of a window; a bad row has nulls."""
    names = classifier.settings.new_columns()
    probabilities = iter(classifier.probabilities(encoded, report).tolist())
    report(len(good) - len(encoded))
    rows = []
    for is_good in good:
        values: list[Any] = [None] * 3
        if is_good:
            scores = next(probabilities)
            best = scores.index(max(scores))
            values = [classifier.labels[best], scores[best], dict(zip(classifier.labels, scores, strict=True))]
        rows.append(dict(zip(names, values, strict=False)))
    return rows


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items; a thread makes the next one while the caller works on the last."""
    end: Any = object()
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, items, end)
        while (item := ahead.result()) is not end:
            ahead = thread.submit(next, items, end)
            yield item
