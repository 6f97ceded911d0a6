"""Print the host's time of a forward pass and of a training step over BERT's, and what a layer calls, without a GPU.

Models of twelve layers and few numbers run on the device of host_device.cpp, where a kernel takes about as long as a
launch does on a GPU. Times are process times, medians of steps that take turns: compare ratios. Calls and launches are
exact, the difference between a model of two layers and one of one. Triton's Python runs; its compiler, and its launches
in C, do not. A step has no optimizer, loss or data loader. Weights are float32; `autocast` is training in bfloat16.
With --csv the rows are written to a result file too; `make gpu-host` writes benchmarks/results/gpu_host.csv.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import load_guard  # noqa: F401  # before torch
import torch
from attention_kernels import LIBRARY
from guard import build_library
from layer_counts import BASE, PEERS, V3
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from timing import environment, write_rows

LIBRARY._destroy()  # attention in Python; the device has its own
DEVICE = ctypes.CDLL(str(build_library(Path(__file__).with_name("host_device.cpp"))))
launches = ctypes.c_long.in_dll(DEVICE, "launches")
SMALL = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SMALL_TABLES = {"position_buckets": 32, "max_position_embeddings": 64}
LENGTHS = torch.tensor([4, 2, 2, 3, 1, 3])  # of the texts of a padded batch
COMPARED = ("bert", "in-tree", "sdpa", "triton")
COUNTS = ("python_calls", "c_calls", "launches", "triton_launches")


def launch(*_: object) -> None:
    """Stand for Triton's launcher in C."""


class Kernel(CompiledKernel):
    """A kernel that Triton has not compiled, and launches as others."""

    def __init__(self, src, target, options):
        self.src, self.name, self.module = src, "", "loaded"
        self.function = self.packed_metadata = self._module_pid = None
        scratch = {f"{kind}_scratch_{part}": 0 for kind in ("global", "profile") for part in ("size", "align")}
        self._run = CudaLauncher(src, SimpleNamespace(**scratch, launch_cooperative_grid=False, launch_pdl=False))


def use_host_device() -> None:
    """Answer what models, PyTorch and Triton ask about "cuda", in C where a PyTorch with CUDA does."""
    answers = {
        "torch._C._cuda_getDevice": int,
        "torch._C._cuda_getCurrentRawStream": int,
        "torch._C._cuda_getDeviceCount": partial(int, 1),
        "torch.cuda._cached_device_count": 1,
        "torch.cuda._exchange_device": int,
        "torch.cuda._get_device_properties": {0: SimpleNamespace(major=9, minor=0)}.__getitem__,
        "torch.cuda._initialized": True,
        "torch.cuda._is_in_bad_fork": bool,
        "torch.cuda._maybe_exchange_device": int,
        "triton.backends.nvidia.driver.PyKernelArg": dict,
        "triton.compiler.compile": Kernel,
        "hf_deberta.engines.unpadding.COST_OF_EXTRA_LAUNCHES": 0,
    }
    for path, answer in answers.items():
        patch(path, answer, create=True).start()
    driver = SimpleNamespace(get_current_device=torch.cuda.current_device, get_current_stream=int)
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    driver.utils = SimpleNamespace(launch=launch, build_signature_metadata=list)
    runtime.driver.set_active(driver)
    torch.autograd.set_multithreading_enabled(False)  # a profiler sees its own thread alone
    torch.set_num_threads(1)


def make_step(peer: str, case: str, mode: str, layers: int) -> Callable[[], None]:
    """Return a function that runs a new model forward, and in training backward."""
    real = (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).long()
    with patch.dict(BASE, SMALL), patch.dict(V3, SMALL_TABLES), torch.device("cuda"):
        model = PEERS[peer](layers).train(mode != "eval")
    inputs = {"input_ids": torch.ones_like(real).cuda()}
    if case == "padded":
        inputs["attention_mask"] = real.cuda()
        if peer in ("sdpa", "triton"):
            inputs["num_real_tokens"] = int(LENGTHS.sum())

    def step() -> None:
        model.zero_grad()
        with torch.set_grad_enabled(mode != "eval"), torch.autocast("cuda", torch.bfloat16, mode == "autocast"):
            states = model(**inputs).last_hidden_state
        if mode != "eval":
            states.sum().backward()

    step()
    step()  # with what the first one cached
    return step


def count_layer(peer: str, case: str, mode: str) -> dict[str, int]:
    counts = []
    for layers in (1, 2):
        step, events = make_step(peer, case, mode, layers), []
        launches.value = 0
        sys.setprofile(lambda frame, event, _, events=events: events.append((event, frame.f_code is launch.__code__)))
        step()
        sys.setprofile(None)
        python, c, triton_launches = map(events.count, (("call", False), ("c_call", False), ("call", True)))
        counts.append((python, c, launches.value, triton_launches))
    return {name: two - one for name, one, two in zip(COUNTS, *counts, strict=True)}


def times_by_bert(case: str, mode: str, seconds: float) -> dict[str, str]:
    steps = {peer: make_step(peer, case, mode, 12) for peer in COMPARED}
    times: dict[str, list[float]] = {peer: [] for peer in COMPARED}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for peer, step in steps.items():
            start = time.process_time()
            step()
            times[peer].append(time.process_time() - start)
    return {peer: f"{statistics.median(each) / statistics.median(times['bert']):.2f}" for peer, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="of turns for each case; 0 counts only")
    parser.add_argument("--csv", type=Path, help="result file, whose rows of the same peer, mode and case are replaced")
    options = parser.parse_args()
    use_host_device()
    rows = []
    print("Time / BERT's; of a layer: calls of Python + of C, launches of PyTorch + of Triton\n")
    print("|  |", " | ".join(COMPARED), "|\n" + "|---" * (len(COMPARED) + 1) + "|")
    for case, mode in product(("plain", "padded"), ("eval", "training", "autocast")):
        times = times_by_bert(case, mode, options.seconds) if options.seconds else dict.fromkeys(COMPARED, "")
        cells = []
        for peer in COMPARED:
            counts, of_case = count_layer(peer, case, mode), {"peer": peer, "mode": mode, "case": case}
            cells.append("{}; {} + {}, {} + {}".format(times[peer], *counts.values()))
            rows.append({**of_case, "time_by_bert": times[peer], **counts, **environment()})
        print(f"| {mode} {case} |", " | ".join(cells), "|", flush=True)
    if options.csv:
        write_rows(options.csv, rows, ("peer", "mode", "case"))


if __name__ == "__main__":
    main()
