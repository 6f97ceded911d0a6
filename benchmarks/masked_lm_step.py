"""Measure a training step of a base-size masked-language model with v3's vocabulary: ours and in-tree.

    python benchmarks/masked_lm_step.py                                    # 8 x 512 tokens, 128100 words, float32
    python benchmarks/masked_lm_step.py --batch 2 --length 64 --repeats 1  # a smaller one

Ours uses the enhanced mask decoder and computes logits for the 15 % labelled positions only, in chunks. In-tree
(`DebertaV2ForMaskedLM`, legacy=False, the same sizes) applies its head to the last layer and computes all logits.
"ours, all logits" is ours with `sparse_prediction=False`. Times are medians of interleaved steps in one process. Memory
is measured in a new process: its peak, and the part of it beyond libraries, weights and gradients. Writes
benchmarks/results/masked_lm_step.csv.
"""

import argparse
import ctypes
import subprocess
import sys
from typing import Any

import torch
import transformers
from encoder import BASE, V3
from memory import peak, start_counting
from timing import RESULTS, environment, medians, time_interleaved, write_rows

import hf_deberta

PEERS = ("ours", "in-tree")
LABELLED_SHARE = 0.15


def make_model(peer: str, vocabulary: int, length: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    positions = max(length, V3["max_position_embeddings"])
    fields = {**BASE, **V3, "vocab_size": vocabulary, "max_position_embeddings": positions}
    config = transformers.DebertaV2Config(**fields, legacy=False)
    if peer == "in-tree":
        return transformers.DebertaV2ForMaskedLM(config)
    config = hf_deberta.HfDebertaConfig.from_dict(config.to_dict(), sparse_prediction=peer == "ours")
    return hf_deberta.HfDebertaForMaskedLM(config)


def make_batch(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (batch, length), generator=generator)
    chosen = torch.randperm(ids.numel(), generator=generator)[: max(1, round(LABELLED_SHARE * ids.numel()))]
    labels = torch.full_like(ids, -100).flatten()
    labels[chosen] = ids.flatten()[chosen]
    return {"input_ids": ids, "labels": labels.view(batch, length)}


class Step:
    """One training step of a new model; calling it runs forward and backward and drops the gradients."""

    def __init__(self, peer: str, arguments: argparse.Namespace):
        dtype = getattr(torch, arguments.dtype)
        model = make_model(peer, arguments.vocab, arguments.length).to(arguments.device, dtype)
        self.model: Any = model.train()
        batch = make_batch(arguments.batch, arguments.length, arguments.vocab)
        self.batch = {name: tensor.to(arguments.device) for name, tensor in batch.items()}
        self.gradient_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def __call__(self, tokens: int | None = None) -> None:
        """Use the first `tokens` tokens of each row; by default all."""
        batch = {name: tensor[:, :tokens].contiguous() for name, tensor in self.batch.items()}
        self.model(**batch).loss.backward()
        self.model.zero_grad(set_to_none=True)


def memory_of_one_step(peer: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return MiB: the peak, and the peak minus libraries, weights and gradients."""
    step = Step(peer, arguments)
    step(tokens=16)  # loads the libraries
    if arguments.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # give memory that the short step freed back to the system
    before = start_counting(arguments.device)
    step()
    highest = peak(arguments.device)
    return highest / 2**20, (highest - before - step.gradient_bytes) / 2**20


def measure_memory(peer: str) -> list[str]:
    """Run `memory_of_one_step` in a new process with the same arguments; return its two numbers."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peers", peer, "--one"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        raise SystemExit(f"the memory of {peer} could not be measured: {process.stderr[-2000:]}")
    return process.stdout.split()[-2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=128100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=(*PEERS, "ours, all logits"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help="internal: print the memory of the first peer")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.one:
        print(*(f"{mebibytes:.0f}" for mebibytes in memory_of_one_step(arguments.peers[0], arguments)))
        return
    memory = {peer: measure_memory(peer) for peer in arguments.peers}  # first, while this process holds no model
    steps = {peer: Step(peer, arguments) for peer in arguments.peers}
    times = medians(time_interleaved(steps, arguments.repeats, arguments.device))
    setting = {name: getattr(arguments, name) for name in ("batch", "length", "vocab", "dtype", "device")}
    rows = []
    for peer, milliseconds in times.items():
        highest, beyond = memory[peer]
        print(f"{peer}: {milliseconds:.0f} ms, peak {highest} MiB, {beyond} MiB beyond weights and gradients")
        row = {"peer": peer, **setting, "milliseconds": f"{milliseconds:.1f}", "repeats": arguments.repeats}
        rows.append(row | {"peak_mib": highest, "beyond_mib": beyond, **environment(arguments.device)})
    write_rows(RESULTS / "masked_lm_step.csv", rows, ("peer", *setting, "machine"))


if __name__ == "__main__":
    main()
