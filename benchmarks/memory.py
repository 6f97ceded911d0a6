"""Measure the extra memory of one forward pass of a base-size encoder, by length: ours, in-tree, BERT with SDPA.

    python benchmarks/memory.py                        # CPU: 1024 to 8192 tokens, float32
    python benchmarks/memory.py --device cuda --dtype bfloat16

Extra memory is the peak of the process minus model and input; a new process measures each number. In-tree is skipped
where its [heads, N, N] tensors would not fit. Writes benchmarks/results/memory.csv.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from encoder import make_models, settings
from timing import RESULTS, environment, write_rows

PEERS = ("in-tree", "bert", "ours sdpa", "enabled")
MAX_LENGTH_IN_TREE = 4096


def peak_of_one_pass(peer: str, length: int, device: str, dtype: str) -> float:
    """Return MiB. A short pass loads the libraries before counting starts."""
    model = make_models([peer], classify=False)[peer].to(device, getattr(torch, dtype)).eval()
    return extra_memory(peer, model, {"input_ids": torch.randint(5, 1000, (1, length), device=device)})


def extra_memory(peer: str, model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Return the MiB that a forward pass of `inputs` takes beyond the model and the inputs."""
    device = inputs["input_ids"].device
    with settings(peer), torch.inference_mode():
        model(torch.full((1, 16), 5, device=device))
        before = start_counting(device.type)
        model(**inputs)
        return (peak(device.type) - before) / 2**20


def start_counting(device: str) -> int:
    """Reset the peak; return the bytes that are held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    return status("VmRSS")


def peak(device: str) -> int:
    """Return the largest number of bytes held since counting started."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help="internal: print MiB of the first peer and length")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.one:
        print(peak_of_one_pass(arguments.peers[0], arguments.lengths[0], arguments.device, arguments.dtype))
        return
    if arguments.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise SystemExit("this system has no /proc/self/clear_refs to measure the peak: use Linux or --device cuda")
    for length in arguments.lengths:
        for peer in arguments.peers:
            if peer == "in-tree" and length > MAX_LENGTH_IN_TREE:
                continue
            command = [sys.executable, __file__, "--one", "--peers", peer, "--lengths", str(length)]
            command += ["--device", arguments.device, "--dtype", arguments.dtype]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            mebibytes = float(output.split()[-1])
            print(f"{length:>6} tokens, {peer}: {mebibytes:.0f} MiB", flush=True)
            row = {"peer": peer, "tokens": length, "dtype": arguments.dtype, "device": arguments.device}
            row |= {"extra_mib": f"{mebibytes:.0f}", **environment(arguments.device)}
            write_rows(RESULTS / "memory.csv", [row], ("peer", "tokens", "dtype", "device", "machine"))


if __name__ == "__main__":
    main()
