"""Disentangled attention on a GPU against its peers and against plain attention, the floor: time, memory, error.

    python benchmarks/attention_gpu.py                                 # 12 heads of 64, bfloat16, 16k tokens a batch
    python benchmarks/attention_gpu.py --dtype float16 --lengths 512
    python benchmarks/attention_gpu.py --sweep --lengths 512 8192      # tiles, warps and stages of each kernel
    TRITON_INTERPRET=1 python benchmarks/attention_gpu.py --dry_run    # the same calls on the CPU, tiny; writes nothing

Peers, each checked against float64 before it is timed:

- flash: `scaled_dot_product_attention` with its flash kernel, without position terms
- ours: the Triton backend; ours sdpa: the sdpa backend, where its bias fits
- flex: FlexAttention with the same scores, read from two tables of products
- gathered: the plain form in the given dtype, as in-tree Transformers computes it, where its scores fit
- flashdeberta: where it is installed
- disentangled-flash: where it is installed; its attention holds the projections, so "ours, projections" does as well

Milliseconds are medians of CUDA events, peers taking turns; memory is the peak above what inputs take. An error is
the largest of output and gradients, each by its norm; `allowed` is twice that of the reference in the dtype.
Writes benchmarks/results/attention_gpu.csv.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from statistics import median

import torch
from timing import RESULTS, circumstances, write_rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from hf_deberta import attention_triton
from hf_deberta.attention import disentangled_attention
from hf_deberta.relative_position import rows_between, rows_of_distances, saturation_of

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
TABLE = (512, 256)  # positions and buckets of v2 and v3
SCORES_FIT = 2048  # tokens up to which peers that hold [B, H, N, N] take part
CHECKED_TOKENS = 1024  # of the checks, which hold such scores in float64

LIMITS = (RuntimeError, TypeError, ValueError, AssertionError)  # of a peer; then it is left out

Call = Callable[..., torch.Tensor]  # of query, key, value, position_key, position_query


def leaves_of(batch: int, heads: int, length: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """query, key and value as projections leave them, and two tables."""
    torch.manual_seed(0)
    states = [torch.randn(batch, length, heads, size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)]
    tables = [torch.randn(heads, 2 * TABLE[1], size, device=device, dtype=dtype) for _ in range(2)]
    return [tensor.requires_grad_() for tensor in (*states, *tables)]


def peers_of(length: int, size: int, device: str) -> dict[str, Call]:
    rows = rows_of_distances(*TABLE).to(device)
    arguments = {"rows_of_distance": rows, "saturation": saturation_of(rows.cpu())}

    def ours(backend: str) -> Call:
        return lambda *tensors: disentangled_attention(*tensors, **arguments, backend=backend)[0]

    def flash(query, key, value, *_):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device == "cuda" else SDPBackend.MATH):
            return scaled_dot_product_attention(query, key, value)

    positions = torch.arange(length, device=device)
    found = {"flash": flash, "ours": ours("triton")}
    if length <= SCORES_FIT:
        between = rows_between(positions, positions, rows)
        found |= {"ours sdpa": ours("sdpa"), "gathered": lambda *tensors: gathered(*tensors, between)}
    if device == "cuda":
        found["flex"] = flex(rows, size)
        found |= flashdeberta()
    return found


def gathered(query, key, value, position_key, position_query, row) -> torch.Tensor:
    """Every step in the dtype of its inputs."""
    scale = 1 / math.sqrt(3 * query.shape[-1])
    index = row.expand(*query.shape[:2], -1, -1)
    scores = query @ key.mT + (query @ position_key.mT).gather(-1, index)
    scores = scores + (key @ position_query.mT).gather(-1, index.mT).mT
    return (scores * scale).softmax(-1) @ value


def flex(rows: torch.Tensor, size: int) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    k, scale = (len(rows) - 1) // 2, 1 / math.sqrt(3 * size)

    def attention(query, key, value, position_key, position_query):
        c2p, p2c = (query @ position_key.mT) * scale, (key @ position_query.mT) * scale

        def score(s, b, h, i, j):
            row = rows[(i - j).clamp(-k, k) + k]
            return s + c2p[b, h, i, row] + p2c[b, h, j, row]

        return compiled(query, key, value, score_mod=score, scale=scale)

    return attention


def flashdeberta() -> dict[str, Call]:
    try:
        from flashdeberta.ops.flash_attention import flash_attention_with_disentangled
    except ImportError:
        return {}

    def attention(query, key, value, position_key, position_query):
        options = {"sm_scale": 1 / math.sqrt(3 * query.shape[-1])}
        options |= {"position_buckets": TABLE[1], "max_relative_distance": TABLE[0]}
        tables = position_key[None], position_query[None]
        return flash_attention_with_disentangled(query, key, value, None, *tables, **options)

    return {"flashdeberta": attention}


def with_projections(batch: int, heads: int, length: int, size: int, dtype: torch.dtype, ours: Call) -> dict:
    """Calls of states and relative table, and these leaves: disentangled-flash, and ours with the same weights."""
    try:
        from disentangled_flash import TritonTrainingDisentangledSelfAttention
        from transformers import DebertaV2Config
    except ImportError:
        return {}
    width = heads * size
    config = DebertaV2Config(
        hidden_size=width, num_attention_heads=heads, relative_attention=True, position_buckets=TABLE[1],
        max_position_embeddings=TABLE[0], max_relative_positions=TABLE[0], share_att_key=True,
        pos_att_type=["c2p", "p2c"], attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    module = TritonTrainingDisentangledSelfAttention(config).to("cuda", dtype)
    states = torch.randn(batch, length, width, device="cuda", dtype=dtype, requires_grad=True)
    table = torch.randn(2 * TABLE[1], width, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.ones(batch, length, dtype=torch.bool, device="cuda")
    weight = dict(module.named_parameters())

    def projected(name: str, tensor: torch.Tensor) -> torch.Tensor:
        out = linear(tensor, weight[f"{name}.weight"], weight[f"{name}.bias"])
        return out.unflatten(-1, (heads, size)).transpose(-3, -2)

    def attention(states, table):
        own = [projected(name, states) for name in ("query_proj", "key_proj", "value_proj")]
        context = ours(*own, projected("key_proj", table), projected("query_proj", table))
        return context.transpose(1, 2).flatten(2)

    peer = lambda states, table: module(states, mask, rel_embeddings=table)[0]  # noqa: E731
    return {"disentangled-flash": (peer, [states, table]), "ours, projections": (attention, [states, table])}


def results(call: Call, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output, and gradients of a weighted sum of it."""
    output = call(*leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)]


