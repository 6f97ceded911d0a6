"""Every private function of PyTorch that the model uses, in one place.

When a release of PyTorch removes one, tests/model/test_private_apis.py says which and what it was for, and this file is
the only one to change.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
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
    return bool(_has_any_global_hook())


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
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the module's own parameter of this name, or None; unlike an attribute it is never a plain tensor."""
    return module._parameters.get(name)


def version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written in place."""
    return tensor._version


def backward_keeps_graph() -> bool:
    """True in a backward pass with retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def has_onednn_linear() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return states [M, K] @ weight^T [K, N] + bias [N], computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def has_cpu_attention_with_log_sum() -> bool:
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def cpu_attention_with_log_sum(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, H, Q, d] with scores query @ key^T + bias, and their log-sum-exp [B, H, Q]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=1.0)
