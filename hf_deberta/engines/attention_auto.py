"""`attn_implementation="auto"`, the default: sdpa, or Triton where it is correct on this device and faster.

Legend: B batch, H heads, N tokens, d head size.

docs/gpu.md describes what is checked and timed, and when. A choice is made once for each `KernelVariant` and `Workload`
and kept until the process ends. Each process of a distributed run decides on its own: backends have no parameters,
hooks or collectives, so DDP, FSDP and tensor parallelism do the same in the same order whatever each rank chooses.
"""

import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from math import inf, isnan
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..model.attention import AUTO, BACKENDS
from ..model.batch_layout import AttentionMask
from ..model.input_checks import has_no_values
from ..model.relative_position import RelativePositions
from .attention_check import KernelVariant, triton_errors, uses_tf32
from .guards import in_functorch_transform, is_tracing_or_exporting, without_dispatch_modes

logger = logging.get_logger(__name__)

ENVIRONMENT_VARIABLE = "HF_DEBERTA_ATTENTION"
FORCED_BACKEND = os.environ.get(ENVIRONMENT_VARIABLE) or AUTO
ALLOWED_FORCED = (AUTO, "sdpa", "triton")
WARM_UP_SECONDS = 0.1  # of both backends after their first calls, which compile; the clock of an idle GPU rises
TIMED_CALLS = 3  # in a turn
TURNS = 4  # of each backend

# query, key, value, positions, mask, dropout_p, scale: the arguments of a backend
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, RelativePositions | None, AttentionMask, float, float]


class Workload(NamedTuple):
    """What is decided once: calls that take about the same time. Sizes are exponents of powers of two, rounded up."""

    kernel: KernelVariant
    dtypes: tuple[torch.dtype, torch.dtype]  # of keys and values
    tokens: int  # N
    heads: int  # B * H
    terms: tuple[str, ...]
    mask: int  # dimensions of the mask, 0 without one
    packed: bool  # documents by boundaries, not by numbers
    longest: int  # of the documents' lengths, -1 if not given
    drops_all: bool
    deterministic: bool


class Failure(NamedTuple):
    """Wrong numbers, or an exception of a backend without its traceback, which would keep the tensors of the call."""

    message: str
    out_of_memory: bool = False


Timing = tuple[float, Failure | None]  # milliseconds; infinity and the reason if there is no time


_faults: dict[KernelVariant, Failure | None] = {}  # None if the kernel passed its check
# one thread at a time checks and times; reentrant, because autograd may run the backward pass of a caller in between
_deciding = threading.RLock()
_choices: dict[Workload, str | None] = {}  # None if the Triton backend does not support it


def measured_backend(
    query: torch.Tensor,  # [B, H, Q, d]
    key: torch.Tensor,  # [B, H, K, d]
    value: torch.Tensor,
    positions: RelativePositions | None,
    mask: AttentionMask,
    dropout_p: float,
    scale: float,
) -> str:
    """Fill the slot `choose_backend`: the faster of sdpa and Triton, if it supports the call, or what the user set."""
    if FORCED_BACKEND != AUTO:
        if FORCED_BACKEND not in ALLOWED_FORCED:
            raise ValueError(f"{ENVIRONMENT_VARIABLE} must be {', '.join(ALLOWED_FORCED)}, not {FORCED_BACKEND!r}")
        return FORCED_BACKEND
    if not may_use_triton(query) or mask.query_positions is not None or is_tracing_or_exporting():
        return "sdpa"
    call: Call = (query, key, value, positions, mask, dropout_p, scale)
    # dropout implies training: reentrant checkpoints first run without gradients, and must drop the same in both passes
    dropout = True if dropout_p > 0 else False  # noqa: SIM210  # a constant of the graph even if the rate is none
    training = dropout or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in floats(call)))
    if torch.compiler.is_compiling():
        if unsupported(call):
            return "sdpa"
        head_size = operator.index(query.shape[-1])  # a constant of the graph even if all its shapes are dynamic
        return choice_in_graph(
            query.device, query.dtype, head_size, training, has_documents(mask), mask.causal, dropout
        )
    if in_functorch_transform():
        return "sdpa"
    workload = workload_of(call, training)
    if workload not in _choices:
        if unsupported(call):
            _choices[workload] = None
        elif is_capturing(query.device) or has_no_values(query):
            return "triton" if _faults.get(workload.kernel, "not checked") is None else "sdpa"
        else:
            return decide(workload, call)
    return _choices[workload] or "sdpa"


