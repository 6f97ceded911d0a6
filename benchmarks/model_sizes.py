"""Print parameters and operations of each preset, beside BERT with the same layers, width and vocabulary.

    python benchmarks/model_sizes.py --length 512

Nothing is allocated: models are created on the meta device. Operations are the matrix products of a forward pass, as
the paper defines the model, from `hf_deberta.pretraining.throughput`; for the position terms the projections of the
relative table are added, which a batch of one row makes once per layer.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from hf_deberta import PRESETS, HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.pretraining.throughput import training_operations

BERT: dict[str, Any] = {
    "relative_attention": False,
    "pos_att_type": "none",
    "norm_rel_ebd": "none",
    "position_biased_input": True,
    "share_att_key": True,
    "attention_key_bias": True,
}
PREDICTED = 0.15  # share of the tokens that masked language modelling predicts


@dataclass(frozen=True)
class Size:
    parameters: int
    encoder: float  # operations per token
    masked_lm: float  # operations per token, with the decoder and the head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=[name for name in PRESETS if name != "tiny"])
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    columns = ["parameters", "BERT's", "encoder, MFLOP per token", "over BERT", "masked LM", "over BERT"]
    print(f"| {args.length} tokens | {' | '.join(columns)} | reach, layers x k |\n|---|{'--:|' * (len(columns) + 1)}")
    for preset in args.presets:
        config = HfDebertaConfig.from_preset(preset, max_position_embeddings=max(512, args.length))
        deberta, bert = measure(config, args.length), measure(as_bert(preset, args.length), args.length)
        distance = config.max_relative_positions
        distance = distance if distance > 0 else config.max_position_embeddings
        cells = [f"{deberta.parameters / 1e6:.0f} M", f"{bert.parameters / 1e6:.0f} M"]
        for name in ("encoder", "masked_lm"):
            cells += [f"{getattr(deberta, name) / 1e6:.0f}", f"{getattr(deberta, name) / getattr(bert, name):.2f}"]
        layers = config.num_hidden_layers
        print(f"| {preset} | {' | '.join(cells)} | {layers} x {distance} = {layers * distance:,} |")


def as_bert(preset: str, length: int) -> HfDebertaConfig:
    fields = {**BERT, "conv_kernel_size": 0, "max_position_embeddings": max(512, length)}
    return HfDebertaConfig.from_preset(preset, **fields)


def measure(config: HfDebertaConfig, length: int) -> Size:
    """Return parameters of the masked-language model, and operations per token for rows of this length."""
    with torch.device("meta"):
        model = HfDebertaForMaskedLM(config)
    tables = table_operations(config, length) / length
    encoder = training_operations(config, 1, length, 0, vocab_size=0) / 3
    masked_lm = training_operations(config, 1, length, PREDICTED) / 3
    convolution = 2 * config.conv_kernel_size * config.hidden_size**2  # beside the first layer of v2
    return Size(model.num_parameters(), encoder + tables + convolution, masked_lm + tables + convolution)


def table_operations(config: HfDebertaConfig, length: int) -> float:
    """Return the operations of projecting the rows of the relative table in use, once in each layer."""
    if not config.relative_attention:
        return 0.0
    rows = min(2 * (config.position_buckets if config.position_buckets > 0 else length), 2 * length)
    return 2.0 * rows * config.hidden_size**2 * len(config.pos_att_type) * config.num_hidden_layers


if __name__ == "__main__":
    main()
