"""Print what each preset needs: parameters and operations beside BERT, and the memory of pretraining it on many GPUs.

    python benchmarks/model_sizes.py --length 512
    python benchmarks/model_sizes.py --memory --batch 4     # GiB per GPU with FSDP2, bf16, activation checkpointing

BERT has the same layers, width and vocabulary. Operations are the matrix products of a forward pass, as the paper
defines the model, from `hf_deberta.pretraining.throughput`; for the position terms the projections of the relative
table are added, which a batch of one row makes once per layer. Nothing is allocated: models are created on the meta
device, and the activations that one layer saves for its backward pass are counted by running it there. The allocator
and the communication library usually add one to three GiB.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from table import markdown

from hf_deberta import PRESETS, HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.engines.linear_cross_entropy import chunk_tokens
from hf_deberta.pretraining.throughput import training_operations

BERT: dict[str, Any] = {
    "relative_attention": False,
    "pos_att_type": "none",
    "norm_rel_ebd": "none",
    "position_biased_input": True,
    "share_att_key": True,
    "attention_key_bias": True,
    "conv_kernel_size": 0,
}
PREDICTED = 0.15  # share of the tokens that masked language modelling predicts
MEMORY_PRESETS = ("v3-base", "v3-large", "v2-xlarge", "v2-xxlarge")
GPUS = (1, 2, 4, 8, 16, 32, 64)
GIB = 2**30


@dataclass(frozen=True)
class Size:
    parameters: int
    encoder: float  # operations per token
    masked_lm: float  # operations per token, with the decoder and the head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--batch", type=int, default=4, help="rows on each GPU, with --memory")
    args = parser.parse_args()
    print(memory_table(args.batch, args.length) if args.memory else size_table(args.length))


def config_of(preset: str, length: int, **fields: Any) -> HfDebertaConfig:
    return HfDebertaConfig.from_preset(preset, max_position_embeddings=max(512, length), **fields)


def size_table(length: int) -> str:
    """Parameters and operations per token of all presets."""
    rows = []
    for preset in PRESETS:
        if preset == "tiny":
            continue
        deberta, bert = (measure(config_of(preset, length, **fields), length) for fields in ({}, BERT))
        cells = [preset, f"{deberta.parameters / 1e6:.0f} M", f"{bert.parameters / 1e6:.0f} M"]
        for name in ("encoder", "masked_lm"):
            cells += [f"{getattr(deberta, name) / 1e6:.0f}", f"{getattr(deberta, name) / getattr(bert, name):.2f}"]
        rows.append(cells)
    columns = ["parameters", "BERT's", "encoder, MFLOP per token", "over BERT", "masked LM", "over BERT"]
    return markdown([f"{length} tokens", *columns], rows)


def measure(config: HfDebertaConfig, length: int) -> Size:
    """Return parameters of the masked-language model, and operations per token for rows of this length."""
    with torch.device("meta"):
        model = HfDebertaForMaskedLM(config)
    encoder = training_operations(config, 1, length, 0, vocab_size=0) / 3
    masked_lm = training_operations(config, 1, length, PREDICTED) / 3
    extra = 2.0 * config.conv_kernel_size * config.hidden_size**2  # beside the first layer of v2
    if config.relative_attention:  # each layer projects the rows of the relative table in use
        rows = min(2 * (config.position_buckets if config.position_buckets > 0 else length), 2 * length)
        projections = len(config.pos_att_type) * config.num_hidden_layers
        extra += 2 * rows * config.hidden_size**2 * projections / length
    return Size(model.num_parameters(), encoder + extra, masked_lm + extra)


def memory_table(batch: int, length: int) -> str:
    """GiB per GPU of a pretraining step, by number of GPUs."""
    rows = []
    for preset in MEMORY_PRESETS:
        with torch.device("meta"):
            model = HfDebertaForMaskedLM(config_of(preset, length)).bfloat16().train()
        layer, shared, everywhere = plan(model, batch, length)
        per_gpu = [f"{(shared / count + everywhere) / GIB:.1f}" for count in GPUS]
        rows.append([preset, f"{model.num_parameters() / 1e6:.0f} M", f"{layer / GIB:.2f}", *per_gpu])
    return markdown(["model", "parameters", "one layer", *(f"{count} GPU" for count in GPUS)], rows)


def plan(model: HfDebertaForMaskedLM, batch: int, length: int) -> tuple[float, float, float]:
    """Return bytes: the activations of one layer, what is divided among GPUs, and what each of them needs."""
    config, tokens, total = model.config, batch * length, model.num_parameters()
    layer = sum(parameter.numel() for parameter in model.deberta.encoder.layer[0].parameters())
    root = total - layer * config.num_hidden_layers
    activations = saved_by_one_layer(model, batch, length)
    # embeddings and head stay gathered, with their gradients; two layers at a time, with the gradients of one
    gathered = 2 * 2 * root + (2 * 2 + 2) * layer
    checkpoints = 2 * tokens * config.hidden_size * config.num_hidden_layers
    # a chunk of float32 logits, and the gradient of the output matrix, which is summed in float32
    predicted = PREDICTED * tokens
    chunk = min(predicted, chunk_tokens(config.vocab_size, torch.device("cuda")))
    loss = 4 * (chunk * config.vocab_size + config.vocab_size * config.hidden_size + predicted * config.hidden_size)
    # shared: float32 weights, gradients and two moments of Adam
    return activations, 16 * total, gathered + checkpoints + activations + loss


def saved_by_one_layer(model: HfDebertaForMaskedLM, batch: int, length: int) -> int:
    """Return the bytes of bf16 activations that a layer saves for its backward pass, without its weights."""
    embeddings = torch.zeros(batch, length, model.config.hidden_size, dtype=torch.bfloat16, device="meta")
    states, layout = model.deberta.start(inputs_embeds=embeddings)
    table = model.deberta.encoder.position_table(layout)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = tensor  # a reference, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.deberta.encoder.layer[-1](states.detach().requires_grad_(), table, layout)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


if __name__ == "__main__":
    main()
