"""The sdpa backend of the package: on CPUs in tiles that fit into caches, with cheap far keys.

Captured graphs, function transforms and other devices have the plain backend (hf_deberta/model/attention_sdpa.py),
whose legend this file shares; r is the reach of a table. On devices documents of a packed row become a padded batch.

- Tiles. The skewed products are computed tile by tile into one tensor.
- Blocks. The bias exists for one block of queries and a few heads at a time (a subset of queries is one block).
- Far keys. From the saturation distance on, all keys on one side of a query share one row. These keys are *far*, the
  others *near*. Over far keys attention needs no bias: the score is (q + Qr).(k + Kr) minus a constant. Each part, near
  or far, gives a context and its log sum, log(sum of exp(score)); a softmax over the log sums weights the contexts.
- Documents of a packed row are processed one by one; neighbours of equal length form a batch.
"""

from dataclasses import replace
from itertools import groupby, repeat
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from ..model import attention_sdpa as plain
from ..model.attention_sdpa import (
    QUERY_BLOCK,
    TRAINING_BLOCK,
    DistanceTables,
    columns_of,
    distance_tables,
    masked,
    position_bias,
    products,
    skewed,
    softmax_attention,
    visible_keys,
    zero_fully_masked_queries,
)
from ..model.batch_layout import AttentionMask, document_numbers
from ..model.input_checks import can_read_values, in_captured_graph, in_transform, without_autocast
from ..model.relative_position import RelativePositions, rows_at
from .guards import is_tracing_or_exporting

logger = logging.get_logger(__name__)

LARGEST_BFLOAT16_SCORE = 128  # see `needs_float32`
LARGEST_BIAS = 2**22  # position terms of the heads that are computed together, to stay in a cache (16 MiB of float32)
TILE = 64  # a tile of n x m computes n + m - 1 columns; smaller tiles waste less, larger ones multiply faster


class Tables(NamedTuple):
    """Tables by distance, and the distance from which on keys are far; None if all keys are treated as near."""

    by_distance: DistanceTables
    saturation: int | None


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
    if in_captured_graph() or in_transform():
        if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                "torch.onnx.export(dynamo=False) would tie the graph to the length of the example; use "
                "hf_deberta.export.to_onnx, or torch.onnx.export(dynamo=True) with dynamic_shapes"
            )
        context, _ = plain.sdpa_attention(query, key, value, positions, mask, dropout_p, scale)
        # exporters decompose the kernel into products, whose context is in another order: views of it would not hold
        return context.contiguous() if is_tracing_or_exporting() else context, None
    if uses_device_path(query) and mask.query_positions is None:
        return attend_on_device(query, key, value, positions, mask, dropout_p, scale)
    if needs_float32(query, key, positions, scale):
        positions = None if positions is None else positions.scaled(scale, torch.float32)
        with without_autocast(query.device):
            query = query.float() * scale
            context = attend_with_scaled_queries(query, key.float(), value.float(), positions, mask, dropout_p)
        return context.to(value.dtype), None
    positions = None if positions is None else positions.scaled(scale, query.dtype)
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
    lengths = document_lengths(mask)
    longest = max(lengths) if lengths else key.shape[2]
    tables = None
    if positions is not None and mask.query_positions is None:  # on the CPU: others have `attend_on_device`
        # the kernel returns the log sums that join parts of the keys without dropout and gradients only
        can_join_parts = dropout_p == 0 and not torch.is_grad_enabled()
        saturation = positions.window.saturation
        if can_join_parts and longest > saturation + QUERY_BLOCK:
            tables = Tables(distance_tables(positions, saturation + QUERY_BLOCK), saturation)
        else:
            tables = Tables(distance_tables(positions, longest), None)
    if lengths:
        return attend_documents(query, key, value, tables or positions, mask.query_positions, lengths, dropout_p)
    visible = visible_keys(mask, key)
    context = attend_rows(query, key, value, tables or positions, mask.query_positions, visible, dropout_p)
    return zero_fully_masked_queries(context, mask, visible)


def uses_device_path(query: torch.Tensor) -> bool:
    return query.device.type != "cpu"


def attend_on_device(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,  # without query positions
    dropout_p: float,
    scale: float,
) -> tuple[torch.Tensor, None]:
    """The plain backend; the documents of a packed row are a padded batch, if that is less work."""
    length = key.shape[2]
    documents = mask.compute_once(("padded documents", length), lambda: padded_documents(mask, length))
    if documents is None:
        return plain.sdpa_attention(query, key, value, positions, mask, dropout_p, scale)
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # [T, H, d]
    query, key, value = (
        row.index_select(0, documents.in_row).unflatten(0, documents.shape).transpose(1, 2) for row in rows
    )
    context, _ = plain.sdpa_attention(query, key, value, positions, documents.mask, dropout_p, scale)
    return context.transpose(1, 2).flatten(0, 1).index_select(0, documents.in_batch).transpose(0, 1)[None], None


