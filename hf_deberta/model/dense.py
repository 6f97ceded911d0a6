"""Linear layers computed by oneDNN on AMD processors with AVX-512.

PyTorch multiplies float32 matrices with MKL. On two cores of an AMD EPYC with AVX-512 that reaches 207 GFLOP/s, while
oneDNN, which PyTorch also contains, reaches 460 (docs/log.md). On these processors, and only there, `dense` calls
oneDNN in the forward and the backward pass; `torch.backends.mkldnn.flags(enabled=False)` turns this off. The module
remains an ordinary `nn.Linear`, and is called if it was hooked, patched or replaced.
"""

import platform
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from .fast_path_guards import (
    PLAIN_TENSORS,
    has_global_hooks_or_modes,
    in_functorch_transform,
    in_reference_mode,
    is_tracing_or_compiling,
    is_unmodified_module,
)
from .private_apis import has_onednn_linear, onednn_linear


def dense(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return `layer(states)`.

    >>> dense(nn.Linear(4, 3), torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """
    if is_tracing_or_compiling() or not (uses_onednn() and is_float32_linear(layer, states)):
        return layer(states)
    flat = states.reshape(-1, states.shape[-1])
    product = OneDNNProduct.apply if torch.is_grad_enabled() else multiply
    return product(flat, layer.weight, layer.bias).unflatten(0, states.shape[:-1])


class OneDNNProduct(torch.autograd.Function):
    """states [M, K] @ weight^T [K, N] + bias [N]; its gradients are such products too, so it has all derivatives."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        needs_states, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(states if needs_weight else None, weight if needs_states else None)
        return multiply(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            OneDNNProduct.apply(gradient, weight.t(), None) if needs_states else None,
            OneDNNProduct.apply(gradient.t(), states.t(), None) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def multiply(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return states [M, K] @ weight^T [K, N] + bias [N] from oneDNN; matrices in row or column order are not copied."""
    states, weight = (matrix if _has_dense_order(matrix) else matrix.contiguous() for matrix in (states, weight))
    return onednn_linear(states, weight, bias)


def _has_dense_order(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


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
        and not in_functorch_transform()
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
