"""Disentangled attention on `scaled_dot_product_attention`: exact, on any machine, one block of scores at a time.

This file serves the CPU, and on all devices captured graphs, function transforms and subsets of queries. The rest of
the calls on GPUs go to attention_sdpa_device.py.

Legend: B batch, H heads, Q queries, K keys, d head size, n queries and m keys of a block (elsewhere m is the number of
terms), r reach: the largest distance in the tables. docs/architecture.md has a glossary.

The position terms become a bias of the scores. Four methods keep it cheap (docs/disentangled_attention.md):

- Skew. The table is laid out by distance instead of by row. Then c2p of a tile is the product query @ table^T, of which
  entry (i, n - 1 - i + j) is the term of query i and key j: a view that costs nothing. p2c is the same with keys and
  queries exchanged, transposed.
- Blocks. The bias exists for one block of queries and a few heads at a time (a subset of queries is one block).
- Far keys. From the saturation distance on, all keys on one side of a query share one row. These keys are *far*, the
  others *near*. Over far keys attention needs no bias: the score is (q + Qr).(k + Kr) minus a constant. Each part, near
  or far, gives a context and its log sum, log(sum of exp(score)); a softmax over the log sums weights the contexts.
- Documents of a packed row are processed one by one; neighbours of equal length form a batch.
"""

from collections.abc import Iterator
from itertools import groupby, repeat
from typing import NamedTuple

import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from .attention_mask import AttentionMask
from .attention_sdpa_device import attend_on_device, attend_with_bias
from .fast_path_guards import can_read_values, in_functorch_transform, is_tracing_or_compiling
from .private_apis import cpu_attention_with_log_sum, has_cpu_attention_with_log_sum
from .relative_position import RelativePositions, rows_at, rows_between

QUERY_BLOCK = 256  # queries whose scores are in memory at once; few enough to stay in a cache
TRAINING_BLOCK = 512  # the same in training, where more than one block means computing each of them twice
LARGEST_BFLOAT16_SCORE = 128  # see `needs_float32`
GPUS = ("cuda", "xpu", "mps")
LARGEST_BIAS = 2**22  # position terms of the heads that are computed together, to stay in a cache (16 MiB of float32)
SHORTEST_KEPT_REACH = 64  # of tables that are kept between calls
TILE = 64  # a tile of n x m computes n + m - 1 columns; smaller tiles waste less, larger ones multiply faster


class DistanceTables(NamedTuple):
    """Tables for distances -r ... r, for queries at consecutive positions."""

    falling: torch.Tensor | None  # Kr [H, 2r + 1, d], the largest distance first
    rising: torch.Tensor | None  # Qr [H, 2r + 1, d], the smallest distance first
    constant: torch.Tensor | None  # p2p [H, 2r + 1], the smallest distance first
    saturation: int | None  # None if all keys are treated as near

    def split(self, heads: int) -> "Iterator[DistanceTables]":
        """The tables of so many heads at a time."""
        parts = [repeat(None) if each is None else each.split(heads) for each in self[:3]]
        for falling, rising, constant in zip(*parts, strict=False):
            yield DistanceTables(falling, rising, constant, self.saturation)


class RowTables(NamedTuple):
    """Tables by row, for queries at any positions."""

    key: torch.Tensor | None  # Kr [H, R, d]
    query: torch.Tensor | None  # Qr [H, R, d]
    constant: torch.Tensor | None  # p2p [H, R]
    rows_of_distance: torch.Tensor  # [2k + 1]


Tables = DistanceTables | RowTables | None


