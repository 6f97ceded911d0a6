"""delta(i, j): properties of buckets and clipping; the exact official tables are in test_golden."""

import pytest
import torch
from numerics import whole_window
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hf_deberta.model import relative_position
from hf_deberta.model.relative_position import (
    may_be_pruned,
    row_numbers,
    rows_at,
    rows_of_distances,
    saturation_of,
)

BUCKETED = [(512, 256), (64, 16), (64, 4), (64, 2), (64, 3), (128, 80)]  # k, buckets
STEEP = [(64, 64), (16, 24), (256, 256)]  # so many buckets that a bucket's number exceeds its distance
CLIPPED = [(1, 0), (2, 0), (7, 0), (64, 0), (512, 0)]


def log_bucket(distance, buckets, max_distance):
    return torch.from_numpy(relative_position.log_bucket(distance.numpy(), buckets, max_distance))


def span(k, buckets):
    return buckets or k


@pytest.mark.parametrize("case", BUCKETED + STEEP, ids=str)
def test_distances_are_clamped_before_they_are_bucketed(case):
    rows = rows_of_distances(*case)
    assert rows[0] == rows[1] and rows[-1] == rows[-2]
    assert rows[1:-1].tolist() == (log_bucket(torch.arange(1 - case[0], case[0]), case[1], case[0]) + case[1]).tolist()


def test_without_clamping_rows_are_those_of_transformers():
    """Past k too. Its clamping to the table is a part of its attention."""
    pairs = [(k, buckets) for buckets in range(2, 65) for k in range(buckets // 2 + 2, 65)]
    for k, buckets in [*pairs, (512, 256), (512, 255), (2048, 512)]:
        distance = torch.arange(-4 * k, 4 * k + 1)
        expected = (make_log_bucket_position(distance, buckets, k).long() + buckets).clamp(0, 2 * buckets - 1)
        assert torch.equal(rows_at(distance, rows_of_distances(k, buckets, clamp=False)), expected), (k, buckets)
    far = torch.tensor([-90, -91, -(10**6)])  # of 15 buckets up to 64 the last is this far away
    assert rows_at(far, rows_of_distances(64, 15, clamp=False)).tolist() == [1, 0, 0]
    assert all(torch.equal(rows_of_distances(*case), rows_of_distances(*case, clamp=False)) for case in CLIPPED)


@pytest.mark.parametrize("case", BUCKETED + STEEP + CLIPPED, ids=str)
def test_tables_whose_buckets_exceed_their_distance_are_not_pruned(case):
    assert may_be_pruned(row_numbers(*case), span(*case)) == (case not in STEEP)


@pytest.mark.parametrize("clamp", [True, False], ids=["clamped", "as in-tree"])
@pytest.mark.parametrize("case", BUCKETED + CLIPPED, ids=str)
def test_rows_in_use_hold_every_row_that_a_length_reaches(case, clamp):
    k, buckets = case
    table = rows_of_distances(k, buckets, clamp)
    before = (span(k, buckets),) * 2
    for length in sorted({1, 2, 3, 5, 8, 9, 10, 31, 33, k - 1, k, k + 1, 3 * k} - {0}):
        position = torch.arange(length)
        reached = rows_at(position[:, None] - position, table)
        window = whole_window(table).for_length(length)
        first, last = window.first, window.end
        assert first <= reached.min() and reached.max() < last, f"length {length}"
        assert first >= 0 and last <= 2 * span(k, buckets)
        assert last - first <= 2 * length  # no more than there are distances
        assert first <= before[0] and last >= before[1]  # a longer sequence uses no fewer
        before = first, last


@pytest.mark.parametrize("case", BUCKETED + STEEP + CLIPPED, ids=str)
def test_rows_first_computed_under_fake_tensor_mode(case):
    """Their numbers are the same, and tensors belong to the mode in which they were made."""
    row_numbers.cache_clear()
    with FakeTensorMode():
        assert isinstance(rows_of_distances(*case), FakeTensor)
        numbers = row_numbers(*case)
        pruned, saturation = may_be_pruned(numbers, span(*case)), saturation_of(numbers)
    rows = rows_of_distances(*case)
    assert type(rows) is torch.Tensor and rows.tolist() == list(numbers)
    assert (pruned, saturation) == (may_be_pruned(rows, span(*case)), saturation_of(rows))


def test_rows_are_a_new_tensor():
    rows_of_distances(8)[0] = 99
    assert rows_of_distances(8).tolist() == [*range(16), 15]  # without buckets every distance has its row
