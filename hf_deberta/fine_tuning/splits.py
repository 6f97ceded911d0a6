"""The data of a task: train, validation and test, from files, a folder, or the Hub.

>>> splits = read_splits(DataArguments(data_dir="glue/cola"), hub=("nyu-mll/glue", "cola"))
>>> splits["train"][0]
{'sentence': "Our friends won't buy this analysis ...", 'label': 1, 'idx': 0}
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from transformers.utils import logging

from hf_deberta.runs.data_files import read_table

SPLITS = ("train", "validation", "test")
OTHER_NAMES = {"valid": "validation", "dev": "validation", "val": "validation"}
SHARD = re.compile(r"(.*?)(?:-(\d{5})-of-(\d{5}))?")  # train, or train-00000-of-00002
SPARK_PART_GLOB = "part-*"  # of a folder that Spark has written

logger = logging.get_logger(__name__)


@dataclass
class DataArguments:
    """Which data, and how much of it."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "A data set of the Hub, or a folder of one, if not that of the task."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Its configuration, or that of the task's data set, if not the task's own."}
    )
    data_dir: str | None = field(
        default=None,
        metadata={
            "help": "A folder with files train.*, validation.*, test.* of the task, their shards, or folders of "
            f"{SPARK_PART_GLOB} in their place, as Spark writes them."
        },
    )
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "Rows to train on: jsonl, parquet, or the task's own kind; csv and tsv where no column holds lists."
        },
    )
    validation_file: str | None = field(default=None, metadata={"help": "Rows to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Rows to predict."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many rows at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many rows at most."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict so many rows at most."})
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of an input at most; longer ones are cut. By default the recipe's."},
    )
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad to --max_seq_length; else to the longest input of a batch."}
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenise again what datasets has cached."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    def source(self, demo: bool = False) -> str:
        """What the model is trained on, in words."""
        names = (getattr(self, "task_name", None), self.train_file, self.dataset_name, self.data_dir)
        return "made-up rows" if demo else next((name for name in names if name), "rows of one's own")

    def mapping(self, description: str) -> dict[str, Any]:
        """Options of `Dataset.map`."""
        return {
            "batched": True,
            "num_proc": self.preprocessing_num_workers,
            "load_from_cache_file": not self.overwrite_cache,
            "desc": description,
        }


def read_splits(
    args: DataArguments,
    hub: tuple[str, str | None] | None = None,
    read: Callable[[str], Dataset] | None = None,
    loading: dict[str, Any] | None = None,
) -> dict[str, Dataset]:
    """The splits by name, as files or the data set name them: `validation`, or `validation_matched` and so on.

    What is called `dev`, `valid` or `val` is `validation`. Of a data set, others than these and `train` are left out.

    Args:
        hub: the task's data set and its configuration, for want of files.
        read: reads a file, if not as a table of rows.
        loading: cache_dir and token, for the Hub.
    """
    files = {split: [file] for split in SPLITS if (file := getattr(args, f"{split}_file"))}
    if args.data_dir is not None:
        found = files_of(Path(args.data_dir), named=files)
        parts = [split for split in found if split.startswith("train_")]
        if parts and not args.train_file:
            said = ", ".join(path.name for split in parts for path in found[split])
            raise ValueError(
                f"{args.data_dir} holds {said}, and rows to train on come from one file, train.*: put them into one, "
                "or name one with --train_file"
            )
        files = {split: paths for split, paths in found.items() if split not in parts} | files
    if files and (args.dataset_name or args.dataset_config_name):
        raise ValueError(
            "the data are either a data set (--dataset_name, --dataset_config_name) or files (--train_file, "
            "--data_dir), not both"
        )
    if files:
        splits = {
            split: datasets.concatenate_datasets([(read or read_table)(str(path)) for path in paths])
            for split, paths in files.items()
        }
    else:
        name, config = (args.dataset_name, None) if args.dataset_name else (hub or (None, None))
        if name is None:
            raise ValueError("say which data: --train_file and --validation_file, --data_dir, or --dataset_name")
        there = datasets.load_dataset(name, args.dataset_config_name or config, **loading or {})
        taken = {}
        for split in sorted(there, key=lambda split: our_name(split) != split):  # validation goes before dev
            if is_split(our_name(split)):
                taken.setdefault(our_name(split), split)
        if not taken:
            raise ValueError(f"{name} has no split train, validation or test, but {', '.join(there)}")
        splits = {ours: there[theirs] for ours, theirs in taken.items()}
        if left_out := [split for split in there if split not in taken.values()]:
            logger.warning(f"splits of {name} that are left out: {', '.join(left_out)}")
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples, "test": args.max_predict_samples}
    for split, rows in splits.items():
        if len(rows) == 0:
            said = ", ".join(map(str, files.get(split) or [name]))
            raise ValueError(f"the split {split!r} is empty ({said})")
        limit = limits.get(split.partition("_")[0])
        splits[split] = rows if limit is None else rows.select(range(min(limit, len(rows))))
    return splits


def one_of_each(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """The splits, for a script that knows `train`, `validation` and `test` alone."""
    others = [split for split in splits if split not in SPLITS]
    if others:
        raise ValueError(
            f"splits are {', '.join(SPLITS)} here, and there is {', '.join(others)}: name its file by "
            "--validation_file or --test_file"
        )
    return splits


def our_name(split: str) -> str:
    """`validation_matched` of `dev_matched`, and so on."""
    part, line, rest = split.partition("_")
    return OTHER_NAMES.get(part, part) + line + rest


def is_split(name: str) -> bool:
    """Whether a split is to train on, which there is one of, or to evaluate or predict, such as `test_matched`."""
    return name == "train" or name.partition("_")[0] in SPLITS[1:]


def files_of(folder: Path, named: Collection[str] = ()) -> dict[str, list[Path]]:
    """The files of a folder whose names begin with a split's: one of each split, or all its shards in order.

    A folder of parts, such as train/part-*, is one file.

    Args:
        named: splits whose files are named by flags, whatever the folder holds of them.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"--data_dir {folder} is not a folder")
    found, places = defaultdict(list), defaultdict(list)
    for path in sorted(folder.iterdir()):
        stem, place, number = SHARD.fullmatch(Path(path.name.removesuffix(".gz")).stem).groups()
        split = our_name(stem)
        if split.partition("_")[0] in SPLITS and parts_of(path):
            found[split].append(path)
            places[split].append((int(place or 0), int(number or 1)))
    for split, paths in found.items():
        if split not in named and places[split] != [(place, len(paths)) for place in range(len(paths))]:
            raise ValueError(
                f"{folder} holds {', '.join(path.name for path in paths)}, and the split {split!r} should be one file, "
                "or all its shards once, NAME-00000-of-00002 and so on: name one file by its flag, or put there what "
                "is missing"
            )
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no file train.*, validation.* or test.*, and no folder train/{SPARK_PART_GLOB}"
        )
    return {split: [part for path in paths for part in parts_of(path)] for split, paths in found.items()}


def parts_of(path: Path) -> list[Path]:
    """The file itself, or of a folder the parts that it holds."""
    return [path] if path.is_file() else sorted(path.glob(SPARK_PART_GLOB))
