"""One call for disentangled attention, whatever computes it.

Legend: B batch, H heads, Q queries, K keys, d head size, R rows of the relative table in use.

The call says who asks (queries, all positions or some), who answers (keys), which row of the relative table
stands between them, and who may see whom. `backend` says how to compute it. Backends never import one another.
"triton", for GPUs, leaves queries at some positions only to "sdpa", and with a warning what it cannot do.

Another engine comes in by Transformers' own interface. It is called as `disentangled_attention` is, everything
spelled out (no `backend`, `lengths`, `need_probabilities`), and returns the context, zeros for who sees nothing:

    >>> from transformers import AttentionInterface
    >>> AttentionInterface.register("my_engine", my_function)
    >>> model.set_attn_implementation("my_engine")
"""

import math
from collections.abc import Callable

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .attention_reference import reference_attention
from .attention_sdpa import sdpa_attention
from .fast_path_guards import in_reference_mode, is_tracing_or_compiling
from .relative_position import rows_between, saturation_of

BACKENDS = ("eager", "sdpa", "triton")

logger = logging.get_logger(__name__)


def disentangled_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    position_key: torch.Tensor | None = None,  # [H, R, d], for c2p and p2p
    position_query: torch.Tensor | None = None,  # [H, R, d], for p2c and p2p
    *,
    terms: tuple[str, ...] | None = None,
    rows_of_distance: torch.Tensor | None = None,  # [2k + 1], rows counted from first_row
    first_row: int = 0,
    saturation: int | None = None,
    query_positions: torch.Tensor | None = None,  # [B, Q]
    mask: torch.Tensor | None = None,  # bool, [B, K] real keys or [B, K, K] who sees whom
    cu_seqlens: torch.Tensor | None = None,  # [documents + 1], with B = 1
    lengths: tuple[int, ...] | None = None,  # of these documents
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "eager",
    need_probabilities: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Context [B, H, Q, d], and probabilities [B, H, Q, K] where they were asked for.

    Args:
        terms: position terms to add, of "c2p", "p2c", "p2p"; by default those whose table is given.
        rows_of_distance: `relative_position.rows_of_distances(...)`; row `first_row` of the whole table is
            row 0 of `position_key` and `position_query`.
        saturation: `relative_position.saturation_of(rows_of_distance)`, for who has it at hand.
        query_positions: where in the keys' sequence each query stands; by default query i is key i.
        mask: True may be seen. With [B, K], padding is not seen and sees nothing; with [B, K, K], entry
            [b, i, j] lets position i see position j. A query that sees nothing gets a zero context.
        cu_seqlens: document boundaries of a packed row; documents do not see one another.
        lengths: lengths of these documents, for who has them at hand.
        scale: 1/sqrt(m d), m = 1 + number of terms, if not given.

    Example:
        >>> from hf_deberta.model.relative_position import rows_of_distances
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> table = torch.randn(2, 8, 8)          # 2 heads, rows for distances up to 4
        >>> context, _ = disentangled_attention(q, k, v, table, table, rows_of_distance=rows_of_distances(4))
    """
    if terms is None:
        terms = _terms_given(position_key, position_query)
    _check_shapes(query, key, value, position_key, position_query, terms, rows_of_distance)
    _check_positions(query, key, query_positions, mask, cu_seqlens)
    if scale is None:
        scale = 1.0 / math.sqrt((1 + len(terms)) * query.shape[-1])
    if need_probabilities and backend != "eager":
        logger.warning_once(f"backend {backend!r} has no attention probabilities to return: 'eager' computes these.")
        backend = "eager"
    if in_reference_mode():
        backend = "eager"
    tensors = (query, key, value, position_key, position_query)
    if backend == "eager":
        visible = visibility(query_positions, mask, cu_seqlens, key.shape[2])
        row = None
        if terms:
            rows = (position_key if position_key is not None else position_query).shape[-2]
            positions = torch.arange(key.shape[2], device=key.device)
            asked = positions[None] if query_positions is None else query_positions
            # pairs that no document holds may be further apart than any row in use; they are masked
            row = (rows_between(asked, positions, rows_of_distance) - first_row).clamp(0, rows - 1)
        context, probabilities = reference_attention(*tensors, row, visible, scale, tuple(terms), dropout_p)
        return context, probabilities if need_probabilities else None
    if terms and saturation is None:
        saturation = saturation_of(rows_of_distance)
    if backend == "triton":
        # imported late: it reads what is installed
        from .attention_triton import is_applicable, triton_attention, unsupported_reason

        backend = "sdpa"
        if is_applicable(query, query_positions):
            reason = unsupported_reason(query, key, value, terms, scale, dropout_p)
            if reason is None:
                table = (rows_of_distance, first_row, saturation)
                who = (mask, cu_seqlens, lengths)
                return triton_attention(*tensors, *table, *who, scale, tuple(terms), dropout_p), None
            if not is_tracing_or_compiling():
                logger.warning_once(f"backend 'triton' leaves a call to 'sdpa': {reason}")
    if backend == "sdpa":
        padding_only = mask is not None and mask.dim() == 2 and cu_seqlens is None
        if cu_seqlens is not None and mask is None and not is_tracing_or_compiling() and in_order(query_positions):
            visible, lengths = None, lengths or tuple(cu_seqlens.diff().tolist())
        else:
            lengths = None
            visible = (
                mask[:, None, None] if padding_only else visibility(query_positions, mask, cu_seqlens, key.shape[2])
            )
        table = (rows_of_distance, first_row, saturation)
        who = (query_positions, visible, lengths)
        context = sdpa_attention(*tensors, *table, *who, scale, tuple(terms), dropout_p)
        return zero_fully_masked_queries(context, query_positions, mask, visible, padding_only), None
    context = registered_attention_function(backend)(
        *tensors,
        terms=tuple(terms),
        rows_of_distance=rows_of_distance,
        first_row=first_row,
        saturation=saturation,
        query_positions=query_positions,
        mask=mask,
        cu_seqlens=cu_seqlens,
        scale=scale,
        dropout_p=dropout_p,
    )
    if not torch.is_tensor(context) or context.shape != query.shape:
        raise TypeError(
            f"attention engine {backend!r} must return the context [B, H, Q, d] = {tuple(query.shape)} alone; it is "
            "called as disentangled_attention is, not as Transformers' other attention functions"
        )
    return context, None


def registered_attention_function(name: str) -> Callable[..., torch.Tensor]:
    """A function that was registered for our models with Transformers' `AttentionInterface`."""
    engine = ALL_ATTENTION_FUNCTIONS.get(name)
    if engine is None or engine.__module__.startswith("transformers."):
        raise ValueError(
            f"unknown attention backend {name!r}: choose one of {', '.join(BACKENDS)}, or register your own, see the "
            "module hf_deberta.model.attention"
        )
    return engine


