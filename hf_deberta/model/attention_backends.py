"""The table of attention backends; `disentangled_attention` in attention.py describes what they compute."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention_reference import reference_attention
from .attention_sdpa import sdpa_attention

Result = tuple[torch.Tensor, torch.Tensor | None]  # context [B, H, Q, d], probabilities [B, H, Q, K]


@dataclass(frozen=True)
class Backend:
    """A way of computing disentangled attention; calls that it does not support go to its `fallback`."""

    attend: Callable[..., Result]
    unsupported_reason: Callable[..., str | None] = lambda *_: None  # has the parameters of `attend` but the scale
    supports_query_positions: bool = True  # if not, such calls go to the fallback without a warning
    fallback: str = "sdpa"


def _triton_attention(*call) -> Result:
    from .attention_triton import triton_attention  # imported late: it reads what is installed

    return triton_attention(*call)


def _triton_unsupported_reason(*call) -> str | None:
    from .attention_triton import unsupported_reason

    return unsupported_reason(*call)


BACKENDS = {
    "eager": Backend(reference_attention),
    "sdpa": Backend(sdpa_attention),
    "triton": Backend(_triton_attention, _triton_unsupported_reason, supports_query_positions=False),
}
