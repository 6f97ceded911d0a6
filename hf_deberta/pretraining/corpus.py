"""From text files, or any dataset of the Hub, to the tokenizer and the token files of a pretraining run.

A document is a line of a text file (or a paragraph, or the whole file: `--sample_by`), or a row of a jsonl, csv or
parquet file or of a dataset.
"""

import glob
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet
from datasets import IterableDataset, Value
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.pretraining.deduplication import ExactDeduplication
from hf_deberta.pretraining.mixture import STOPPING_STRATEGIES, DatasetName, Documents, first_documents, load_datasets
from hf_deberta.pretraining.token_file import TokenFile, rename_unless_taken, temporary_folder_beside, write_token_file
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.data_files import (
    cache_rows,
    list_files,
    read_parquet,
    require_columns,
    warn_of_shared_files,
)
from hf_deberta.training.errors import InputError, describe, input_errors
from hf_deberta.training.json_files import read_json_object
from hf_deberta.training.text_files import file_kind, hash_file, read_documents, read_rows

FILE_TYPES = {name: name for name in ("txt", "json", "csv", "tsv", "parquet")} | {"jsonl": "json"}
DOCUMENTS_PER_BATCH = 1000  # tokenized together
MAX_TOKENIZER_DOCUMENTS = 1_000_000  # the most documents that a tokenizer is trained on
EVALUATION_SPLITS = ("validation", "test")
COLUMN_HINT = ": name the column of the text with --text_column"
TOKENIZER_FLAGS = "trained_with.json"  # beside a trained tokenizer: the flags it was trained with

logger = logging.get_logger(__name__)


@dataclass
class CorpusArguments:
    """The text to train on, and how rows are made from it."""

    dataset_name: list[str] | None = flag(
        None, "Dataset of the Hub, or a local folder with one. Several are interleaved: NAME:CONFIG:WEIGHT ..."
    )
    dataset_config_name: str | None = flag(None, "Configuration of datasets that name none.")
    stopping_strategy: str = flag(
        "first_exhausted", "When several end, as in datasets.interleave_datasets.", choices=list(STOPPING_STRATEGIES)
    )
    train_file: list[str] | None = flag(
        None, "Text files (txt) or tables (jsonl, csv, tsv, parquet), or patterns of them."
    )
    validation_file: list[str] | None = free_flag(None, "Files to evaluate on, of the same types as --train_file.")
    test_file: list[str] | None = free_flag(None, "Files to evaluate on at the end, besides the validation documents.")
    validation_split_percentage: float = flag(
        5, "Percentage of the training documents to evaluate on, if there are no others."
    )
    text_column: str = flag("text", "Column of a table that holds the text.")
    sample_by: Literal["line", "paragraph", "document"] = flag(
        "line", "What a document of a text file is; document: the file."
    )
    streaming: bool = free_flag(False, "Read the dataset without a copy on disk.")
    max_train_samples: int | None = flag(None, "Use at most N training documents.")
    max_eval_samples: int | None = free_flag(None, "Evaluate on at most N documents, equal shares of each dataset.")
    deduplicate: bool = flag(False, "Leave out training documents whose text came before, and count them.")
    tokens_dir: str | None = free_flag(None, "Folder of the tokenized corpus (default: OUTPUT_DIR/_tokens).")
    overwrite_cache: bool = free_flag(False, "Tokenize again instead of using the files in --tokens_dir.")
    max_seq_length: int = flag(512, "Tokens per row, [CLS] and [SEP] included.")
    pack: bool = flag(True, "Fill rows with several documents, without attention between them; false: one per row.")
    train_tokenizer: int | None = flag(None, "Train a tokenizer with a vocabulary of this size on the corpus.")
    tokenizer_type: Literal["unigram", "bpe"] = flag("unigram", "Of the trained tokenizer: as v2 and v3, or as v1.")

    def __post_init__(self) -> None:
        if (self.dataset_name is None) == (self.train_file is None):
            raise InputError("give the text to train on: either --train_file or --dataset_name")
        self.datasets = [DatasetName.parse(name) for name in self.dataset_name or []]
        share = self.validation_split_percentage
        if not 0 <= share < 100:
            raise InputError(f"--validation_split_percentage must be in [0, 100), not {share}")

    def card_fields(self) -> dict[str, str | None]:
        """Return the `data` and `dataset` of `model_card.write_training_card`."""
        files = ", ".join(Path(file).name for file in self.train_file or [])
        names = ", ".join(part.name for part in self.datasets)
        return {"data": names or files, "dataset": names if len(self.datasets) == 1 else None}


