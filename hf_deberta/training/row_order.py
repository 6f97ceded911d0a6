"""The order of a task's rows, which depends on (seed, epoch) alone, so that a run goes on exactly."""

from collections.abc import Iterator

import numpy as np

from hf_deberta.training.packing import EpochSampler

POOL = 50  # batches within which rows are sorted by length


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
