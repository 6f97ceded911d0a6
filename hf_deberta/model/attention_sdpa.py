"""Disentangled attention on `scaled_dot_product_attention`: exact, on any machine, without an [N, N] table.

Legend: B batch, H heads, Q queries, K keys, d head size, n and m queries and keys of a block, r reach of the tables.

The position terms become a bias to the scores. Four facts make it cheap (docs/disentangled_attention.md):

- With the table laid out by distance instead of by row, c2p of a tile is a product and a *skew*: entry (i, j) is
  entry (i, n - 1 - i + j) of query @ table^T, a view that costs nothing. p2c is the keys' product, transposed.
- Queries are taken in blocks, so that their bias never exists for all at once (query subsets are one block).
- Past the last distance with a row of its own all keys on one side share a row, and attention there is plain:
  (q + Qr).(k + Kr) up to a constant. The near part and the far ones are joined by their log sums.
- Documents of a packed row are attended to one by one, those of one length that stand together at once.
"""

from itertools import groupby

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .fast_path_guards import in_functorch_transform, is_tracing_or_compiling
from .private_apis import cpu_attention_with_log_sum, has_cpu_attention_with_log_sum
from .relative_position import rows_between

QUERY_BLOCK = 256  # queries whose scores are in memory at once; few, so that they stay in a cache
TRAINING_BLOCK = 512  # the same in training, where more than one block means to compute each of them twice
TILE = 64  # a tile of n x m computes n + m - 1 columns; smaller tiles waste less, larger ones multiply faster

Tables = tuple[torch.Tensor | None, ...]  # see tables_by_distance and tables_by_row; empty without position terms


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
    lengths: tuple[int, ...] | None,  # of the documents of a packed row, B = 1
    scale: float,
    terms: tuple[str, ...],
    dropout_p: float,
) -> torch.Tensor:
    """Context [B, H, Q, d]; that of a query which sees nothing is finite and means nothing."""
    longest = max(lengths) if lengths else key.shape[2]
    far_is_plain = bool(terms) and joins_parts(query, dropout_p) and longest > saturation + QUERY_BLOCK
    reach = saturation + QUERY_BLOCK if far_is_plain else longest
    tables = ()
    if terms and query_positions is None:
        tables = tables_by_distance(position_key, position_query, rows_of_distance, first_row, reach, terms, scale)
    elif terms:
        tables = tables_by_row(position_key, position_query, rows_of_distance, first_row, terms, scale)
    saturation = saturation if far_is_plain else None
    if lengths:
        return attend_documents(query, key, value, tables, query_positions, lengths, saturation, scale, dropout_p)
    return attend_rows(query, key, value, tables, query_positions, visible, saturation, scale, dropout_p)


def attend_documents(query, key, value, tables, query_positions, lengths, saturation, scale, dropout_p):
    """Each document of a packed row by itself; neighbours with equal numbers of queries and keys make a batch."""
    counts = lengths if query_positions is None else queries_in(query_positions, lengths)
    runs = [(n, q, len(list(run))) for (n, q), run in groupby(zip(lengths, counts, strict=True))]
    keys, values = ([part[0] for part in tensor.split([n * d for n, _, d in runs], 2)] for tensor in (key, value))
    queries = [part[0] for part in query.split([q * d for _, q, d in runs], 2)]
    contexts, start, first = [], 0, 0
    for i, (length, count, documents) in enumerate(runs):
        if count > 0:
            positions = None
            if query_positions is not None:
                asked = query_positions[0, first : first + count * documents].unflatten(0, (documents, count))
                starts = torch.arange(start, start + length * documents, length, device=query.device)
                positions = asked - starts[:, None]
            batch = (states[i].unflatten(1, (documents, -1)).transpose(0, 1) for states in (queries, keys, values))
            context = attend_rows(*batch, tables, positions, None, saturation, scale, dropout_p)
            contexts.append(context.transpose(0, 1).flatten(1, 2))
        start, first = start + length * documents, first + count * documents
    return torch.cat(contexts, 1)[None]


def queries_in(query_positions: torch.Tensor, lengths: tuple[int, ...]) -> list[int]:
    """How many of the queries, which stand in order, each document holds."""
    ends = torch.tensor(lengths, device=query_positions.device).cumsum(0)
    document = torch.searchsorted(ends, query_positions[0].contiguous(), right=True)
    return torch.bincount(document, minlength=len(lengths)).tolist()


