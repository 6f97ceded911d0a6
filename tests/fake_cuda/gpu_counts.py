"""Print what one layer costs on a GPU, counted on a simulated device: launches, GB and GFLOP.

    python tests/fake_cuda/gpu_counts.py
    python tests/fake_cuda/gpu_counts.py --peers in-tree sdpa --shapes 32x512 1x8192 --modes training

Base size, bfloat16. No number is a time. `ms` is arithmetic, GFLOP / 600 TFLOP/s + GB / 3.8 TB/s: compare ratios.
"""

import argparse

import load_guard  # noqa: F401  # before torch
from layer_counts import PEERS, count_layer

SHAPES = ("8x128", "32x512", "4x2048", "1x8192")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["in-tree", "bert", "sdpa", "triton"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x tokens")
    parser.add_argument("--modes", nargs="+", choices=("eval", "training"), default=("eval", "training"))
    options = parser.parse_args()
    print("One layer: launches (PyTorch + Triton), GB, GFLOP, ms\n")
    print("|  |", " | ".join(options.peers), "|")
    print("|---" * (len(options.peers) + 1) + "|")
    for mode in options.modes:
        for shape in options.shapes:
            batch, length = map(int, shape.split("x"))
            cells = [describe(peer, batch, length, mode == "training") for peer in options.peers]
            print(f"| {mode} {shape} |", " | ".join(cells), "|", flush=True)


def describe(peer: str, batch: int, length: int, training: bool) -> str:
    counts = count_layer(peer, batch, length, training)
    launches = f"{counts.launches} + {counts.triton_launches}" if counts.triton_launches else f"{counts.launches}"
    if counts.triton_launches:
        return launches  # what a Triton kernel reads and computes is not known here
    return f"{launches}, {counts.gigabytes:.2f}, {counts.gflop:.0f}, {counts.milliseconds():.2f}"


if __name__ == "__main__":
    main()
