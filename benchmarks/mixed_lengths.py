"""Measure the resident memory of a process that computes texts of many lengths: ours, in-tree.

    python benchmarks/mixed_lengths.py
    python benchmarks/mixed_lengths.py --calls 200 1000 --peers "ours, oneDNN" in-tree

oneDNN keeps a compiled primitive for each number of rows that it has multiplied (hf_deberta/engines/onednn.py), so
memory may grow with each new length. Batches have 1 to 8 rows of 1 to 512 tokens without padding. The model is small
(two layers, 64 wide): its weights and activations hide nothing. A new process measures each peer. Linux only.
"""

import argparse
import ctypes
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from encoder import V3
from memory import status
from timing import RESULTS, environment, write_rows

import hf_deberta
from hf_deberta.engines import onednn

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
MAX_LENGTH, MAX_BATCH = 512, 8


def make_in_tree() -> Any:
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**SMALL, **V3))


def make_ours() -> Any:
    return hf_deberta.HfDebertaModel(hf_deberta.HfDebertaConfig.from_dict(make_in_tree().config.to_dict()))


def make_ours_with_onednn() -> Any:
    """Ours as on processors where oneDNN is used."""
    onednn.prefers_onednn = lambda: True  # type: ignore[assignment]
    return make_ours()


PEERS: dict[str, Callable[[], Any]] = {
    "ours": make_ours,
    "ours optimized, torch": lambda: hf_deberta.optimize(make_ours(), runtime="torch"),
    "ours optimized, torch, bfloat16": lambda: hf_deberta.optimize(make_ours(), torch.bfloat16, runtime="torch"),
    "ours optimized, torch, int8": lambda: hf_deberta.optimize(make_ours(), torch.int8, runtime="torch"),
    "ours optimized, OpenVINO": lambda: hf_deberta.optimize(make_ours(), runtime="openvino"),
    "ours optimized, OpenVINO, bfloat16": lambda: hf_deberta.optimize(make_ours(), torch.bfloat16, runtime="openvino"),
    "ours, oneDNN": make_ours_with_onednn,
    "ours, bfloat16": lambda: make_ours().bfloat16(),
    "in-tree": make_in_tree,
    "in-tree, bfloat16": lambda: make_in_tree().bfloat16(),
}


def soak(peer: str, counts: list[int]) -> None:
    """Print the number of calls, the resident memory and the memory in use, in MiB, after so many calls."""
    model, draw = PEERS[peer]().eval(), random.Random(0)
    with torch.inference_mode():
        for call in range(1, max(counts) + 1):
            shape = draw.randint(1, MAX_BATCH), draw.randint(1, MAX_LENGTH)
            model(torch.full(shape, 5))
            if call in counts:
                resident = status("VmRSS")
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                print(call, round(resident / 2**20), round(status("VmRSS") / 2**20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, nargs="+", default=[20, 200, 1000, 2000], help="measure after each number")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--one", action="store_true", help="internal: measure the first peer in this process")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.one:
        soak(arguments.peers[0], arguments.calls)
        return
    for peer in arguments.peers:
        command = [sys.executable, __file__, "--one", "--peers", peer, "--calls", *map(str, arguments.calls)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = []
        for calls, resident, in_use in map(str.split, output.splitlines()):
            print(f"{peer} after {calls} calls: {resident} MiB, {in_use} in use", flush=True)
            rows.append({"peer": peer, "calls": calls, "resident_mib": resident, "in_use_mib": in_use})
        rows = [row | environment() for row in rows]
        write_rows(RESULTS / "mixed_lengths.csv", rows, ("peer", "calls", "machine"))


if __name__ == "__main__":
    main()
