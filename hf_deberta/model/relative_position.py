"""Relative positions: which row of the relative table belongs to a distance, and which rows a sequence needs.

Legend: H heads, N tokens, Q queries, K keys, d head size, R rows of the table in use, k the largest distance,
s rows per side (buckets, or k).

A distance is `query - key`. Logarithmic buckets (half of the s buckets exact, half logarithmic up to k) or plain
clipping turn it into a row in [0, 2s); row s is distance 0. All of this is integer arithmetic, computed once.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from .private_apis import without_dispatch_modes

TERMS = ("c2p", "p2c", "p2p")  # content to position, position to content, position to position


@dataclass(frozen=True)
class RelativePositions:
    """The position terms of one attention call: projected tables, and the row of each distance.

    `from_tables` computes `rows_of_distance` (counted from the first row of the tables), `saturation` and the default
    `terms`.
    """

    position_key: torch.Tensor | None  # [H, R, d], for c2p and p2p
    position_query: torch.Tensor | None  # [H, R, d], for p2c and p2p
    rows_of_distance: torch.Tensor  # [2k + 1], in [0, R), for distances -k ... k
    saturation: int  # from this distance on, all distances of a side share a row
    terms: tuple[str, ...]  # the position terms to add, a subset of TERMS
    query_scale: float = 1.0  # factor of the scores that position queries include already
    reusable: bool = False  # kept for other calls, so backends may keep what they compute from it in `computed`
    computed: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_tables(
        cls,
        position_key: torch.Tensor | None,
        position_query: torch.Tensor | None,
        rows_of_distance: torch.Tensor,  # of the whole table, see `rows_of_distances`
        terms: Sequence[str] | None = None,
        first_row: int = 0,
    ) -> "RelativePositions":
        """Relative positions for the whole table, or for a window of it that begins at `first_row`.

        `terms` defaults to "c2p" if there is a `position_key`, and "p2c" if there is a `position_query`.
        """
        if terms is None:
            terms = ("c2p",) * (position_key is not None) + ("p2c",) * (position_query is not None)
        table = position_query if position_key is None else position_key
        saturation = saturation_of(rows_of_distance)
        if table is not None:
            rows_of_distance = rows_in_window(rows_of_distance, first_row, first_row + table.shape[-2])
        return cls(position_key, position_query, rows_of_distance, saturation, tuple(terms))

    def check(self, heads: int) -> None:
        """Raise a ValueError for unknown terms, missing tables, and tables of another number of heads."""
        tables = {
            "c2p": (self.position_key,),
            "p2c": (self.position_query,),
            "p2p": (self.position_key, self.position_query),
        }
        for term in self.terms:
            if term not in tables:
                raise ValueError(f"unknown position term {term!r}: choose from {', '.join(TERMS)}")
            if any(table is None or table.shape[0] != heads for table in tables[term]):
                raise ValueError(
                    f"position term {term!r} needs its table with the queries' {heads} heads: position_key for c2p, "
                    "position_query for p2c; a tensor-parallel plan splits their projections like query_proj"
                )

    def to(self, dtype: torch.dtype) -> "RelativePositions":
        """These relative positions with both tables cast to `dtype`."""
        key, query = (None if table is None else table.to(dtype) for table in (self.position_key, self.position_query))
        return replace(self, position_key=key, position_query=query)

    def with_scaled_queries(self, scale: float, dtype: torch.dtype) -> "RelativePositions":
        """These relative positions with position queries that include `scale`, multiplied in `dtype`."""
        position_query = self.position_query
        if self.query_scale == scale:
            return self
        if position_query is not None:
            position_query = position_query.to(dtype) * (scale / self.query_scale)
        return replace(self, position_query=position_query, query_scale=scale)


@dataclass(frozen=True)
class RowsInUse:
    """The rows [first, end) of the relative table that a forward pass projects, and the row of each distance."""

    first: int
    end: int
    of_distance: torch.Tensor  # [2k + 1], counted from `first`
    saturation: int  # from this distance on, all distances of a side share a row


def log_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket in (-buckets, buckets) of a signed distance.

    Distances up to `buckets // 2` have a bucket each. The float32 arithmetic, with a Python double as divisor, is part
    of the definition: released weights were trained with its rounding.
    """
    middle = buckets // 2
    magnitude = distance.abs().clamp(min=middle - 1).to(torch.float32)
    logarithmic = torch.ceil(float32_log(magnitude / middle) / math.log((max_distance - 1) / middle) * (middle - 1))
    far = distance.sign() * (logarithmic.to(torch.long) + middle)
    return torch.where(distance.abs() <= middle, distance, far)


