"""When a fast path is safe, and the switch that turns all fast paths off.

A fast path computes the same numbers without calling a module, or with another operation (docs/debugging.md). Fast
paths are not used where they would be wrong or would bypass user code: in captured graphs (torch.compile, torch.export,
torch.jit.trace), in transforms of torch.func, for modules that were hooked, patched or replaced, and under global hooks
and dispatch modes. Input checks do not depend on hooks or modes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .private_apis import (
    has_global_hook,
    has_no_values,
    in_dispatch_mode,
    in_forward_ad,
    in_torch_func,
    is_hooked_or_patched,
    registered_parameter,
)

PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.LayerNorm)
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)

_reference_requests = int(os.environ.get("HF_DEBERTA_REFERENCE", "0") not in ("", "0"))


@contextmanager
def reference_mode() -> Iterator[None]:
    """Switch all fast paths off in the whole process: eager attention, nn.Linear, no cache, no unpadding.

    >>> with hf_deberta.reference_mode():
    ...     output = model(**inputs)

    Setting the environment variable HF_DEBERTA_REFERENCE=1 before the start does the same until the process ends.
    """
    global _reference_requests
    _reference_requests += 1
    try:
        yield
    finally:
        _reference_requests -= 1


def in_reference_mode() -> bool:
    """True if `reference_mode` or HF_DEBERTA_REFERENCE asks for the plain computation."""
    return _reference_requests > 0


def is_tracing_or_compiling() -> bool:
    """True while torch.compile, torch.export or torch.jit.trace builds a graph, which must hold for other inputs."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_tracing_or_exporting() -> bool:
    """True while torch.export or torch.jit.trace builds a graph, which may leave the process.

    PyTorch 2.7 and 2.8 say the same of torch.compile, so its graphs have plain operations there.
    """
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def in_functorch_transform() -> bool:
    """True in torch.func and forward-mode differentiation, which cannot transform our autograd functions."""
    return in_torch_func() or in_forward_ad()


def has_global_hooks_or_modes() -> bool:
    """True if every module is hooked (to record activations) or every operation is intercepted (to count FLOPs).

    These may also replace results, so nothing that was computed under them may be cached.
    """
    return in_dispatch_mode() or has_global_hook()


def can_read_values(tensor: torch.Tensor) -> bool:
    """True if Python may read the tensor's values: it has some, and reading them does not wait for a device."""
    return tensor.device.type == "cpu" and not (is_tracing_or_compiling() or in_torch_func() or has_no_values(tensor))


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