class PaddedDocuments(NamedTuple):
    """The documents of a packed row of T tokens as a padded batch."""

    in_row: torch.Tensor  # [documents * longest], the place of each token of the batch in the row; any for padding
    in_batch: torch.Tensor  # [T], the place of each token of the row in documents * longest
    shape: tuple[int, int]  # documents, longest
    mask: AttentionMask


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
    in_row = (starts + within).clamp(max=tokens - 1).flatten()
    number = document_numbers(bounds, tokens).clamp(max=documents - 1)
    in_batch = torch.arange(tokens, device=bounds.device) - bounds[number] + number * longest
    real = AttentionMask(mask=starts + within < ends, causal=mask.causal)
    return PaddedDocuments(in_row, in_batch.clamp(max=documents * longest - 1), (documents, longest), real)


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
    if mask.query_positions is not None and bool((mask.query_positions.diff() < 0).any()):
        return None
    return mask.lengths or tuple(mask.cu_seqlens.diff().tolist())


def attend_documents(
    query: torch.Tensor,  # [1, H, Q, d]
    key: torch.Tensor,
    value: torch.Tensor,
    tables: Tables | RelativePositions | None,
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
    tables: Tables | RelativePositions | None,
    query_positions: torch.Tensor | None,  # [B, Q]
    visible: torch.Tensor | None,  # [B or 1, 1, 1 or Q, K] of bool
    dropout_p: float,
) -> torch.Tensor:
    """Context of a batch in which each row is one sequence, a block of queries and some heads at a time.

    If a query sees no key, its context is finite but meaningless: `zero_fully_masked_queries` zeroes it later.
    """
    if tables is None:
        return softmax_attention(query, key, value, None, visible, dropout_p)
    if isinstance(tables, RelativePositions):
        assert query_positions is not None  # attend_with_scaled_queries
        bias = gathered_bias(query, key, tables, query_positions)
        return softmax_attention(query, key, value, bias, visible, dropout_p)
    training = torch.is_grad_enabled() or dropout_p > 0  # reentrant checkpoints draw dropout without gradients first
    size = TRAINING_BLOCK if training else QUERY_BLOCK
    near = key.shape[2] if tables.saturation is None else min(key.shape[2], size + 2 * tables.saturation)
    heads = max(1, LARGEST_BIAS // max(1, query.shape[0] * min(query.shape[2], size) * near))
    by_head = [repeat(None) if table is None else table.split(heads) for table in tables.by_distance]
    parts = zip(query.split(heads, 1), key.split(heads, 1), value.split(heads, 1), *by_head, strict=False)
    contexts = []
    for q, k, v, *tables_of_heads in parts:
        table = Tables(DistanceTables(*tables_of_heads), tables.saturation)
        if query.shape[2] <= size:
            contexts.append(attend_block(q, k, v, table, visible, 0, dropout_p))
            continue
        blocks = []
        for start in range(0, query.shape[2], size):
            seen = visible if visible is None or visible.shape[2] == 1 else visible[:, :, start : start + size]
            call = q[:, :, start : start + size], k, v, table, seen, start, dropout_p
            if torch.is_grad_enabled():  # each block is computed again for its gradients
                blocks.append(checkpoint(attend_block, *call, use_reentrant=False))
            else:
                blocks.append(attend_block(*call))
        contexts.append(torch.cat(blocks, 2))
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, 1)


