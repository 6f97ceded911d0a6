"""Every private function of PyTorch that the model uses, and a public one that depends on the release, in one place.

When a release of PyTorch removes one, tests/model/test_private_apis.py says which and what it was for, and this file is
the only one to change.
"""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)


def in_torch_func() -> bool:
    """True inside a transform of torch.func: vmap, grad, jvp, ..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_ad() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def has_global_hook() -> bool:
    """True if a hook is registered for all modules, as by `register_module_forward_hook`."""
    of_all = nn.modules.module
    forward = of_all._global_forward_hooks or of_all._global_forward_pre_hooks
    return bool(forward or of_all._global_backward_hooks or of_all._global_backward_pre_hooks)


def in_dispatch_mode() -> bool:
    """True inside a TorchDispatchMode, such as FlopCounterMode."""
    return _get_current_dispatch_mode() is not None


def has_no_values(tensor: torch.Tensor) -> bool:
    """True for a fake tensor, and where operations give fake or symbolic tensors."""
    return isinstance(tensor, FakeTensor) or any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def without_dispatch_modes() -> AbstractContextManager:
    """Return a context in which tensors are real and have values, also inside FakeTensorMode and other modes."""
    return _disable_current_modes()


def is_hooked_or_patched(module: nn.Module) -> bool:
    """True if calling the module does more than the `forward` of its class."""
    return any(hooks(module)) or "forward" in vars(module)


def hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dictionaries of the module's hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the module's own parameter of this name, or None; unlike an attribute it is never a plain tensor."""
    return module._parameters.get(name)


def registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries of the module's own parameters and of its children."""
    return module._parameters, module._modules


def assume(condition: bool | torch.SymBool) -> None:
    """Tell torch.export that a condition on sizes holds; elsewhere, raise an error if it does not."""
    torch._check(condition)


def version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written in place."""
    return tensor._version


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written in place."""
    return [*map(attrgetter("_version"), tensors)]


def backward_keeps_graph() -> bool:
    """True in a backward pass with retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def products_use_tf32() -> bool:
    """True if PyTorch's own products of float32 on GPUs use TF32.

    torch.get_float32_matmul_precision() fails once the setting was changed directly.
    """
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):  # before PyTorch 2.9
        return products.allow_tf32
    return products.fp32_precision == "tf32"


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


def has_cpu_attention_with_log_sum() -> bool:
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def cpu_attention_with_log_sum(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, H, Q, d] with scores query @ key^T + bias, and their log-sum-exp [B, H, Q]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=1.0)