@dataclass
class Corpus:
    """Documents to train and to evaluate on.

    >>> corpus = Corpus(CorpusArguments(train_file=["corpus.txt"]))
    >>> next(corpus.batches("train"))
    ['Once upon a time ...', ...]
    """

    arguments: CorpusArguments
    cache_dir: str | None = None
    token: str | None = None  # for private datasets of the Hub

    def __post_init__(self) -> None:
        """Load the splits."""
        args = self.arguments
        splits: dict[str, Documents] = {}
        needs_validation = args.validation_file is None and args.validation_split_percentage > 0
        split_off = self._split_off_validation if needs_validation else None
        if args.dataset_name is not None:
            names = [replace(part, config=part.config or args.dataset_config_name) for part in args.datasets]
            options = {"streaming": args.streaming, "cache_dir": self.cache_dir, "token": self.token}
            splits = load_datasets(
                names, args.text_column, args.stopping_strategy, options, split_off, args.max_eval_samples
            )
        patterns = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
        files = {split: expand_patterns(values) for split, values in patterns.items() if values}
        warn_of_shared_files(files)
        splits |= {split: read_files(paths, args, self.cache_dir) for split, paths in files.items()}
        if split_off is not None and "validation" not in splits:
            splits |= split_off(splits["train"])
        for split, documents in splits.items():
            if documents.column_names is not None:  # of a stream they may be unknown
                with input_errors(self.source(split)):
                    require_columns(documents, [args.text_column], split, COLUMN_HINT)
        limits = {"train": args.max_train_samples, **dict.fromkeys(EVALUATION_SPLITS, args.max_eval_samples)}
        self.splits = {split: first_documents(splits[split], limits[split]) for split in splits if split in limits}

    def _split_off_validation(self, train: Documents) -> dict[str, Documents]:
        """Take the last documents for validation."""
        if self.arguments.streaming:
            raise InputError("a stream cannot be split: give --validation_file, or --validation_split_percentage 0")
        number = len(train)
        if number < 2:
            raise InputError(
                f"the corpus ({self.source('train')}) has {number} document(s), too few to split some off for "
                "validation; is it empty? --sample_by says what a document is, --validation_split_percentage 0 splits "
                "none off"
            )
        last = min(round(number * (1 - self.arguments.validation_split_percentage / 100)), number - 1)
        return {"train": train.select(range(last)), "validation": train.select(range(last, number))}

    def batches(self, split: str, documents: Documents = None) -> Iterator[list[str]]:
        """Yield the texts of a split, or of some of its documents, in batches; a missing text, null, is empty."""
        documents = self.splits[split] if documents is None else documents
        column = self.arguments.text_column
        with input_errors(self.source(split), Exception):
            for number, batch in enumerate(documents.iter(DOCUMENTS_PER_BATCH)):
                for index, text in enumerate(batch[column]):
                    if not isinstance(text, str | None):
                        row = number * DOCUMENTS_PER_BATCH + index + 1
                        raise InputError(
                            f"{self.source(split)}, {split} row {row}: {column!r} must be text, not "
                            f"{describe(text)}{COLUMN_HINT}"
                        )
                yield [text or "" for text in batch[column]]

    def source(self, split: str) -> str:
        """Return the files or the dataset of a split, for messages."""
        return list_files(self.files(split)) or ", ".join(part.name for part in self.arguments.datasets)

    def fingerprint(self, split: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return two hashes, that of the content of files last: one that is replaced may keep its size and its time."""
        args = self.arguments
        paths = [*map(Path, self.files(split))]
        if args.streaming:  # a stream has no fingerprint, but the files of a folder show a change
            folders = (Path(part.name) for part in args.datasets)
            paths += sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        sources: list[Any] = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        if args.dataset_name is not None:
            sources.append(getattr(self.splits[split], "_fingerprint", None))
        if len(args.datasets) > 1:
            sources.append(args.stopping_strategy)
        if args.deduplicate and split == "train":
            sources.append("deduplicate")
        content: list[Any] = [args.dataset_name, args.dataset_config_name, args.text_column, args.sample_by, sources]
        max_eval_samples = args.max_eval_samples if split in EVALUATION_SPLITS else None
        content += [args.max_train_samples, max_eval_samples, args.validation_split_percentage, split]
        content += [args.validation_file is None]  # whether validation is split off the training documents
        hashed = json.dumps(content) + tokenizer_rules(tokenizer), "".join(map(hash_file, self.files(split)))
        return " ".join(hashlib.sha256(text.encode()).hexdigest() for text in hashed)

    def files(self, split: str) -> list[str]:
        args = self.arguments
        files = {"validation": args.validation_file, "test": args.test_file}.get(split)
        return expand_patterns(files or args.train_file or [])

    def token_file(
        self, split: str, tokenizer: PreTrainedTokenizerBase, folder: str | Path, overwrite: bool = False
    ) -> TokenFile:
        """Return the token file of a split; tokenize unless the folder holds it for the same text and tokenizer."""
        folder = Path(folder) / split
        fingerprint = self.fingerprint(split, tokenizer)
        if overwrite:
            shutil.rmtree(folder, ignore_errors=True)
        existing = TokenFile.read_if_same(folder, fingerprint)
        if existing is not None:
            return existing
        if (folder / "about.json").exists():
            logger.info(f"{folder} was made from another text or tokenizer: tokenizing again")
        batches = with_progress(self.batches(split), self.splits[split], f"tokenizing {split}")
        counts: dict[str, int] = {}
        if self.arguments.deduplicate and split == "train":
            deduplication = ExactDeduplication()
            batches, counts = deduplication.without_duplicates(batches), deduplication.counts
        documents = (ids for batch in batches if batch for ids in encode(tokenizer, batch))
        with input_errors(self.source(split)):  # there may be no text
            token_file = write_token_file(folder, documents, len(tokenizer), fingerprint, counts)
        if counts:
            logger.info(
                f"{split}: {counts['duplicates']:,} documents ({counts['duplicate_characters']:,} characters) came "
                f"before and were left out, {len(token_file):,} were kept"
            )
        return token_file

    def text_size(self, split: str) -> tuple[int, int]:
        """Return the words (between white space) and the bytes of a split's text in UTF-8."""
        words = size = 0
        for batch in self.batches(split):
            words += sum(len(text.split()) for text in batch)
            size += sum(len(text.encode("utf-8", "surrogatepass")) for text in batch)
        return words, size

    def train_tokenizer(self, folder: str | Path, model_max_length: int) -> HfDebertaTokenizer:
        """Return the tokenizer in the folder; train it on the training documents if there is none."""
        folder, args = Path(folder), self.arguments
        flags = {"train_tokenizer": args.train_tokenizer, "tokenizer_type": args.tokenizer_type}
        if (folder / "tokenizer_config.json").exists():
            return load_trained_tokenizer(folder, flags)
        documents = self.splits["train"]
        if not args.streaming and len(documents) > MAX_TOKENIZER_DOCUMENTS:
            numbers = np.linspace(0, len(documents) - 1, MAX_TOKENIZER_DOCUMENTS, dtype=np.int64)
            documents = documents.select(numbers)
        batches = with_progress(self.batches("train", documents), documents, "reading text for the tokenizer")
        texts = islice((text for batch in batches for text in batch), MAX_TOKENIZER_DOCUMENTS)
        tokenizer = train_tokenizer(texts, args.train_tokenizer or 0, args.tokenizer_type, model_max_length)
        with temporary_folder_beside(folder) as unfinished:
            tokenizer.save_pretrained(unfinished)
            (unfinished / TOKENIZER_FLAGS).write_text(json.dumps(flags), encoding="utf-8")
            rename_unless_taken(unfinished, folder)
        return HfDebertaTokenizer.from_pretrained(folder, trust_remote_code=False)


def with_progress(batches: Iterable[list[str]], documents: Documents, label: str) -> Iterator[list[str]]:
    """Yield the batches and show a progress bar, which knows the remaining time if the documents can be counted."""
    total = None if isinstance(documents, IterableDataset) else len(documents)
    with tqdm(total=total, desc=label, unit=" documents", unit_scale=True) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch))