def attend_rows(query, key, value, tables, query_positions, visible, saturation, scale, dropout_p):
    """Every row of the batch is one sequence."""
    if not tables:
        return attend(query, key, value, None, visible, scale, dropout_p)
    if query_positions is not None:
        bias = gathered_bias(query, key, *tables, query_positions)
        return attend(query, key, value, bias, visible, scale, dropout_p)
    training = torch.is_grad_enabled() or dropout_p > 0  # reentrant checkpoints draw dropout without gradients first
    size = TRAINING_BLOCK if training else QUERY_BLOCK
    # a loop would tie a graph to this length; torch.func knows no checkpoints
    if is_tracing_or_compiling() or in_functorch_transform() or query.shape[2] <= size:
        return attend_block(query, key, value, *tables, visible, 0, saturation, scale, dropout_p)
    recompute, contexts = torch.is_grad_enabled(), []
    for start in range(0, query.shape[2], size):
        block = query[:, :, start : start + size]
        seen = visible if visible is None or visible.shape[2] == 1 else visible[:, :, start : start + size]
        arguments = (block, key, value, *tables, seen, start, saturation, scale, dropout_p)
        context = checkpoint(attend_block, *arguments, use_reentrant=False) if recompute else attend_block(*arguments)
        contexts.append(context)
    return torch.cat(contexts, 2)


def attend_block(query, key, value, falling, rising, constant, visible, start, saturation, scale, dropout_p):
    """The queries from position `start` on; `saturation` is None where far keys are treated as near ones."""
    queries, keys = query.shape[2], key.shape[2]
    low, high = 0, keys
    if saturation is not None:
        low, high = max(start - saturation + 1, 0), min(start + queries - 1 + saturation, keys)
    near = slice(low, high)
    bias = band_bias(query, key[:, :, near], falling, rising, constant, start - low)
    seen = None if visible is None else visible[..., near]
    if low == 0 and high == keys:
        return attend(query, key, value, bias, seen, scale, dropout_p)
    parts = [attend_part(query, key[:, :, near], value[:, :, near], bias, seen, scale)]
    for far, end in ((slice(0, low), -1), (slice(high, keys), 0)):
        if far.start < far.stop:
            seen = None if visible is None else visible[..., far]
            ends = (None if table is None else table[:, end] for table in (rising, constant))
            at_end = (None if falling is None else falling[:, -1 - end], *ends)
            parts.append(attend_far(query, key[:, :, far], value[:, :, far], *at_end, seen, scale))
    return joined(parts)


def attend_far(query, key, value, position_key, position_query, constant, visible, scale):
    """Attention to keys that all stand at one row: tables [H, d] and [H], scaled. Context and log sum."""
    shift = 0.0
    if position_query is not None:
        query = query + position_query[:, None] / scale
    if position_key is not None:
        key = key + position_key[:, None] / scale
    if position_key is not None and position_query is not None:
        # (q + Qr).(k + Kr) holds Qr.Kr as well; the kernel adds it up in float32 at least
        wide = torch.promote_types(query.dtype, torch.float32)
        shift = -(position_key.to(wide) * position_query.to(wide)).sum(-1)[:, None] / scale
    if constant is not None:
        shift = shift + constant[:, None]
    context, log_sum = attend_part(query, key, value, None, visible, scale)
    return context, log_sum + shift


