"""What may stand between a call and its plain meaning: compilers, tracers, function transforms, modes, hooks, patches.

Shortcuts that leave a module's `forward` or an operation's name out are taken only where none of these would notice.
"""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.LayerNorm)
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def is_tracing_or_compiling() -> bool:
    """Whether a graph is being made, by torch.compile, torch.export or torch.jit.trace: no value may be looked at."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def in_functorch_transform() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: they know no autograd function of ours."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def has_global_hooks_or_modes() -> bool:
    """Whether something sees every operation or every module: a flop counter, fake tensors, global hooks."""
    return _get_current_dispatch_mode() is not None or _has_any_global_hook()


def can_read_values(tensor: torch.Tensor) -> bool:
    """Whether Python may ask for numbers: on the CPU only, elsewhere it would wait, and not where there are none."""
    return tensor.device.type == "cpu" and not (
        is_tracing_or_compiling() or in_functorch_transform() or has_global_hooks_or_modes()
    )


def is_unmodified_module(module: nn.Module) -> bool:
    """Whether a module is plain torch: not replaced, hooked or patched, and its weights are ordinary tensors."""
    return (
        type(module) in PLAIN_MODULES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in vars(module)
        and type(module._parameters.get("weight")) in PLAIN_TENSORS  # replicas and shards hold theirs elsewhere
        and type(module._parameters.get("bias")) in (*PLAIN_TENSORS, type(None))
    )
