"""Dense layers on processors that the default library serves badly.

PyTorch multiplies float32 matrices with MKL. On two cores of an AMD EPYC with AVX-512 that reaches 207 GFLOP/s, and
oneDNN, which PyTorch carries too, 460 (docs/log.md). So on AMD processors with AVX-512, and only there, `dense` takes
oneDNN's product, forward and backward. `torch.backends.mkldnn.flags(enabled=False)` switches that off. The module
stays an ordinary `nn.Linear`: whatever replaces it, hooks it or patches it is called.
"""

import platform
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from .fast_path_guards import (
    PLAIN_TENSORS,
    has_global_hooks_or_modes,
    in_functorch_transform,
    is_tracing_or_compiling,
    is_unmodified_module,
)


def dense(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """`layer(states)`.

    >>> dense(nn.Linear(4, 3), torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """
    if is_tracing_or_compiling() or not (
        prefers_onednn() and torch.backends.mkldnn.enabled and is_plain(layer, states)
    ):
        return layer(states)
    flat = states.reshape(-1, states.shape[-1])
    if torch.is_grad_enabled():
        product = OneDNNProduct.apply(flat, layer.weight, layer.bias)
    else:
        product = multiply(flat, layer.weight, layer.bias)
    return product.unflatten(0, states.shape[:-1])


class OneDNNProduct(torch.autograd.Function):
    """x w^T + b with its gradients, which are products of the same kind; differentiable as often as needed."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        for_states, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(states if for_weight else None, weight if for_states else None)
        return multiply(states, weight, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        for_states, for_weight, for_bias = ctx.needs_input_grad
        return (
            OneDNNProduct.apply(gradient, weight.t(), None) if for_states else None,
            OneDNNProduct.apply(gradient.t(), states.t(), None) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def multiply(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """states [M, K] times weight [N, K], each in row or column order, plus bias [N]."""
    states, weight = (matrix if _in_some_order(matrix) else matrix.contiguous() for matrix in (states, weight))
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def _in_some_order(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def is_plain(layer: nn.Module, states: torch.Tensor) -> bool:
    """Whether calling `layer` could mean nothing but x w^T + b of float32 tensors on the CPU."""
    return (
        type(layer) is nn.Linear
        and type(states) in PLAIN_TENSORS
        and is_unmodified_module(layer)
        and states.dtype == layer.weight.dtype == torch.float32
        and states.device.type == layer.weight.device.type == "cpu"
        and states.numel() > 0
        and not (torch.is_autocast_enabled("cpu") or in_functorch_transform() or has_global_hooks_or_modes())
    )


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """On AMD processors with AVX-512, where PyTorch is built with both libraries."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in processor_vendor()
    )


def processor_vendor() -> str:
    """What the system tells of the processor's maker; empty if nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return "".join(line for line in cpuinfo.read_text().splitlines() if line.startswith("vendor_id"))
    return platform.processor()
