"""Inputs that did not fit, which a user should hear of."""

from datasets import Dataset
from transformers.utils import logging

logger = logging.get_logger(__name__)


def warn_of_cut_inputs(rows: Dataset, split: str, length: int) -> None:
    """Rows of just the greatest length were cut, or all but."""
    if "attention_mask" in rows.column_names:
        full = sum(sum(mask) >= length for mask in rows["attention_mask"])
    else:
        full = sum(len(ids) >= length for ids in rows["input_ids"])
    if full:
        logger.warning(f"{split}: {full:,} of {len(rows):,} inputs fill --max_seq_length {length}, the longer were cut")