def attend_block(
    query: torch.Tensor,  # [B, H, n, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,
    tables: Tables,
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
    bias = position_bias(query, key[:, :, near], tables.by_distance, start - low, BandBias.apply)
    seen = None if visible is None else visible[..., near]
    if low == 0 and high == keys:
        return softmax_attention(query, key, value, bias, seen, dropout_p)
    parts = [cpu_attention_with_log_sum(query, key[:, :, near], value[:, :, near], masked(bias, seen, query))]
    for far, distance in ((slice(0, low), -1), (slice(high, keys), 0)):  # the largest distance, the smallest
        if far.start < far.stop:
            seen = None if visible is None else visible[..., far]
            parts.append(attend_far(query, key[:, :, far], value[:, :, far], tables.by_distance, distance, seen))
    return merge_partial_attention(parts)


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
    key_table, query_table, p2p = tables
    if query_table is not None:
        position_query = query_table[:, distance, None]
        query = query + position_query
    if key_table is not None:
        position_key = key_table[:, -1 - distance, None]
        key = key + position_key
    if query_table is not None and key_table is not None:
        # (q + Qr).(k + Kr) holds Qr.Kr as well; the kernel adds it up in float32 at least
        wide = torch.promote_types(query.dtype, torch.float32)
        shift = -(position_key.to(wide) * position_query.to(wide)).sum(-1)
    if p2p is not None:
        shift = shift + p2p[:, distance, None]
    context, log_sum = cpu_attention_with_log_sum(query, key, value, masked(None, visible, query))
    return context, log_sum + shift


def merge_partial_attention(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Context over all keys, from the contexts and log sums over parts of the keys."""
    weights = torch.stack([log_sum for _, log_sum in parts]).softmax(0)[..., None].to(parts[0][0].dtype)
    products = [context * weight for (context, _), weight in zip(parts, weights, strict=True)]
    return sum(products[1:], start=products[0])


def gathered_bias(
    query: torch.Tensor, key: torch.Tensor, positions: RelativePositions, query_positions: torch.Tensor
) -> torch.Tensor:
    """The position terms [B, H, Q, K] of queries at any positions; p2c of one query needs one row for each key."""
    table = positions.position_query
    if table is None or "p2c" not in positions.terms or query.shape[2] > 1 or torch.is_grad_enabled():
        return plain.gathered_bias(query, key, positions, query_positions)
    at_keys = torch.arange(key.shape[2], device=key.device)
    row = rows_at(query_positions[..., None] - at_keys, positions.window.rows_of_distance)
    rows = table[:, row[:, 0]].transpose(0, 1)  # [B, H, K, d]
    wide = torch.promote_types(key.dtype, torch.float32)
    bias = (key.to(wide) * rows).sum(-1)[:, :, None].to(key.dtype)
    others = replace(positions, terms=tuple(term for term in positions.terms if term != "p2c"))
    return bias + plain.gathered_bias(query, key, others, query_positions) if others.terms else bias


class BandBias(torch.autograd.Function):
    """The position terms of contents, `content_bias`, tile by tile into one tensor; its gradients likewise."""

    @staticmethod
    def forward(ctx, query, key, key_table, query_table, offset):
        ctx.save_for_backward(query, key, key_table, query_table)
        ctx.offset = offset
        query, key = query.transpose(0, 1), key.transpose(0, 1)  # [H, B, ., d]: one product serves the whole batch
        bias = query.new_empty(*query.shape[:3], key.shape[2])
        if key_table is not None:
            fill_tiles(bias, query, key_table, offset)
        if query_table is not None:
            by_key = torch.empty_like(bias.mT, memory_format=torch.contiguous_format)
            fill_tiles(by_key, key, query_table, -offset)  # transposed as a whole, which is faster than tile by tile
            bias.copy_(by_key.mT) if key_table is None else bias.add_(by_key.mT)
        return bias.transpose(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        query, key, key_table, query_table = ctx.saved_tensors
        gradient = gradient.transpose(0, 1)
        for_query = for_key = for_key_table = for_query_table = None
        if key_table is not None:
            for_query, for_key_table = term_gradients(gradient, query.transpose(0, 1), key_table, ctx.offset)
        if query_table is not None:
            for_key, for_query_table = term_gradients(gradient.mT, key.transpose(0, 1), query_table, -ctx.offset)
        return for_query, for_key, for_key_table, for_query_table, None


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
        columns = columns_of(tile.start, tile.stop, m, offset, table)
        for_states[:, :, tile] = products(by_column, table[:, columns].mT)
        for_table[:, columns] += by_column.flatten(1, 2).mT @ states[:, :, tile].flatten(1, 2)
    return for_states.transpose(0, 1), for_table


def fill_tiles(target: torch.Tensor, states: torch.Tensor, table: torch.Tensor, offset: int) -> None:
    """Write the skewed product of states [H, B, n, d] and table [H, 2r + 1, d] into `target` [H, B, n, m]."""
    n, m = target.shape[-2:]
    for tile in tiles(n):
        window = table[:, columns_of(tile.start, tile.stop, m, offset, table)]
        target[:, :, tile] = skewed(products(states[:, :, tile], window), m)


def tiles(length: int) -> list[slice]:
    return [slice(begin, min(begin + TILE, length)) for begin in range(0, length, TILE)]


def cpu_attention_with_log_sum(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, H, Q, d] with scores query @ key^T + bias, and their log-sum-exp [B, H, Q]."""
    if bias is not None and bias.stride(-1) > 1:  # of p2c alone; PyTorch 2.7 would read other numbers
        bias = bias.contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=1.0)
