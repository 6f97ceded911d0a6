"""The Triton backend: disentangled attention on a GPU in tiles, forward and backward.

The operator that PyTorch calls is in attention_triton_operator.py; this file has what it cannot compute, and gives it
positions and masks of this package.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch

from ..model.batch_layout import AttentionMask
from ..model.input_checks import in_captured_graph, in_transform
from ..model.relative_position import RelativePositions
from .attention_triton_operator import tiled_attention

IS_INSTALLED = find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs kernels in Python, on the CPU: for tests

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 128
LARGEST_ROW = 2**31 - 1  # numbers; offsets within a row are 32-bit integers, those between rows have 64 bits
LARGEST_FLOAT32_HEAD = 64  # with 128: 96 KiB of shared memory, of 99 on small GPUs, and 4 kB of stack


def unsupported_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float = 0.0,
) -> str | None:
    """Why this backend cannot compute a call, or None if it can."""
    if (reason := unsupported_device(query.device)) is not None:
        return reason
    if query.numel() == 0:
        return "there are no tokens"
    if (row := query.numel() // query.shape[0]) > LARGEST_ROW:
        return f"a row of {row:,} numbers is larger than {LARGEST_ROW:,}"
    if query.dtype not in DTYPES:
        return f"it supports float16, bfloat16 and float32, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    largest = LARGEST_FLOAT32_HEAD if query.dtype == torch.float32 and not INTERPRETING else LARGEST_HEAD
    if query.shape[-1] > largest:
        return f"heads of {query.shape[-1]} channels are larger than {largest} in {query.dtype}"
    if dropout_p >= 1:
        return "it does not support a dropout of 1"
    if positions is not None and "p2p" in positions.terms:
        return "it does not support the term p2p"
    if in_transform() and not in_captured_graph():
        return "it supports neither torch.func nor forward-mode differentiation"
    return None


@torch.compiler.assume_constant_result
def unsupported_device(device: torch.device) -> str | None:
    """Why no kernel runs on a device, or None."""
    if not (device.type == "cuda" or INTERPRETING):
        return f"it runs on GPUs, not on {device.type}"
    if not IS_INSTALLED:
        return "triton is not installed"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def triton_attention(
    query: torch.Tensor,  # [B, H, N, d]
    key: torch.Tensor,
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float = 0.0,
    scale: float = 1.0,
) -> tuple[torch.Tensor, None]:
    """Context [B, H, N, d]; there are no probabilities."""
    tables: dict[str, Any] = {}
    if positions is not None:
        if positions.query_scale != 1.0:
            positions = positions.scaled(1.0, query.dtype)
        tables = {
            "position_key": positions.position_key if "c2p" in positions.terms else None,
            "position_query": positions.position_query if "p2c" in positions.terms else None,
            "rows_of_distance": positions.window.rows_of_distance,
            "saturation": positions.window.saturation,
        }
    context = tiled_attention(
        query, key, value, **tables, visible=mask.mask, documents=mask.documents, cu_seqlens=mask.cu_seqlens,
        longest=None if mask.cu_seqlens is None else mask.longest, causal=mask.causal, scale=scale,
        dropout_p=dropout_p, compute_once=mask.compute_once,
    )  # fmt: skip
    return context, None
