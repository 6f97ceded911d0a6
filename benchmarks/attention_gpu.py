"""Measure time, memory and error of disentangled attention on a GPU against its peers and plain attention.

    python benchmarks/attention_gpu.py                                 # 12 heads of 64, bfloat16, 16k tokens a batch
    python benchmarks/attention_gpu.py --dtype float16 --lengths 512
    python benchmarks/attention_gpu.py --sweep --lengths 512 8192      # tiles, warps and stages of each kernel
    TRITON_INTERPRET=1 python benchmarks/attention_gpu.py --dry_run    # the same calls on the CPU, tiny; writes nothing

Peers; each one except flash is compared with float64 on up to 1024 tokens before it is timed:

- flash: `scaled_dot_product_attention` with its flash kernel, without position terms: a lower bound
- ours: the Triton backend; ours sdpa and ours eager: those backends, where their bias or scores fit into memory
- flex: FlexAttention with the same scores, read from two tables of products
- flashdeberta: where it is installed, timed last: its illegal memory access would make this process unusable

A peer that fails or computes something else is skipped with the reason. If it is one of ours, or if a length fails as
a whole, the script exits with an error at the end.

Times are medians of CUDA events of interleaved calls. `gpu_milliseconds` is the GPU's own time, with everything queued
before it starts. `call_milliseconds` is the time from the call to the end of the last kernel on an idle GPU, so it
includes the time that the host needs to queue kernels. Memory is the peak minus what was allocated before the call: the
inputs, and, for backward alone, what forward saved. The error is the largest relative error (by norm) of output and
gradients. Ours may have what the tests allow: twice the error of the reference in the same dtype, plus one rounding.
Writes benchmarks/results/attention_gpu.csv.
"""

import argparse
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch
from timing import record, synchronize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_deberta.engines import attention_triton
from hf_deberta.model.attention import disentangled_attention
from hf_deberta.model.relative_position import RelativePositions, rows_of_distances, saturation_of

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
TABLE = (512, 256)  # positions and buckets of v2 and v3
MAX_LENGTH_OF_SCORES = 2048  # peers that store [B, H, N, N] are skipped for longer rows
MAX_CHECKED_TOKENS = 1024  # the checks store such scores in float64
MAX_PEER_ERROR = 0.5  # relative; a larger error is not due to rounding
SLEEP = 10_000_000  # cycles, about 5 ms: the GPU waits while the host queues a call

Call = Callable[..., torch.Tensor]  # its arguments are the leaves
Mode = tuple[Callable[[], object], Callable[[object], None]]  # a preparation that is not timed; the timed call


def make_leaves(batch: int, length: int, args: argparse.Namespace) -> list[torch.Tensor]:
    """Return query, key and value in the layout of the projections, and two position tables."""
    torch.manual_seed(0)
    like = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    shape = (batch, length, args.heads, args.head_size)
    states = [torch.randn(shape, **like).transpose(1, 2) for _ in range(3)]
    tables = [torch.randn(args.heads, 2 * TABLE[1], args.head_size, **like) for _ in range(2)]
    return [tensor.requires_grad_() for tensor in (*states, *tables)]


def calls_of(names: tuple[str, ...], length: int, args: argparse.Namespace) -> dict[str, Call]:
    """Return the attention of each peer that can compute rows of this length."""
    makers: dict[str, Callable[[], Call]] = {"flash": lambda: flash, "ours": lambda: ours("triton", args.device)}
    makers |= {"flex": lambda: flex(args.head_size), "flashdeberta": flashdeberta}
    if length <= MAX_LENGTH_OF_SCORES:
        makers |= {f"ours {name}": partial(ours, name, args.device) for name in ("sdpa", "eager")}
    return {name: makers[name]() for name in names if name in makers}


def ours(backend: str, device: str) -> Call:
    rows = rows_of_distances(*TABLE)
    rows, saturation = rows.to(device), saturation_of(rows)

    def attention(query, key, value, position_key, position_query):
        positions = RelativePositions(position_key, position_query, rows, saturation, ("c2p", "p2c"))
        return disentangled_attention(query, key, value, positions, backend=backend)[0]

    return attention


def flash(query, key, value, *_) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH):
        return scaled_dot_product_attention(query, key, value)


def flex(size: int) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.fail_on_recompile_limit_hit = True  # beyond the limit it would silently run unfused
    compiled = torch.compile(flex_attention, dynamic=False)
    rows = rows_of_distances(*TABLE).to("cuda")
    k, scale = (len(rows) - 1) // 2, 1 / math.sqrt(3 * size)

    def attention(query, key, value, position_key, position_query):
        c2p, p2c = (query @ position_key.mT) * scale, (key @ position_query.mT) * scale

        def score(s, b, h, i, j):
            row = rows[(i - j).clamp(-k, k) + k]
            return s + c2p[b, h, i, row] + p2c[b, h, j, row]

        return compiled(query, key, value, score_mod=score, scale=scale)

    return attention


