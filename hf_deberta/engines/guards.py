"""When a fast path is safe.

A fast path computes the same numbers without calling a module, or with another operation (docs/use.md). Fast
paths are not used where they would be wrong or would bypass user code: in captured graphs (torch.compile, torch.export,
torch.jit.trace), in transforms of torch.func, for modules that were hooked, patched or replaced, and under global hooks
and dispatch modes. Input checks do not depend on hooks or modes.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.LayerNorm)
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
EXPORTS_SET_FLAG = torch.__version__ >= "2.9"  # compared as versions


def is_tracing_or_exporting() -> bool:
    """True while torch.export or torch.jit.trace builds a graph, which may leave the process.

    PyTorch 2.7 and 2.8 say the same of torch.compile, so its graphs have plain operations there.
    """
    # up to PyTorch 2.11 `is_exporting` is true in what torch.compile traces
    exporting = torch.compiler._is_exporting_flag if EXPORTS_SET_FLAG else torch.compiler.is_exporting()
    return exporting or torch.jit.is_tracing()


def has_global_hooks_or_modes() -> bool:
    """True if every module is hooked (to record activations) or every operation is intercepted (to count FLOPs).

    These may also replace results, so nothing that was computed under them may be cached.
    """
    of_all = nn.modules.module
    forward = of_all._global_forward_hooks or of_all._global_forward_pre_hooks
    hooked = forward or of_all._global_backward_hooks or of_all._global_backward_pre_hooks
    return bool(hooked) or _get_current_dispatch_mode() is not None


def is_unmodified_module(module: nn.Module) -> bool:
    """True if calling the module does what its class in torch.nn does, with ordinary weights.

    False for modules with hooks, patched forwards or adapters, for quantized and sharded weights, and for the replicas
    of DataParallel, whose weights are attributes and not parameters.
    """
    return (
        type(module) in PLAIN_MODULES
        and not is_hooked_or_patched(module)
        and type(registered_parameter(module, "weight")) in PLAIN_TENSORS
        and type(registered_parameter(module, "bias")) in (*PLAIN_TENSORS, type(None))
    )


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
