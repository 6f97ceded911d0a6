"""A training step (forward and backward) of a base-size masked-language model with a v3 vocabulary: ours, in-tree.

    python benchmarks/masked_lm_step.py                                    # 8 x 512 tokens, 128100 words, float32
    python benchmarks/masked_lm_step.py --batch 2 --length 64 --repeats 1  # a smaller one

Ours decodes with the enhanced mask decoder and scores the 15 % labelled positions some at a time; in-tree
(`DebertaV2ForMaskedLM`, legacy=False, the same sizes) applies its head to the last layer and makes all logits. "ours,
all logits" is ours with `sparse_prediction=False`. Times are medians of steps that take turns in one process. Memory is
that of a process of its own: its peak, and what of it is beyond libraries, weights and their gradients. Writes
benchmarks/results/masked_lm_step.csv.
"""

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Callable

import torch
import transformers
from encoder import BASE, V3
from memory import peak, start_counting
from timing import RESULTS, circumstances, interleaved, medians, write_rows

import hf_deberta

PEERS = ("ours", "in-tree")
LABELLED = 0.15


def model_of(peer: str, vocabulary: int, length: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    known = max(length, V3["max_position_embeddings"])
    fields = {**BASE, **V3, "vocab_size": vocabulary, "max_position_embeddings": known}
    config = transformers.DebertaV2Config(**fields, legacy=False)
    if peer == "in-tree":
        return transformers.DebertaV2ForMaskedLM(config)
    config = hf_deberta.HfDebertaConfig.from_dict(config.to_dict(), sparse_prediction=peer == "ours")
    return hf_deberta.HfDebertaForMaskedLM(config)


def batch_of(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (batch, length), generator=generator)
    chosen = torch.randperm(ids.numel(), generator=generator)[: max(1, round(LABELLED * ids.numel()))]
    labels = torch.full_like(ids, -100).flatten()
    labels[chosen] = ids.flatten()[chosen]
    return {"input_ids": ids, "labels": labels.view(batch, length)}


def step(peer: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """What makes one step of a new model; its gradients go with it."""
    dtype = getattr(torch, arguments.dtype)
    model = model_of(peer, arguments.vocab, arguments.length).to(arguments.device, dtype).train()
    given = batch_of(arguments.batch, arguments.length, arguments.vocab)
    given = {name: tensor.to(arguments.device) for name, tensor in given.items()}

    def forward_and_backward(tokens: int | None = None) -> None:
        model(**{name: tensor[:, :tokens].contiguous() for name, tensor in given.items()}).loss.backward()
        model.zero_grad(set_to_none=True)

    forward_and_backward.gradients = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return forward_and_backward


def memory_of_one_step(peer: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """MiB at the peak, in all and beyond libraries, weights and gradients; a short step loads the libraries first."""
    make_step = step(peer, arguments)
    make_step(tokens=16)
    if arguments.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # what the short step gave back is the system's again
    before = start_counting(arguments.device)
    make_step()
    highest = peak(arguments.device)
    return highest / 2**20, (highest - before - make_step.gradients) / 2**20


def memory_of(peer: str) -> list[str]:
    """The same, measured by another process with the same arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peers", peer, "--one"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit(f"the memory of {peer} could not be measured: {found.stderr[-2000:]}")
    return found.stdout.split()[-2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=128100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=(*PEERS, "ours, all logits"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help="measure the memory of the first peer, print two MiB")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.one:
        print(*(f"{mebibytes:.0f}" for mebibytes in memory_of_one_step(arguments.peers[0], arguments)))
        return
    memory = {peer: memory_of(peer) for peer in arguments.peers}  # first, while this process holds no model
    steps = {peer: step(peer, arguments) for peer in arguments.peers}
    times = medians(interleaved(steps, arguments.repeats, arguments.device))
    about = {name: getattr(arguments, name) for name in ("batch", "length", "vocab", "dtype", "device")}
    rows = []
    for peer, milliseconds in times.items():
        highest, beyond = memory[peer]
        print(f"{peer}: {milliseconds:.0f} ms, peak {highest} MiB, {beyond} MiB beyond weights and gradients")
        row = {"peer": peer, **about, "milliseconds": f"{milliseconds:.1f}", "repeats": arguments.repeats}
        rows.append(row | {"peak_mib": highest, "beyond_mib": beyond, **circumstances(arguments.device)})
    write_rows(RESULTS / "masked_lm_step.csv", rows, ("peer", *about, "machine"))


if __name__ == "__main__":
    main()