def sdpa_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> tuple[torch.Tensor, None]:
    """Context [B, H, Q, d]; there are no probabilities."""
    if uses_device_path(query) and mask.query_positions is None:
        return attend_on_device(query, key, value, positions, mask, dropout_p, scale), None
    if needs_float32(query, key, positions, scale):
        positions = None if positions is None else positions.with_scaled_queries(scale, torch.float32).to(torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query = query.float() * scale
            context = attend_with_scaled_queries(query, key.float(), value.float(), positions, mask, dropout_p)
        return context.to(value.dtype), None
    positions = None if positions is None else positions.with_scaled_queries(scale, query.dtype)
    return attend_with_scaled_queries(query * scale, key, value, positions, mask, dropout_p), None


def attend_with_scaled_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
) -> torch.Tensor:
    """Context [B, H, Q, d]."""
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx.export(dynamo=False) would tie the graph to the length of the example; use "
            "hf_deberta.export.to_onnx, or torch.onnx.export(dynamo=True) with dynamic_shapes"
        )
    lengths = document_lengths(mask)
    longest = max(lengths) if lengths else key.shape[2]
    tables = tables_for(positions, mask, longest, can_join_parts(query, dropout_p))
    if lengths:
        return attend_documents(query, key, value, tables, mask.query_positions, lengths, dropout_p)
    if mask.mask is not None and mask.is_padding_only:
        visible: torch.Tensor | None = mask.mask[:, None, None]
    else:
        visible = mask.visible(key.shape[2], key.device)
    context = attend_rows(query, key, value, tables, mask.query_positions, visible, dropout_p)
    return zero_fully_masked_queries(context, mask, visible)


def uses_device_path(query: torch.Tensor) -> bool:
    """True on GPUs; graphs and function transforms need operations that any tool understands."""
    return query.device.type in GPUS and not (is_tracing_or_compiling() or in_functorch_transform())


def needs_float32(query: torch.Tensor, key: torch.Tensor, positions: RelativePositions | None, scale: float) -> bool:
    """True if the scores of half-precision inputs should be computed in float32.

    On the CPU float16 is several times slower than float32, and overflows. The position terms are a bias in the type of
    the queries: bfloat16 rounds them by up to 1 from 128 on. Whether they may be so large is known from the norms of
    queries, keys and tables, where these can be read.
    """
    if query.device.type != "cpu" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.dtype == torch.float16:
        return True
    if positions is None or not can_read_values(query):
        return False
    query_norm, key_norm, position_key_norm, position_query_norm = map(
        largest_norm, (query, key, positions.position_key, positions.position_query)
    )
    largest_score = query_norm * (key_norm + position_key_norm) + key_norm * position_query_norm / positions.query_scale
    return not largest_score * scale < LARGEST_BFLOAT16_SCORE


def largest_norm(vectors: torch.Tensor | None) -> float:
    """The largest Euclidean norm of vectors [..., d]; 0 if there are none."""
    if vectors is None or vectors.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(vectors.detach(), dim=-1).amax())


def document_lengths(mask: AttentionMask) -> tuple[int, ...] | None:
    """Lengths of the documents if they can be processed one by one."""
    if mask.cu_seqlens is None or mask.mask is not None or mask.causal or not can_read_values(mask.cu_seqlens):
        return None
    return (mask.lengths or tuple(mask.cu_seqlens.diff().tolist())) if mask.has_sorted_queries() else None


def zero_fully_masked_queries(context: torch.Tensor, mask: AttentionMask, visible: torch.Tensor | None) -> torch.Tensor:
    """Zero the context of queries that see nothing: padding, or an empty row of the mask."""
    if visible is None:
        return context
    if mask.mask is None or not mask.is_padding_only:
        return context * visible.any(-1, keepdim=True)
    sees = mask.mask if mask.query_positions is None else mask.mask.gather(1, mask.query_positions)
    return context * sees[:, None, :, None]


