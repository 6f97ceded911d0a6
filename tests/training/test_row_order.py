"""The order of rows: each row once, shuffled by (seed, epoch), optionally with similar lengths in a batch."""

import tracemalloc

import numpy as np

from hf_deberta.training.row_order import EpochSampler, RowOrder


def order_of(epoch: int, **options) -> list[int]:
    order = RowOrder(103, **options)
    order.set_epoch(epoch)
    return list(order)


def test_each_row_once_shuffled_by_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(1, 90, 103).tolist()
    for options in ({"seed": 3}, {"seed": 3, "lengths": lengths, "batch": 8}):
        orders = [order_of(epoch, **options) for epoch in (0, 1)]
        assert all(sorted(order) == list(range(103)) for order in orders)
        assert orders[0] != orders[1] and orders[0] == order_of(0, **options)
        assert orders[0] != order_of(0, **{**options, "seed": 4})


def test_indices_of_the_sampler_count_through_the_epochs_and_it_holds_eight_bytes_for_a_row():
    sampler = EpochSampler(50, seed=1)
    sampler.set_epoch(2)
    order = RowOrder(50, seed=1)
    order.set_epoch(2)
    assert list(sampler) == [100 + row for row in order]
    tracemalloc.start()
    assert sum(1 for _ in EpochSampler(100_000, seed=1)) == 100_000
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100_000 * 12


def test_rows_of_similar_length_share_a_batch_and_batches_are_shuffled():
    lengths = np.random.default_rng(0).integers(1, 90, 103)
    order = np.array(order_of(0, seed=3, lengths=lengths.tolist(), batch=8))
    batches = lengths[order[:96]].reshape(-1, 8)
    plain = lengths[np.array(order_of(0, seed=3))[:96]].reshape(-1, 8)
    assert np.ptp(batches, axis=1).mean() < 0.3 * np.ptp(plain, axis=1).mean()
    assert (np.diff(batches.mean(1)) < 0).any() and (np.diff(batches.mean(1)) > 0).any()
