"""Classify the texts of parquet and json lines files: the rows of a file with label and score, in a file of its own.

>>> settings = ScoreSettings(model="cross-encoder/nli-deberta-v3-base", text="premise", text_pair="hypothesis")
>>> score_shard(TextClassifier(settings), Path("in/a.parquet"), Path("out/a.parquet"))
ShardCounts(rows=1000, tokens=52317, bad_rows=0)

A file is read in windows. The texts of a window are sorted by length and packed into rows of whole texts, so that no
padding is computed; while one window is computed, a thread reads and tokenizes the next one. `hf-deberta score` calls
this from the workers of Ray.
"""

import gzip
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import pyarrow
import torch
from pyarrow.parquet import ParquetFile, ParquetWriter

from hf_deberta.model.modeling_heads import HfDebertaForSequenceClassification
from hf_deberta.serving.optimize import optimize
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.errors import InputError, one_line
from hf_deberta.training.file_faults import DAMAGED, describe

WINDOW_ROWS = 4096
FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}
UNFINISHED = "_*.unfinished"  # names of files that a stopped worker leaves behind
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


@dataclass(frozen=True)
class ShardCounts:
    rows: int = 0
    tokens: int = 0
    bad_rows: int = 0

    def __add__(self, other: "ShardCounts") -> "ShardCounts":
        return ShardCounts(self.rows + other.rows, self.tokens + other.tokens, self.bad_rows + other.bad_rows)


# 1. The model


