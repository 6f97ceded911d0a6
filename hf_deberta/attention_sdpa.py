"""Disentangled attention on `scaled_dot_product_attention`: exact, on any machine, without an [N, N] table.

Legend: B batch, H heads, Q queries, K keys, d head size, n and m queries and keys of a tile, r reach of the tables.

The position terms become a bias to the scores. Three facts make it cheap (docs/disentangled_attention.md):

- With the table laid out by distance instead of by row, c2p of a tile is a product and a *skew*: entry (i, j) is
  entry (i, n - 1 - i + j) of query @ table^T, a view that costs nothing. p2c is the keys' product, transposed.
- Past the last distance with a row of its own all keys on one side share a row: the bias there is a_i + b_j.
- Queries are taken in blocks, so that their bias never exists for all at once (query subsets are one block).
"""

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .relative_position import rows_between

QUERY_BLOCK = 128  # queries whose scores are in memory at once; few, so that they stay in a cache
TRAINING_BLOCK = 512  # the same in training, where more than one block means to compute each of them twice
TILE = 128  # a tile of n x m computes n + m - 1 columns; smaller tiles waste less, larger ones multiply faster


def sdpa_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    position_key: torch.Tensor | None,  # [H, R, d]
    position_query: torch.Tensor | None,  # [H, R, d]
    rows_of_distance: torch.Tensor | None,  # [2k + 1]
    first_row: int,
    saturation: int,  # from this distance on, rows are those of the ends
    query_positions: torch.Tensor | None,  # [B, Q]
    visible: torch.Tensor | None,  # [B or 1, 1, 1 or Q, K] of bool
    scale: float,
    terms: tuple[str, ...],
    dropout_p: float,
) -> torch.Tensor:
    """Context [B, H, Q, d]; that of a query which sees nothing is finite and means nothing."""
    if not terms:
        return attend(query, key, value, None, visible, scale, dropout_p)
    if query_positions is not None:
        row = rows_between(query_positions, torch.arange(key.shape[2], device=key.device), rows_of_distance)
        bias = gathered_bias(query * scale, key * scale, position_key, position_query, row - first_row, terms, scale)
        return attend(query, key, value, bias, visible, scale, dropout_p)
    tables = tables_by_distance(
        position_key, position_query, rows_of_distance, first_row, saturation, key.shape[2], terms, scale
    )
    queries = query.shape[2]
    size = TRAINING_BLOCK if torch.is_grad_enabled() else QUERY_BLOCK
    recompute = queries > size and torch.is_grad_enabled()
    contexts = []
    for start in range(0, queries, size):
        block = query[:, :, start : start + size]
        seen = visible if visible is None or visible.shape[2] == 1 else visible[:, :, start : start + size]
        arguments = (block, key, value, *tables, seen, start, saturation, scale, dropout_p)
        if recompute:
            contexts.append(checkpoint(attend_block, *arguments, use_reentrant=False))
        else:
            contexts.append(attend_block(*arguments))
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, 2)


def attend_block(query, key, value, falling, rising, constant, visible, start, saturation, scale, dropout_p):
    bias = band_bias(query, key, falling, rising, constant, start, saturation)
    return attend(query, key, value, bias, visible, scale, dropout_p)