def flashdeberta() -> Call:
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled

    def attention(query, key, value, position_key, position_query):
        options = {"sm_scale": 1 / math.sqrt(3 * query.shape[-1])}
        options |= {"position_buckets": TABLE[1], "max_relative_distance": TABLE[0]}
        tables = position_key[None], position_query[None]
        return flash_attention_with_disentangled(query, key, value, None, *tables, **options)

    return attention


@contextmanager
def report_failure(name: str) -> Iterator[None]:
    """Report any error of a peer or of Triton's compiler and continue; for ours, print the traceback as well."""
    try:
        yield
    except Exception as reason:
        print(f"  {name} is skipped: {type(reason).__name__}: {first_line(reason)}", flush=True)
        if name.startswith("ours"):
            traceback.print_exc()


def first_line(reason: Exception) -> str:
    return str(reason).partition("\n")[0]


def output_and_gradients(call: Call, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradients of a weighted sum of it; every dtype represents the weights exactly."""
    output = call(*leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def right_peers(calls: dict[str, Call], leaves: list[torch.Tensor], device: str) -> dict[str, str]:
    """Print each peer's largest relative error against float64; return those of peers that are right, and of eager."""
    eager = ours("eager", device)
    exact = output_and_gradients(eager, [leaf.detach().double().requires_grad_() for leaf in leaves])

    def error(call: Call) -> float:
        pairs = zip(output_and_gradients(call, leaves), exact, strict=True)
        return torch.stack([(x.double() - y).norm() / y.norm() for x, y in pairs]).max().item()

    of_eager = error(eager)
    result = {"eager": f"{of_eager:.1e}"}
    for name, call in calls.items():
        if name == "flash":  # has no position terms
            result[name] = ""
            continue
        allowed = 2 * of_eager + torch.finfo(leaves[0].dtype).eps if name.startswith("ours") else MAX_PEER_ERROR
        with report_failure(name):
            found = error(call)
            right = found <= allowed  # False for NaN
            print(
                f"  error of {name}: {found:.1e}" + ("" if right else f" is WRONG, allowed {allowed:.1e}"), flush=True
            )
            result |= {name: f"{found:.1e}"} if right else {}
    return result


def modes(call: Call, leaves: list[torch.Tensor]) -> dict[str, Mode]:
    """Return the calls to time: forward without gradients, backward alone, and both."""
    gradient = torch.randn_like(call(*leaves))

    def forward(_):
        with torch.no_grad():
            call(*leaves)

    def backward(output):
        torch.autograd.grad(output, leaves, gradient, allow_unused=True)

    def nothing():
        return None

    def output():
        return call(*leaves)

    return {
        "forward": (nothing, forward),
        "backward": (output, backward),
        "both": (nothing, lambda _: backward(output())),
    }


def elapsed(mode: Mode, queued: bool) -> tuple[float, bool]:
    """Return the milliseconds of a call, and whether the host queued it in time.

    Args:
        queued: let the GPU sleep until the host has queued all kernels.
    """
    before, call = mode
    prepared = before()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(SLEEP)
    start.record()
    call(prepared)
    in_time = not (queued and start.query())
    end.record()
    end.synchronize()
    return start.elapsed_time(end), in_time


def milliseconds(calls: dict[str, Mode], repeats: int) -> dict[str, tuple[float, float]]:
    """Return medians of GPU time and call time. Peers take turns; three warm-up rounds are not counted."""
    times: dict[tuple[str, bool], list[float]] = {(name, queued): [] for name in calls for queued in (True, False)}
    late = set()
    for turn in range(-3, repeats):
        for name, queued in times:
            time, in_time = elapsed(calls[name], queued)
            if turn >= 0:
                times[name, queued].append(time)
                late |= set() if in_time else {name}
    for name in sorted(late):
        print(f"  {name}: the GPU woke before all was queued; gpu_milliseconds include the host's time", flush=True)
    return {name: (median(times[name, True]), median(times[name, False])) for name in calls}


def peak_megabytes(mode: Mode) -> float:
    before, call = mode
    prepared = before()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(prepared)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def measure(names: tuple[str, ...], length: int, args: argparse.Namespace) -> bool:
    """Check, time and write one length; return whether all of ours were timed."""
    torch.compiler.reset()  # all lengths share one cache of eight shapes
    batch = max(args.tokens // length, 1)
    calls = calls_of(names, length, args)
    error = right_peers(calls, make_leaves(1, min(length, MAX_CHECKED_TOKENS), args), args.device)
    leaves = make_leaves(batch, length, args)
    ready: dict[str, dict[str, Mode]] = {}
    for name, call in calls.items():
        if name in error:
            with report_failure(name):
                ready[name] = warm_up(modes(call, leaves), args.device)
    if args.dry_run:
        print(f"  run: {', '.join(ready)}", flush=True)
    else:
        write_times(ready, error, f"{batch}x{length}", args)
    return all(name in ready for name in calls if name.startswith("ours"))


def warm_up(mode_calls: dict[str, Mode], device: str) -> dict[str, Mode]:
    """Run each mode once, so that it is compiled; return the modes."""
    for before, call in mode_calls.values():
        call(before())
        synchronize(device)
    return mode_calls


def write_times(ready: dict[str, dict[str, Mode]], error: dict[str, str], case: str, args) -> None:
    import triton

    setting = {"case": case, "heads": f"{args.heads}x{args.head_size}", "dtype": args.dtype}
    for mode in ("forward", "backward", "both"):
        times = milliseconds({name: kinds[mode] for name, kinds in ready.items()}, args.repeats)
        flash_time = times["flash"][0] if "flash" in times else None  # it has no float32 kernel
        rows = []
        for name, (gpu, call) in times.items():
            row = {"peer": name, "mode": mode, "gpu_milliseconds": f"{gpu:.3f}", "call_milliseconds": f"{call:.3f}"}
            row |= {"over_flash": f"{gpu / flash_time:.2f}" if flash_time else ""}
            row |= {"peak_megabytes": f"{peak_megabytes(ready[name][mode]):.0f}"}
            row |= {"error": error[name], "eager_error": error["eager"], **setting}
            rows.append({**row, "repeats": args.repeats, "triton": triton.__version__})
        text = ", ".join(f"{name} {gpu:.3f} ({call:.3f})" for name, (gpu, call) in times.items())
        print(f"  {mode}, ms of GPU (of the call): {text}", flush=True)
        if rows:
            record("attention_gpu.csv", rows, ("peer", "mode", "case", "heads", "dtype"), "cuda")


def sweep(length: int, args: argparse.Namespace) -> None:
    """Print the microseconds of each kernel for each tile size, number of warps and number of stages."""
    call, leaves = ours("triton", args.device), make_leaves(max(args.tokens // length, 1), length, args)
    for tile, warps, stages in itertools.product(args.tiles, (2, 4, 8), (1, 2, 3)):
        launch = (tile, ((warps, stages),) * 4)
        attention_triton.LAUNCHES.update(dict.fromkeys(attention_triton.LAUNCHES, launch))
        try:
            before, both = modes(call, leaves)["both"]
            both(before())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(args.repeats):
                    both(before())
                torch.cuda.synchronize()
        except Exception as reason:  # more shared memory than there is, in one of several classes
            print(f"  tile {tile}, {warps} warps, {stages} stages: {first_line(reason)}", flush=True)
            continue
        times = {event.key: event.self_device_time_total / args.repeats for event in profile.key_averages()}
        text = ", ".join(f"{name} {time:.0f}" for name, time in times.items() if name.endswith("_kernel"))
        print(f"  tile {tile}, {warps} warps, {stages} stages: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time our kernels with other tiles, warps and stages")
    parser.add_argument("--tiles", type=int, nargs="+", default=(32, 64), help="of --sweep; 128 takes long to compile")
    parser.add_argument("--dry_run", action="store_true", help="run tiny calls on the CPU; needs TRITON_INTERPRET=1")
    args = parser.parse_args()
    args.device = "cpu" if args.dry_run else "cuda"
    if args.dry_run:
        args.lengths, args.tokens, args.heads, args.head_size, args.dtype = [20], 20, 1, 16, "float32"
    elif not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; use TRITON_INTERPRET=1 and --dry_run to try it without")
    groups = [("flash", "ours", "ours sdpa", "ours eager", *([] if args.dry_run else ["flex"]))]
    if find_spec("flashdeberta") and not (args.dry_run or args.sweep):
        groups.append(("flash", "ours", "flashdeberta"))
    failed = []
    for names, length in itertools.product(groups, args.lengths):
        print(f"{max(args.tokens // length, 1)} x {length}", flush=True)
        if args.sweep:
            sweep(length, args)
            continue
        succeeded = False
        with report_failure(f"ours and others at {length}"):
            succeeded = measure(names, length, args)
        if names == groups[0] and not succeeded:
            failed.append(str(length))
    if failed:
        raise SystemExit(f"a peer of ours failed or was wrong at {', '.join(failed)} tokens, see above")


if __name__ == "__main__":
    main()
