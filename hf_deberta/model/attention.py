"""Disentangled attention with interchangeable backends.

Legend: B batch, H heads, Q queries, K keys, d head size, m number of terms of the score.

`RelativePositions` holds the position terms, `AttentionMask` what each query may see. All backends have one signature:

    attend(query, key, value, positions, mask, dropout_p, scale) -> context [B, H, Q, d], probabilities or None

`positions` is None without position terms. Scores are multiplied by `scale`; position queries may include it already,
see `RelativePositions.query_scale`. Probabilities are [B, H, Q, K]. The context of a query that sees nothing is zero.
Backends do not import each other; a new one is a file with such a function, and an entry of `BACKENDS`.

From outside the package, register a function that returns the context alone. It has the same parameters except for the
scale, which its queries and position queries include:

    from transformers import AttentionInterface
    AttentionInterface.register("my_attention", my_attention)
    model.set_attn_implementation("my_attention")
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .attention_reference import reference_attention
from .attention_sdpa import sdpa_attention
from .batch_layout import AttentionMask
from .input_checks import in_captured_graph
from .relative_position import RelativePositions
from .slots import in_reference_mode, replaceable

logger = logging.get_logger(__name__)

AUTO = "auto"

Result = tuple[torch.Tensor, torch.Tensor | None]  # context [B, H, Q, d], probabilities [B, H, Q, K]


@dataclass(frozen=True)
class Backend:
    """A way of computing disentangled attention; calls that it does not support go to "sdpa"."""

    attend: Callable[..., Result]
    unsupported_reason: Callable[..., str | None] = lambda *_: None  # has the parameters of `attend` but the scale
    supports_query_positions: bool = True  # if not, such calls go to "sdpa" without a warning


BACKENDS = {"eager": Backend(reference_attention), "sdpa": Backend(sdpa_attention)}


def disentangled_attention(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,  # [B, H, K, d]
    positions: RelativePositions | None = None,
    mask: AttentionMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "eager",
) -> Result:
    """Compute disentangled attention (equation 4 of the DeBERTa paper) of inputs that are checked.

    Returns the context [B, H, Q, d], and probabilities [B, H, Q, K] if the backend is "eager".

    Args:
        query: [B, H, Q, d].
        key: [B, H, K, d], and value like it.
        positions: position terms to add to the scores; by default none.
        mask: which keys each query may see, and the positions of the queries; by default every query sees every key.
        scale: factor of the scores, by default `attention_scale`.
        backend: one of `BACKENDS`, "auto", which chooses one, or a name registered with
            Transformers' `AttentionInterface`.

    Example:
        >>> from hf_deberta.model.relative_position import RelativePositions, rows_of_distances
        >>> query = key = value = torch.randn(1, 2, 5, 8)  # 5 tokens, 2 heads of size 8
        >>> table = torch.randn(2, 8, 8)  # 8 rows, for distances up to 4
        >>> positions = RelativePositions.from_tables(table, table, rows_of_distances(4))
        >>> context, probabilities = disentangled_attention(query, key, value, positions)
        >>> context.shape, probabilities.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5, 5]))
    """
    if mask is None:
        mask = AttentionMask()
    if key.shape != value.shape or query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "query [B, H, Q, d] and key, value [B, H, K, d] must agree in B, H and d, not "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if positions is not None:
        positions.check(query.shape[1])
        if not positions.terms:
            positions = None
    mask.check(query, key)
    if scale is None:
        scale = attention_scale(1 + (0 if positions is None else len(positions.terms)), query.shape[-1])
    return attend(query, key, value, positions, mask, dropout_p, scale, backend)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
    backend: str,
) -> Result:
    """`disentangled_attention` of a layer, whose inputs need no checks; in reference mode always "eager"."""
    call = query, key, value, positions, mask, dropout_p
    if in_reference_mode():
        return BACKENDS["eager"].attend(*call, scale)
    if backend == AUTO:
        backend = choose_backend(*call, scale)
    if backend not in BACKENDS:
        return _attend_outside(backend, *call, scale)
    selected = BACKENDS[backend]
    if mask.query_positions is not None and not selected.supports_query_positions:
        selected = BACKENDS["sdpa"]
    elif (reason := selected.unsupported_reason(*call)) is not None:
        if not in_captured_graph():
            logger.warning_once(f"backend {backend!r} falls back to 'sdpa': {reason}")
        selected = BACKENDS["sdpa"]
    return selected.attend(*call, scale)


@replaceable
def choose_backend(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> str:
    """The backend that "auto" stands for in this call; an engine may choose another where it is right."""
    return "sdpa"


def dropout_rate(module: nn.Module) -> float:
    """The rate of an attention dropout in its present mode: backends apply it, and the module is not called."""
    if isinstance(module, nn.Identity):
        return 0.0
    if not isinstance(module, nn.Dropout) or type(module).forward is not nn.Dropout.forward:
        raise TypeError(f"the dropout of attention must be nn.Dropout or nn.Identity, not {type(module).__name__}")
    return module.p if module.training else 0.0


def attention_scale(terms: int, head_size: int) -> float:
    """1 / sqrt(m d), the factor of all scores; m counts content to content and the position terms.

    >>> attention_scale(4, 64)
    0.0625
    """
    return (terms * head_size) ** -0.5


def check_attention_name(name: str) -> None:
    """Raise a ValueError if there is no backend and no registered function of this name."""
    if name != AUTO and name not in BACKENDS:
        registered_attention_function(name)


def registered_attention_function(name: str) -> Callable[..., torch.Tensor]:
    """The function registered under this name with Transformers' `AttentionInterface`, from outside Transformers."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or function.__module__.startswith("transformers."):
        raise ValueError(
            f'Specified `attn_implementation="{name}"` is not supported: choose one of '
            f"{', '.join((AUTO, *sorted(BACKENDS)))}, or register a function, see the module hf_deberta.model.attention"
        )
    return function


def _attend_outside(name: str, query, key, value, positions, mask, dropout_p, scale) -> Result:
    """Call an attention function from outside the package."""
    function = registered_attention_function(name)
    if positions is not None:
        positions = replace(positions.scaled(scale, query.dtype), query_scale=1.0)
    context = function(query * scale, key, value, positions, mask, dropout_p)
    if not torch.is_tensor(context) or context.shape != query.shape:
        raise TypeError(
            f"attention function {name!r} must return the context [B, H, Q, d] = {tuple(query.shape)} alone; it is "
            "called like the backends of hf_deberta.model.attention, not like Transformers' attention functions"
        )
    return context, None
