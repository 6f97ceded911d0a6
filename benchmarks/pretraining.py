"""Measure pretraining on a GPU: tokens per second and model FLOPs utilization of whole training steps.

    python benchmarks/pretraining_gpu.py                               # base size, 32 x 512 tokens
    python benchmarks/pretraining_gpu.py --device cpu --preset tiny --batch 2 --length 64 --repeats 1

A step is forward, backward and AdamW, with weights in float32 and autocast to bfloat16, on random tokens of which 15 %
are masked. Peers, by their names in the result file:

- mlm in-tree: Transformers' DebertaV2ForMaskedLM, which has no enhanced mask decoder and computes all logits
- mlm ours BACKEND: the masked-language model with the enhanced mask decoder and this attention backend
- rtd ours BACKEND: generator and discriminator of replaced token detection

Peers take turns; times are medians. MFU counts the operations that the model is defined by, not those of an
implementation (hf_deberta/pretraining/throughput.py); it needs a device whose peak is known. A peer that fails is
skipped with the reason; if it is one of ours, the script exits with an error at the end. Writes
benchmarks/results/pretraining_gpu.csv.
"""

import argparse
from typing import Any

import torch
import transformers
from timing import RESULTS, environment, medians, synchronize, time_interleaved, write_rows

import hf_deberta
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig
from hf_deberta.pretraining.throughput import peak_operations, rtd_training_operations, training_operations

PEERS = ("mlm in-tree", "mlm ours sdpa", "mlm ours triton", "rtd ours sdpa", "rtd ours triton")
LABELLED_SHARE = 0.15


def make_model(peer: str, config: hf_deberta.HfDebertaConfig) -> Any:
    torch.manual_seed(0)
    objective, _, name = peer.partition(" ")
    if name == "in-tree":
        fields = {name: value for name, value in config.to_dict().items() if value is not None}
        return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config.from_dict(fields, legacy=False))
    model: Any
    if objective == "mlm":
        model = hf_deberta.HfDebertaForMaskedLM(config)
    else:
        model = HfDebertaForRtdPretraining(HfDebertaRtdConfig.from_discriminator(config))
    model.set_attn_implementation(name.removeprefix("ours "))
    return model


class Batch:
    """Random tokens, of which each row has the same number masked, and the inputs that a model makes of them."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: int):
        generator = torch.Generator().manual_seed(1)
        shape = arguments.batch, arguments.length
        ids = torch.randint(5, vocabulary, shape, generator=generator)
        self.labels_per_row = max(1, round(LABELLED_SHARE * arguments.length))
        labelled = torch.rand(shape, generator=generator).argsort(1) < self.labels_per_row
        self.inputs = {
            "input_ids": ids.masked_fill(labelled, 4).to(arguments.device),
            "attention_mask": torch.ones_like(ids).to(arguments.device),
            "labels": ids.masked_fill(~labelled, -100).to(arguments.device),
        }
        self.tokens, self.length, self.predicted = ids.numel(), arguments.length, int(labelled.sum())

    def operations(self, peer: str, config: hf_deberta.HfDebertaConfig) -> float:
        """Return the operations of a step as the model is defined: with the decoder, for ours."""
        counts = self.tokens, self.length, self.predicted
        if peer.startswith("rtd"):
            return rtd_training_operations(*HfDebertaRtdConfig.from_discriminator(config).models(), *counts)
        return training_operations(config, *counts)


class Step:
    """A training step of a new model; calling it updates the weights."""

    def __init__(self, peer: str, config: hf_deberta.HfDebertaConfig, batch: Batch, device: str):
        self.model = make_model(peer, config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs, self.device = dict(batch.inputs), device
        if peer.startswith("mlm ours"):
            self.inputs["max_predictions_per_row"] = batch.labels_per_row

    def __call__(self) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def start(peer: str, config: hf_deberta.HfDebertaConfig, batch: Batch, device: str) -> Step | None:
    """Return the step of a peer after a first call; None with a message if it fails."""
    try:
        step = Step(peer, config, batch, device)
        step()
        synchronize(device)
    except Exception as reason:  # a kernel that does not compile, too little memory
        print(f"{peer} is skipped: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
        return None
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v3-base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--no-write", action="store_true", help="print the times, write no file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    config = hf_deberta.HfDebertaConfig.from_preset(arguments.preset)
    batch = Batch(arguments, config.vocab_size)
    peak = peak_operations(torch.device(arguments.device))
    steps = {peer: start(peer, config, batch, arguments.device) for peer in arguments.peers}
    running = {peer: step for peer, step in steps.items() if step is not None}
    setting = {name: getattr(arguments, name) for name in ("preset", "batch", "length", "device")}
    rows = []
    for peer, milliseconds in medians(time_interleaved(running, arguments.repeats, arguments.device)).items():
        speed = batch.tokens / milliseconds * 1e3
        mfu = "" if peak is None else f"{batch.operations(peer, config) / milliseconds * 1e3 / peak:.3f}"
        print(f"{peer}: {milliseconds:.1f} ms, {speed:.0f} tokens per second, MFU {mfu or 'unknown'}", flush=True)
        row = {"peer": peer, **setting, "milliseconds": f"{milliseconds:.1f}", "tokens_per_second": f"{speed:.0f}"}
        rows.append(row | {"mfu": mfu, "repeats": arguments.repeats, **environment(arguments.device)})
    if rows and not arguments.no_write:
        write_rows(RESULTS / "pretraining_gpu.csv", rows, ("peer", *setting, "machine"))
    missing = [peer for peer, step in steps.items() if step is None and "ours" in peer]
    if missing:
        raise SystemExit(f"skipped: {', '.join(missing)}")


if __name__ == "__main__":
    main()
