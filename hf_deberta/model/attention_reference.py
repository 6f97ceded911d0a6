"""Disentangled attention, equation 4 of the paper, in plain torch: the reference for all backends.

Legend: B batch, H heads, Q queries, K keys, d head size, R rows of the relative table, m number of terms.

    S[i, j] = ( q_i . k_j  +  q_i . Kr[r]  +  k_j . Qr[r]  +  Qr[r] . Kr[r] ) / sqrt(m d),   r = delta(i, j)
                content       c2p            p2c            p2p (ablation)

    P = softmax over visible keys;  context_i = sum_j P[i, j] v_j

q and Qr are multiplied by the scale, 1 / sqrt(m d), first: each term contains one of the two.
"""

import torch
from torch.nn.functional import dropout

from .batch_layout import AttentionMask
from .input_checks import without_autocast
from .relative_position import RelativePositions, rows_at


def reference_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, Q, d] and probabilities [B, H, Q, K]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = query.to(dtype) * scale
    positions = None if positions is None else positions.scaled(scale, dtype)
    row = None
    if positions is not None:
        at_keys = torch.arange(key.shape[2], device=key.device)
        at_queries = at_keys[None] if mask.query_positions is None else mask.query_positions
        row = rows_at(at_queries[..., None] - at_keys, positions.window.rows_of_distance)
    return softmax_attention(query, key, value, positions, row, mask.visible(key.shape[2], key.device), dropout_p)


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    row: torch.Tensor | None,  # [B or 1, Q, K], delta(i, j)
    visible: torch.Tensor | None,  # [B or 1, 1, Q, K] of bool
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, Q, d] and probabilities [B, H, Q, K] for any assignment of rows to pairs.

    Half-precision inputs are scored in float32, under autocast too, so that no product overflows before the softmax.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    with without_autocast(query.device):
        scores = query @ key.mT
        if positions is not None and row is not None:
            scores = sum(position_terms(query, key, positions, row).values(), start=scores)
        probabilities = visible_softmax(scores, visible)
    probabilities = dropout(probabilities, dropout_p).to(value.dtype)
    return probabilities @ value, probabilities


def position_terms(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    positions: RelativePositions,
    row: torch.Tensor,  # [B or 1, Q, K]
) -> dict[str, torch.Tensor]:
    """The terms of S that have a row, delta(i, j), by name, each [B, H, Q, K]."""
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    index = row[:, None].expand(batch, heads, queries, keys)
    position_key, position_query, terms = positions.position_key, positions.position_query, positions.terms
    parts = {}
    if position_key is not None and "c2p" in terms:
        by_row = query @ position_key.mT  # [B, H, Q, R]
        parts["c2p"] = by_row.gather(-1, index)
    if position_query is not None and "p2c" in terms:
        by_row = key @ position_query.mT  # [B, H, K, R]
        parts["p2c"] = by_row.gather(-1, index.mT).mT
    if position_key is not None and position_query is not None and "p2p" in terms:
        by_row = (position_query * position_key).sum(-1)  # [H, R]
        parts["p2p"] = by_row[None, :, None].expand(batch, heads, queries, -1).gather(-1, index)
    return parts


def visible_softmax(scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Softmax over visible keys; a query that sees nothing gets zeros, in value and gradient."""
    if visible is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * visible
