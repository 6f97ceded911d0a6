"""Disentangled attention on `scaled_dot_product_attention`, with the position terms as its bias, a block at a time.

Legend: B batch, H heads, Q queries, K keys, d head size, n queries and m keys of a block (elsewhere m is the number of
terms), r reach: the largest distance in the tables, W columns of a product.

Tables laid out by distance instead of by row make the terms cheap (docs/disentangled_attention.md): c2p of n queries
and m keys is the product query @ table^T, of which entry (i, n - 1 - i + j) is the term of query i and key j. That is a
view, `skewed`, which costs nothing. p2c is the same with keys and queries exchanged, transposed.

For n = m = 3, with table columns for the distances 2, 1, 0, -1, -2:

    product row 0:  .  .  0 -1 -2        skewed row 0:  0 -1 -2
    product row 1:  .  1  0 -1  .        skewed row 1:  1  0 -1
    product row 2:  2  1  0  .  .        skewed row 2:  2  1  0

From the saturation distance on, all keys on one side of a query share a row of the tables. For these *far* keys the
bias is a number per query plus a number per key, so only *near* keys need products with the tables.

The package replaces this backend by faster ones (hf_deberta/engines), which use the functions from `softmax_attention`
on.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .attention_reference import position_terms
from .batch_layout import AttentionMask
from .input_checks import in_captured_graph, in_transform, without_autocast
from .relative_position import RelativePositions, rows_at

QUERY_BLOCK = 256  # queries whose scores are in memory at once; few enough to stay in a cache
TRAINING_BLOCK = 512  # the same in training, where more than one block means computing each of them twice
DEVICE_BLOCK = 2048  # the same on other devices than CPUs, where small blocks wait for launches


class DistanceTables(NamedTuple):
    """Tables for distances -r ... r, for queries at consecutive positions."""

    keys_by_falling_distance: torch.Tensor | None  # Kr [H, 2r + 1, d], the largest distance first
    queries_by_rising_distance: torch.Tensor | None  # Qr [H, 2r + 1, d], the smallest distance first
    p2p_by_distance: torch.Tensor | None  # p2p [H, 2r + 1], the smallest distance first


def sdpa_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> tuple[torch.Tensor, None]:
    """Context [B, H, Q, d]; there are no probabilities.

    CPUs compute half precision in float32: float16 overflows there, and the bias would be rounded to bfloat16.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    dtype = wide if query.device.type == "cpu" else query.dtype
    with without_autocast(query.device):
        query, key, wide_value = query.to(dtype) * scale, key.to(dtype), value.to(dtype)
        if positions is not None:
            # in half precision the gradients of rows that many distances share would lose most digits
            positions = positions.scaled(scale, wide)
        context = attend_in_blocks(query, key, wide_value, positions, mask, dropout_p)
    return context.to(value.dtype), None


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
) -> torch.Tensor:
    """Context [B, H, Q, d] of scaled queries; in training, several blocks are computed again for the gradients."""
    visible = visible_keys(mask, key)
    training = torch.is_grad_enabled() or dropout_p > 0  # reentrant checkpoints draw dropout without gradients first
    size = DEVICE_BLOCK if query.device.type != "cpu" else TRAINING_BLOCK if training else QUERY_BLOCK
    # a loop, or a comparison of lengths, would tie a graph to them; torch.func does not support checkpoints
    in_one_block = in_captured_graph() or in_transform() or query.shape[2] <= size
    tables, saturation, all_near = None, 0, True
    if positions is not None and mask.query_positions is None:
        saturation = max(positions.window.saturation, 1)
        # few far keys would save less than it costs to lay their bias beside the other
        all_near = in_one_block or key.shape[2] <= size + 2 * saturation
        reach = key.shape[2] if all_near else size + saturation
        wide_tables = distance_tables(positions, reach)
        tables = DistanceTables(*(None if table is None else table.to(query.dtype) for table in wide_tables))

    def attend(block: torch.Tensor, start: int) -> torch.Tensor:
        bias = None
        if tables is not None and all_near:
            bias = position_bias(block, key, tables, start)
        elif tables is not None:
            bias = bias_with_far_keys(block, key, tables, start, saturation)
        elif positions is not None and mask.query_positions is not None:
            query_positions = mask.query_positions[:, start : start + block.shape[2]]
            bias = gathered_bias(block, key, positions.scaled(positions.query_scale, query.dtype), query_positions)
        seen = visible
        if visible is not None and visible.shape[2] > 1:
            seen = visible[:, :, start : start + block.shape[2]]
        return softmax_attention(block, key, value, bias, seen, dropout_p)

    if in_one_block:
        context = attend(query, 0)
    else:
        calls = [(query[:, :, start : start + size], start) for start in range(0, query.shape[2], size)]
        if torch.is_grad_enabled():
            context = torch.cat([checkpoint(attend, *call, use_reentrant=False) for call in calls], 2)
        else:
            context = torch.cat([attend(*call) for call in calls], 2)
    return zero_fully_masked_queries(context, mask, visible)


