"""Time one self-attention module of base width (768, 12 heads) with its projections: forward, and with backward.

    python benchmarks/attention.py                      # float32 on the CPU, 4096 tokens in rows of 128 to 4096
    python benchmarks/attention.py --device cuda --dtype bfloat16 --tokens 16384 --lengths 128 512 2048 8192

Peers: in-tree DebertaV2, BERT with SDPA, ours with each backend; no padding. In eval mode without gradients ours
caches its projected position tables, while in-tree projects them in each call. Writes benchmarks/results/attention.csv.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from encoder import backends, make_models
from timing import RESULTS, environment, medians, time_interleaved, write_rows

from hf_deberta.model.batch_layout import BatchLayout

MAX_LENGTH_IN_TREE = 2048  # on the CPU


def calls(
    peers: list[str], batch: int, length: int, device: str, dtype: torch.dtype, backward: bool
) -> dict[str, Callable]:
    """Return a call per peer, which runs the attention of the first layer; models have equal weights."""
    states = torch.randn(batch, length, 768, device=device, dtype=dtype, requires_grad=backward)
    peer_calls = {}
    for peer, model in make_models(peers, classify=False).items():
        model = model.to(device, dtype).train(backward)
        attention = model.encoder.layer[0].attention.self
        peer_calls[peer] = step_of(forward_of(peer, model, attention, states), backward)
    return peer_calls


def forward_of(peer: str, model: Any, attention: Any, states: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that runs the attention module of a peer."""
    batch, length, _ = states.shape
    if peer == "bert":
        return lambda: attention(states)[0]
    if peer == "in-tree":
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=states.device)
        encoder = model.encoder
        rows = encoder.get_rel_pos(states)  # in-tree computes them once for all layers
        return lambda: attention(states, mask, relative_pos=rows, rel_embeddings=encoder.get_rel_embedding())[0]
    encoder = model.encoder
    shape = (batch, length)

    def forward() -> torch.Tensor:
        layout = BatchLayout.from_inputs(None, None, None, shape, states.device)
        layout = encoder.shared_by_layers(states, layout)
        return attention(states, encoder.position_table(layout), layout)[0]

    return forward


def step_of(forward: Callable[[], torch.Tensor], backward: bool) -> Callable[[], None]:
    def call() -> None:
        with torch.set_grad_enabled(backward):
            output = forward()
        if backward:
            output.square().mean().backward()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for length in arguments.lengths:
        peers = ["bert", *(f"ours {backend}" for backend in backends(arguments.device))]
        if length <= MAX_LENGTH_IN_TREE or arguments.device == "cuda":
            peers.insert(0, "in-tree")
        batch = max(arguments.tokens // length, 1)
        for mode in ("forward", "training"):
            dtype = getattr(torch, arguments.dtype)
            peer_calls = calls(peers, batch, length, arguments.device, dtype, mode == "training")
            times = medians(time_interleaved(peer_calls, arguments.repeats, arguments.device))
            text = ", ".join(f"{peer} {time:.1f} ms" for peer, time in times.items())
            print(f"{batch} x {length}, {mode}: {text}", flush=True)
            setting = {"mode": mode, "case": f"{batch}x{length}", "dtype": arguments.dtype, "device": arguments.device}
            setting |= {"repeats": arguments.repeats, **environment(arguments.device)}
            rows = [{"peer": peer, "milliseconds": f"{time:.2f}", **setting} for peer, time in times.items()]
            write_rows(RESULTS / "attention.csv", rows, ("peer", "mode", "case", "dtype", "device", "machine"))


if __name__ == "__main__":
    main()
