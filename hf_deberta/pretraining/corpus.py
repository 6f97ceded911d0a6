"""From text files, or any data set of the Hub, to the tokenizer and the token files of a pretraining run.

A document is a line of a text file (or a paragraph, or the file: `--sample_by`), or a row of a jsonl, csv or parquet
file or of a data set.
"""

import codecs
import glob
import hashlib
import json
import multiprocessing
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.pretraining.token_file import TokenFile, rename_atomically, unfinished_beside, write_token_file
from hf_deberta.pretraining.tokenizer_training import KINDS, train_tokenizer
from hf_deberta.runs.data_files import TSV
from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer

KINDS_OF_FILE = {name: name for name in ("txt", "json", "csv", "tsv", "parquet")} | {"jsonl": "json"}
BATCH = 1000  # documents that are tokenised in one go
MAX_QUEUED_BATCHES = 4  # batches for each process, of which the ids may wait to be written
TOKENIZER_DOCUMENTS = 1_000_000  # from how many a tokenizer is learnt at most
ASKED = "asked.json"  # beside a learnt tokenizer: the flags it was learnt by

logger = logging.get_logger(__name__)


@dataclass
class CorpusArguments:
    """What to train on, and how its rows are made."""

    dataset_name: str | None = field(default=None, metadata={"help": "A data set of the Hub, or a folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Text files (txt), or tables (jsonl, csv, parquet); patterns are expanded."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to validate on."})
    validation_split_percentage: float = field(
        default=5, metadata={"help": "Share of the training documents to validate on if there are no others."}
    )
    text_column: str = field(default="text", metadata={"help": "The column of a table that holds the text."})
    sample_by: str = field(
        default="line", metadata={"help": "What a document of a text file is: line, paragraph or document (the file)."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read a data set as it comes, without a copy on disk."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many documents at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on so many documents at most."})
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise; by default one, which uses all cores by threads."}
    )
    tokens_dir: str | None = field(
        default=None, metadata={"help": "Where the tokenised corpus is kept; OUTPUT_DIR/_tokens if not given."}
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenise again, once in a run."})
    max_seq_length: int = field(default=512, metadata={"help": "Tokens of a row, [CLS] and [SEP] included."})
    pack: bool = field(
        default=True,
        metadata={"help": "Fill rows with several documents, which do not see one another; else one document each."},
    )
    line_by_line: bool = field(
        default=False, metadata={"help": "The same as --no_pack, as Transformers' script has it."}
    )
    train_tokenizer: int | None = field(
        default=None, metadata={"help": "Learn a tokenizer with a vocabulary of this size from the corpus."}
    )
    tokenizer_type: str = field(default="unigram", metadata={"help": "unigram (as v2, v3) or bpe (as v1)."})

    def __post_init__(self) -> None:
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError("say what to train on: either --train_file or --dataset_name")
        if self.sample_by not in ("line", "paragraph", "document"):
            raise ValueError(f"--sample_by is line, paragraph or document, not {self.sample_by!r}")
        if self.tokenizer_type not in KINDS:
            raise ValueError(f"--tokenizer_type is {' or '.join(KINDS)}, not {self.tokenizer_type!r}")
        self.pack = self.pack and not self.line_by_line
        share = self.validation_split_percentage
        if not 0 <= share < 100:
            raise ValueError(f"--validation_split_percentage must lie in [0, 100), not {share}")

    def about(self) -> dict[str, str | None]:
        """What a model card says of it."""
        files = ", ".join(Path(file).name for file in self.train_file or [])
        return {"data": self.dataset_name or files, "dataset": self.dataset_name}


@dataclass
class Corpus:
    """Documents to train and to validate on.

    >>> corpus = Corpus(CorpusArguments(train_file=["corpus.txt"]))
    >>> next(iter(corpus.texts("train")))
    'Once upon a time ...'
    """

    arguments: CorpusArguments
    cache_dir: str | None = None
    token: str | None = None  # for private data sets of the Hub

    def __post_init__(self) -> None:
        self.splits = self._load()

    def _load(self) -> dict[str, Iterable[dict]]:
        args = self.arguments
        loaded = {"streaming": args.streaming, "cache_dir": self.cache_dir}
        if args.dataset_name is not None:
            name = (args.dataset_name, args.dataset_config_name)
            splits = dict(datasets.load_dataset(*name, token=self.token, **loaded))
            if "train" not in splits:
                raise ValueError(f"{args.dataset_name} has no split 'train' but {', '.join(splits)}")
        else:
            splits = {"train": read_files(args.train_file, args.sample_by, **loaded)}
        if args.validation_file is not None:
            splits["validation"] = read_files(args.validation_file, args.sample_by, **loaded)
        elif "validation" not in splits and args.validation_split_percentage > 0:
            splits |= self._split(splits["train"])
        for name, split in splits.items():
            columns = split.column_names
            if columns is not None and args.text_column not in columns:
                raise ValueError(
                    f"the {name} documents have no column {args.text_column!r} but {', '.join(columns)}: say which "
                    "holds the text with --text_column"
                )
        limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
        return {name: limited(split, limits[name]) for name, split in splits.items() if name in limits}

    def _split(self, train) -> dict[str, Iterable[dict]]:
        """The last documents are for validation."""
        if self.arguments.streaming:
            raise ValueError("a stream cannot be split: give --validation_file, or --validation_split_percentage 0")
        number = len(train)
        if number < 2:
            raise ValueError(
                f"the corpus is {number} document(s), too few to set some aside for validation; is it empty? "
                "(--sample_by says what a document is, --validation_split_percentage 0 sets none aside)"
            )
        kept = min(round(number * (1 - self.arguments.validation_split_percentage / 100)), number - 1)
        return {"train": train.select(range(kept)), "validation": train.select(range(kept, number))}

    def texts(self, split: str) -> Iterator[str]:
        for row in self.splits[split]:
            yield row[self.arguments.text_column] or ""

    def batches(self, split: str) -> Iterator[list[str]]:
        for batch in self.splits[split].iter(BATCH):
            yield [text or "" for text in batch[self.arguments.text_column]]

    def fingerprint(self, split: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Changes when the text or the tokenizer does."""
        args = self.arguments
        read = [(path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in self.files(split)]
        if args.dataset_name is not None:  # what a stream reads has no fingerprint
            read.append(getattr(self.splits[split], "_fingerprint", None))
        given = [args.dataset_name, args.dataset_config_name, args.text_column, args.sample_by, read]
        most_to_validate = args.max_eval_samples if split == "validation" else None
        given += [args.max_train_samples, most_to_validate, args.validation_split_percentage, split]
        given += [args.validation_file is None]  # whether the end of the training documents is for validation
        content = json.dumps(given) + rules_of(tokenizer)
        return hashlib.sha256(content.encode()).hexdigest()

    def files(self, split: str) -> list[str]:
        args = self.arguments
        return expand((args.validation_file if split == "validation" else None) or args.train_file or [])

    def tokens(
        self, split: str, tokenizer: PreTrainedTokenizerBase, folder: str | Path, anew: bool = False
    ) -> TokenFile:
        """The token file of a split; made now unless the folder holds that of the same text and tokenizer."""
        folder = Path(folder) / split
        made_of = self.fingerprint(split, tokenizer)
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        if (found := TokenFile.kept(folder, made_of)) is not None:
            return found
        if (folder / "about.json").exists():
            logger.warning(f"{folder} was made of another text or tokenizer, and is made anew")
        documents = tokenized(self.batches(split), tokenizer, self.arguments.preprocessing_num_workers)
        try:
            with saying_what_is_not_utf8(self.files(split)):
                return write_token_file(folder, documents, len(tokenizer), {"made_of": made_of})
        except ValueError as error:
            raise ValueError(f"the {split} documents cannot be used: {error}") from error

    def tokenizer(self, folder: str | Path, model_max_length: int) -> HfDebertaTokenizer:
        """A tokenizer learnt from the training documents, kept in the folder."""
        folder, args = Path(folder), self.arguments
        asked = {"train_tokenizer": args.train_tokenizer, "tokenizer_type": args.tokenizer_type}
        if (folder / "tokenizer_config.json").exists():
            return kept_tokenizer(folder, asked)
        split = self.splits["train"]
        if not args.streaming and len(split) > TOKENIZER_DOCUMENTS:
            split = split.select(np.linspace(0, len(split) - 1, TOKENIZER_DOCUMENTS, dtype=np.int64))
        texts = (row[args.text_column] or "" for row in islice(split, TOKENIZER_DOCUMENTS))
        with saying_what_is_not_utf8(self.files("train")):
            tokenizer = train_tokenizer(texts, args.train_tokenizer, args.tokenizer_type, model_max_length)
        with unfinished_beside(folder) as unfinished:
            tokenizer.save_pretrained(unfinished)
            (unfinished / ASKED).write_text(json.dumps(asked), encoding="utf-8")
            rename_atomically(unfinished, folder)
        return HfDebertaTokenizer.from_pretrained(folder)


def kept_tokenizer(folder: Path, asked: dict[str, int | str]) -> HfDebertaTokenizer:
    """The one that was learnt before, by the same flags."""
    kept, path = HfDebertaTokenizer.from_pretrained(folder), folder / ASKED
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"train_tokenizer": len(kept)}
    if differing := [f"--{name} {value}" for name, value in before.items() if asked[name] != value]:
        raise ValueError(
            f"{folder} holds a tokenizer that was learnt with {' and '.join(differing)}: ask for the same to go on "
            "with it, or remove that folder, or give another --output_dir, to learn one anew"
        )
    logger.warning(f"the tokenizer in {folder} ({len(kept)} tokens) is used again")
    return kept


def rules_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that its ids depend on; truncation and padding are a caller's, and none here."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # it is written in Python: its words and settings must do
        given = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs]
        return json.dumps(given, sort_keys=True, default=str)
    return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})


def limited(split, most: int | None):
    """The first so many documents."""
    if most is None:
        return split
    return split.select(range(min(most, len(split)))) if hasattr(split, "__len__") else split.take(most)


def expand(patterns: Iterable[str]) -> list[str]:
    """Files that the patterns name, each pattern at least one."""
    files = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"{pattern} names no file")
        files += found
    return files


def read_files(patterns: list[str], sample_by: str, **loading):
    """The documents of files of one kind, which their names tell."""
    files = expand(patterns)
    kinds = {KINDS_OF_FILE.get(Path(file).name.removesuffix(".gz").rpartition(".")[2].lower()) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise ValueError(f"files must all be of one kind of {', '.join(KINDS_OF_FILE)}, not {', '.join(files[:5])}")
    (kind,) = kinds
    if not any(Path(file).stat().st_size for file in files):
        raise ValueError(f"there is no text to train on: {', '.join(files[:5])} is empty")
    builder = {"txt": "text", "tsv": "csv"}.get(kind, kind)
    options = {"txt": {"sample_by": sample_by}, "tsv": TSV}.get(kind, {})
    with saying_what_is_not_utf8(files):
        return datasets.load_dataset(builder, data_files=files, split="train", **options, **loading)


@contextmanager
def saying_what_is_not_utf8(files: list[str]) -> Iterator[None]:
    """Files are looked through only where reading them has failed."""
    try:
        yield
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if isinstance(error, UnicodeDecodeError) or isinstance(error.__cause__, UnicodeDecodeError):
            for file in files:
                if not file.endswith((".gz", ".parquet")):
                    check_utf8(file)
        raise


def check_utf8(path: str) -> None:
    """Say where a file is not UTF-8, which a library would say many frames deeper."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        while part := file.read(2**24):
            try:
                decoder.decode(part)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text: byte {part[error.start]:#04x} at or before {read + error.end}; convert "
                    "it, for instance with iconv -f latin1 -t utf-8"
                ) from None
            read += len(part)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: it ends in the middle of a character") from None


def tokenized(
    batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase, processes: int | None = None
) -> Iterator[list[int]]:
    """Ids of each document, without special tokens."""
    if not processes or processes == 1:
        for batch in batches:
            yield from encode(tokenizer, batch)
        return
    # spawned, not forked: the tokenizer's threads would not survive a fork
    with multiprocessing.get_context("spawn").Pool(processes, _take_tokenizer, (tokenizer,)) as pool:
        waiting = deque()  # not Pool.imap, which would read on and keep the whole corpus in memory
        for batch in batches:
            waiting.append(pool.apply_async(_encode_in_worker, (batch,)))
            if len(waiting) == MAX_QUEUED_BATCHES * processes:
                yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    quiet = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    return tokenizer(texts, add_special_tokens=False, truncation=False, **quiet)["input_ids"]


def _take_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    global _tokenizer
    _tokenizer = tokenizer


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return [np.asarray(ids, dtype=np.uint32) for ids in encode(_tokenizer, texts)]
