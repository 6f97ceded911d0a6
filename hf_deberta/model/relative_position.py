"""Relative positions: the row of the relative table for a distance, the rows that a length needs, their projections.

Legend: H heads, N tokens, Q queries, K keys, d head size, R rows of the table in use, k the largest distance,
s rows per side (buckets, or k).

A distance is `query - key`. Logarithmic buckets (half of the s buckets exact, half logarithmic up to k) or plain
clipping turn it into a row in [0, 2s); row s is distance 0. All of this is integer arithmetic, computed once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers.utils import logging

from .input_checks import cast_for_products, in_captured_graph
from .slots import from_cache, linear

logger = logging.get_logger(__name__)

LONGEST_TEXT = 2**16  # tokens; rows that begin at a larger distance are ignored
TERMS = ("c2p", "p2c", "p2p")  # content to position, position to content, position to position


@dataclass(frozen=True)
class TableWindow:
    """The rows [first, end) of the relative table that a forward pass uses, and the row of each distance."""

    first: int
    end: int
    rows_of_distance: torch.Tensor  # [2k + 1], counted from `first`, for distances -k ... k
    saturation: int  # from this distance on, all distances of a side share a row
    can_shrink: bool  # True for a whole table that `may_be_pruned`

    def for_length(self, length: int) -> "TableWindow":
        """The rows that sequences of `length` tokens use; all rows in a captured graph, which must hold for others.

        Distances between different documents of a packed row may have other rows. These pairs are masked, so any row
        inside will do.
        """
        if not self.can_shrink or in_captured_graph():
            return self
        span = self.end // 2
        first, end = max(span - length + 1, 0), min(span + length, self.end)
        rows_of_distance = (self.rows_of_distance - first).clamp(0, end - first - 1)
        return TableWindow(first, end, rows_of_distance, self.saturation, can_shrink=False)


@dataclass(frozen=True)
class RelativePositions:
    """The position terms of one attention call: projected tables, and the row of each distance."""

    position_key: torch.Tensor | None  # [H, R, d], for c2p and p2p
    position_query: torch.Tensor | None  # [H, R, d], for p2c and p2p
    window: TableWindow  # whose rows the tables have
    terms: tuple[str, ...]  # the position terms to add, a subset of TERMS
    query_scale: float = 1.0  # factor of the scores that position queries include already

    @classmethod
    def from_tables(
        cls,
        position_key: torch.Tensor | None,
        position_query: torch.Tensor | None,
        rows_of_distance: torch.Tensor,  # see `rows_of_distances`
        terms: Sequence[str] | None = None,
    ) -> "RelativePositions":
        """Relative positions for whole tables.

        `terms` defaults to "c2p" if there is a `position_key`, and "p2c" if there is a `position_query`.
        """
        if terms is None:
            terms = ("c2p",) * (position_key is not None) + ("p2c",) * (position_query is not None)
        table = position_query if position_key is None else position_key
        rows = 0 if table is None else table.shape[-2]
        window = TableWindow(0, rows, rows_of_distance, saturation_of(rows_of_distance), can_shrink=False)
        return cls(position_key, position_query, window, tuple(terms))

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

    def scaled(self, scale: float, dtype: torch.dtype) -> "RelativePositions":
        """Both tables in `dtype`; position queries, multiplied in this type, include `scale`."""
        key, query = self.position_key, self.position_query
        key, query = (None if key is None else key.to(dtype)), (None if query is None else query.to(dtype))
        if query is not None and self.query_scale != scale:
            query = query * (scale / self.query_scale)
        return replace(self, position_key=key, position_query=query, query_scale=scale)


class TableProjection(NamedTuple):
    """The projection of the relative table by one layer; a projection that no position term needs is None."""

    key: nn.Module | None  # hidden to H d, for c2p and p2p
    query: nn.Module | None  # hidden to H d, for p2c and p2p
    dropout: nn.Module  # on the table
    head_size: int
    scale: float  # of the attention scores
    terms: tuple[str, ...]  # the position terms of the layer

    def relative_positions(
        self, table: torch.Tensor | None, window: TableWindow | None, length: int, owner: nn.Module
    ) -> RelativePositions | None:
        """The position terms of a layer, the `owner`, for up to `length` tokens; None if the layer has no terms."""
        if table is None or window is None or not self.terms:
            return None
        if table.is_cpu:  # nothing is cached elsewhere
            modules = [module for module in (self.key, self.query, self.dropout) if module is not None]
            positions = from_cache(owner, modules, lambda: self.project(table, window), table, window.rows_of_distance)
            if positions is not None:
                return positions
        part = window.for_length(length)
        return self.project(table if part is window else table[part.first : part.end], part)

    def project(self, table: torch.Tensor, window: TableWindow) -> RelativePositions:
        """The position terms from the window's rows of the table, [R, hidden].

        Position queries on the CPU are scaled here, once for the cache, except in half precision, which the reference
        backend scales in float32.
        """
        table = cast_for_products(self.dropout(table))  # once: each projection would cast it
        key = None if self.key is None else split_heads(linear(self.key, table), self.head_size)
        query = None if self.query is None else split_heads(linear(self.query, table), self.head_size)
        query_scale = 1.0
        if query is not None and query.is_cpu and query.dtype in (torch.float32, torch.float64):
            query, query_scale = query * self.scale, self.scale
        return RelativePositions(key, query, window, self.terms, query_scale)


def split_heads(states: torch.Tensor, head_size: int) -> torch.Tensor:
    """[..., N, H d] to [..., H, N, d]; with tensor parallelism a process has some of the configuration's heads."""
    return torch.unflatten(states, -1, (-1, head_size)).transpose(-3, -2)  # in C, unlike the method


