"""Count the real tokens of each batch where it is collated, so that a GPU leaves out its padding.

The model computes a padded batch as one row of its real tokens. Only the CPU can read from the mask how many these are:
on a GPU the model would wait for the device. So the collator passes their number, the input `num_real_tokens`. Shapes,
labels, losses and predictions of the batch stay as they are.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_deberta.engines.unpadding import is_right_padded
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel

NUM_REAL_TOKENS = "num_real_tokens"


class RealTokensMixin(Trainer):
    """Mixin for a `Trainer` whose batches hold the number of their real tokens, if its model takes it.

    Not with several GPUs in one process, nor if one process collates the batches of all, as accelerate does for an
    `IterableDataset`: both split batches later.

    Put it before the other `Trainer` classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = cast(nn.Module, self.model)
        is_input = isinstance(model, HfDebertaPreTrainedModel) or NUM_REAL_TOKENS in signature(model.forward).parameters
        one_collates_for_all = self.accelerator.dispatch_batches or isinstance(self.train_dataset, IterableDataset)
        if is_input and self.args.n_gpu <= 1 and not one_collates_for_all:
            self.data_collator = CountingCollator(self.data_collator)


class CountingCollator:
    """A collator that adds `num_real_tokens` to the batches of another.

    >>> collate = CountingCollator(DataCollatorWithPadding(tokenizer))
    >>> collate([{"input_ids": [1, 5, 2]}, {"input_ids": [1, 2]}])["num_real_tokens"]
    5

    Args:
        round_number: makes the number larger; with `engines.unpadding.round_up` it has few different values.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], round_number: Callable[[int], int] = int) -> None:
        self.collate, self.round_number = collate, round_number

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        number = count_real_tokens(batch.get("attention_mask"))
        if number is not None:
            batch[NUM_REAL_TOKENS] = self.round_number(number)
        return batch


def count_real_tokens(mask: torch.Tensor | None) -> int | None:
    """Return the sum of an attention mask [..., N].

    None without a mask, and if a row is empty or padded elsewhere than on the right, which the model does not unpad.
    """
    if mask is None:
        return None
    rows = mask.flatten(0, -2).bool()
    return int(rows.sum()) if bool(rows[:, 0].all()) and is_right_padded(rows) else None
