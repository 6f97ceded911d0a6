"""The order of training rows, which depends on seed and epoch alone, so that a run resumes exactly.

accelerate's `SeedableRandomSampler` would not do: it shuffles with seed + epoch, so the second epoch of one seed is the
first epoch of the next one, and it yields no epoch number, from which `packing.TokenRows` draws new masks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

BATCHES_SORTED_TOGETHER = 50  # rows are sorted by length within so many batches


class EpochSampler(torch.utils.data.Sampler):
    """Yields `epoch * rows + row` for each row once, shuffled by (seed, epoch). `packing.TokenRows` takes such indices.

    Shuffles with NumPy's PCG64DXSM, since PyTorch's default sampler is biased on very large datasets (ModernBERT,
    appendix C).
    """

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed, self.epoch = rows, seed, 0
        np.random.SeedSequence(seed)  # a ValueError if it is negative

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        rng = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence((self.seed, self.epoch))))
        first = self.epoch * self.rows
        for row in rng.permutation(self.rows):  # a list would take five times the memory
            yield first + int(row)


class RowOrder(EpochSampler):
    """Yields each row number once, shuffled by (seed, epoch).

    With `lengths`, rows of similar length share a batch, and the batches are shuffled.
    """

    def __init__(self, rows: int, seed: int, lengths: list[int] | None = None, batch: int = 1):
        super().__init__(rows, seed)
        self.lengths, self.batch = None if lengths is None else np.asarray(lengths), batch

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(super().__iter__(), np.int64, self.rows) - self.epoch * self.rows
        if self.lengths is not None:
            order = self._group_by_length(order, self.lengths)
        yield from order.tolist()

    def _group_by_length(self, order: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        size = BATCHES_SORTED_TOGETHER * self.batch
        pools = [order[start : start + size] for start in range(0, self.rows, size)]
        order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
        in_full_batches = self.rows // self.batch * self.batch
        rng = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence((self.seed, self.epoch, 1))))
        batches = rng.permutation(order[:in_full_batches].reshape(-1, self.batch))
        return np.concatenate([batches.reshape(-1), order[in_full_batches:]])


class SetEpochCallback(TrainerCallback):
    """Sets the epoch of `trainer.order`: with several processes, accelerate does not when a run resumes.

    Also sets `trainer.trained` after the first step: a finished run that is started again makes none. `trainer.order`
    is an EpochSampler once there is a training dataloader.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.trained = True
