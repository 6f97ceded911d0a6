"""The sdpa backend on GPUs and other devices: few launches, little memory traffic, no wait for the device.

Legend: B batch, H heads, N tokens, d head size, n queries of a block, m keys, r reach: the largest distance in the
tables, W columns of a product.

The position terms are a bias of the scores, built from two products with tables that are laid out by distance:

    by_query[i, c] = q_i . Kr[r - c]        c2p of query i and key j is column j - i + r: a skewed_view view
    by_key[j, c]   = k_j . Qr[c - r]        p2c is column i - j + r: the same view, transposed

From the saturation distance on, all keys on one side of a query share a row of the table: they are *far*. Queries are
therefore cut into tiles. A tile has a window of *near* keys, whose bias is the sum of two skewed views, and far keys on
either side, whose bias is a number per query plus a number per key: columns of the largest and the smallest distance.
So the products have about 2 (tile + saturation) columns, however long the sequence is.

The bias of one block of queries exists at a time. In training with one block, up to 2048 tokens, each layer keeps its
bias for the backward pass; with several, each block is computed again there, and each layer keeps the two products.
Documents of a packed row become a padded batch for attention alone.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from ..model.attention_sdpa import attend_with_bias
from ..model.batch_layout import AttentionMask, document_numbers
from ..model.relative_position import RelativePositions, rows_at

logger = logging.get_logger(__name__)

BLOCK = 2048  # queries whose bias is in memory at once
TILE = 512  # queries of a tile; smaller tiles need narrower products, and more launches
ALIGNMENT = 8  # elements: rows that begin at multiples of 16 bytes are multiplied and read faster


def attend_on_device(
    query: torch.Tensor,  # [B, H, N, d]
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,  # without query positions
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """Context [B, H, N, d]."""
    length = key.shape[2]
    documents = mask.compute_once(("padded documents", length), lambda: padded_documents(mask, length))
    if documents is not None:
        query, key, value = map(documents.pad, (query, key, value))
        return documents.unpad(attend_on_device(query, key, value, positions, documents.mask, dropout_p, scale))
    masked, fully_masked = mask.compute_once(("masked pairs", length), lambda: masked_pairs(mask, key))
    context = attend_in_blocks(query, key, value, positions, mask, masked, dropout_p, scale)
    return context if fully_masked is None else context.masked_fill(fully_masked, 0)


def masked_pairs(mask: AttentionMask, key: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Pairs that attention must skip, [B or 1, 1, 1 or N, N], and queries that see nothing, [B or 1, 1, N, 1]."""
    if mask.mask is not None and mask.is_padding_only:
        return ~mask.mask[:, None, None, :], ~mask.mask[:, None, :, None]
    visible = mask.visible(key.shape[2], key.device)
    if visible is None:
        return None, None
    # without a mask, each token sees at least itself
    return ~visible, None if mask.mask is None else ~visible.any(-1, keepdim=True)


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    masked: torch.Tensor | None,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """Context [B, H, N, d], with the bias of one block of queries at a time."""
    length = query.shape[2]
    if positions is None:
        bias = None
        if masked is not None:  # a finite number, because a query that sees nothing must not give NaN
            dtype = query.dtype
            bias = mask.compute_once(("bias", length, dtype), lambda: masked.to(dtype) * torch.finfo(dtype).min)
        return attend_with_bias(query, key, value, bias, dropout_p, scale)
    layout = DeviceLayout.for_length(length, positions.saturation)
    by_query, by_key = products_by_distance(query, key, positions, mask, layout, scale)

    def attend(block: torch.Tensor, by_query: torch.Tensor | None, start: int) -> torch.Tensor:
        pairs = masked
        if masked is not None and masked.shape[2] > 1:
            pairs = masked[:, :, start : start + block.shape[2]]
        bias = PositionBias.apply(by_query, by_key, pairs, layout, (start, block.shape[2], length))
        return attend_with_bias(block, key, value, bias, dropout_p, scale)

    if length <= BLOCK:
        return attend(query, by_query, 0)
    blocks, contexts = query.split(BLOCK, 2), []
    parts = [None] * len(blocks) if by_query is None else by_query.split(BLOCK, 2)
    for call in zip(blocks, parts, range(0, length, BLOCK), strict=True):
        if torch.is_grad_enabled():
            contexts.append(checkpoint(attend, *call, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            contexts.append(attend(*call))
    return torch.cat(contexts, 2)


class Region(NamedTuple):
    """Pairs of queries and keys of a tile: near keys, or far keys to the left or to the right of the queries."""

    side: str
    queries: slice  # of the block
    keys: slice
    offset: int  # position of the first key minus that of the first query


@dataclass(frozen=True)
class DeviceLayout:
    """Which distances the products have, and which keys are near or far."""

    reach: int  # r, larger than any distance between a query and a near key
    saturation: int
    tile: int

    @classmethod
    def for_length(cls, length: int, saturation: int) -> "DeviceLayout":
        """The layout for sequences of this length; without far keys if these would be few."""
        if length <= TILE + saturation:
            return cls(length, length, length)
        return cls(TILE + saturation, max(saturation, 1), TILE)

    def rows_by_column(self, rows_of_distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of the table at each column of `by_query` and of `by_key`, [W]."""
        distance = torch.arange(aligned(2 * self.reach + 1), device=rows_of_distance.device) - self.reach
        return rows_at(-distance, rows_of_distance), rows_at(distance, rows_of_distance)

    def regions(self, start: int, queries: int, keys: int) -> list[Region]:
        """The regions of the queries from position `start` on."""
        regions = []
        for first in range(0, queries, self.tile):
            tile = slice(first, min(first + self.tile, queries))
            low = max(start + tile.start - self.saturation + 1, 0)
            high = min(start + tile.stop - 1 + self.saturation, keys)
            for side, begin, end in (("left", 0, low), ("near", low, high), ("right", high, keys)):
                if begin < end:
                    regions.append(Region(side, tile, slice(begin, end), begin - (start + tile.start)))
        return regions

    def by_query(self, product: torch.Tensor, region: Region) -> torch.Tensor:
        """The view of `by_query` [H, B, n, W] that the region needs, [H, B, queries, keys or 1]."""
        if region.side == "near":
            return skewed_view(
                product, region.queries, region.offset + self.reach, region.keys.stop - region.keys.start
            )
        column = 0 if region.side == "left" else 2 * self.reach
        return product[:, :, region.queries, column : column + 1]

    def by_key(self, product: torch.Tensor, region: Region) -> torch.Tensor:
        """The view of `by_key` [H, B, m, W] that the region needs, [H, B, keys, queries or 1]."""
        if region.side == "near":
            queries = region.queries.stop - region.queries.start
            return skewed_view(product, region.keys, self.reach - region.offset, queries)
        column = 2 * self.reach if region.side == "left" else 0
        return product[:, :, region.keys, column : column + 1]


def products_by_distance(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: RelativePositions,
    mask: AttentionMask,
    layout: DeviceLayout,
    scale: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`by_query` [H, B, N, W], which includes the term p2p, and `by_key` [H, B, N, W]; None without such terms."""
    rows_of_distance = positions.rows_of_distance
    falling, rising = mask.compute_once((layout, rows_of_distance), lambda: layout.rows_by_column(rows_of_distance))
    by_query = by_key = None
    if "c2p" in positions.terms and positions.position_key is not None:
        columns = select_rows(positions.position_key.to(query.dtype), falling, mask)
        by_query = Products.apply(query, columns, scale)
    if "p2c" in positions.terms and positions.position_query is not None:
        columns = select_rows(positions.position_query.to(query.dtype), rising, mask)
        by_key = Products.apply(key, columns, scale / positions.query_scale)
    if "p2p" in positions.terms and positions.position_key is not None and positions.position_query is not None:
        products = (positions.position_key * positions.position_query).sum(-1, keepdim=True).to(query.dtype)
        constant = select_rows(products, falling, mask).mT[:, None] * (scale / positions.query_scale)
        if by_query is None:
            by_query = query.new_zeros(1, query.shape[0], query.shape[2], 1)
        by_query = by_query + constant
    return by_query, by_key


def select_rows(table: torch.Tensor, rows: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Rows [H, W, d] of a table [H, R, d]; the matrix for its gradient is computed once per forward pass."""
    if not table.requires_grad:
        return table.index_select(1, rows)

    def compute() -> torch.Tensor:
        return (rows == torch.arange(table.shape[1], device=rows.device)[:, None]).to(table.dtype)

    selection = mask.compute_once((rows, table.shape[1], table.dtype), compute)
    return SelectRows.apply(table, rows, selection)


class SelectRows(torch.autograd.Function):
    """Rows of a table. Many columns have the row of far keys: the product adds their gradients up in float32."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, rows: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(selection)  # [R, W], 1 where column w has row r
        return table.index_select(1, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        (selection,) = ctx.saved_tensors
        return torch.bmm(selection.expand(gradient.shape[0], -1, -1), gradient), None, None


class Products(torch.autograd.Function):
    """States [B, H, N, d] times columns [H, W, d] times a factor, [H, B, N, W]; the factor costs nothing here."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, columns: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(states, columns)
        ctx.factor = factor
        rows = states.transpose(0, 1).flatten(1, 2)  # a view of states in the layout of a projection
        return scaled_product(rows, columns.mT, factor).unflatten(1, (states.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        states, columns = (saved.to(gradient.dtype) for saved in ctx.saved_tensors)  # autocast may have cast them
        gradient = gradient.flatten(1, 2)
        for_states = for_columns = None
        if ctx.needs_input_grad[0]:
            rows = scaled_product(gradient, columns, ctx.factor)
            for_states = rows.unflatten(1, (states.shape[0], -1)).transpose(0, 1)
        if ctx.needs_input_grad[1]:
            for_columns = scaled_product(gradient.mT, states.transpose(0, 1).flatten(1, 2), ctx.factor)
        return for_states, for_columns, None


def scaled_product(left: torch.Tensor, right: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * left @ right, in one launch."""
    # beta=0 ignores the first input, but MPS multiplies it by 0, so it must be finite
    return torch.baddbmm(left[:1, :1, :1], left, right, beta=0, alpha=factor)


class PositionBias(torch.autograd.Function):
    """The bias [B, H, n, m] of a block of queries; `masked` pairs have the lowest number.

    Hidden pairs need no special gradient: their probability is zero, and so is the gradient of their score.
    """

    @staticmethod
    def forward(
        ctx: Any,
        by_query: torch.Tensor | None,  # [H, B, n, W]
        by_key: torch.Tensor | None,  # [H, B, m, W]
        masked: torch.Tensor | None,  # [B or 1, 1, n or 1, m] of bool
        layout: DeviceLayout,
        block: tuple[int, int, int],  # position of the first query, n, m
    ) -> torch.Tensor:
        ctx.layout, ctx.block = layout, block
        needed = zip((by_query, by_key), ctx.needs_input_grad, strict=False)
        ctx.shapes = [None if product is None or not need else product.shape for product, need in needed]
        product = by_key if by_query is None else by_query
        assert product is not None  # there is a position term
        heads, batch = product.shape[:2]
        _, queries, keys = block
        bias = product.new_empty(batch, heads, queries, aligned(keys))[..., :keys]
        for region in layout.regions(*block):
            target = bias[:, :, region.queries, region.keys].transpose(0, 1)
            if by_query is not None and by_key is not None:
                torch.add(layout.by_query(by_query, region), layout.by_key(by_key, region).mT, out=target)
            elif by_query is not None:
                target.copy_(layout.by_query(by_query, region))
            elif by_key is not None:
                target.copy_(layout.by_key(by_key, region).mT)
        return bias if masked is None else bias.masked_fill_(masked, torch.finfo(bias.dtype).min)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        gradient = gradient.transpose(0, 1)
        for_query, for_key = (None if shape is None else gradient.new_zeros(shape) for shape in ctx.shapes)
        for region in ctx.layout.regions(*ctx.block):
            part = gradient[:, :, region.queries, region.keys]
            if for_query is not None:
                target = ctx.layout.by_query(for_query, region)
                target.copy_(part) if region.side == "near" else torch.sum(part, -1, keepdim=True, out=target)
            if for_key is not None:
                target = ctx.layout.by_key(for_key, region)
                target.copy_(part.mT) if region.side == "near" else target.add_(part.sum(-2)[..., None])
        return for_query, for_key, None, None, None


def skewed_view(product: torch.Tensor, rows: slice, column: int, columns: int) -> torch.Tensor:
    """The view [H, B, rows, columns] whose entry (a, b) is row a of `rows` and column `column` - a + b."""
    width = product.shape[3]  # the stride of rows too, but for a single row any stride would do
    offset = product.storage_offset() + rows.start * width + column
    size = (*product.shape[:2], rows.stop - rows.start, columns)
    return product.as_strided(size, (*product.stride()[:2], width - 1, 1), offset)


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PaddedDocuments:
    """The documents of a packed row [1, total] as a padded batch."""

    padded_index: torch.Tensor  # [documents * longest], the token of the row; any token for padding
    row_index: torch.Tensor  # [total], into documents * longest
    shape: tuple[int, int]  # documents, longest
    mask: AttentionMask

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """[1, H, total, d] to [documents, H, longest, d]."""
        selected = SelectTokens.apply(states.squeeze(0).transpose(0, 1), self.padded_index, self.row_index)
        return selected.unflatten(0, self.shape).transpose(1, 2)

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """[documents, H, longest, d] to [1, H, total, d]."""
        tokens = states.transpose(1, 2).flatten(0, 1)
        return SelectTokens.apply(tokens, self.row_index, self.padded_index).transpose(0, 1)[None]


class SelectTokens(torch.autograd.Function):
    """Tokens of states [T, H, d] by index; the gradient is a selection too, because padding has none."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        index, inverse = ctx.saved_tensors
        return SelectTokens.apply(gradient, inverse, index), None, None


def padded_documents(mask: AttentionMask, tokens: int) -> PaddedDocuments | None:
    """The documents of a packed row as a padded batch, if that is less work than the row with a mask of pairs."""
    bounds, longest = mask.cu_seqlens, mask.longest
    if bounds is None or mask.mask is not None:
        return None
    if longest is None:
        logger.warning_once(
            "cu_seq_lens_q without max_length_q: attention computes all pairs of tokens of the row. Pass max_length_q, "
            "the length of the longest document"
        )
        return None
    documents = bounds.shape[0] - 1
    if documents * longest**2 >= tokens**2:
        return None
    within = torch.arange(longest, device=bounds.device)
    starts, ends = bounds[:-1, None], bounds[1:, None]
    index = (starts + within).clamp(max=tokens - 1).flatten()
    number = document_numbers(bounds, tokens).clamp(max=documents - 1)
    row_index = torch.arange(tokens, device=bounds.device) - bounds[number] + number * longest
    real = AttentionMask(mask=starts + within < ends, causal=mask.causal)
    return PaddedDocuments(index, row_index.clamp(max=documents * longest - 1), (documents, longest), real)