class TextClassifier:
    """A sequence classifier and its tokenizer: on CPUs prepared by `optimize`, on GPUs in bfloat16."""

    def __init__(self, settings: ScoreSettings):
        self.settings = settings
        os.environ["RAYON_NUM_THREADS"] = str(settings.cores)  # of the tokenizer
        torch.set_num_threads(settings.cores)
        dtype = getattr(torch, settings.dtype)
        loaded: Any = HfDebertaForSequenceClassification.from_pretrained(
            settings.model,
            dtype=torch.float32 if settings.device == "cpu" else dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
        model, info = loaded
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise InputError(f"{settings.model} is no sequence classifier: it has no weights for {missing}")
        model.eval()
        self.model = optimize(model, dtype, runtime="torch") if settings.device == "cpu" else model.to(settings.device)
        self.tokenizer = load_tokenizer(settings.model, trust_remote_code=False)
        config = model.config
        self.labels = [config.id2label[number] for number in range(config.num_labels)]
        if settings.all_scores and len(set(self.labels)) < len(self.labels):
            labels = ", ".join(self.labels)
            raise InputError(
                f"--all_scores needs labels of different names, not {labels}: change id2label in config.json"
            )
        limit = min(self.tokenizer.model_max_length, config.max_position_embeddings)
        self.max_length = settings.max_length or limit
        special = self.tokenizer.num_special_tokens_to_add(pair=settings.text_pair is not None)
        if self.max_length <= special:  # the tokenizer would not cut texts
            raise InputError(f"--max_length must be more than the {special} special tokens, not {self.max_length}")
        self.max_tokens = settings.tokens_per_batch or TOKENS_PER_BATCH[settings.device]

    def tokenize(self, texts: Sequence[Sequence[str]]) -> list[dict[str, list[int]]]:
        """Return the inputs of each text or pair, from one list of texts or two; longer ones are cut."""
        if not texts[0]:
            return []
        names = ["input_ids", *(["token_type_ids"] if self.model.config.type_vocab_size > 0 else [])]
        options = {"truncation": True, "max_length": self.max_length, "verbose": False}
        encoded = self.tokenizer(*map(list, texts), return_attention_mask=False, **options)
        columns = [encoded[name] for name in names if name in encoded]
        return [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]

    def probabilities(self, rows: Sequence[dict[str, list[int]]]) -> np.ndarray:
        """Return a probability for each row and label, as the pipeline of Transformers does; regressions keep theirs.

        Softmax over labels, but sigmoid for multi-label classifiers and those with one label.
        """
        result = np.empty((len(rows), len(self.labels)), np.float32)
        torch.set_num_threads(self.settings.cores)  # counts for the thread that calls it
        for batch in pack_by_tokens([len(row["input_ids"]) for row in rows], self.max_tokens):
            result[batch] = self._compute([rows[index] for index in batch])
        if not np.isfinite(result).all():
            raise InputError(f"{self.settings.model} returns scores that are not finite: try --dtype float32")
        return result

    @torch.inference_mode()
    def _compute(self, rows: list[dict[str, list[int]]]) -> np.ndarray:
        """Compute rows as one row of whole texts, which do not see each other."""
        packed = {name: np.concatenate([row[name] for row in rows])[None] for name in rows[0]}
        lengths = [len(row["input_ids"]) for row in rows]
        boundaries = np.cumsum([0, *lengths], dtype=np.int32)
        device = self.settings.device
        inputs: dict[str, Any] = {name: torch.from_numpy(ids).to(device) for name, ids in packed.items()}
        inputs["cu_seq_lens_q"] = torch.from_numpy(boundaries).to(device)
        logits = self.model(**inputs, max_length_q=max(lengths)).logits.float()
        problem = self.model.config.problem_type
        if problem != "regression":
            independent = problem == "multi_label_classification" or logits.shape[1] == 1
            logits = logits.sigmoid() if independent else logits.softmax(-1)
        return logits.cpu().numpy()


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

    def __init__(self, source: Path, target: IO[bytes], settings: ScoreSettings, labels: Sequence[str]):
        self.path, self.settings = source, settings
        with explain_file_errors(source, "scored"):
            self.source = ParquetFile(source)
        schema = self.source.schema_arrow
        for column in settings.columns:
            if column not in schema.names:
                raise InputError(f"{source} has no column {column!r}; it has {', '.join(schema.names)}")
        check_new_columns(schema.names, settings, str(source))
        scores = pyarrow.struct([(label, pyarrow.float32()) for label in labels])
        self.types = [pyarrow.string(), pyarrow.float32(), scores]
        for name, kind in zip(settings.new_columns(), self.types, strict=False):
            schema = schema.append(pyarrow.field(name, kind))
        self.schema = schema
        self.writer = ParquetWriter(target, schema, compression="zstd")

    def windows(self) -> Iterator[Any]:
        with explain_file_errors(self.path, "scored"):
            yield from self.source.iter_batches(WINDOW_ROWS)

    def texts(self, window: Any, first: int) -> list[list[Any]]:
        return [window.column(column).to_pylist() for column in self.settings.columns]

    def write(self, window: Any, added: list[dict[str, Any]]) -> None:
        names = self.settings.new_columns()
        new = [pyarrow.array([row[n] for row in added], kind) for n, kind in zip(names, self.types, strict=False)]
        self.writer.write_batch(pyarrow.RecordBatch.from_arrays([*window.columns, *new], schema=self.schema))

    def close(self) -> None:
        self.writer.close()


class JsonRows:
    """Rows of a json lines file. What a line holds is written as it is, and new fields behind it."""

    def __init__(self, source: Path, target: IO[bytes], settings: ScoreSettings, labels: Sequence[str]):
        self.path, self.settings, self.is_zipped = source, settings, source.name.endswith(".gz")
        self.target = cast(IO[bytes], gzip.GzipFile(fileobj=target, mode="wb")) if self.is_zipped else target

    def windows(self) -> Iterator[list[bytes]]:
        opened = gzip.open if self.is_zipped else open
        with explain_file_errors(self.path, "scored"), opened(self.path, "rb") as file:
            lines = map(bytes.strip, file)
            while window := list(islice(lines, WINDOW_ROWS)):
                yield window

    def texts(self, window: list[bytes], first: int) -> list[list[Any]]:
        rows = []
        for number, line in enumerate(window, first):
            place = f"{self.path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place} is no valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise InputError(f"{place} holds {describe(row)}, not a JSON object")
            check_new_columns(row, self.settings, place)
            rows.append([row.get(column) for column in self.settings.columns])
        return [list(column) for column in zip(*rows, strict=True)]

    def write(self, window: list[bytes], added: list[dict[str, Any]]) -> None:
        for line, new in zip(window, added, strict=True):
            body = line[:-1].rstrip()  # without the closing bracket
            separator = b"" if body == b"{" else b", "
            self.target.write(body + separator + json.dumps(new, ensure_ascii=False).encode()[1:] + b"\n")

    def close(self) -> None:
        if self.is_zipped:
            self.target.close()


def check_new_columns(columns: Iterable[str], settings: ScoreSettings, what: str) -> None:
    taken = sorted(set(columns) & set(settings.new_columns()))
    if taken:
        raise InputError(f"{what} has a column {taken[0]!r} already: add --prefix, such as --prefix predicted_")


def format_of(path: Path) -> str | None:
    return next((ending for ending in FORMATS if path.name.lower().endswith(ending)), None)


@contextmanager
def explain_file_errors(path: Path, action: str) -> Iterator[None]:
    """Raise errors of reading or writing as an InputError that names the file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, *DAMAGED) as error:
        raise InputError(f"{path} could not be {action}: {one_line(error)}") from error


# 3. A shard


def score_shard(classifier: TextClassifier, source: Path, target: Path) -> ShardCounts:
    """Write the rows of `source` with label and score to `target`, which appears when it is complete."""
    counts = ShardCounts()
    try:
        with explain_file_errors(target, "written"), unique_unfinished_file(target) as file:
            kind = ParquetRows if format_of(source) == ".parquet" else JsonRows
            rows: Any = kind(source, file, classifier.settings, classifier.labels)
            with closing(rows), closing(one_ahead(tokenized_windows(classifier, rows))) as windows:
                for window, encoded, good in windows:
                    rows.write(window, new_values(classifier, encoded, good))
                    tokens = sum(len(row["input_ids"]) for row in encoded)
                    counts += ShardCounts(len(good), tokens, len(good) - len(encoded))
    except torch.OutOfMemoryError as error:
        raise InputError(f"{source} needs more memory than the GPU has: lower --tokens_per_batch") from error
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
        texts = rows.texts(window, first)
        problems = [problem_of(values, classifier.settings.columns) for values in zip(*texts, strict=True)]
        bad = next((number for number, problem in enumerate(problems) if problem), None)
        if bad is not None and not classifier.settings.skip_bad_rows:
            raise InputError(
                f"{rows.path}, row {first + bad} has a bad text: {problems[bad]}; --skip_bad_rows gives such "
                "rows a null label"
            )
        good = [problem is None for problem in problems]
        kept = [[text for text, is_good in zip(column, good, strict=True) if is_good] for column in texts]
        yield window, classifier.tokenize(kept), good
        first += len(good)


def problem_of(values: Sequence[Any], columns: Sequence[str]) -> str | None:
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, str):
            return f"the {column} must be text, not {describe(value)}"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"the {column} has half of a surrogate pair"
    return None


def new_values(classifier: TextClassifier, encoded: list, good: list[bool]) -> list[dict[str, Any]]:
    """Return the new columns of each row of a window; a bad row has nulls."""
    names = classifier.settings.new_columns()
    probabilities = classifier.probabilities(encoded)
    best = probabilities.argmax(1)
    scores = iter(zip(best.tolist(), probabilities.tolist(), strict=True))
    rows = []
    for is_good in good:
        values: list[Any] = [None] * 3
        if is_good:
            label, row = next(scores)
            values = [classifier.labels[label], row[label], dict(zip(classifier.labels, row, strict=True))]
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
