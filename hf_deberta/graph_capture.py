"""Who is watching: compilers and tracers, whose graphs must hold for other inputs, and modes that see every op."""

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def capturing() -> bool:
    """Whether a graph is being made, by torch.compile, torch.export or torch.jit.trace: no value may be looked at."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def transforming() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: no autograd function of ours may be used."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def dispatching() -> bool:
    """Whether a mode takes every operation apart: a flop counter, fake tensors."""
    return _get_current_dispatch_mode() is not None