def load_trained_tokenizer(folder: Path, flags: dict[str, Any]) -> HfDebertaTokenizer:
    """Load a tokenizer that was trained before; an InputError if it is damaged or was trained with other flags."""
    path = folder / TOKENIZER_FLAGS
    with input_errors(f"{folder} (remove it to train the tokenizer again)", OSError, ValueError):
        tokenizer = HfDebertaTokenizer.from_pretrained(folder, trust_remote_code=False)
        before = read_json_object(path) if path.exists() else {"train_tokenizer": len(tokenizer)}
    if differing := [f"--{name} {value}" for name, value in before.items() if flags[name] != value]:
        raise InputError(
            f"{folder} holds a tokenizer that was trained with {' and '.join(differing)}: use the same flags to keep "
            "it, or remove that folder or choose another --output_dir to train a new one"
        )
    logger.info(f"using the tokenizer in {folder} ({len(tokenizer)} tokens)")
    return tokenizer


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return, as JSON, everything that the token ids depend on, without truncation and padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer written in Python: its vocabulary and settings stand for its rules
        rules = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs]
        return json.dumps(rules, sort_keys=True, default=str)
    return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})


def expand_patterns(patterns: Iterable[str]) -> list[str]:
    """Return the files that the patterns match. Each pattern must match at least one."""
    files = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        matches = [match for match in matches if not Path(match).is_dir()]
        if not matches:
            raise InputError(f"no file matches {pattern}; for the files of a folder write 'FOLDER/*'")
        files += matches
    return files