def attend_part(query, key, value, bias, visible, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Context over some of the keys, and the logarithm of the sum of exp(score) [B, H, Q]."""
    return cpu_attention_with_log_sum(query, key, value, masked(bias, visible, query), scale)


def joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The context over all keys from those over parts of them."""
    weights = torch.stack([log_sum for _, log_sum in parts]).softmax(0)[..., None].to(parts[0][0].dtype)
    return sum(context * weight for (context, _), weight in zip(parts, weights, strict=True))


def joins_parts(query: torch.Tensor, dropout_p: float) -> bool:
    """Whether attention over parts of the keys can be had with its log sums."""
    return (
        query.device.type == "cpu"
        and dropout_p == 0
        and not torch.is_grad_enabled()
        and not is_tracing_or_compiling()
        and not in_functorch_transform()
        and has_cpu_attention_with_log_sum()
    )


def attend(query, key, value, bias, visible, scale: float, dropout_p: float) -> torch.Tensor:
    """softmax(scale q k + bias) v over visible keys; `bias` is scaled already."""
    bias = masked(bias, visible, query)
    if bias is not None and query.device.type == "cpu" and (bias.requires_grad or dropout_p > 0):
        # the CPU's fused kernel has neither a gradient for a bias nor dropout, and its unfused one copies more
        heads_first = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query * scale, key, value)]
        bias = bias.expand(*query.shape[:3], key.shape[2]).transpose(0, 1).flatten(0, 1)
        scores = torch.baddbmm(bias, heads_first[0], heads_first[1].mT)
        probabilities = dropout(scores.softmax(-1), dropout_p)
        return (probabilities @ heads_first[2]).unflatten(0, (query.shape[1], -1)).transpose(0, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def masked(bias: torch.Tensor | None, visible: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """`bias` with the lowest number where nothing may be seen."""
    if visible is None:
        return bias
    if bias is None:
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def tables_by_distance(
    position_key, position_query, rows_of_distance, first_row: int, reach: int, terms, scale: float
) -> Tables:
    """Scaled tables for distances up to `reach`: Kr [H, 2r + 1, d] falling, Qr rising, and p2p [H, 2r + 1] rising."""
    k = (rows_of_distance.shape[0] - 1) // 2
    distance = torch.arange(-reach, reach + 1, device=rows_of_distance.device)
    rows = known_rows(rows_of_distance[distance.clamp(-k, k) + k] - first_row, position_key, position_query)
    falling = position_key[:, rows.flip(0)] * scale if "c2p" in terms else None
    rising = position_query[:, rows] * scale if "p2c" in terms else None
    constant = (position_key * position_query).sum(-1)[:, rows] * scale if "p2p" in terms else None
    return falling, rising, constant


def tables_by_row(position_key, position_query, rows_of_distance, first_row: int, terms, scale: float) -> Tables:
    """Scaled tables Kr and Qr [H, R, d], p2p [H, R], and the row of each distance."""
    rows = known_rows(rows_of_distance - first_row, position_key, position_query)
    by_row_key = position_key * scale if "c2p" in terms else None
    by_row_query = position_query * scale if "p2c" in terms else None
    constant = (position_key * position_query).sum(-1) * scale if "p2p" in terms else None
    return by_row_key, by_row_query, constant, rows


def known_rows(rows, position_key, position_query) -> torch.Tensor:
    """Pairs that no document holds may be further apart than any row in use; they are masked."""
    table = position_key if position_key is not None else position_query
    return rows.clamp(0, table.shape[1] - 1)


def gathered_bias(query, key, by_row_key, by_row_query, constant, rows, query_positions: torch.Tensor) -> torch.Tensor:
    """The position terms [B, H, Q, K] for queries that stand anywhere."""
    batch, heads, queries, _ = query.shape
    row = rows_between(query_positions, torch.arange(key.shape[2], device=key.device), rows)
    index = row[:, None].expand(batch, heads, -1, -1)
    parts = []
    if by_row_key is not None:
        parts.append((query @ by_row_key.mT).gather(-1, index))
    if by_row_query is not None:
        parts.append((key @ by_row_query.mT).gather(-1, index.mT).mT)
    if constant is not None:
        parts.append(constant[None, :, None].expand(batch, -1, queries, -1).gather(-1, index))
    return sum(parts[1:], start=parts[0])


def band_bias(query, key, falling, rising, constant, offset: int) -> torch.Tensor:
    """The position terms [B, H, n, m] of queries that stand side by side, the first at key `offset`."""
    bias = 0.0
    if falling is not None or rising is not None:
        in_tiles = query.device.type == "cpu" and not (is_tracing_or_compiling() or in_functorch_transform())
        fill = BandBias.apply if in_tiles else whole_band
        bias = fill(query, key, falling, rising, offset)
    if constant is not None:
        reach = (constant.shape[1] - 1) // 2
        own = torch.arange(query.shape[2], device=query.device) + offset
        distance = own[:, None] - torch.arange(key.shape[2], device=query.device)
        bias = bias + constant[None, :, distance + reach]
    return bias


def whole_band(query, key, falling, rising, offset) -> torch.Tensor:
    """c2p + p2c [B, H, n, m] as one tile, in operations that everything can trace and differentiate.

    The windows have a column more than the tile needs: with n = m = 2 tokens the skew's row would otherwise be as long
    as the tile's, a special case that an exported graph cannot hold.
    """
    n, m = query.shape[2], key.shape[2]
    parts = []
    if falling is not None:
        window = falling[:, window_of(0, n, m + 1, offset, falling)]
        parts.append(skewed(products(query.transpose(0, 1), window), m))
    if rising is not None:
        window = rising[:, window_of(0, m, n + 1, -offset, rising)]
        parts.append(skewed(products(key.transpose(0, 1), window), n).mT)
    return sum(parts[1:], start=parts[0]).transpose(0, 1)


class BandBias(torch.autograd.Function):
    """The same tile by tile, into one tensor; and its gradients, likewise."""

    @staticmethod
    def forward(ctx, query, key, falling, rising, offset):
        ctx.save_for_backward(query, key, falling, rising)
        ctx.offset = offset
        query, key = query.transpose(0, 1), key.transpose(0, 1)  # [H, B, ., d]: one product serves the whole batch
        n, m = query.shape[2], key.shape[2]
        bias = query.new_empty(*query.shape[:3], m)
        if falling is not None:
            for tile in tiles(n):
                window = falling[:, window_of(tile.start, tile.stop, m, offset, falling)]
                bias[:, :, tile] = skewed(products(query[:, :, tile], window), m)
        if rising is not None:
            for tile in tiles(m):
                window = rising[:, window_of(tile.start, tile.stop, n, -offset, rising)]
                part = skewed(products(key[:, :, tile], window), n).mT
                bias[..., tile].copy_(part) if falling is None else bias[..., tile].add_(part)
        return bias.transpose(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # second derivatives are wanted
            return *differentiable_gradients(ctx.saved_tensors, ctx.offset, gradient, ctx.needs_input_grad), None
        query, key, falling, rising = ctx.saved_tensors
        gradient = gradient.transpose(0, 1)
        for_query = for_key = for_falling = for_rising = None
        if falling is not None:
            for_query, for_falling = term_gradients(gradient, query.transpose(0, 1), falling, ctx.offset)
        if rising is not None:
            for_key, for_rising = term_gradients(gradient.mT, key.transpose(0, 1), rising, -ctx.offset)
        return for_query, for_key, for_falling, for_rising, None


def differentiable_gradients(tensors, offset: int, gradient, needed) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `whole_band`, with a graph of their own."""
    bias = whole_band(*tensors, offset)
    wanted = [tensor for tensor, need in zip(tensors, needed[:4], strict=True) if need]
    found = iter(torch.autograd.grad(bias, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needed[:4])


def term_gradients(gradient, states, table, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of states [H, B, n, d] and table [H, 2r + 1, d], from that of their skewed product [H, B, n, m]."""
    n, m = gradient.shape[-2:]
    for_states, for_table = torch.empty_like(states), torch.zeros_like(table)
    for tile in tiles(n):
        part = gradient[:, :, tile]
        by_column = part.new_zeros(*part.shape[:3], part.shape[2] + m - 1)
        skewed(by_column, m).copy_(part)
        columns = window_of(tile.start, tile.stop, m, offset, table)
        for_states[:, :, tile] = products(by_column, table[:, columns].mT)
        for_table[:, columns] += by_column.flatten(1, 2).mT @ states[:, :, tile].flatten(1, 2)
    return for_states.transpose(0, 1), for_table


def tiles(length: int) -> list[slice]:
    return [slice(begin, min(begin + TILE, length)) for begin in range(0, length, TILE)]


def window_of(begin: int, end: int, others: int, offset: int, table: torch.Tensor) -> slice:
    """Columns of the table for own states from `begin` to `end`, the first of all at `offset` in the others' row."""
    reach = (table.shape[1] - 1) // 2
    return slice(reach - (offset + end - 1), reach + others - (offset + begin))


def products(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[H, B, n, d] times [H, W, d]: [H, B, n, W]."""
    return (states.flatten(1, 2) @ columns.mT).unflatten(1, states.shape[1:3])


def skewed(product: torch.Tensor, length: int) -> torch.Tensor:
    """Entry (i, j) of the result is entry (i, n - 1 - i + j) of `product` [..., n, n + length - 1 or more]; a view."""
    n, width = product.shape[-2:]
    if n == 1:
        return product[..., :length]
    flat = product.flatten(-2)[..., n - 1 : n * width - 1]
    return flat.unflatten(-1, (n, width - 1))[..., :length]
