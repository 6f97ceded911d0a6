"""Linear layers computed by oneDNN on AMD processors with AVX-512.

PyTorch multiplies float32 matrices with MKL. On two cores of an AMD EPYC with AVX-512 that reaches 207 GFLOP/s, while
oneDNN, which PyTorch also contains, reaches 460 (benchmarks/log.md). There, and only there, oneDNN computes the
forward and the backward pass; `torch.backends.mkldnn.flags(enabled=False)` turns this off. The module remains an
ordinary `nn.Linear`, and is called in graphs of torch.compile, and if it was hooked, patched or replaced.

oneDNN compiles a primitive for each pair of a number of rows and a shape of weights, and keeps the last 1024 of them,
0.6 MB each. So that inputs of many lengths do not fill this cache, products have few numbers of rows: `pad_rows`.
"""

import platform
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from ..model.input_checks import in_captured_graph, in_transform
from ..model.slots import in_reference_mode
from .guards import PLAIN_TENSORS, has_global_hooks_or_modes, is_unmodified_module


def linear_by_onednn(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer, with oneDNN where that is faster; the module itself is then not called.

    >>> linear_by_onednn(nn.Linear(4, 3), torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """
    if in_captured_graph() or not (uses_onednn() and is_float32_linear(layer, states)):
        return layer(states)
    flat = states.reshape(-1, states.shape[-1])
    product = OneDNNProduct.apply if torch.is_grad_enabled() else multiply_padded
    return product(flat, layer.weight, layer.bias)[: flat.shape[0]].unflatten(0, states.shape[:-1])


class OneDNNProduct(torch.autograd.Function):
    """`multiply_padded` with all derivatives; the gradient [P, N] of its result has zeros in the padded rows."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        needs_states, needs_weight, _ = ctx.needs_input_grad
        ctx.rows = states.shape[0]
        ctx.save_for_backward(states if needs_weight else None, weight if needs_states else None)
        return multiply_padded(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            OneDNNProduct.apply(gradient, weight.t(), None)[: ctx.rows] if needs_states else None,
            multiply_transposed(gradient, states) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def multiply(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return states [M, K] @ weight^T [K, N] + bias [N] from oneDNN."""
    return multiply_padded(states, weight, bias)[: states.shape[0]]


def multiply_padded(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of `multiply` with P = `rounded_rows(M)` rows; the rows from M on are to be ignored."""
    return onednn_linear(dense_order(pad_rows(states)), dense_order(weight), bias)


def multiply_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left^T [N, M] @ right [M, K] from oneDNN, the gradient of a weight; either may be padded already."""
    left, right = pad_rows(left), pad_rows(right)
    if torch.is_grad_enabled():  # for second derivatives
        return left.t() @ right
    return onednn_linear(dense_order(left.t()), dense_order(right.t()), None)


def pad_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [M, K] with rows of zeros up to `rounded_rows(M)`, or the tensor itself if there are none to add.

    >>> pad_rows(torch.ones(13, 4)).shape
    torch.Size([16, 4])
    """
    missing = rounded_rows(states.shape[0]) - states.shape[0]
    return functional.pad(states, (0, 0, 0, missing)) if missing else states


def rounded_rows(rows: int) -> int:
    """Return the smallest allowed number of rows that is not below `rows`.

    Allowed are 1 and multiples of 8; between 2^k and 2^(k + 1), from 64 on, only every multiple of 2^k / 8. These are
    33 numbers up to 512 and 57 up to 4096. From 64 on, at most an eighth is added.

    >>> [rounded_rows(rows) for rows in (1, 2, 17, 72, 333)]
    [1, 8, 24, 72, 352]
    """
    if rows <= 1:  # oneDNN multiplies one row differently
        return rows
    step = max(8, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


def dense_order(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix if it is in row or column order, otherwise a copy in row order."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def uses_onednn() -> bool:
    """True if oneDNN may compute products now: it is faster here, is enabled, and hides nothing from hooks or modes."""
    return (
        prefers_onednn()
        and bool(torch.backends.mkldnn.enabled)
        and not in_reference_mode()
        and not has_global_hooks_or_modes()  # hooks would miss the layer; FLOP counters do not know oneDNN's operation
    )


def is_float32_linear(layer: nn.Module, states: torch.Tensor) -> TypeGuard[nn.Linear]:
    """True if calling `layer` gives states @ weight^T + bias of float32 tensors on the CPU."""
    if type(layer) is not nn.Linear or type(states) not in PLAIN_TENSORS or not is_unmodified_module(layer):
        return False
    return (
        states.dtype == layer.weight.dtype == torch.float32
        and states.device.type == layer.weight.device.type == "cpu"
        and states.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not in_transform()
    )


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """True on AMD processors with AVX-512, if PyTorch was built with both libraries."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and has_onednn_linear()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in processor_vendor()
    )


def processor_vendor() -> str:
    """Return the processor's vendor as the system names it, or an empty string."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return "".join(line for line in cpuinfo.read_text().splitlines() if line.startswith("vendor_id"))
    return platform.processor()


# ---- private functions of PyTorch --------------------------------------------------------------------------------


def has_onednn_linear() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_onednn_bfloat16() -> bool:
    """True if this processor has the instructions for oneDNN's products in bfloat16, as those with AVX-512 do."""
    return has_onednn_linear() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_linear(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """Return act(states [M, K] @ weight^T [K, N] + bias [N]), computed by oneDNN; `activation` is "none" or "gelu"."""
    algorithm = "" if activation == "none" else "none"  # of the GELU: by the error function
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, activation, [], algorithm)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] in the order in which oneDNN reads it, for `onednn_linear` and the next function."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 128)  # a usual number of rows; for 1 the order differs


def onednn_linear_with_sum(
    states: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return states [M, K] @ weight^T [K, N] + bias [N] + other [M, N], computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.binary(states, other, weight, bias, "add")


def to_uint8(states: torch.Tensor, offset: int) -> torch.Tensor:
    """Return round(states) + offset as uint8, for states of float32."""
    if hasattr(torch, "quantize_per_tensor"):  # in one pass; deprecated, which it says once
        return torch.quantize_per_tensor(states, 1.0, offset, torch.quint8).view(torch.uint8)
    return states.round().add_(offset).clamp_(0, 255).to(torch.uint8)


def pack_int8_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] of int8 for `onednn_int8_linear`."""
    with warnings.catch_warnings():  # that to_uint8 is deprecated, which PyTorch says once in a process
        warnings.simplefilter("ignore")
        to_uint8(torch.zeros(1), 0)
    return torch.ops.onednn.qlinear_prepack(weight, None)


def onednn_int8_linear(
    states: torch.Tensor,  # [M, K] of uint8
    offset: int,
    weight: torch.Tensor,  # from pack_int8_weight
    weight_scale: torch.Tensor,  # [N]
    weight_offset: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return (states - offset) @ weight^T * weight_scale, [M, N] of float32."""
    factors = (states, 1.0, offset, weight, weight_scale, weight_offset)
    return torch.ops.onednn.qlinear_pointwise(*factors, None, 1.0, 0, torch.float32, "none", [], "")