def read_files(files: list[str], args: CorpusArguments, cache_dir: str | None) -> Documents:
    """Read the documents of files, which must all have the same type."""
    types = {FILE_TYPES.get(file_kind(file)) for file in files}
    if len(types) > 1 or None in types:
        raise InputError(f"all files must have the same type ({', '.join(FILE_TYPES)}), not {', '.join(files[:5])}")
    if types == {"parquet"}:  # other columns may differ from file to file, as the metadata of datatrove do
        with input_errors(files[0], Exception):
            columns = pyarrow.parquet.read_schema(files[0]).names
        options: dict[str, Any] = {"columns": [args.text_column]} if args.text_column in columns else {}
        return read_parquet(files, cache_dir, streaming=args.streaming, **options)
    files = [file for file in files if Path(file).stat().st_size] or files[:1]  # parts that Spark writes may be empty
    make_rows = partial(document_rows, files, args.text_column, args.sample_by)
    if args.streaming:
        return IterableDataset.from_generator(make_rows)  # with features it would take five times as long
    return cache_rows(files, make_rows, {args.text_column: Value("string")}, cache_dir, sample_by=args.sample_by)


def document_rows(files: list[str], column: str, sample_by: str) -> Iterator[dict[str, Any]]:
    """Yield the text of each document of files, in a column with this name."""
    for file in files:
        if file_kind(file) == "txt":
            yield from ({column: text} for text in read_documents(file, sample_by))
            continue
        for number, row in enumerate(read_rows(file), 1):
            if number == 1 and column not in row:
                raise InputError(f"{file} has no column {column!r}; it has {', '.join(row)}{COLUMN_HINT}")
            text = row.get(column)
            if not isinstance(text, str | None):
                raise InputError(f"{file}, row {number}: {column!r} must be text, not {describe(text)}{COLUMN_HINT}")
            yield {column: text}


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens."""
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    return tokenizer(texts, add_special_tokens=False, truncation=False, **options)["input_ids"]