def visible_keys(mask: AttentionMask, key: torch.Tensor) -> torch.Tensor | None:
    """Which keys each query sees, [B or 1, 1, 1 or Q, K]; padding sees them too, see `zero_fully_masked_queries`."""
    if mask.mask is not None and mask.is_padding_only:
        return mask.mask[:, None, None]
    return mask.visible(key.shape[2], key.device)


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    visible: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    """softmax(q k + bias) v over visible keys."""
    bias = masked(bias, visible, query)
    # the CPU's fused kernel has neither a gradient for a bias nor dropout, and its unfused one copies more
    needs_unfused = bias is not None and query.device.type == "cpu" and (bias.requires_grad or dropout_p > 0)
    # fused kernels lack transforms, which also hide that a bias needs a gradient; a graph must hold for other lengths
    if (needs_unfused or in_transform()) and not in_captured_graph():
        heads_first = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        bias = query.new_zeros(1) if bias is None else bias
        bias = bias.expand(*query.shape[:3], key.shape[2]).transpose(0, 1).flatten(0, 1)
        scores = torch.baddbmm(bias, heads_first[0], heads_first[1].mT)
        probabilities = dropout(scores.softmax(-1), dropout_p)
        return (probabilities @ heads_first[2]).unflatten(0, (query.shape[1], -1)).transpose(0, 1)
    only_bias = bias is not None and bias.requires_grad and not any(x.requires_grad for x in (query, key, value))
    if only_bias and drops_log_sums(query):  # in frozen layers
        query = query.detach().requires_grad_()
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=1.0)


def masked(bias: torch.Tensor | None, visible: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """`bias` with the lowest number for keys that are not visible."""
    if visible is None:
        return bias
    if bias is None:
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def zero_fully_masked_queries(context: torch.Tensor, mask: AttentionMask, visible: torch.Tensor | None) -> torch.Tensor:
    """Zero the context of queries that see nothing: padding, or an empty row of the mask."""
    if visible is None:
        return context
    if mask.mask is None or not mask.is_padding_only:
        return context * visible.any(-1, keepdim=True)
    sees = mask.mask if mask.query_positions is None else mask.mask.gather(1, mask.query_positions)
    return context * sees[:, None, :, None]


def drops_log_sums(query: torch.Tensor) -> bool:
    """True for CUDA, whose kernel keeps no log sums if only the bias needs a gradient (pytorch issue 148476)."""
    return query.device.type != "cpu"


def gathered_bias(
    query: torch.Tensor, key: torch.Tensor, positions: RelativePositions, query_positions: torch.Tensor
) -> torch.Tensor:
    """The position terms [B, H, Q, K] of queries at any positions [B, Q]."""
    at_keys = torch.arange(key.shape[2], device=key.device)
    row = rows_at(query_positions[..., None] - at_keys, positions.window.rows_of_distance)
    first, *others = position_terms(query, key, positions, row).values()
    return sum(others, start=first)


def distance_tables(positions: RelativePositions, reach: int) -> DistanceTables:
    """Tables by row, [H, R, d] or [H, R], as tables by distance up to `reach`."""
    key, query, terms = positions.position_key, positions.position_query, positions.terms
    rows_of_distance = positions.window.rows_of_distance
    rows = rows_at(torch.arange(-reach, reach + 1, device=rows_of_distance.device), rows_of_distance)
    key_table = query_table = p2p = None
    if key is not None and "c2p" in terms:
        key_table = key[:, rows.flip(0)]
    if query is not None and "p2c" in terms:
        query_table = query[:, rows]
    if key is not None and query is not None and "p2p" in terms:
        p2p = (key * query).sum(-1)[:, rows]
    return DistanceTables(key_table, query_table, p2p)


def bias_with_far_keys(
    query: torch.Tensor, key: torch.Tensor, tables: DistanceTables, start: int, saturation: int
) -> torch.Tensor:
    """The position terms [B, H, n, K] of queries from position `start` on, with products for near keys alone."""
    low, high = max(start - saturation + 1, 0), min(start + query.shape[2] - 1 + saturation, key.shape[2])
    parts = [
        far_bias(query, key[:, :, :low], tables, -1),
        position_bias(query, key[:, :, low:high], tables, start - low).expand(*query.shape[:3], -1),
        far_bias(query, key[:, :, high:], tables, 0),
    ]
    return torch.cat(parts, -1)


def far_bias(query: torch.Tensor, key: torch.Tensor, tables: DistanceTables, distance: int) -> torch.Tensor:
    """The position terms [B, H, n, m] of far keys; `distance`: 0 for the smallest, -1 for the largest of the tables."""
    key_table, query_table, p2p = tables
    parts = []
    if key_table is not None:
        parts.append(products(query.transpose(0, 1), key_table[:, -1 - distance, None]).transpose(0, 1))
    if query_table is not None:
        parts.append(products(key.transpose(0, 1), query_table[:, distance, None]).transpose(0, 1).mT)
    if p2p is not None:
        parts.append(p2p[None, :, distance, None, None])
    return sum(parts[1:], start=parts[0]).expand(*query.shape[:3], key.shape[2])


def position_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    tables: DistanceTables,
    offset: int,
    by_content: Callable[..., torch.Tensor] | None = None,  # by default `content_bias`
) -> torch.Tensor:
    """The position terms [B, H, n, m] of queries at consecutive positions, the first of them at key `offset`."""
    key_table, query_table, p2p = tables
    parts = []
    if key_table is not None or query_table is not None:
        parts.append((by_content or content_bias)(query, key, key_table, query_table, offset))
    if p2p is not None:
        parts.append(p2p_bias(p2p, query.shape[2], key.shape[2], offset))
    return sum(parts[1:], start=parts[0])