def in_order(query_positions: torch.Tensor | None) -> bool:
    return query_positions is None or bool((query_positions.diff() >= 0).all())


def zero_fully_masked_queries(context, query_positions, mask, visible, padding_only: bool) -> torch.Tensor:
    """Zero context for queries that see nothing: padding, or an empty row of the mask."""
    if visible is None:
        return context
    if not padding_only:
        return context * visible.any(-1, keepdim=True)
    sees = mask if query_positions is None else mask.gather(1, query_positions)
    return context * sees[:, None, :, None]


def visibility(
    query_positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    keys: int,
) -> torch.Tensor | None:
    """Which key each query may see, [B or 1, 1, Q, K] of bool, or None for all."""
    visible = None
    if mask is not None:
        visible = mask if mask.dim() == 3 else mask[:, :, None] & mask[:, None, :]
    if cu_seqlens is not None:
        document = documents_of(cu_seqlens, keys)
        together = (document[:, None] == document[None, :])[None]
        visible = together if visible is None else visible & together
    if visible is None:
        return None
    if query_positions is not None:
        batch = max(visible.shape[0], query_positions.shape[0])
        index = query_positions[:, :, None].expand(batch, -1, keys)
        visible = visible.expand(batch, -1, -1).gather(1, index)
    return visible[:, None]


def documents_of(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Document number of each token, [length]: boundaries [0, 2, 5] give 0 0 1 1 1."""
    position = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)


def _terms_given(position_key: torch.Tensor | None, position_query: torch.Tensor | None) -> tuple[str, ...]:
    return ("c2p",) * (position_key is not None) + ("p2c",) * (position_query is not None)


def _check_shapes(query, key, value, position_key, position_query, terms, rows_of_distance) -> None:
    if key.shape != value.shape or query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "query [B, H, Q, d] and key, value [B, H, K, d] must agree in B, H and d, not "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    tables = {"c2p": (position_key,), "p2c": (position_query,), "p2p": (position_key, position_query)}
    for term in terms:
        if term not in tables:
            raise ValueError(f"unknown position term {term!r}: choose of {', '.join(tables)}")
        if any(table is None for table in tables[term]):
            raise ValueError(f"position term {term!r} needs its table: position_key for c2p, position_query for p2c")
    if terms and rows_of_distance is None:
        raise ValueError("position terms need rows_of_distance, see relative_position.rows_of_distances")


def _check_positions(query, key, query_positions, mask, cu_seqlens) -> None:
    batch, keys = key.shape[0], key.shape[2]
    if query_positions is None and query.shape[2] != keys:
        raise ValueError(
            f"{query.shape[2]} queries for {keys} keys need query_positions [B, Q] to say where they stand"
        )
    if query_positions is not None and query_positions.shape != (batch, query.shape[2]):
        raise ValueError(
            f"query_positions must be [B, Q] = {(batch, query.shape[2])}, not {tuple(query_positions.shape)}"
        )
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, True for what may be seen, not {mask.dtype}")
        if tuple(mask.shape) not in ((batch, keys), (batch, keys, keys)):
            raise ValueError(
                f"mask must be [B, K] = {(batch, keys)} or [B, K, K] = {(batch, keys, keys)}, not {tuple(mask.shape)}"
            )
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens goes with one packed row, not with a batch of {batch}")
