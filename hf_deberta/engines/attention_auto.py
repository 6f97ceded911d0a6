"""`attn_implementation="auto"`, the default: Triton on GPUs in half precision, where it passes a check, or else sdpa.

The first call checks them, once for each GPU, dtype and head size in a process. Each process of a distributed run
decides on its own: backends have no parameters, hooks or collectives, so DDP, FSDP and tensor parallelism do the same
in the same order whatever each rank chooses.
"""

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isnan
from typing import NamedTuple

import torch
from transformers.utils import logging

from ..model.attention import AUTO, BACKENDS
from ..model.batch_layout import AttentionMask
from ..model.relative_position import RelativePositions
from .attention_check import KernelVariant, triton_errors
from .guards import is_tracing_or_exporting, without_dispatch_modes

logger = logging.get_logger(__name__)

ENVIRONMENT_VARIABLE = "HF_DEBERTA_ATTENTION"
FORCED_BACKEND = os.environ.get(ENVIRONMENT_VARIABLE) or AUTO
ALLOWED_FORCED = (AUTO, "sdpa", "triton")
DTYPES = (torch.float16, torch.bfloat16)  # in float32, without matrix units, no GPU has shown that Triton is faster


class Failure(NamedTuple):
    """Wrong numbers, or an exception of a backend without its traceback, which would keep the tensors of the call."""

    message: str
    out_of_memory: bool = False


_faults: dict[KernelVariant, Failure | None] = {}  # None if the kernel passed its check
# one thread at a time checks; reentrant, because autograd may run the backward pass of a caller in between
_checking = threading.RLock()


def checked_backend(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> str:
    """Replace `choose_backend`: Triton if it supports the call and passes a check, or what the user set."""
    if FORCED_BACKEND != AUTO:
        if FORCED_BACKEND not in ALLOWED_FORCED:
            raise ValueError(f"{ENVIRONMENT_VARIABLE} must be {', '.join(ALLOWED_FORCED)}, not {FORCED_BACKEND!r}")
        return FORCED_BACKEND
    if not may_use_triton(query) or query.dtype not in DTYPES or mask.query_positions is not None:
        return "sdpa"
    call = (query, key, value, positions, mask, dropout_p)
    if is_tracing_or_exporting() or BACKENDS["triton"].unsupported_reason(*call) is not None:
        return "sdpa"
    head_size = operator.index(query.shape[-1])  # a constant of a graph even if all its shapes are dynamic
    kernel = KernelVariant(query.device, query.dtype, head_size)
    if torch.compiler.is_compiling():
        return choice_in_graph(*kernel)
    if kernel not in _faults and is_capturing(query.device):
        return "sdpa"  # in this call
    return "triton" if fault_of(kernel) is None else "sdpa"


def may_use_triton(query: torch.Tensor) -> bool:
    """True for an ordinary tensor on a GPU: no DTensor, no fake tensor."""
    return query.is_cuda and type(query) is torch.Tensor


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on this device, where nothing may wait for it."""
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result
def choice_in_graph(*kernel) -> str:
    """The backend of a graph, which holds for all shapes; runs while torch.compile traces."""
    return "triton" if fault_of(KernelVariant(*kernel)) is None else "sdpa"


def fault_of(kernel: KernelVariant) -> Failure | None:
    """What is wrong with the Triton backend here, or None; checked at the first call, which warns.

    If there was no memory for the check, the next call checks again.
    """
    if kernel in _faults:
        return _faults[kernel]
    with _checking:
        if kernel in _faults:  # checked by another thread meanwhile
            return _faults[kernel]
        fault = find_fault(kernel)
        if fault is not None:
            logger.warning(
                f"attn_implementation='auto' uses sdpa on {kernel.device} for {kernel}: the Triton kernels failed "
                f"their check: {fault.message}. To use the kernels all the same, set attn_implementation or the "
                f"environment variable {ENVIRONMENT_VARIABLE} to 'triton'; to use sdpa without a check, to 'sdpa'."
            )
        if fault is None or not fault.out_of_memory:
            _faults[kernel] = fault
        return fault


def find_fault(kernel: KernelVariant) -> Failure | None:
    try:
        with (  # without the caller's modes, hooks, autocast and random state
            without_dispatch_modes(),
            torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(kernel.device.type, enabled=False),
            own_random_state(kernel.device),
        ):
            errors = triton_errors(kernel)
    except Exception as error:  # out of resources, compilation, launch, ...: whatever a device may answer
        return failure_of(error)
    name = max(errors, key=lambda name: inf if isnan(errors[name]) else errors[name])
    if errors[name] <= kernel.tolerance:  # false for NaN
        return None
    return Failure(
        f"{name} is off by {errors[name]:.2g} of its largest entry, rounding explains {kernel.tolerance:.2g}"
    )


def failure_of(error: Exception) -> Failure:
    first_line = str(error).strip().partition("\n")[0]
    return Failure(f"{type(error).__name__}: {first_line}", isinstance(error, torch.OutOfMemoryError))


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Restore the GPU's generator, which dropout uses. Nothing here uses the CPU's, from which other threads draw."""
    if device.type != "cuda":
        yield
        return
    state = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(state, device)