def position_table(
    encoder: nn.Module, whole: TableWindow | None, length: int
) -> tuple[torch.Tensor | None, TableWindow | None]:
    """The normalised relative table [R, hidden] of an encoder, and its rows; None without relative attention.

    The table has all rows if it is cached for other calls, else those that sequences of `length` tokens use.
    """
    if whole is None:
        return None, None
    parts: Any = [getattr(encoder, name, None) for name in ("rel_embeddings", "LayerNorm")]
    embedding, *norms = modules = [module for module in parts if isinstance(module, nn.Module)]

    def rows_of(window: TableWindow) -> torch.Tensor:
        table = embedding(torch.arange(window.first, window.end, device=window.rows_of_distance.device))
        for norm in norms:
            table = norm(table)
        return table

    table = from_cache(encoder, modules, lambda: rows_of(whole))
    if table is not None:
        return table, whole
    window = whole.for_length(length)
    return rows_of(window), window


def warn_past_largest_distance(length: int, parameters: tuple[int, int, bool] | None, function: str) -> None:
    """Say once which rows are in use if that matters; `parameters` are the arguments of `rows_of_distances`."""
    max_distance, buckets, clamp = parameters or (0, 0, False)
    if buckets > 0 and not in_captured_graph() and length > max_distance:
        logger.warning_once(
            f"this input has more than {max_distance} tokens, and for larger distances the official code and "
            "Transformers read different rows of the position table. Those of "
            f"{'the official code' if clamp else 'Transformers'} are in use; for the others, call {function} with "
            f"clamp_relative_distance={not clamp}"
        )


def log_bucket(distance: numpy.ndarray, buckets: int, max_distance: int, in_tree: bool = False) -> numpy.ndarray:
    """Bucket of a signed distance: the official one, in (-buckets, buckets) below `max_distance`, or Transformers'.

    Distances up to `buckets // 2` have a bucket each. The float32 arithmetic, with a Python float as divisor, or in
    Transformers a logarithm of float32, is part of the definition: weights were trained with its rounding.
    """
    middle = buckets // 2
    magnitude = numpy.abs(distance).clip(min=middle).astype(numpy.float32) / numpy.float32(middle)
    logarithm, divisor = float32_log(magnitude), numpy.float32(math.log((max_distance - 1) / middle))
    if in_tree:
        logarithm = numpy.log(magnitude, dtype=numpy.float64).astype(numpy.float32)
        divisor = numpy.float32(math.log(numpy.float32((max_distance - 1) / middle)))
    far = numpy.ceil(logarithm / divisor * (middle - 1)).astype(numpy.int64) + middle
    return numpy.where(numpy.abs(distance) <= middle, distance, numpy.sign(distance) * far)


