"""Extra memory of one forward pass of a base-size encoder, by length: ours, in-tree, BERT with SDPA.

    python benchmarks/memory.py                        # CPU: 1024 to 8192 tokens, float32
    python benchmarks/memory.py --device cuda --dtype bfloat16

What the process holds at its peak beyond model and input; each figure comes from a process of its own. In-tree is left
out where its [heads, N, N] tensors would not fit. Writes benchmarks/results/memory.csv.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from encoder import models, settings
from timing import RESULTS, circumstances, write_rows

PEERS = ("in-tree", "bert", "ours sdpa", "enabled")
IN_TREE_FITS = 4096


def peak_of_one_pass(peer: str, length: int, device: str, dtype: str) -> float:
    """MiB; the process's high-water mark is reset after a short pass, so that libraries are loaded."""
    model = models([peer], classify=False)[peer].to(device, getattr(torch, dtype)).eval()
    with settings(peer), torch.inference_mode():
        model(torch.full((1, 16), 5, device=device))
        ids = torch.randint(5, 1000, (1, length), device=device)
        before = start_counting(device)
        model(ids)
        return (peak(device) - before) / 2**20


def start_counting(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts from what is held now
    return status("VmRSS")


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help="measure the first peer at the first length, print MiB")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.one:
        print(peak_of_one_pass(arguments.peers[0], arguments.lengths[0], arguments.device, arguments.dtype))
        return
    if arguments.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise SystemExit("the peak of a process is read from /proc, which this system lacks; use Linux, or cuda")
    for length in arguments.lengths:
        for peer in arguments.peers:
            if peer == "in-tree" and length > IN_TREE_FITS:
                continue
            about = [
                "--peers",
                peer,
                "--lengths",
                str(length),
                "--device",
                arguments.device,
                "--dtype",
                arguments.dtype,
            ]
            found = subprocess.run(
                [sys.executable, __file__, "--one", *about], capture_output=True, text=True, check=True
            )
            mebibytes = float(found.stdout.split()[-1])
            print(f"{length:>6} tokens, {peer}: {mebibytes:.0f} MiB", flush=True)
            row = {"peer": peer, "tokens": length, "dtype": arguments.dtype, "device": arguments.device}
            row |= {"extra_mib": f"{mebibytes:.0f}", **circumstances(arguments.device)}
            write_rows(RESULTS / "memory.csv", [row], ("peer", "tokens", "dtype", "device", "machine"))


if __name__ == "__main__":
    main()