def content_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    key_table: torch.Tensor | None,  # by falling distance
    query_table: torch.Tensor | None,  # by rising distance
    offset: int,
) -> torch.Tensor:
    """c2p + p2c [B, H, n, m].

    The windows have one column more than needed: with n = m = 2 tokens the skew's row would otherwise be as long as the
    result's, a special case that an exported graph cannot hold.
    """
    n, m = query.shape[2], key.shape[2]
    parts = []
    if key_table is not None:
        window = key_table[:, columns_of(0, n, m + 1, offset, key_table)]
        parts.append(skewed(products(query.transpose(0, 1), window), m))
    if query_table is not None:
        window = query_table[:, columns_of(0, m, n + 1, -offset, query_table)]
        parts.append(skewed(products(key.transpose(0, 1), window), n).mT)
    return sum(parts[1:], start=parts[0]).transpose(0, 1)


def p2p_bias(p2p: torch.Tensor, n: int, m: int, offset: int) -> torch.Tensor:
    """p2p [1, H, n, m] from its table by distance [H, 2r + 1]."""
    positions = torch.arange(n, device=p2p.device) + offset
    distance = positions[:, None] - torch.arange(m, device=p2p.device)
    return p2p[None, :, distance + (p2p.shape[1] - 1) // 2]


def columns_of(begin: int, end: int, others: int, offset: int, table: torch.Tensor) -> slice:
    """Columns of the table for states `begin` to `end` and all `others`; state 0 is at position `offset` of these."""
    reach = (table.shape[1] - 1) // 2
    return slice(reach - (offset + end - 1), reach + others - (offset + begin))


def products(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[H, B, n, d] times [H, W, d]: [H, B, n, W], one product for the whole batch."""
    return torch.unflatten(states.flatten(1, 2) @ columns.mT, 1, states.shape[1:3])


def skewed(product: torch.Tensor, length: int) -> torch.Tensor:
    """Entry (i, j) of the result is entry (i, n - 1 - i + j) of `product` [..., n, n + length - 1 or more]; a view."""
    n, width = product.shape[-2:]
    if n == 1:
        return product[..., :length]
    flat = product.flatten(-2)[..., n - 1 : n * width - 1]
    return torch.unflatten(flat, -1, (n, width - 1))[..., :length]
