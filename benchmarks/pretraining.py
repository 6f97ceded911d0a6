"""Measure pretraining steps of whole models: milliseconds, tokens per second, model FLOPs utilization, peak memory.

    python benchmarks/pretraining.py                          # on a GPU: base size, 32 x 512 tokens
    python benchmarks/pretraining.py --device cpu --batch 8 --no_optimizer --peers "mlm in-tree" "mlm ours sdpa"
    python benchmarks/pretraining.py --device cpu --preset tiny --batch 2 --length 64 --repeats 1

A step is forward, backward and AdamW, with weights in float32, on random tokens of which 15 % are masked; on a GPU with
autocast to bfloat16. Peers, by their names in the result file:

- mlm in-tree: Transformers' DebertaV2ForMaskedLM, which has no enhanced mask decoder and computes all logits
- mlm ours BACKEND: the masked-language model with the enhanced mask decoder and this attention backend
- rtd ours BACKEND: generator and discriminator of replaced token detection

Peers take turns; times are medians. MFU counts the operations that the model is defined by, not those of an
implementation (hf_deberta/pretraining/throughput.py); it needs a device whose peak is known. Memory is the peak of a
process of its own for each peer. A peer that fails is skipped with the reason; if it is one of ours, the script exits
with an error at the end. Writes benchmarks/results/pretraining.csv.
"""

import argparse
import ctypes
import sys
from typing import Any

import torch
import transformers
from encoder import in_tree_config
from timing import in_new_process, peak, record, report_failure, require_ours, start_counting, synchronize

import hf_deberta
from hf_deberta.gpu_check import time_interleaved
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig
from hf_deberta.pretraining.throughput import peak_operations, rtd_training_operations, training_operations

PEERS = ("mlm in-tree", "mlm ours sdpa", "mlm ours triton", "rtd ours sdpa", "rtd ours triton")
LABELLED_SHARE = 0.15


def make_model(peer: str, config: hf_deberta.HfDebertaConfig) -> Any:
    torch.manual_seed(0)
    objective, _, name = peer.partition(" ")
    if name == "in-tree":
        return transformers.DebertaV2ForMaskedLM(in_tree_config(config))
    model: Any
    if objective == "mlm":
        model = hf_deberta.HfDebertaForMaskedLM(config)
    else:
        model = HfDebertaForRtdPretraining(HfDebertaRtdConfig.from_discriminator(config))
    model.set_attn_implementation(name.removeprefix("ours "))
    return model


class Batch:
    """Random tokens, of which each row has the same number masked, and the inputs that a model makes of them."""

    def __init__(self, args: argparse.Namespace, vocabulary: int):
        generator = torch.Generator().manual_seed(1)
        shape = args.batch, args.length
        ids = torch.randint(5, vocabulary, shape, generator=generator)
        self.labels_per_row = max(1, round(LABELLED_SHARE * args.length))
        labelled = torch.rand(shape, generator=generator).argsort(1) < self.labels_per_row
        self.inputs = {
            "input_ids": ids.masked_fill(labelled, 4).to(args.device),
            "attention_mask": torch.ones_like(ids).to(args.device),
            "labels": ids.masked_fill(~labelled, -100).to(args.device),
        }
        self.tokens, self.length, self.predicted = ids.numel(), args.length, int(labelled.sum())

    def operations(self, peer: str, config: hf_deberta.HfDebertaConfig) -> float:
        """Return the operations of a step as the model is defined: with the decoder, for ours."""
        counts = self.tokens, self.length, self.predicted
        if peer.startswith("rtd"):
            return rtd_training_operations(*HfDebertaRtdConfig.from_discriminator(config).models(), *counts)
        return training_operations(config, *counts)


class Step:
    """A training step of a new model; calling it updates the weights, or without optimizer drops the gradients."""

    def __init__(self, peer: str, config: hf_deberta.HfDebertaConfig, batch: Batch, args: argparse.Namespace):
        self.model = make_model(peer, config).to(args.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs, self.device, self.updates = dict(batch.inputs), args.device, not args.no_optimizer
        if "ours" in peer:
            self.inputs["max_predictions_per_row"] = batch.labels_per_row

    def __call__(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(**self.inputs).loss
        loss.backward()
        if self.updates:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def peak_mebibytes(step: Step) -> float:
    """Return the largest memory of this process in a step after the first."""
    step()
    if step.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # give memory that the first step freed back to the system
    start_counting(step.device)
    step()
    return peak(step.device) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v3-base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peers", nargs="+", default=PEERS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--no_optimizer", action="store_true", help="forward and backward alone")
    parser.add_argument("--memory_of", help="internal: print the peak memory of a peer")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    config = hf_deberta.HfDebertaConfig.from_preset(args.preset)
    batch = Batch(args, config.vocab_size)
    if args.memory_of:
        print(f"{peak_mebibytes(Step(args.memory_of, config, batch, args)):.0f}")
        return
    memory, steps = {}, {}
    for peer in args.peers:
        with report_failure(peer):  # before any model of this process takes memory
            memory[peer] = in_new_process(__file__, *sys.argv[1:], "--memory_of", peer)
    for peer in memory:
        with report_failure(peer):
            step = Step(peer, config, batch, args)
            step()
            synchronize(args.device)
            steps[peer] = step
    peak_rate = peak_operations(torch.device(args.device))
    setting = {name: getattr(args, name) for name in ("preset", "batch", "length", "device")}
    setting["optimizer"] = "none" if args.no_optimizer else "AdamW"
    for peer, milliseconds in time_interleaved(steps, args.repeats, torch.device(args.device)).items():
        rate = batch.operations(peer, config) / milliseconds * 1e3
        row = {"peer": peer, **setting, "milliseconds": f"{milliseconds:.1f}"}
        row |= {"tokens_per_second": f"{batch.tokens / milliseconds * 1e3:.0f}"}
        row |= {"mfu": f"{rate / peak_rate:.3f}" if peak_rate else "", "peak_mib": memory[peer]}
        print(", ".join(f"{name} {value}" for name, value in row.items() if name not in setting), flush=True)
        record("pretraining.csv", [{**row, "repeats": args.repeats}], ("peer", *setting), args.device)
    require_ours(args.peers, steps)


if __name__ == "__main__":
    main()