def decide(workload: Workload, call: Call) -> str:
    """Check the kernels, time both backends and keep the choice."""
    with _deciding:
        if workload not in _choices:  # not decided by another thread meanwhile
            fault = fault_of(workload.kernel)
            if fault is not None and fault.out_of_memory:
                return "sdpa"  # in this call
            if fault is not None:
                _choices[workload] = "sdpa"
            elif workload.deterministic:  # times differ from run to run
                _choices[workload] = "triton"
            else:
                _choices[workload] = faster_backend(workload.kernel, call)
        return _choices[workload] or "sdpa"


def may_use_triton(query: torch.Tensor) -> bool:
    """True for an ordinary tensor on a GPU: no DTensor, no fake tensor."""
    return query.is_cuda and type(query) is torch.Tensor


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on this device, where nothing may wait for it."""
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def has_documents(mask: AttentionMask) -> bool:
    return mask.documents is not None or mask.cu_seqlens is not None


def unsupported(call: Call) -> bool:
    return BACKENDS["triton"].unsupported_reason(*call[:-1]) is not None


@torch.compiler.assume_constant_result
def choice_in_graph(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    training: bool,
    documents: bool,
    causal: bool,
    dropout: bool,
) -> str:
    """The backend of a graph, which holds for all shapes; runs while torch.compile traces."""
    kernel = KernelVariant(device, dtype, uses_tf32(dtype), head_size, training, documents, causal, dropout)
    deterministic = torch.are_deterministic_algorithms_enabled()
    choices = {
        choice
        for workload, choice in list(_choices.items())  # other threads may add to it
        if workload.kernel == kernel and workload.deterministic == deterministic and choice is not None
    }
    with _deciding:
        return "sdpa" if choices == {"sdpa"} or fault_of(kernel) is not None else "triton"


def workload_of(call: Call, training: bool) -> Workload:
    query, key, value, positions, mask, dropout_p, _ = call
    batch, heads, tokens, head_size = query.shape
    masks = (has_documents(mask), mask.causal, dropout_p > 0)
    longest = max(mask.lengths) if mask.lengths else mask.longest
    return Workload(  # built for each call, so by position: it takes less time
        KernelVariant(query.device, query.dtype, uses_tf32(query.dtype), head_size, training, *masks),
        (key.dtype, value.dtype),
        exponent(tokens),
        exponent(batch * heads),
        () if positions is None else positions.terms,
        0 if mask.mask is None else mask.mask.dim(),
        mask.cu_seqlens is not None,
        exponent(longest or 0),
        dropout_p >= 1,
        torch.are_deterministic_algorithms_enabled(),
    )


def exponent(number: int) -> int:
    """The exponent of the smallest power of two that is not below a number; -1 for 0."""
    return (number - 1).bit_length() if number else -1


# ---- the check ---------------------------------------------------------------------------------------------------


def fault_of(kernel: KernelVariant) -> Failure | None:
    """What is wrong with the Triton backend here, or None; checked at the first call, which warns.

    If there was no memory for the check, the next call checks again.
    """
    if kernel in _faults:
        return _faults[kernel]
    fault = find_fault(kernel)
    if fault is not None:
        warn_that_sdpa_is_used(kernel, f"the Triton kernels failed their check: {fault.message}")
    if fault is None or not fault.out_of_memory:
        _faults[kernel] = fault
    return fault


def find_fault(kernel: KernelVariant) -> Failure | None:
    try:
        with own_state(kernel.device):
            errors = triton_errors(kernel)
    except Exception as error:  # out of resources, compilation, launch, ...: whatever a device may answer
        return failure_of(error)
    name = max(errors, key=lambda name: inf if isnan(errors[name]) else errors[name])
    if errors[name] <= kernel.tolerance:  # false for NaN
        return None
    return Failure(
        f"{name} is off by {errors[name]:.2g} of its largest entry, rounding explains {kernel.tolerance:.2g}"
    )


def warn_that_sdpa_is_used(kernel: KernelVariant, reason: str) -> None:
    logger.warning(
        f"attn_implementation='auto' uses sdpa on {kernel.device} for {kernel}: {reason}. To use the kernels all the "
        f"same, set attn_implementation or the environment variable {ENVIRONMENT_VARIABLE} to 'triton'; to use sdpa "
        "without a check, to 'sdpa'."
    )


def failure_of(error: Exception) -> Failure:
    first_line = str(error).strip().partition("\n")[0]
    return Failure(f"{type(error).__name__}: {first_line}", isinstance(error, torch.OutOfMemoryError))


# ---- the times ---------------------------------------------------------------------------------------------------


def faster_backend(kernel: KernelVariant, call: Call) -> str:
    """The backend that takes less time."""
    times = milliseconds(("sdpa", "triton"), call, kernel.training)
    choice, failure = faster_of(times["sdpa"], times["triton"]), times["triton"][1]
    if failure is not None and choice == "sdpa":
        warn_that_sdpa_is_used(kernel, f"the Triton kernels failed when they were timed: {failure.message}")
    return choice


def faster_of(sdpa: Timing, triton: Timing) -> str:
    """The name of the backend that takes less time."""
    (sdpa_time, _), (triton_time, failure) = sdpa, triton
    if failure is None:
        return "triton" if triton_time < sdpa_time else "sdpa"
    # Triton needs less memory, which is short because the timed call stands beside the caller's
    return "triton" if failure.out_of_memory and sdpa_time == inf else "sdpa"


def milliseconds(backends: Sequence[str], call: Call, training: bool) -> dict[str, Timing]:
    """Time of a call with each backend, forward and in training backward; infinity, and why, if it fails.

    The backends take turns, in the opposite order each time: a clock that rises or falls meanwhile favours neither.
    """
    device = call[0].device
    failures: dict[str, Failure] = {}
    times: dict[str, list[float]] = {backend: [] for backend in backends}

    def take_turns(measure: Callable[[Callable[[], None]], float | None], order: Iterable[str]) -> None:
        for backend in order:
            try:
                if backend not in failures:
                    times[backend].append(measure(partial(run, backend)) or 0.0)
            except Exception as error:  # out of memory: not a fault of the backend, and still a reason for the other
                failures[backend] = failure_of(error)

    with own_state(device), torch.set_grad_enabled(training):
        try:
            run = run_with_random_numbers(call, training)
        except Exception as error:
            return dict.fromkeys(backends, (inf, failure_of(error)))
        in_a_row = partial(median_milliseconds, device=device)
        take_turns(operator.call, backends)  # compiles
        start = time.monotonic()
        while time.monotonic() - start < WARM_UP_SECONDS:
            take_turns(in_a_row, backends)
        for values in times.values():
            values.clear()
        for turn in range(TURNS):
            take_turns(in_a_row, backends if turn % 2 == 0 else backends[::-1])
    return {name: (inf, failures[name]) if name in failures else (median(times[name]), None) for name in backends}


def run_with_random_numbers(call: Call, training: bool) -> Callable[[str], None]:
    """Return a function that runs a backend on random numbers in the shapes of a call."""
    generator = torch.Generator(call[0].device).manual_seed(0)
    stand_ins = random_call(call, training, generator)
    leaves = floats(stand_ins) if training else []
    gradient = torch.empty_like(stand_ins[0]).normal_(generator=generator)

    def run(backend: str) -> None:
        context, _ = BACKENDS[backend].attend(*stand_ins)
        if leaves:
            torch.autograd.grad(context, leaves, gradient, allow_unused=True)

    return run


def median_milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """Median time of calls that are queued one after another, as layers are."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_CALLS + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(events))


