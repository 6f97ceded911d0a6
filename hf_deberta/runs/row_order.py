"""The order of a task's rows, which depends on (seed, epoch) alone, so that a run goes on exactly."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

POOL = 50  # batches within which rows are sorted by length


class EpochSampler(torch.utils.data.Sampler):
    """All rows in an order that depends on (seed, epoch) alone; yields `epoch * rows + row`, as `Rows` wants it.

    NumPy's PCG64DXSM, since the default order of PyTorch's samplers was found biased on very large data sets
    (ModernBERT, appendix C).
    """

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed, self.epoch = rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        rng = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence((self.seed, self.epoch))))
        first = self.epoch * self.rows
        for row in rng.permutation(self.rows):  # not as a list, which takes five times the memory
            yield first + int(row)


class RowOrder(EpochSampler):
    """All rows, each by its number; with `lengths`, rows of like length share a batch, and the batches are mixed."""

    def __init__(self, rows: int, seed: int, lengths: list[int] | None = None, batch: int = 1):
        super().__init__(rows, seed)
        self.lengths, self.batch = None if lengths is None else np.asarray(lengths), batch

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(super().__iter__(), np.int64, self.rows) - self.epoch * self.rows
        if self.lengths is not None:
            order = self.grouped(order)
        yield from order.tolist()

    def grouped(self, order: np.ndarray) -> np.ndarray:
        size = POOL * self.batch
        pools = [order[start : start + size] for start in range(0, self.rows, size)]
        order = np.concatenate([pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools])
        whole = self.rows // self.batch * self.batch
        mixed = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence((self.seed, self.epoch, 1))))
        batches = mixed.permutation(order[:whole].reshape(-1, self.batch))
        return np.concatenate([batches.reshape(-1), order[whole:]])


class SetEpochCallback(TrainerCallback):
    """Tells the order of rows which epoch it is, since accelerate's loader does not where several processes resume.

    And notes that something is trained: of a finished run nothing is.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.trainer.trained = True
