"""The order of rows: each row once, shuffled by (seed, epoch), optionally with similar lengths in a batch."""

import numpy as np

from hf_deberta.training.row_order import RowOrder


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


def test_rows_of_similar_length_share_a_batch_and_batches_are_shuffled():
    lengths = np.random.default_rng(0).integers(1, 90, 103)
    order = np.array(order_of(0, seed=3, lengths=lengths.tolist(), batch=8))
    batches = lengths[order[:96]].reshape(-1, 8)
    plain = lengths[np.array(order_of(0, seed=3))[:96]].reshape(-1, 8)
    assert np.ptp(batches, axis=1).mean() < 0.3 * np.ptp(plain, axis=1).mean()
    assert (np.diff(batches.mean(1)) < 0).any() and (np.diff(batches.mean(1)) > 0).any()
