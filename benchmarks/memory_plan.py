"""Estimate the memory per GPU of a pretraining step with FSDP2, bf16 and activation checkpointing.

    python benchmarks/memory_plan.py --presets v2-xxlarge --batch 4 --length 512

Nothing is allocated: models are created on the meta device, and the activations that one layer saves for its backward
pass are counted by running it there. The allocator and the communication library usually add one to three GiB.
"""

import argparse

import torch

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM

GPUS = (1, 2, 4, 8, 16, 32, 64)
GIB = 2**30


def saved_by_one_layer(model: HfDebertaForMaskedLM, batch: int, length: int) -> int:
    """Return the bytes of bf16 activations that a layer saves for its backward pass, without its weights."""
    config = model.config
    embeddings = torch.zeros(batch, length, config.hidden_size, dtype=torch.bfloat16, device="meta")
    states, context = model.deberta.start(inputs_embeds=embeddings)
    table = model.deberta.encoder.position_table(context)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = tensor  # a reference, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.deberta.encoder.layer[-1](states.detach().requires_grad_(), table, context)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def plan(preset: str, batch: int, length: int, emd_share: float = 0.15) -> dict[str, float]:
    """Return bytes by purpose: "sharded" is divided by the number of GPUs, the others are needed on every GPU."""
    with torch.device("meta"):
        config = HfDebertaConfig.from_preset(preset, max_position_embeddings=max(512, length))
        model = HfDebertaForMaskedLM(config).bfloat16().train()
    total = model.num_parameters()
    layer = sum(parameter.numel() for parameter in model.deberta.encoder.layer[0].parameters())
    root = total - layer * config.num_hidden_layers
    tokens = batch * length
    return {
        "parameters": total,
        # float32 weights, gradients and two moments of Adam
        "sharded": 16 * total,
        # embeddings and head stay gathered, with their gradients; two layers at a time, with the gradients of one
        "gathered": 2 * 2 * root + (2 * 2 + 2) * layer,
        "checkpoints": 2 * tokens * config.hidden_size * config.num_hidden_layers,
        "one layer": saved_by_one_layer(model, batch, length),
        # a chunk of float32 logits, and the gradient of the output matrix, which is summed in float32
        "loss": 2**26 + 4 * config.vocab_size * config.hidden_size + 4 * emd_share * tokens * config.hidden_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["v3-base", "v3-large", "v2-xlarge", "v2-xxlarge"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    print(f"GiB per GPU, {args.batch} x {args.length} tokens on each, attention by scaled_dot_product_attention\n")
    print("| model | parameters | one layer | " + " | ".join(f"{n} GPU" for n in GPUS) + " |")
    print("|---|--:|--:|" + "--:|" * len(GPUS))
    for preset in args.presets:
        memory = plan(preset, args.batch, args.length)
        everywhere = sum(memory[name] for name in ("gathered", "checkpoints", "one layer", "loss"))
        per_gpu = [(memory["sharded"] / n + everywhere) / GIB for n in GPUS]
        cells = [
            f"{memory['parameters'] / 1e6:.0f} M",
            f"{memory['one layer'] / GIB:.2f}",
            *(f"{x:.1f}" for x in per_gpu),
        ]
        print(f"| {preset} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
