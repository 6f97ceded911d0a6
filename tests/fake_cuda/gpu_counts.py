"""Print what one layer, and a pretraining step, cost on a GPU, counted on a simulated device: launches, GB and GFLOP.

    python tests/fake_cuda/gpu_counts.py
    python tests/fake_cuda/gpu_counts.py --peers in-tree sdpa --shapes 32x512 1x8192 --modes training

Base size, bfloat16. No number is a time. `ms` is arithmetic, GFLOP / 600 TFLOP/s + GB / 3.8 TB/s: compare ratios.
With --csv the counts are written to a result file too; `make gpu-counts` writes benchmarks/results/gpu_counts.csv.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import load_guard  # noqa: F401  # before torch
from layer_counts import PEERS, LayerCounts, count_layer, count_step

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from timing import environment, write_rows

SHAPES = ("8x128", "32x512", "4x2048", "1x8192")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["in-tree", "bert", "sdpa", "triton"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x tokens")
    parser.add_argument("--modes", nargs="+", choices=("eval", "training"), default=("eval", "training"))
    parser.add_argument("--csv", type=Path, help="result file, whose rows of the same peer, mode and case are replaced")
    options = parser.parse_args()
    rows = []
    print("One layer: launches (PyTorch + Triton), GB, GFLOP, ms\n")
    print("|  |", " | ".join(options.peers), "|")
    print("|---" * (len(options.peers) + 1) + "|")
    for mode in options.modes:
        for shape in options.shapes:
            batch, length = map(int, shape.split("x"))
            counts = {peer: count_layer(peer, batch, length, mode == "training") for peer in options.peers}
            print(f"| {mode} {shape} |", " | ".join(map(describe, counts.values())), "|", flush=True)
            rows += [row_of(peer, mode, shape, count) for peer, count in counts.items()]
    print("\nA step of v3-base, 32 x 512 tokens: launches (PyTorch + Triton), GB\n")
    for objective, backend in product(("mlm", "rtd"), ("sdpa", "triton")):
        step = count_step(objective, backend, 32, 512)
        print(f"{objective} {backend}: {step.launches} + {step.triton_launches}, {step.gigabytes:.0f}", flush=True)
        rows.append(row_of(backend, f"{objective} step", "32x512", step))
    if options.csv:
        write_rows(options.csv, rows, ("peer", "mode", "case"))


def describe(counts: LayerCounts) -> str:
    launches = f"{counts.launches} + {counts.triton_launches}" if counts.triton_launches else f"{counts.launches}"
    if counts.triton_launches:
        return launches  # what a Triton kernel reads and computes is not known here
    return f"{launches}, {counts.gigabytes:.2f}, {counts.gflop:.0f}, {counts.milliseconds():.2f}"


def row_of(peer: str, mode: str, case: str, counts: LayerCounts) -> dict[str, str]:
    with_triton = peer == "triton"  # the work of its attention is not known here
    return {
        "peer": peer,
        "mode": mode,
        "case": case,
        "launches": str(counts.launches),
        "triton_launches": str(counts.triton_launches),
        "gigabytes": "" if with_triton and not mode.endswith("step") else f"{counts.gigabytes:.2f}",
        "gflop": "" if with_triton else f"{counts.gflop:.0f}",
        **environment(),
    }


if __name__ == "__main__":
    main()