def errors(calls: dict[str, Call], length: int, shape: tuple, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Of each call, and of the reference in `dtype` as "eager", against float64: the largest over outputs."""
    leaves = leaves_of(1, min(shape[0], 2), length, shape[1], dtype, device)
    rows = rows_of_distances(*TABLE).to(device)

    def reference(*tensors):
        return disentangled_attention(*tensors, rows_of_distance=rows)[0]

    exact = results(reference, [leaf.detach().double().requires_grad_() for leaf in leaves])
    found = {}
    for name, call in {"eager": reference, **calls}.items():
        if name == "flash":
            continue
        try:
            pairs = list(zip(results(call, leaves), exact, strict=True))
        except LIMITS as reason:
            if name in ("eager", "ours"):
                raise
            print(f"  {name} is left out: {str(reason).splitlines()[0]}", flush=True)
            continue
        found[name] = max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)
    return found


def modes(call: Call, leaves: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Forward without gradients, backward alone, and both."""
    output = call(*leaves)
    gradient = torch.randn_like(output)

    def forward():
        with torch.no_grad():
            call(*leaves)

    def backward():
        torch.autograd.grad(output, leaves, gradient, retain_graph=True, allow_unused=True)

    def both():
        torch.autograd.grad(call(*leaves), leaves, gradient, allow_unused=True)

    return {"forward": forward, "backward": backward, "both": both}


def milliseconds(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Medians; calls take turns, after three rounds that do not count."""
    times = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


def peak_megabytes(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(length: int, given: argparse.Namespace) -> None:
    """Check, time and write one length."""
    dtype, batch = getattr(torch, given.dtype), max(given.tokens // length, 1)
    peers = peers_of(length, given.head_size, given.device)
    checked = peers_of(min(length, CHECKED_TOKENS), given.head_size, given.device)
    checked = {name: call for name, call in checked.items() if name in peers}
    error = errors(checked, min(length, CHECKED_TOKENS), (given.heads, given.head_size), dtype, given.device)
    for name, value in error.items():
        print(f"  error of {name}: {value:.1e}, allowed {2 * error['eager']:.1e}", flush=True)
    if error["ours"] > 2 * error["eager"]:
        raise SystemExit("ours is further from float64 than allowed: nothing is timed")
    leaves = leaves_of(batch, given.heads, length, given.head_size, dtype, given.device)
    if given.dry_run:
        for name, call in peers.items():
            for mode in modes(call, leaves).values():
                mode()
            print(f"  {name} runs", flush=True)
        return
    cases = {name: (call, leaves) for name, call in peers.items() if name == "flash" or name in error}
    cases |= with_projections(batch, given.heads, length, given.head_size, dtype, peers["ours"])
    by_mode: dict[str, dict[str, Callable]] = {"forward": {}, "backward": {}, "both": {}}
    for name, case in cases.items():
        try:
            for mode, call in modes(*case).items():
                call()
                by_mode[mode][name] = call
        except LIMITS as reason:
            print(f"  {name} is left out: {str(reason).splitlines()[0]}", flush=True)
    about = {"case": f"{batch}x{length}", "heads": f"{given.heads}x{given.head_size}", "dtype": given.dtype}
    about |= {"repeats": given.repeats, **circumstances("cuda"), "triton": triton_version()}
    for mode, calls in by_mode.items():
        calls = {name: call for name, call in calls.items() if name in by_mode["both"]}
        found = milliseconds(calls, given.repeats)
        rows = []
        for name, time in found.items():
            row = {"peer": name, "mode": mode, "milliseconds": f"{time:.3f}"}
            row |= {"over_flash": f"{time / found['flash']:.2f}"}
            row |= {"peak_megabytes": f"{peak_megabytes(calls[name]):.0f}"}
            row |= {"error": f"{error[name]:.1e}" if name in error else "", "eager_error": f"{error['eager']:.1e}"}
            rows.append({**row, **about})
        print(f"  {mode}: " + ", ".join(f"{row['peer']} {row['milliseconds']} ms" for row in rows), flush=True)
        write_rows(RESULTS / "attention_gpu.csv", rows, ("peer", "mode", "case", "heads", "dtype", "machine"))


def sweep(length: int, given: argparse.Namespace) -> None:
    """Microseconds of each kernel for each tile, number of warps and of stages; prints, and writes nothing."""
    dtype, batch = getattr(torch, given.dtype), max(given.tokens // length, 1)
    leaves = leaves_of(batch, given.heads, length, given.head_size, dtype, "cuda")
    both = modes(peers_of(length, given.head_size, "cuda")["ours"], leaves)["both"]
    for tile, warps, stages in itertools.product((32, 64, 128), (4, 8), (1, 2, 3)):
        launch = (tile, ((warps, stages),) * 3)
        attention_triton.LAUNCHES.update(dict.fromkeys(attention_triton.LAUNCHES, launch))
        try:
            both()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(given.repeats):
                    both()
                torch.cuda.synchronize()
        except Exception as reason:  # more shared memory than there is, in one of several classes
            print(f"  tile {tile}, {warps} warps, {stages} stages: {str(reason).splitlines()[0]}", flush=True)
            continue
        found = {event.key: event.self_device_time_total / given.repeats for event in profile.key_averages()}
        times = ", ".join(f"{name} {time:.0f}" for name, time in found.items() if name.endswith("_kernel"))
        print(f"  tile {tile}, {warps} warps, {stages} stages: {times}", flush=True)


def triton_version() -> str:
    import triton

    return triton.__version__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time our kernels alone, with other launches")
    parser.add_argument("--dry_run", action="store_true", help="tiny, in Triton's interpreter on the CPU")
    given = parser.parse_args()
    given.device = "cpu" if given.dry_run else "cuda"
    if given.dry_run:
        given.lengths, given.tokens, given.heads, given.head_size, given.dtype = [20], 20, 1, 16, "float32"
    elif not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --dry_run with TRITON_INTERPRET=1 does without")
    for length in given.lengths:
        print(f"{max(given.tokens // length, 1)} x {length}", flush=True)
        (sweep if given.sweep else measure)(length, given)


if __name__ == "__main__":
    main()
