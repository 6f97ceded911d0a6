"""Disentangled attention, equation 4 of the paper, in plain torch: the oracle every backend is held against.

Legend: B batch, H heads, Q queries, K keys, d head size, R rows of the relative table, m terms in use.

    S[i, j] = ( q_i . k_j  +  q_i . Kr[r]  +  k_j . Qr[r]  +  Qr[r] . Kr[r] ) / sqrt(m d),   r = delta(i, j)
                content       c2p            p2c            p2p (ablation)

    P = softmax over the keys that may be seen;  context_i = sum_j P[i, j] v_j
"""

import torch
from torch.nn.functional import dropout


def score_terms(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    position_key: torch.Tensor | None,  # [H, R, d], Kr
    position_query: torch.Tensor | None,  # [H, R, d], Qr
    row: torch.Tensor | None,  # [B or 1, Q, K], delta(i, j)
    terms: tuple[str, ...] = ("c2p", "p2c"),
) -> dict[str, torch.Tensor]:
    """Every term of S by name, unscaled, each [B, H, Q, K]; their sum is S sqrt(m d)."""
    parts = {"c2c": query @ key.mT}
    if not terms:
        return parts
    batch, heads, queries, keys = parts["c2c"].shape
    index = row[:, None].expand(batch, heads, queries, keys)
    if "c2p" in terms:
        by_row = query @ position_key.mT  # [B, H, Q, R]
        parts["c2p"] = by_row.gather(-1, index)
    if "p2c" in terms:
        by_row = key @ position_query.mT  # [B, H, K, R]
        parts["p2c"] = by_row.gather(-1, index.mT).mT
    if "p2p" in terms:
        by_row = (position_query * position_key).sum(-1)  # [H, R]
        parts["p2p"] = by_row[None, :, None].expand(batch, heads, queries, -1).gather(-1, index)
    return parts


def visible_softmax(scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Softmax over visible keys; a query that sees nothing gets zeros, in value and gradient."""
    if visible is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * visible


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,  # [B, H, K, d]
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    row: torch.Tensor | None,
    visible: torch.Tensor | None,  # [B or 1, 1, Q, K] of bool
    scale: float,  # 1 / sqrt(m d)
    terms: tuple[str, ...] = ("c2p", "p2c"),
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context [B, H, Q, d] and probabilities [B, H, Q, K].

    Half-precision inputs are scored in float32, under autocast too, so that no product overflows before the softmax.
    """
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
        position_key = None if position_key is None else position_key.float()
        position_query = None if position_query is None else position_query.float()
    with torch.autocast(query.device.type, enabled=False):
        parts = score_terms(query, key, position_key, position_query, row, terms)
        probabilities = visible_softmax(sum(parts.values()) * scale, visible)
    probabilities = dropout(probabilities, dropout_p).to(value.dtype)
    return probabilities @ value, probabilities
