"""The train, validation and test rows of a task: from files, a folder, or a dataset of the Hub.

>>> splits, sources = read_splits(DataArguments(data_dir="glue/cola"), hub=("nyu-mll/glue", "cola"))
>>> splits["train"][0]
{'sentence': "Our friends won't buy this analysis ...", 'label': 1, 'idx': 0}
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from transformers.utils import logging

from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.data_files import Source, code_hash, read_table, warn_of_shared_files
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.graphed_steps import has_graphs, wants_graphs
from hf_deberta.training.run_identity import RunArguments

SPLITS = ("train", "validation", "test")
SYNONYMS = {"valid": "validation", "dev": "validation", "val": "validation"}
SHARD = re.compile(r"(?P<split>.*?)(?:-(?P<index>\d{5})-of-(?P<count>\d{5}))?")  # train, or train-00000-of-00002
SPARK_PART_GLOB = "part-*"  # files in a folder written by Spark

logger = logging.get_logger(__name__)


@dataclass
class DataArguments:
    """Which rows to use, and how to tokenize them. A subclass with the flag --task_name sets `task_names`."""

    task_names: ClassVar[Collection[str]] = ()
    positive_flags: ClassVar[Collection[str]] = (
        "max_train_samples", "max_eval_samples", "max_predict_samples", "pad_to_multiple_of"
    )  # fmt: skip

    dataset_name: str | None = flag(
        None, "Dataset of the Hub, or a local folder with one, instead of the task's dataset."
    )
    dataset_config_name: str | None = flag(None, "Configuration of the dataset.")
    data_dir: str | None = flag(
        None,
        "Folder with the files train.*, validation.* and test.*. Each may also be a set of shards "
        f"(train-00000-of-00002.*) or a folder of {SPARK_PART_GLOB} files as Spark writes it.",
    )
    train_file: str | None = flag(None, "Rows to train on: jsonl, parquet, csv or tsv, or what the task reads instead.")
    validation_file: str | None = free_flag(None, "Rows to evaluate on.")
    test_file: str | None = free_flag(None, "Rows to predict; labels are optional.")
    max_train_samples: int | None = flag(None, "Train on the first N rows only.")
    max_eval_samples: int | None = free_flag(None, "Evaluate on the first N rows only.")
    max_predict_samples: int | None = free_flag(None, "Predict the first N rows only.")
    skip_bad_rows: bool = free_flag(
        False,
        "Leave out training and validation rows without text or label, with an unknown label, or with "
        "another mistake, instead of stopping. A mistake in a test row is an error: each has a prediction.",
    )
    max_seq_length: int | None = flag(
        None,
        "Maximum number of tokens of an input; longer ones are truncated, but contexts of SQuAD and ReCoRD, and "
        "sentences of run_ner.py, are split.",
    )
    pad_to_multiple_of: int | None = free_flag(
        None,
        "Pad batches to a multiple of N tokens (default: 64 with --cuda_graphs true, otherwise 8 in half precision).",
    )
    pad_to_max_length: bool = flag(False, "Pad to --max_seq_length instead of the longest input of the batch.")
    overwrite_cache: bool = free_flag(False, "Tokenize again instead of using cached inputs.")
    preprocessing_num_workers: int | None = free_flag(None, "Number of tokenizing processes.")

    def __post_init__(self) -> None:
        for name in self.positive_flags:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, not {value}")
        task_name = getattr(self, "task_name", None)
        if task_name is not None and self.task_names:
            known_name = find_task_name(task_name, self.task_names)
            if known_name is None:
                raise InputError(f"--task_name must be one of {', '.join(self.task_names)}, not {task_name!r}")
            vars(self)["task_name"] = known_name  # a field of the subclass

    def card_fields(self, checkpoint: str, demo: bool = False) -> dict[str, str | None]:
        """Return the arguments of `model_card.write_training_card`."""
        task_name, local = getattr(self, "task_name", None), self.dataset_name or self.train_file or self.data_dir or ""
        on_hub = task_name or (self.dataset_name if not Path(local).exists() else None)
        data = "made-up rows" if demo else on_hub or Path(local).resolve().name
        return {"data": data, "dataset": None if demo else on_hub, "base": checkpoint}

    def map_options(self, description: str) -> dict[str, Any]:
        """Keyword arguments of `Dataset.map`."""
        return {
            "batched": True,
            "num_proc": self.preprocessing_num_workers,
            "load_from_cache_file": not self.overwrite_cache,
            "desc": description,
        }

    def padding_options(self, length: int, args: RunArguments) -> dict[str, Any]:
        """Keyword arguments of Transformers' data collators."""
        multiple = self.pad_to_multiple_of
        if multiple is None and has_graphs(args.device) and wants_graphs(args):
            multiple = 64
        return {
            "padding": "max_length" if self.pad_to_max_length else "longest",
            "max_length": length if self.pad_to_max_length else None,
            "pad_to_multiple_of": multiple or (8 if args.fp16 or args.bf16 else None),
        }


