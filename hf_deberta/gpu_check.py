"""`python -m hf_deberta gpu-check`: check the Triton kernels on this machine's GPU, and time them against sdpa.

Legend: B batch, H heads, N tokens, d head size.

It shows what `attn_implementation="auto"` decides here, with the check that it uses
(hf_deberta/engines/attention_auto.py), and checks the kernel of the loss over the vocabulary.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from hf_deberta.engines.attention_auto import DTYPES as CHOSEN_DTYPES
from hf_deberta.engines.attention_auto import failure_of, find_fault
from hf_deberta.engines.attention_check import KernelVariant
from hf_deberta.engines.linear_cross_entropy import kernel_fault
from hf_deberta.model.attention import BACKENDS
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions, rows_of_distances

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((8, 128), (32, 512), (4, 2048), (1, 8192))
TABLE = (512, 256)  # positions and buckets of v2 and v3
HEADER = ("dtype", "head size", "mode", "check", "shape", "sdpa ms", "triton ms", "choice")
WIDTHS = (8, 9, 9, 6, 7, 9, 9, 6)
PASSED, FAILED, UNSUPPORTED = "passed", "FAILED", "-"
TURNS = 20  # of each backend
Row = tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES[:2], help="default: those of auto")
    shapes = " ".join(f"{batch}x{tokens}" for batch, tokens in SHAPES)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, metavar="BxN", default=SHAPES, help=f"(default: {shapes})"
    )
    parser.add_argument("--heads", type=parse_size, default=12, help="default: 12")
    parser.add_argument("--head_sizes", nargs="+", type=parse_size, default=(64,), metavar="d", help="default: 64")


def parse_shape(text: str) -> tuple[int, int]:
    """A batch and a length, from a text such as 32x512."""
    batch, _, tokens = text.partition("x")
    return parse_size(batch), parse_size(tokens)


def parse_size(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Print the table; return 0 if all checks passed, 1 if one failed, 2 if there was nothing to check."""
    device = current_gpu()
    if device is None:
        print("There is no CUDA device, so nothing was checked: attn_implementation='auto' uses sdpa here.")
        return 2
    print(torch.cuda.get_device_name(device), "| torch", torch.__version__)
    print_row(HEADER)
    checks, notes = set(), []
    for dtype, head_size in product(args.dtypes, args.head_sizes):
        kernel = KernelVariant(device, getattr(torch, dtype), head_size)
        check, reason = check_kernel(kernel)
        checks.add(check)
        if reason is not None:
            notes.append(reason)
        for training, (batch, tokens) in product((False, True), args.shapes):
            row, failures = time_shape(kernel, training, check, batch, args.heads, tokens)
            print_row(row)
            notes.extend(failures)
    for dtype in args.dtypes:
        if (fault := kernel_fault(device, getattr(torch, dtype))) is not None:
            checks.add(FAILED)
            notes.append(f"{dtype}, loss over the vocabulary: the kernel failed its check: {fault.message}")
    for note in notes:
        print(note)
    if FAILED in checks:
        return 1
    return 0 if PASSED in checks else 2


def current_gpu() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def check_kernel(kernel: KernelVariant) -> tuple[str, str | None]:
    """If the kernels passed their check, and otherwise why not."""
    unsupported = BACKENDS["triton"].unsupported_reason(*make_call(kernel, False, 1, 1, 1)[:-1])
    if unsupported is not None:
        return UNSUPPORTED, f"{kernel}: {unsupported}"
    fault = find_fault(kernel)
    return (PASSED, None) if fault is None else (FAILED, f"{kernel}: {fault.message}")


def time_shape(
    kernel: KernelVariant, training: bool, check: str, batch: int, heads: int, tokens: int
) -> tuple[Row, list[str]]:
    """A row of the table, and why a backend has no time in it."""
    shape, mode = f"{batch}x{tokens}", "training" if training else "inference"
    steps, failures = {}, []
    for backend in ("sdpa",) if check == UNSUPPORTED else ("sdpa", "triton"):
        try:
            step = make_step(backend, kernel, training, batch, heads, tokens)
            step()  # compiles
            steps[backend] = step
        except Exception as error:  # out of memory, of a launch, ...: whatever a device may answer
            failures.append(f"{kernel}, {mode}, {shape}: {backend} failed: {failure_of(error).message}")
    times = time_interleaved(steps, TURNS, kernel.device)
    numbers = (f"{times[name]:.3f}" if name in times else "-" for name in ("sdpa", "triton"))
    choice = "triton" if check == PASSED and kernel.dtype in CHOSEN_DTYPES else "sdpa"
    return (kernel.precision, str(kernel.head_size), mode, check, shape, *numbers, choice), failures


def make_call(kernel: KernelVariant, training: bool, batch: int, heads: int, tokens: int) -> tuple:
    """The arguments of a backend: random numbers with the strides that projections leave, and both tables of v3."""
    random = partial(torch.randn, device=kernel.device, dtype=kernel.dtype)
    states = [random((batch, tokens, heads, kernel.head_size)).transpose(1, 2) for _ in range(3)]
    keys, queries = (random((heads, 2 * TABLE[1], kernel.head_size)) for _ in range(2))
    for tensor in (*states, keys, queries):
        tensor.requires_grad_(training)
    positions = RelativePositions.from_tables(keys, queries, rows_of_distances(*TABLE).to(kernel.device))
    return *states, positions, AttentionMask(), 0.0, (3 * kernel.head_size) ** -0.5


def make_step(
    backend: str, kernel: KernelVariant, training: bool, batch: int, heads: int, tokens: int
) -> Callable[[], None]:
    """A call of a backend, in training with its backward pass."""
    call = make_call(kernel, training, batch, heads, tokens)
    gradient = torch.randn_like(call[0])
    leaves = [*call[:3], call[3].position_key, call[3].position_query]

    def step() -> None:
        context, _ = BACKENDS[backend].attend(*call)
        if training:
            torch.autograd.grad(context, leaves, gradient)

    return step


def time_interleaved(calls: Mapping[str, Callable[[], Any]], turns: int, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of each peer; peers take turns, and the first turn is not counted.

    A turn is two calls, and the second counts: threads of one runtime keep cores busy while the next peer begins.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            call()
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_row(row: Row) -> None:
    """Print cells below each other."""
    print("  ".join(cell.ljust(width) for cell, width in zip(row, WIDTHS, strict=True)).rstrip(), flush=True)