def attend_documents(
    query: torch.Tensor,  # [1, H, Q, d]
    key: torch.Tensor,
    value: torch.Tensor,
    tables: Tables,
    query_positions: torch.Tensor | None,  # [1, Q], sorted
    lengths: tuple[int, ...],
    dropout_p: float,
) -> torch.Tensor:
    """Context of a packed row, document by document; neighbours with equal numbers of queries and keys form a batch."""
    counts = lengths if query_positions is None else queries_per_document(query_positions, lengths)
    runs = [(n, count, len(list(run))) for (n, count), run in groupby(zip(lengths, counts, strict=True))]
    keys, values = ([part[0] for part in tensor.split([n * d for n, _, d in runs], 2)] for tensor in (key, value))
    queries = [part[0] for part in query.split([count * d for _, count, d in runs], 2)]
    contexts, start, first = [], 0, 0
    for i, (length, count, documents) in enumerate(runs):
        if count > 0:
            positions = None
            if query_positions is not None:
                in_row = query_positions[0, first : first + count * documents].unflatten(0, (documents, count))
                starts = torch.arange(start, start + length * documents, length, device=query.device)
                positions = in_row - starts[:, None]
            q, k, v = (states[i].unflatten(1, (documents, -1)).transpose(0, 1) for states in (queries, keys, values))
            context = attend_rows(q, k, v, tables, positions, None, dropout_p)
            contexts.append(context.transpose(0, 1).flatten(1, 2))
        start, first = start + length * documents, first + count * documents
    return torch.cat(contexts, 1)[None]


