"""`hf-deberta inspect`: configuration, parameters, attention backend and memory of a checkpoint."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_deberta
from hf_deberta import PRESETS, HfDebertaConfig, gpu_check
from hf_deberta.commands.any_checkpoint import CHECKPOINT_ERRORS, MODEL_HELP, MODEL_TYPES, class_candidates, read_fields
from hf_deberta.engines import attention_auto
from hf_deberta.engines.attention_triton import unsupported_device
from hf_deberta.training.errors import input_errors

BYTES_OF_ADAM = 16  # for each parameter in float32: weight, gradient, and two moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{MODEL_HELP}, or a preset such as v3-base")
    parser.add_argument("--batch", type=gpu_check.parse_size, default=8, help="rows of a batch (default: 8)")
    parser.add_argument("--tokens", type=gpu_check.parse_size, default=128, help="tokens of a row (default: 128)")


def main(args: argparse.Namespace) -> None:
    """Print the description; weights are not loaded."""
    if args.model in PRESETS and not Path(args.model).exists():
        kind, class_name = "preset", "HfDebertaForMaskedLM"
        config = HfDebertaConfig.from_preset(args.model)
    else:
        kind = f"{MODEL_TYPES[read_fields(args.model).get('model_type', 'deberta')]} checkpoint"
        class_name = class_candidates(args.model)[-1]  # the encoder, if official files do not name their head
        with input_errors(args.model, *CHECKPOINT_ERRORS):
            config = HfDebertaConfig.from_pretrained(args.model)
    with torch.device("meta"):
        model = getattr(hf_deberta, class_name)(config)
    print(f"{args.model}: {kind}, {class_name}")
    for title, lines in {
        "configuration": describe_config(config, class_name),
        "parameters": describe_parameters(model),
        "attention backend on this machine": describe_backend(config),
        "memory": describe_memory(model, args.batch, args.tokens),
    }.items():
        print(f"\n{title}")
        for name, value in lines.items():
            print(f"  {name:<30}{value}")


def describe_config(config: HfDebertaConfig, class_name: str) -> dict[str, str]:
    size = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads"
    buckets = f"{config.position_buckets} log buckets" if config.position_buckets > 0 else "a row for each distance"
    distance = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    decoder = f"{config.emd_steps} steps" if config.uses_mask_decoder else "none"
    may_have_decoder = issubclass(getattr(hf_deberta, class_name), hf_deberta.HfDebertaForMaskedLM)  # causal ones, too
    has_decoder = may_have_decoder and config.uses_mask_decoder
    limit = f"{config.max_position_embeddings} tokens" if config.position_biased_input or has_decoder else "any length"
    return {
        "size": f"{size}, feed-forward size {config.intermediate_size}",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "longest row": limit,
        "relative positions": f"{buckets}, up to distance {distance}" if config.relative_attention else "none",
        "attention terms": ", ".join(["c2c", *(config.pos_att_type or [])]),
        "convolution (nGiE)": f"kernel {config.conv_kernel_size}" if config.conv_kernel_size > 0 else "none",
    } | ({"enhanced mask decoder": decoder} if may_have_decoder else {})


def describe_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Counts by part; a tied matrix counts once."""
    counts = {"embeddings": 0, "encoder": 0, "head": 0}
    for name, parameter in model.named_parameters():
        part = next((part for part in ("embeddings", "encoder") if part in name.split(".")[:2]), "head")
        counts[part] += parameter.numel()
    counts["all"] = sum(counts.values())
    return {part: f"{count:,}" for part, count in counts.items()}


def describe_backend(config: HfDebertaConfig) -> dict[str, str]:
    """The backend of this machine, and the reason."""
    backend = config._attn_implementation or attention_auto.AUTO
    if backend != attention_auto.AUTO:
        return {backend: "set in the configuration of the checkpoint"}
    if attention_auto.FORCED_BACKEND != attention_auto.AUTO:
        return {attention_auto.FORCED_BACKEND: f"set by the environment variable {attention_auto.ENVIRONMENT_VARIABLE}"}
    if (gpu := gpu_check.current_gpu()) is None:
        return {"sdpa": "there is no CUDA device, and the Triton kernels need one"}
    if (reason := unsupported_device(gpu)) is not None:
        return {"sdpa": f"the Triton kernels cannot be used: {reason}"}
    return {"triton": "in float16 and bfloat16, if the kernels pass their check (hf-deberta gpu-check); otherwise sdpa"}


def describe_memory(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, str]:
    count = sum(parameter.numel() for parameter in model.parameters())
    layers = model.config.num_hidden_layers * saved_by_one_layer(model, batch, tokens)
    return {
        "weights, float32": mebibytes(4 * count),
        "weights, bfloat16": mebibytes(2 * count),
        "training with Adam, float32": mebibytes(BYTES_OF_ADAM * count),
        f"  and its layers, {batch}x{tokens}": f"{mebibytes(layers)} of activations, less with gradient checkpointing",
    }


def saved_by_one_layer(model: PreTrainedModel, batch: int, tokens: int) -> int:
    """Return the bytes that a layer saves for its backward pass, without its weights; nothing is allocated."""
    encoder_model: Any = model.base_model
    states = torch.zeros(batch, tokens, model.config.hidden_size, device="meta", requires_grad=True)
    layout = encoder_model.batch_layout(torch.zeros(batch, tokens, dtype=torch.long, device="meta"))
    table, layout = encoder_model.encoder.position_table(layout, states.device)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor  # a reference, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        encoder_model.encoder.layer[-1](states, table, layout)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def mebibytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"
