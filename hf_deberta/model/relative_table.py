"""The relative-position table in a forward pass: the rows to project, their projection by each layer, and the cache.

Legend: H heads, d head size, R rows of the table in use, s rows per side of distance 0.

`HfDebertaModel` and the encoders of Transformers that `enable()` changes both compute their tables here. The cache is
for inference: there the projected tables depend on weights only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .dense import dense
from .fast_path_guards import is_tracing_or_compiling
from .relative_position import RelativePositions, RowsInUse, rows_in_use, rows_in_window
from .weight_cache import WeightCache, can_cache

logger = logging.get_logger(__name__)


class Tables(NamedTuple):
    """The projected relative table."""

    key: torch.Tensor | None  # [H, R, d], position keys
    query: torch.Tensor | None  # [H, R, d], position queries
    query_scale: float = 1.0  # factor that `query` has been multiplied by


class DistanceRows(NamedTuple):
    """The row of each distance in the whole table, with `span`, `can_be_pruned` and `saturation` of that mapping."""

    of_distance: torch.Tensor  # [2k + 1]
    span: int  # s
    can_be_pruned: bool  # True if short sequences use rows near distance 0 only
    saturation: int  # from this distance on, all distances of a side share a row


@dataclass(frozen=True)
class TableProjection:
    """The projection of the relative table by one layer; a projection that no position term needs is None."""

    key: nn.Module | None  # hidden to H d, for c2p and p2p
    query: nn.Module | None  # hidden to H d, for p2c and p2p
    dropout: nn.Module  # on the table
    head_size: int
    scale: float  # of the attention scores
    terms: tuple[str, ...]  # the position terms of the layer

    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for module in (self.key, self.query) if module is not None)

    def can_cache(self) -> bool:
        return not self.dropout.training and can_cache(self.modules())

    def project(self, table: torch.Tensor) -> Tables:
        """Project a table [R, hidden].

        Position queries are scaled here, once for the cache, except in half precision, which the reference backend
        scales in float32.
        """
        table = self.dropout(table)
        key = None if self.key is None else split_heads(dense(self.key, table), self.head_size)
        query = None if self.query is None else split_heads(dense(self.query, table), self.head_size)
        if query is None or query.dtype not in (torch.float32, torch.float64):
            return Tables(key, query)
        return Tables(key, query * self.scale, self.scale)


def find_rows_in_use(
    distances: DistanceRows, length: int, modules: tuple[nn.Module, ...], projections: Iterable[TableProjection]
) -> RowsInUse:
    """The rows that sequences of `length` tokens use, or all rows.

    All rows are projected if the projections are cached, and in a captured graph, which must hold for other lengths.
    """
    cached = can_cache(modules) and all(projection.can_cache() for projection in projections)
    pruned = distances.can_be_pruned and not is_tracing_or_compiling() and not cached
    first, end = rows_in_use(length, distances.span, pruned)
    of_distance = rows_in_window(distances.of_distance, first, end) if pruned else distances.of_distance
    return RowsInUse(first, end, of_distance, distances.saturation)


def warn_past_largest_distance(length: int, parameters: tuple[int, int, bool] | None, function: str) -> None:
    """Say once whose rows are in use if that matters; `parameters` are the arguments of `rows_of_distances`."""
    max_distance, buckets, clamp = parameters or (0, 0, False)
    if buckets > 0 and not is_tracing_or_compiling() and length > max_distance:
        logger.warning_once(
            f"this input has more than {max_distance} tokens, and for larger distances the official code and "
            "Transformers read different rows of the position table. Those of "
            f"{'the official code' if clamp else 'Transformers'} are in use; for the others, call {function} with "
            f"clamp_relative_distance={not clamp}"
        )


def table_modules(encoder: nn.Module) -> tuple[nn.Module, ...]:
    """The embedding of an encoder's relative table and, if the encoder has one, its LayerNorm."""
    modules = (getattr(encoder, "rel_embeddings", None), getattr(encoder, "LayerNorm", None))
    return tuple(module for module in modules if isinstance(module, nn.Module))


def relative_table(modules: tuple[nn.Module, ...], rows: RowsInUse, cache: WeightCache | None) -> torch.Tensor:
    """The rows in use of the relative table, normalised, [R, hidden]; cached if they are the whole table."""
    embedding, *norms = modules

    def compute() -> torch.Tensor:
        table = embedding(torch.arange(rows.first, rows.end, device=rows.of_distance.device))
        for norm in norms:
            table = norm(table)
        return table

    if cache is not None and can_cache(modules) and (rows.first, rows.end) == (0, embedding.num_embeddings):
        return cache.get_or_compute(modules, compute)
    if cache is not None:
        cache.clear()
    return compute()


def relative_positions(
    projection: TableProjection, table: torch.Tensor | None, rows: RowsInUse | None, cache: WeightCache | None
) -> RelativePositions | None:
    """The position terms of a layer, whose tables are cached for inference; None if the layer has no terms."""
    if table is None or rows is None or not projection.terms:
        return None
    if cache is not None and projection.can_cache():
        tables = cache.get_or_compute(projection.modules(), lambda: projection.project(table), table)
    else:
        if cache is not None:
            cache.clear()
        tables = projection.project(table)
    return RelativePositions(
        tables.key, tables.query, rows.of_distance, rows.saturation, projection.terms, tables.query_scale
    )


def split_heads(states: torch.Tensor, head_size: int) -> torch.Tensor:
    """[..., N, H d] to [..., H, N, d]; with tensor parallelism a process has some of the configuration's heads."""
    return states.unflatten(-1, (-1, head_size)).transpose(-3, -2)
