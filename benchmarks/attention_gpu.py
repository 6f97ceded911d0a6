"""Measure time, memory and error of disentangled attention on a GPU against other implementations and plain attention.

    python benchmarks/attention_gpu.py                                 # 12 heads of 64, bfloat16, 16k tokens a batch
    python benchmarks/attention_gpu.py --dtype float16 --lengths 512
    python benchmarks/attention_gpu.py --sweep --lengths 512 8192      # tiles, warps and stages of each kernel
    TRITON_INTERPRET=1 python benchmarks/attention_gpu.py --dry_run    # the same calls on the CPU, tiny; writes nothing

Peers; each one except flash is compared with float64 on up to 1024 tokens before it is timed:

- flash: `scaled_dot_product_attention` with its flash kernel, without position terms: a lower bound
- ours: the Triton backend; ours sdpa and ours eager: those backends, where their bias or scores fit into memory
- flex: FlexAttention with the same scores, read from two tables of products

A peer that fails or computes something else is skipped with the reason. If it is one of ours, the script exits with an
error at the end. Times are the GPU's own: medians of CUDA events, of peers that take turns, with all kernels of a call
queued before they start. Memory is the peak minus what was allocated before the call: the inputs, and for backward what
forward saved. The error is the largest relative error (by norm) of output and gradients. Ours may have what the tests
allow: twice the error of the reference in the same dtype, plus one rounding. Writes
benchmarks/results/attention_gpu.csv.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from timing import peak, record, report_failure, start_counting, synchronize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_deberta.engines import attention_triton_operator
from hf_deberta.model.attention import disentangled_attention
from hf_deberta.model.relative_position import RelativePositions, rows_of_distances, saturation_of

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
TABLE = (512, 256)  # positions and buckets of v2 and v3
MAX_LENGTH_OF_SCORES = 2048  # peers that store [B, H, N, N] are skipped for longer rows
MAX_CHECKED_TOKENS = 1024  # the checks store such scores in float64
MAX_PEER_ERROR = 0.5  # relative; a larger error is not due to rounding
SLEEP = 10_000_000  # cycles, about 5 ms: the GPU waits while the host queues a call

Call = Callable[..., torch.Tensor]  # its arguments are the leaves


def make_leaves(batch: int, length: int, args: argparse.Namespace) -> list[torch.Tensor]:
    """Return query, key and value in the layout of the projections, and two position tables."""
    torch.manual_seed(0)
    like = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    shape = (batch, length, args.heads, args.head_size)
    states = [torch.randn(shape, **like).transpose(1, 2) for _ in range(3)]
    tables = [torch.randn(args.heads, 2 * TABLE[1], args.head_size, **like) for _ in range(2)]
    return [tensor.requires_grad_() for tensor in (*states, *tables)]


def make_calls(length: int, args: argparse.Namespace) -> dict[str, Call]:
    """Return the attention of each peer that can compute rows of this length."""
    calls = {"flash": flash, "ours": ours("triton", args.device)}
    if length <= MAX_LENGTH_OF_SCORES:
        calls |= {f"ours {name}": ours(name, args.device) for name in ("sdpa", "eager")}
    return calls if args.dry_run else {**calls, "flex": flex(args.head_size)}


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


def output_and_gradients(call: Call, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradients of a weighted sum of it; every dtype represents the weights exactly."""
    output = call(*leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def errors_of(calls: dict[str, Call], leaves: list[torch.Tensor], device: str) -> dict[str, str]:
    """Print each peer's largest relative error against float64; return those of peers that are right, and of eager."""
    eager = ours("eager", device)
    exact = output_and_gradients(eager, [leaf.detach().double().requires_grad_() for leaf in leaves])

    def error(call: Call) -> float:
        pairs = zip(output_and_gradients(call, leaves), exact, strict=True)
        return torch.stack([(x.double() - y).norm() / y.norm() for x, y in pairs]).max().item()

    of_eager = error(eager)
    errors = {"eager": f"{of_eager:.1e}", "flash": ""}  # flash has no position terms
    for name in [name for name in calls if name not in errors]:
        allowed = 2 * of_eager + torch.finfo(leaves[0].dtype).eps if name.startswith("ours") else MAX_PEER_ERROR
        with report_failure(name):
            found = error(calls[name])
            print(f"  error of {name}: {found:.1e}, allowed {allowed:.1e}", flush=True)
            if found <= allowed:  # not for NaN
                errors[name] = f"{found:.1e}"
    return errors


def forward(call: Call, leaves: list[torch.Tensor]) -> Callable[[], object]:
    return torch.no_grad()(partial(call, *leaves))


def backward(call: Call, leaves: list[torch.Tensor]) -> Callable[[], object]:
    output = call(*leaves)
    return partial(torch.autograd.grad, output, leaves, torch.randn_like(output), allow_unused=True)


MODES = {"forward": forward, "backward": backward}  # each returns a call to be timed, after what is not timed


def milliseconds(calls: dict[str, Callable[[], Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Return the median of each peer's GPU time. Peers take turns; three warm-up rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, repeats):
        for name, prepare in calls.items():
            call = prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP)
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].append(start.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


def peak_megabytes(prepare: Callable[[], Callable[[], object]]) -> float:
    call = prepare()
    torch.cuda.synchronize()
    before = start_counting("cuda")
    call()
    torch.cuda.synchronize()
    return (peak("cuda") - before) / 2**20


def measure(length: int, args: argparse.Namespace) -> bool:
    """Check, time and write one length; return whether all of ours were timed."""
    torch.compiler.reset()  # all lengths share one cache of eight shapes
    batch = max(args.tokens // length, 1)
    calls = make_calls(length, args)
    errors = errors_of(calls, make_leaves(1, min(length, MAX_CHECKED_TOKENS), args), args.device)
    leaves = make_leaves(batch, length, args)
    ready = []
    for name in [name for name in calls if name in errors]:
        with report_failure(name):
            for mode in MODES.values():  # compiles them
                mode(calls[name], leaves)()
            synchronize(args.device)
            ready.append(name)
    for mode in () if args.dry_run else MODES:
        prepared = {name: partial(MODES[mode], calls[name], leaves) for name in ready}
        times = milliseconds(prepared, args.repeats)
        rows = []
        for name, time in times.items():
            row = {"peer": name, "mode": mode, "case": f"{batch}x{length}", "heads": f"{args.heads}x{args.head_size}"}
            row |= {"dtype": args.dtype, "gpu_milliseconds": f"{time:.3f}"}
            row["over_flash"] = f"{time / times['flash']:.2f}" if "flash" in times else ""  # not in float32
            row |= {"peak_megabytes": f"{peak_megabytes(prepared[name]):.0f}", "error": errors[name]}
            rows.append(row | {"eager_error": errors["eager"], "repeats": args.repeats})
            print(f"  {mode}, {name}: {time:.3f} ms", flush=True)
        if rows:
            record("attention_gpu.csv", rows, ("peer", "mode", "case", "heads", "dtype"), "cuda")
    return all(name in ready for name in calls if name.startswith("ours"))


def sweep(length: int, args: argparse.Namespace) -> bool:
    """Print the microseconds of each kernel for each tile size, number of warps and number of stages."""
    call, leaves = ours("triton", args.device), make_leaves(max(args.tokens // length, 1), length, args)
    for tile, warps, stages in itertools.product((32, 64), (2, 4, 8), (1, 2, 3)):
        launch = (tile, ((warps, stages),) * 4)
        attention_triton_operator.LAUNCHES.update(dict.fromkeys(attention_triton_operator.LAUNCHES, launch))
        setting = f"  tile {tile}, {warps} warps, {stages} stages"
        with report_failure(setting):  # more shared memory than there is
            backward(call, leaves)()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(args.repeats):
                    backward(call, leaves)()
                torch.cuda.synchronize()
            times = {event.key: event.self_device_time_total / args.repeats for event in profile.key_averages()}
            text = ", ".join(f"{name} {time:.0f}" for name, time in times.items() if name.endswith("_kernel"))
            print(f"{setting}: {text}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time our kernels with other tiles, warps and stages")
    parser.add_argument("--dry_run", action="store_true", help="run tiny calls on the CPU; needs TRITON_INTERPRET=1")
    args = parser.parse_args()
    args.device = "cpu" if args.dry_run else "cuda"
    if args.dry_run:
        args.lengths, args.tokens, args.heads, args.head_size, args.dtype = [20], 20, 1, 16, "float32"
    elif not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; use TRITON_INTERPRET=1 and --dry_run to try it without")
    failed = set(args.lengths)
    for length in args.lengths:
        print(f"{max(args.tokens // length, 1)} x {length}", flush=True)
        with report_failure(f"{length} tokens"):
            if (sweep if args.sweep else measure)(length, args):
                failed.remove(length)
    if failed:
        raise SystemExit(f"a peer of ours failed or was wrong at {sorted(failed)} tokens, see above")


if __name__ == "__main__":
    main()