def float32_log(x: torch.Tensor) -> torch.Tensor:
    """ln x, bit-identical on every processor, unlike torch.log.

    With x = 2^e m and 1 <= m < 2 it is e ln 2 + ln m, each rounded to float32. This gives all official tables, also the
    two for which torch.log on Intel processors rounds the farthest distance the other way (docs/log.md).
    """
    half, exponent = torch.frexp(x)
    return (exponent - 1).to(torch.float32) * math.log(2) + torch.log(2 * half.double()).to(torch.float32)


def rows_of_distances(max_distance: int, buckets: int = 0, clamp: bool = True) -> torch.Tensor:
    """Table row of each distance in [-k, k], as a new tensor of 2k + 1 integers on the CPU.

    Distances beyond k have the row of k, see `rows_between`. With buckets, the official code clamps distances to
    k - 1 first, so both ends equal their neighbours; without buckets only -k has row 0. `clamp=False` is what in-tree
    Transformers does: with buckets, too, -k and beyond have row 0.

    >>> rows_of_distances(4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 7]
    """
    return torch.tensor(row_numbers(max_distance, buckets, clamp), device="cpu")  # even if models are made on "meta"


@lru_cache(maxsize=64)
def row_numbers(max_distance: int, buckets: int = 0, clamp: bool = True) -> tuple[int, ...]:
    """`rows_of_distances` as Python integers, which have values even where tensors have none."""
    with without_dispatch_modes():
        distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
        span = max_distance
        if buckets > 0:
            span = buckets
            clamped = distance.clamp(-(max_distance - 1), max_distance - 1)
            bucket = log_bucket(clamped, buckets, max_distance)
            if not clamp:
                bucket[0] = -span
            distance = bucket
        return tuple((distance + span).clamp(0, 2 * span - 1).tolist())


def saturation_of(rows_of_distance: torch.Tensor | Sequence[int]) -> int:
    """The distance from which on all distances of a side share a row: 506 for 256 buckets up to 512.

    >>> saturation_of(rows_of_distances(512, 256))
    506
    """
    rows = as_integers(rows_of_distance)
    k = (len(rows) - 1) // 2
    return max(sum(row != rows[-1] for row in rows[k:]), sum(row != rows[0] for row in rows[: k + 1]))


def as_integers(rows_of_distance: torch.Tensor | Sequence[int]) -> Sequence[int]:
    return rows_of_distance.tolist() if isinstance(rows_of_distance, torch.Tensor) else rows_of_distance


def rows_between(
    query_positions: torch.Tensor,  # [..., Q]
    key_positions: torch.Tensor,  # [..., K]
    rows_of_distance: torch.Tensor,  # [2k + 1]
) -> torch.Tensor:
    """delta(i, j), the row of each pair: [..., Q, K]."""
    return rows_at(query_positions[..., :, None] - key_positions[..., None, :], rows_of_distance)


def rows_at(distance: torch.Tensor, rows_of_distance: torch.Tensor) -> torch.Tensor:
    """The row of each distance, which may lie beyond k."""
    k = (rows_of_distance.shape[0] - 1) // 2
    return rows_of_distance[distance.clamp(-k, k) + k]


def rows_in_window(rows_of_distance: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Rows counted from `first`, the first row of a window [first, end) of the table.

    Distances between different documents of a packed row may have rows outside the window. These pairs are masked, so
    any row inside will do.
    """
    return (rows_of_distance - first).clamp(0, end - first - 1)


def rows_in_use(length: int, span: int, pruned: bool = True) -> tuple[int, int]:
    """[first, end) rows that sequences of `length` tokens can reach; other rows need no projection.

    `pruned=False` is the whole table, for tables that fail `may_be_pruned`.

    >>> rows_in_use(32, 256)
    (225, 288)
    """
    if not pruned:
        return 0, 2 * span
    return max(span - length + 1, 0), min(span + length, 2 * span)


def may_be_pruned(rows_of_distance: torch.Tensor | Sequence[int], span: int) -> bool:
    """True if a distance of n is never more than n rows away from row s.

    This holds for all released tables. It fails if logarithmic buckets spread few distances over more rows (64 buckets
    up to distance 64); short sequences then use far rows.
    """
    rows = as_integers(rows_of_distance)
    k = (len(rows) - 1) // 2
    return all(abs(row - span) <= abs(i - k) for i, row in enumerate(rows))