def float32_log(x: numpy.ndarray) -> numpy.ndarray:
    """ln x of float32, bit-identical on every processor.

    With x = 2^e m and 1 <= m < 2 it is e ln 2 + ln m, each rounded to float32. This gives all official tables, also the
    two for which a float32 logarithm on Intel processors rounds the farthest distance differently (benchmarks/log.md).
    """
    half, exponent = numpy.frexp(x)
    powers = (exponent - 1).astype(numpy.float32) * numpy.float32(math.log(2))
    return powers + numpy.log(2 * half.astype(numpy.float64)).astype(numpy.float32)


def rows_of_distances(max_distance: int, buckets: int = 0, clamp: bool = True) -> torch.Tensor:
    """Table row of each distance in [-k, k], or more if rows change past k, as a new tensor of integers on the CPU.

    Distances beyond k have the row of k, see `rows_at`. With buckets, the official code clamps distances to
    k - 1 first, so both ends equal their neighbours; without buckets only -k has row 0. `clamp=False` is what in-tree
    Transformers does: row 0 begins at -k for even numbers of buckets, for odd ones further away; for 2 and 3 nowhere.

    >>> rows_of_distances(4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 7]
    """
    return torch.tensor(row_numbers(max_distance, buckets, clamp), device="cpu")  # even if models are made on "meta"


@lru_cache(maxsize=64)
def row_numbers(max_distance: int, buckets: int = 0, clamp: bool = True) -> tuple[int, ...]:
    """`rows_of_distances` as Python integers, which have values even where tensors have none."""
    span, furthest = buckets if buckets > 0 else max_distance, max_distance
    if not clamp and (middle := buckets // 2) > 1 and buckets % 2:
        row_0 = middle * ((max_distance - 1) / middle) ** (middle / (middle - 1)) * (1 + 1e-6)  # above any rounding
        furthest = max(furthest, int(row_0) + 1) if row_0 < LONGEST_TEXT else furthest
    distance = numpy.arange(-furthest, furthest + 1)
    if buckets > 0:
        distance = distance.clip(1 - max_distance, max_distance - 1) if clamp else distance
        distance = log_bucket(distance, buckets, max_distance, in_tree=not clamp)
    return tuple((distance + span).clip(0, 2 * span - 1).tolist())


def saturation_of(rows_of_distance: torch.Tensor | Sequence[int]) -> int:
    """The distance from which on all distances of a side share a row: 506 for 256 buckets up to 512.

    >>> saturation_of(rows_of_distances(512, 256))
    506
    """
    rows = [int(row) for row in rows_of_distance]
    k = (len(rows) - 1) // 2
    return max(sum(row != rows[-1] for row in rows[k:]), sum(row != rows[0] for row in rows[: k + 1]))


def rows_at(distance: torch.Tensor, rows_of_distance: torch.Tensor) -> torch.Tensor:
    """delta(i, j), the row of each distance i - j, which may lie beyond k."""
    k = (rows_of_distance.shape[0] - 1) // 2
    return rows_of_distance[distance.clamp(-k, k) + k]


def may_be_pruned(rows_of_distance: torch.Tensor | Sequence[int], span: int) -> bool:
    """True if a distance of n is never more than n rows away from row s.

    This holds for all released tables. It fails if logarithmic buckets spread few distances over more rows (64 buckets
    up to distance 64); short sequences then use far rows.
    """
    rows = [int(row) for row in rows_of_distance]
    k = (len(rows) - 1) // 2
    return all(abs(row - span) <= abs(i - k) for i, row in enumerate(rows))