def floats(call: Call) -> list[torch.Tensor]:
    """Query, key, value and tables: the inputs that may have gradients."""
    positions = call[3]
    tables = () if positions is None else (positions.position_key, positions.position_query)
    return [*call[:3], *(table for table in tables if table is not None)]


def random_call(call: Call, training: bool, generator: torch.Generator) -> Call:
    """The call with random numbers in its shapes, in one dtype, as leaves of a graph in training."""

    def stand_in(data: Any) -> Any:
        if isinstance(data, RelativePositions | AttentionMask):
            names = [part.name for part in fields(data) if part.init]
            return replace(data, **{name: stand_in(getattr(data, name)) for name in names})
        if not torch.is_tensor(data):
            return data
        if not data.is_floating_point():
            return data.clone()
        numbers = torch.empty_like(data, dtype=call[0].dtype).normal_(generator=generator)
        return numbers.requires_grad_(training)

    return tuple(map(stand_in, call))


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Run checks and timings without the caller's modes, hooks, autocast and random state."""
    with ExitStack() as states:
        states.enter_context(without_dispatch_modes())
        states.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
        states.enter_context(torch.inference_mode(False))
        states.enter_context(torch.enable_grad())
        states.enter_context(torch.autocast(device.type, enabled=False))
        states.enter_context(own_random_state(device))
        yield


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