def queries_per_document(query_positions: torch.Tensor, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Number of queries in each document, from sorted positions [1, Q]."""
    ends = torch.tensor(lengths, device=query_positions.device).cumsum(0)
    document = torch.searchsorted(ends, query_positions[0].contiguous(), right=True)
    return tuple(torch.bincount(document, minlength=len(lengths)).tolist())


def attend_rows(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,
    value: torch.Tensor,
    tables: Tables,
    query_positions: torch.Tensor | None,  # [B, Q]
    visible: torch.Tensor | None,  # [B or 1, 1, 1 or Q, K] of bool
    dropout_p: float,
) -> torch.Tensor:
    """Context of a batch in which each row is one sequence.

    If a query sees no key, its context is finite but meaningless: `zero_fully_masked_queries` zeroes it later.
    """
    if tables is None:
        return attend(query, key, value, None, visible, dropout_p)
    if isinstance(tables, RowTables):
        assert query_positions is not None  # tables_for
        return attend(query, key, value, gathered_bias(query, key, tables, query_positions), visible, dropout_p)
    training = torch.is_grad_enabled() or dropout_p > 0  # reentrant checkpoints draw dropout without gradients first
    size = TRAINING_BLOCK if training else QUERY_BLOCK
    # a loop would tie a graph to this shape, and torch.func does not support checkpoints
    if is_tracing_or_compiling() or in_functorch_transform():
        return attend_block(query, key, value, tables, visible, 0, dropout_p)
    near = key.shape[2] if tables.saturation is None else min(key.shape[2], size + 2 * tables.saturation)
    heads = max(1, LARGEST_BIAS // max(1, query.shape[0] * min(query.shape[2], size) * near))
    parts = zip(query.split(heads, 1), key.split(heads, 1), value.split(heads, 1), tables.split(heads), strict=True)
    contexts = [attend_in_blocks(q, k, v, table, visible, dropout_p, size) for q, k, v, table in parts]
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, 1)


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: DistanceTables,
    visible: torch.Tensor | None,
    dropout_p: float,
    size: int,  # of a block
) -> torch.Tensor:
    """Context block by block of the queries; in training each block is computed again for the gradients."""
    if query.shape[2] <= size:
        return attend_block(query, key, value, tables, visible, 0, dropout_p)
    recompute, contexts = torch.is_grad_enabled(), []
    for start in range(0, query.shape[2], size):
        block = query[:, :, start : start + size]
        seen = visible if visible is None or visible.shape[2] == 1 else visible[:, :, start : start + size]
        arguments = (block, key, value, tables, seen, start, dropout_p)
        context = checkpoint(attend_block, *arguments, use_reentrant=False) if recompute else attend_block(*arguments)
        contexts.append(context)
    return torch.cat(contexts, 2)


def attend_block(
    query: torch.Tensor,  # [B, H, n, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,
    tables: DistanceTables,
    visible: torch.Tensor | None,  # [B or 1, 1, 1 or n, K]
    start: int,
    dropout_p: float,
) -> torch.Tensor:
    """Context of the queries from position `start` on."""
    queries, keys, saturation = query.shape[2], key.shape[2], tables.saturation
    low, high = 0, keys
    if saturation is not None:
        low, high = max(start - saturation + 1, 0), min(start + queries - 1 + saturation, keys)
    near = slice(low, high)
    bias = band_bias(query, key[:, :, near], tables, start - low)
    seen = None if visible is None else visible[..., near]
    if low == 0 and high == keys:
        return attend(query, key, value, bias, seen, dropout_p)
    parts = [attend_part(query, key[:, :, near], value[:, :, near], bias, seen)]
    for far, distance in ((slice(0, low), -1), (slice(high, keys), 0)):  # the largest distance, the smallest
        if far.start < far.stop:
            seen = None if visible is None else visible[..., far]
            parts.append(attend_far(query, key[:, :, far], value[:, :, far], tables, distance, seen))
    return joined(parts)


def attend_far(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: DistanceTables,
    distance: int,  # index into tables from the smallest distance to the largest
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context over far keys, which share one row of the table, and log(sum of exp(score))."""
    shift: float | torch.Tensor = 0.0
    if tables.rising is not None:
        position_query = tables.rising[:, distance, None]
        query = query + position_query
    if tables.falling is not None:
        position_key = tables.falling[:, -1 - distance, None]
        key = key + position_key
    if tables.rising is not None and tables.falling is not None:
        # (q + Qr).(k + Kr) holds Qr.Kr as well; the kernel adds it up in float32 at least
        wide = torch.promote_types(query.dtype, torch.float32)
        shift = -(position_key.to(wide) * position_query.to(wide)).sum(-1)
    if tables.constant is not None:
        shift = shift + tables.constant[:, distance, None]
    context, log_sum = attend_part(query, key, value, None, visible)
    return context, log_sum + shift


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context over a part of the keys, and log(sum of exp(score)) [B, H, Q]."""
    return cpu_attention_with_log_sum(query, key, value, masked(bias, visible, query))


def joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Context over all keys, from the contexts and log sums over parts of the keys."""
    weights = torch.stack([log_sum for _, log_sum in parts]).softmax(0)[..., None].to(parts[0][0].dtype)
    products = [context * weight for (context, _), weight in zip(parts, weights, strict=True)]
    return sum(products[1:], start=products[0])


def can_join_parts(query: torch.Tensor, dropout_p: float) -> bool:
    """True if attention over a part of the keys can return its log sum, which joining needs."""
    return (
        query.device.type == "cpu"
        and dropout_p == 0
        and not torch.is_grad_enabled()
        and not is_tracing_or_compiling()
        and not in_functorch_transform()
        and has_cpu_attention_with_log_sum()
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    visible: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    """softmax(q k + bias) v over visible keys."""
    bias = masked(bias, visible, query)
    needs_unfused = bias is not None and query.device.type == "cpu" and (bias.requires_grad or dropout_p > 0)
    if bias is not None and needs_unfused and not torch.jit.is_tracing():  # a trace is for inference
        # the CPU's fused kernel has neither a gradient for a bias nor dropout, and its unfused one copies more
        heads_first = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        bias = bias.expand(*query.shape[:3], key.shape[2]).transpose(0, 1).flatten(0, 1)
        scores = torch.baddbmm(bias, heads_first[0], heads_first[1].mT)
        probabilities = dropout(scores.softmax(-1), dropout_p)
        return (probabilities @ heads_first[2]).unflatten(0, (query.shape[1], -1)).transpose(0, 1)
    context = attend_with_bias(query, key, value, bias, dropout_p, scale=1.0)
    # exporters decompose the kernel into products, whose context is in another order: views of it would not hold
    return context.contiguous() if torch.compiler.is_exporting() else context


def masked(bias: torch.Tensor | None, visible: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """`bias` with the lowest number for keys that are not visible."""
    if visible is None:
        return bias
    if bias is None:
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def tables_for(positions: RelativePositions | None, mask: AttentionMask, longest: int, joins_parts: bool) -> Tables:
    """The tables that the queries need; `longest` is the length of the longest sequence."""
    if positions is None:
        return None
    key = positions.position_key if "c2p" in positions.terms else None
    query = positions.position_query if "p2c" in positions.terms else None
    constant = None
    if "p2p" in positions.terms and positions.position_key is not None and positions.position_query is not None:
        constant = (positions.position_key * positions.position_query).sum(-1)
    if mask.query_positions is not None:
        return RowTables(key, query, constant, positions.rows_of_distance)
    far_is_plain = joins_parts and longest > positions.saturation + QUERY_BLOCK
    reach = positions.saturation + QUERY_BLOCK if far_is_plain else longest
    saturation = positions.saturation if far_is_plain else None
    if not positions.reusable:
        return laid_out(positions, key, query, constant, reach, saturation)
    kept = positions.computed.get("distance tables")
    if kept is None or reach > kept[0]:
        grown = max(SHORTEST_KEPT_REACH, 2 ** (reach - 1).bit_length())  # with the longest text, in few steps
        reach = max(reach, min(grown, positions.saturation + QUERY_BLOCK))
        kept = reach, laid_out(positions, key, query, constant, reach, saturation)
        positions.computed["distance tables"] = kept
    return kept[1]._replace(saturation=saturation)


def laid_out(
    positions: RelativePositions,
    key: torch.Tensor | None,
    query: torch.Tensor | None,
    constant: torch.Tensor | None,
    reach: int,
    saturation: int | None,
) -> DistanceTables:
    """Tables by row, [H, R, d] or [H, R], as tables by distance up to `reach`."""
    distance = torch.arange(-reach, reach + 1, device=positions.rows_of_distance.device)
    rows = rows_at(distance, positions.rows_of_distance)
    return DistanceTables(
        falling=None if key is None else key[:, rows.flip(0)],
        rising=None if query is None else query[:, rows],
        constant=None if constant is None else constant[:, rows],
        saturation=saturation,
    )


def gathered_bias(
    query: torch.Tensor, key: torch.Tensor, tables: RowTables, query_positions: torch.Tensor
) -> torch.Tensor:
    """The position terms [B, H, Q, K] of queries at any positions."""
    batch, heads, queries, _ = query.shape
    row = rows_between(query_positions, torch.arange(key.shape[2], device=key.device), tables.rows_of_distance)
    index = row[:, None].expand(batch, heads, -1, -1)
    parts = []
    if tables.key is not None:
        parts.append((query @ tables.key.mT).gather(-1, index))
    if tables.query is not None and queries == 1 and not torch.is_grad_enabled():
        rows = tables.query[:, row[:, 0]].transpose(0, 1)  # [B, H, K, d]: each key needs one row, not all
        wide = torch.promote_types(key.dtype, torch.float32)
        parts.append((key.to(wide) * rows).sum(-1)[:, :, None].to(key.dtype))
    elif tables.query is not None:
        parts.append((key @ tables.query.mT).gather(-1, index.mT).mT)
    if tables.constant is not None:
        parts.append(tables.constant[None, :, None].expand(batch, -1, queries, -1).gather(-1, index))
    return sum(parts[1:], start=parts[0])


def band_bias(query: torch.Tensor, key: torch.Tensor, tables: DistanceTables, offset: int) -> torch.Tensor:
    """The position terms [B, H, n, m] of queries at consecutive positions, the first of them at key `offset`."""
    parts = []
    if tables.falling is not None or tables.rising is not None:
        in_tiles = query.device.type == "cpu" and not (is_tracing_or_compiling() or in_functorch_transform())
        fill = BandBias.apply if in_tiles else whole_band
        parts.append(fill(query, key, tables.falling, tables.rising, offset))
    if tables.constant is not None:
        reach = (tables.constant.shape[1] - 1) // 2
        positions = torch.arange(query.shape[2], device=query.device) + offset
        distance = positions[:, None] - torch.arange(key.shape[2], device=query.device)
        parts.append(tables.constant[None, :, distance + reach])
    return sum(parts[1:], start=parts[0])


def whole_band(
    query: torch.Tensor, key: torch.Tensor, falling: torch.Tensor | None, rising: torch.Tensor | None, offset: int
) -> torch.Tensor:
    """c2p + p2c [B, H, n, m] as one tile, in operations that can be traced and differentiated by any tool.

    The windows have one column more than the tile needs: with n = m = 2 tokens the skew's row would otherwise be as
    long as the tile's, a special case that an exported graph cannot hold.
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
    """`whole_band` tile by tile into one tensor; its gradients likewise."""

    @staticmethod
    def forward(ctx, query, key, falling, rising, offset):
        ctx.save_for_backward(query, key, falling, rising)
        ctx.offset = offset
        query, key = query.transpose(0, 1), key.transpose(0, 1)  # [H, B, ., d]: one product serves the whole batch
        bias = query.new_empty(*query.shape[:3], key.shape[2])
        if falling is not None:
            fill_tiles(bias, query, falling, offset)
        if rising is not None:
            by_key = torch.empty_like(bias.mT, memory_format=torch.contiguous_format)
            fill_tiles(by_key, key, rising, -offset)  # transposed as a whole, which is faster than tile by tile
            bias.copy_(by_key.mT) if falling is None else bias.add_(by_key.mT)
        return bias.transpose(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # for second derivatives
            return *differentiable_gradients(ctx.saved_tensors, ctx.offset, gradient, ctx.needs_input_grad), None
        query, key, falling, rising = ctx.saved_tensors
        gradient = gradient.transpose(0, 1)
        for_query = for_key = for_falling = for_rising = None
        if falling is not None:
            for_query, for_falling = term_gradients(gradient, query.transpose(0, 1), falling, ctx.offset)
        if rising is not None:
            for_key, for_rising = term_gradients(gradient.mT, key.transpose(0, 1), rising, -ctx.offset)
        return for_query, for_key, for_falling, for_rising, None


def differentiable_gradients(
    tensors: tuple[torch.Tensor, ...], offset: int, gradient: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `whole_band` with a graph, so that they can be differentiated again."""
    query, key, falling, rising = tensors
    bias = whole_band(query, key, falling, rising, offset)
    inputs = [tensor for tensor, need in zip(tensors, needed[:4], strict=True) if need]
    gradients = iter(torch.autograd.grad(bias, inputs, gradient, create_graph=True))
    return tuple(next(gradients) if need else None for need in needed[:4])


def term_gradients(
    gradient: torch.Tensor, states: torch.Tensor, table: torch.Tensor, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of states [H, B, n, d] and table [H, 2r + 1, d] from that of their skewed product [H, B, n, m]."""
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


def fill_tiles(target: torch.Tensor, states: torch.Tensor, table: torch.Tensor, offset: int) -> None:
    """Write the skewed product of states [H, B, n, d] and table [H, 2r + 1, d] into `target` [H, B, n, m]."""
    n, m = target.shape[-2:]
    for tile in tiles(n):
        window = table[:, window_of(tile.start, tile.stop, m, offset, table)]
        target[:, :, tile] = skewed(products(states[:, :, tile], window), m)


def tiles(length: int) -> list[slice]:
    return [slice(begin, min(begin + TILE, length)) for begin in range(0, length, TILE)]


def window_of(begin: int, end: int, others: int, offset: int, table: torch.Tensor) -> slice:
    """Columns of the table for states `begin` to `end` and all `others`; state 0 is at position `offset` of these."""
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