def read_splits(
    args: DataArguments,
    hub: tuple[str, str | None] | None = None,
    read_file: Callable[[str], Dataset] = read_table,
    download_options: dict[str, Any] | None = None,
) -> tuple[dict[str, Dataset], dict[str, Source]]:
    """Return the rows and their source by split: `train`, `validation` or `validation_...`, `test` or `test_...`.

    The names `dev`, `valid` and `val` mean `validation`. Other splits of a dataset are left out.

    Args:
        hub: name and configuration of the task's dataset, used if no file is given.
        download_options: cache_dir and token, for the Hub.
    """
    files = {split: [Path(file)] for split in SPLITS if (file := getattr(args, f"{split}_file"))}
    if args.data_dir is not None:
        files = files_in_folder(Path(args.data_dir), overridden=files) | files
    if files and (args.dataset_name or args.dataset_config_name):
        raise InputError(
            "give a dataset (--dataset_name, --dataset_config_name) or files (--train_file, --data_dir), not both"
        )
    if files:
        warn_of_shared_files(files)
        splits, sources = {}, {}
        for split, paths in files.items():
            splits[split], counts = read_files(paths, read_file)
            sources[split] = Source(split, counts)
    else:
        name, config = (args.dataset_name, None) if args.dataset_name else (hub or (None, None))
        if name is None:
            raise InputError("no data given: use --train_file and --validation_file, --data_dir, or --dataset_name")
        with input_errors(name, Exception):  # also a name, a configuration or a connection that does not exist
            dataset = datasets.load_dataset(name, args.dataset_config_name or config, **download_options or {})
        splits = known_splits(dataset, name)
        sources = {split: Source(split, {f"{name} ({split})": len(rows)}) for split, rows in splits.items()}
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples, "test": args.max_predict_samples}
    for split, rows in splits.items():
        if len(rows) == 0:
            raise InputError(f"the split {split!r} is empty ({sources[split]()})")
        number = min(limits[split.partition("_")[0]] or len(rows), len(rows))
        fingerprint = Hasher.hash([rows._fingerprint, number, code_hash()])
        splits[split] = rows.select(range(number), new_fingerprint=fingerprint)
    return splits, sources


def find_task_name(task_name: str, names: Collection[str]) -> str | None:
    """Return the name that equals a --task_name but for case, hyphens and underscores."""
    return next((name for name in names if _letters(name) == _letters(task_name)), None)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def read_files(paths: list[Path], read_file: Callable[[str], Dataset]) -> tuple[Dataset, dict[str, int]]:
    """Return the rows of all files of a split, and how many are in each."""
    if missing := [path for path in paths if not path.exists()]:
        raise InputError(f"there is no file or folder {missing[0]}")
    tables = {str(path): read_file(str(path)) for path in paths}
    with input_errors("", ValueError):  # files whose columns have different types
        rows = datasets.concatenate_datasets([*tables.values()])
    return rows, {file: len(table) for file, table in tables.items()}


def known_splits(dataset: DatasetDict, name: str) -> dict[str, Dataset]:
    """The splits of a dataset to train on, evaluate or predict, by canonical name."""
    original_names: dict[str, str] = {}
    for split in sorted(dataset, key=lambda split: canonical_name(split) != split):  # validation wins over dev
        name_of_split = canonical_name(split)
        if name_of_split == "train" or name_of_split.partition("_")[0] in SPLITS[1:]:
            original_names.setdefault(name_of_split, split)
    if not original_names:
        raise InputError(f"{name} has no split train, validation or test, only {', '.join(dataset)}")
    if unused := [split for split in dataset if split not in original_names.values()]:
        logger.info(f"Unused splits of {name}: {', '.join(unused)}")
    return {split: dataset[original] for split, original in original_names.items()}


def require_plain_splits(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """The same splits; an error if there is another than `train`, `validation` and `test`."""
    if others := [split for split in splits if split not in SPLITS]:
        raise InputError(
            f"splits of this task are {', '.join(SPLITS)}, not {', '.join(others)}: name one file with "
            "--validation_file or --test_file"
        )
    return splits


def canonical_name(split: str) -> str:
    """dev_matched -> validation_matched."""
    part, separator, rest = split.partition("_")
    return SYNONYMS.get(part, part) + separator + rest


def files_in_folder(folder: Path, overridden: Collection[str] = ()) -> dict[str, list[Path]]:
    """The files of each split in a folder: one file, all shards in order, or all parts of a folder `train/part-*`.

    Args:
        overridden: splits whose files come from flags; their files in the folder are not checked.
    """
    if not folder.is_dir():
        raise InputError(f"--data_dir {folder} is not a folder")
    shards: dict[str, list[tuple[int, int, Path]]] = defaultdict(list)  # number, how many, and file
    for path in sorted(folder.iterdir()):
        match = SHARD.fullmatch(Path(path.name.removesuffix(".gz")).stem)
        split = canonical_name(match["split"] if match else path.name)
        if match and split.partition("_")[0] in SPLITS and data_files(path):
            shards[split].append((int(match["index"] or 0), int(match["count"] or 1), path))
    if not shards:
        raise InputError(f"{folder} has no file train.*, validation.* or test.*, and no folder train/{SPARK_PART_GLOB}")
    several_train = [shard[-1].name for split in shards if split.startswith("train_") for shard in shards[split]]
    if several_train and "train" not in overridden:
        raise InputError(
            f"{folder} has {', '.join(several_train)}, but training rows must be in one file train.*: merge them, or "
            "name one with --train_file"
        )
    for split, files in shards.items():
        if split not in overridden and [shard[:2] for shard in files] != [(i, len(files)) for i in range(len(files))]:
            names = ", ".join(path.name for *_, path in files)
            raise InputError(
                f"{folder} has {names} for the split {split!r}; expected one file, or every shard exactly once "
                "(NAME-00000-of-00002, ...): add what is missing, or name one file by flag"
            )
    return {
        split: [file for *_, path in files for file in data_files(path)]
        for split, files in shards.items()
        if not split.startswith("train_")
    }


def data_files(path: Path) -> list[Path]:
    """The file itself, or the Spark parts in a folder."""
    return [path] if path.is_file() else sorted(path.glob(SPARK_PART_GLOB))
