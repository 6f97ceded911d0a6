"""Measure the extra memory of one forward pass of a base-size encoder, by length: ours, in-tree, BERT with SDPA.

    python benchmarks/memory.py                        # CPU: 1024 to 8192 tokens, float32
    python benchmarks/memory.py --device cuda --dtype bfloat16

Extra memory is the peak of the process minus model and input; a new process measures each number. In-tree is skipped
where its [heads, N, N] tensors would not fit. Writes benchmarks/results/memory.csv.
"""

import argparse

import torch
import transformers
from encoder import make_model, settings
from timing import in_new_process, peak, record, start_counting

PEERS = ("in-tree", "bert", "ours sdpa", "enabled")
MAX_LENGTH_IN_TREE = 4096


def extra_mebibytes(peer: str, length: int, device: str, dtype: str) -> float:
    """Return the MiB that a forward pass of one row takes beyond the model and the inputs."""
    model = make_model(peer, classify=False).to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(5, 1000, (1, length), device=device)
    with settings(peer), torch.inference_mode():
        model(torch.full((1, 16), 5, device=device))  # loads the libraries
        before = start_counting(device)
        model(ids)
        return (peak(device) - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peers", nargs="+", default=PEERS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help="internal: print MiB of the first peer and length")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.one:
        print(extra_mebibytes(args.peers[0], args.lengths[0], args.device, args.dtype))
        return
    flags = ["--one", "--device", args.device, "--dtype", args.dtype]
    for length in args.lengths:
        for peer in args.peers:
            if peer == "in-tree" and length > MAX_LENGTH_IN_TREE:
                continue
            mebibytes = float(in_new_process(__file__, *flags, "--peers", peer, "--lengths", length))
            print(f"{length:>6} tokens, {peer}: {mebibytes:.0f} MiB", flush=True)
            row = {"peer": peer, "tokens": length, "dtype": args.dtype, "device": args.device}
            row["extra_mib"] = f"{mebibytes:.0f}"
            record("memory.csv", [row], ("peer", "tokens", "dtype", "device"), args.device)


if __name__ == "__main__":
    main()
