"""Load a data set of the Hub, or several, interleaved by their weights.

>>> DatasetName.parse("wikimedia/wikipedia:20231101.en:0.7")
DatasetName(name='wikimedia/wikipedia', config='20231101.en', weight=0.7)
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, nan
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

import datasets
from datasets import Dataset, Features, IterableDataset, Value
from transformers.utils import logging

from hf_deberta.training.errors import InputError, input_errors

# of datasets: first_exhausted, all_exhausted, ...
STOPPING_STRATEGIES = get_args(get_type_hints(datasets.interleave_datasets)["stopping_strategy"])
SEED = 0  # the same text for each seed of a run, so that runs share token files

logger = logging.get_logger(__name__)

Documents: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True)
class DatasetName:
    """One value of --dataset_name: name, name:config or name:config:weight; config and weight may be empty."""

    name: str
    config: str | None = None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "DatasetName":
        if Path(text).exists():  # a folder, whose name may contain colons
            return cls(text)
        parts = text.split(":")
        name, config, weight = (*parts, "", "")[:3]
        try:
            number = float(weight or 1)
        except ValueError:
            number = nan
        if not name or len(parts) > 3 or not 0 < number < inf:
            raise InputError(
                f"--dataset_name must be NAME, NAME:CONFIG or NAME:CONFIG:WEIGHT with a weight above 0, not {text!r}"
            )
        return cls(name, config or None, number)


def load_datasets(
    names: list[DatasetName],
    text_column: str,
    stopping_strategy: str,
    options: dict[str, Any],
    split_off: Callable[[Documents], dict[str, Documents]] | None = None,
    max_eval_samples: int | None = None,
) -> dict[str, Documents]:
    """Return the splits of one data set, or of several as one.

    The training documents of several data sets are interleaved. Their validation documents are put one after the
    other, and so are their test documents.

    Args:
        text_column: the only column that is kept of several data sets.
        stopping_strategy: of `datasets.interleave_datasets`.
        options: keyword arguments of `datasets.load_dataset`, which never runs code from a repository.
        split_off: divides training documents if there is no split "validation", before some are repeated.
        max_eval_samples: several data sets have equal shares of so many documents to evaluate on.
    """
    loaded = []
    for name in names:
        with input_errors(str(name.name), Exception):
            if Path(name.name, "state.json").exists():  # of Dataset.save_to_disk; read without a copy
                rows = datasets.load_from_disk(name.name)
                loaded.append({"train": rows.to_iterable_dataset() if options["streaming"] else rows})
            else:
                loaded.append(dict(datasets.load_dataset(name.name, name.config, **options)))
        if "train" not in loaded[-1]:
            raise InputError(f"{name.name} has no split 'train'; it has {', '.join(loaded[-1])}")
    if split_off is not None and not any("validation" in splits for splits in loaded):
        loaded = [splits | split_off(splits["train"]) for splits in loaded]
    if len(names) == 1:
        return loaded[0]
    for name, splits in zip(names, loaded, strict=True):
        for split, documents in splits.items():
            with input_errors(f"{name.name}, {split} documents (--text_column)", ValueError):
                splits[split] = text = documents.select_columns([text_column])
                if text.features == Features({text_column: Value("large_string")}):  # of Polars
                    splits[split] = text.map(dict, features=Features({text_column: Value("string")}))  # streams too
    mixed = {"train": interleave(names, [splits["train"] for splits in loaded], stopping_strategy)}
    for split in ("validation", "test"):
        if parts := [splits[split] for splits in loaded if split in splits]:
            share = None if max_eval_samples is None else ceil(max_eval_samples / len(parts))
            mixed[split] = datasets.concatenate_datasets([first_documents(part, share) for part in parts])
    return mixed


def interleave(names: list[DatasetName], trains: list[Documents], stopping_strategy: str) -> Documents:
    """Take documents from the data sets by turns: each from one that is drawn in proportion to its weight."""
    shares = [name.weight / sum(name.weight for name in names) for name in names]
    mixed = datasets.interleave_datasets(trains, shares, seed=SEED, stopping_strategy=stopping_strategy)
    parts = ", ".join(f"{name.name} {share:.1%}" for name, share in zip(names, shares, strict=True))
    number = f"{len(mixed):,} of {sum(map(len, trains)):,}" if hasattr(mixed, "__len__") else "a stream of"
    logger.info(f"training text: {number} documents: {parts} ({stopping_strategy})")
    return mixed


def first_documents(documents: Documents, number: int | None) -> Documents:
    if number is None:
        return documents
    return documents.take(min(number, len(documents)) if hasattr(documents, "__len__") else number)