def attend(query, key, value, bias, visible, scale: float, dropout_p: float) -> torch.Tensor:
    """softmax(scale q k + bias) v over visible keys; `bias` is scaled already."""
    if visible is not None:
        if bias is None:
            bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill(~visible, torch.finfo(query.dtype).min)
    if bias is not None and bias.requires_grad and query.device.type == "cpu":
        # the CPU's fused kernel has no gradient for a bias, and its unfused one copies more
        scores = torch.baddbmm(
            bias.expand(*query.shape[:3], key.shape[2]).flatten(0, 1),
            (query * scale).flatten(0, 1),
            key.flatten(0, 1).mT,
        )
        probabilities = dropout(scores.softmax(-1), dropout_p)
        return (probabilities @ value.flatten(0, 1)).unflatten(0, query.shape[:2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def gathered_bias(query, key, position_key, position_query, row, terms, scale: float) -> torch.Tensor:
    """The position terms [B, H, Q, K] for scaled queries that stand anywhere, and scaled keys."""
    rows = (position_key if position_key is not None else position_query).shape[1]
    batch, heads, queries, _ = query.shape
    index = row.clamp(0, rows - 1)[:, None].expand(batch, heads, -1, -1)
    parts = []
    if "c2p" in terms:
        parts.append((query @ position_key.mT).gather(-1, index))
    if "p2c" in terms:
        parts.append((key @ position_query.mT).gather(-1, index.mT).mT)
    if "p2p" in terms:
        by_row = (position_query * position_key).sum(-1) * scale  # [H, R]
        parts.append(by_row[None, :, None].expand(batch, -1, queries, -1).gather(-1, index))
    return sum(parts[1:], start=parts[0])


def tables_by_distance(
    position_key, position_query, rows_of_distance, first_row: int, saturation: int, keys: int, terms, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """Scaled tables by distance: Kr [H, 2r + 1, d] falling, Qr rising, and p2p [H, 2r + 1] rising."""
    k = (rows_of_distance.shape[0] - 1) // 2
    reach = min(keys - 1, saturation + TILE)
    distance = torch.arange(-reach, reach + 1, device=rows_of_distance.device)
    rows = rows_of_distance[distance.clamp(-k, k) + k] - first_row
    falling = position_key[:, rows.flip(0)] * scale if "c2p" in terms else None
    rising = position_query[:, rows] * scale if "p2c" in terms else None
    constant = (position_key * position_query).sum(-1)[:, rows] * scale if "p2p" in terms else None
    return falling, rising, constant


def band_bias(query, key, falling, rising, constant, start: int, saturation: int) -> torch.Tensor:
    """The position terms [B, H, n, K] of a block of queries that begins at position `start`."""
    queries, keys = query.shape[2], key.shape[2]
    parts = []
    if falling is not None:
        parts.append(skewed_products(query, falling, start, 0, keys, saturation))
    if rising is not None:
        parts.append(skewed_products(key, rising, 0, start, queries, saturation).mT)
    if constant is not None:
        reach = (constant.shape[1] - 1) // 2
        asked = torch.arange(start, start + queries, device=query.device)
        distance = asked[:, None] - torch.arange(keys, device=query.device)
        parts.append(constant[:, distance.clamp(-reach, reach) + reach])
    return sum(parts[1:], start=parts[0])


def skewed_products(
    states: torch.Tensor,  # [B, H, S, d], at positions first, first + 1, ...
    table: torch.Tensor,  # [H, 2r + 1, d], column r + other - own is for another position
    first: int,
    first_other: int,
    others: int,
    saturation: int,
) -> torch.Tensor:
    """[B, H, S, others]: each state times the table's row for its distance to each other position."""
    reach = (table.shape[1] - 1) // 2
    heads_first = states.transpose(0, 1)  # [H, B, S, d]: one product per head serves the whole batch
    tiles = []
    for begin in range(0, states.shape[2], TILE):
        tile = heads_first[:, :, begin : begin + TILE]
        n = tile.shape[2]
        a = first + begin - first_other  # own position, counted as the others are
        # others from `low` to `high` are near some state of the tile; further ones share a row
        low = min(max(a - saturation + 1, 0), others)
        high = max(min(a + n - 1 + saturation, others), low)
        pieces = []
        if low > 0:
            pieces.append(products(tile, table[:, :1]).expand(-1, -1, -1, low))
        if high > low:
            columns = table[:, reach + low - (a + n - 1) : reach + high - a]
            pieces.append(skew(products(tile, columns), high - low))
        if high < others:
            pieces.append(products(tile, table[:, -1:]).expand(-1, -1, -1, others - high))
        tiles.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, 2)).transpose(0, 1)


def products(tile: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[H, B, n, d] times [H, W, d]: [H, B, n, W]."""
    return (tile.flatten(1, 2) @ columns.mT).unflatten(1, tile.shape[1:3])


def skew(product: torch.Tensor, length: int) -> torch.Tensor:
    """Entry (i, j) of the result is entry (i, n - 1 - i + j) of `product` [..., n, n + length - 1]; a view."""
    n, width = product.shape[-2:]
    if n == 1:
        return product
    flat = product.flatten(-2)[..., n - 1 : n * width - 1]
    return flat.unflatten(-1, (n, width - 1))[..., :length]
