"""`hf-deberta bench`: time a checkpoint on this machine against Transformers' own classes.

Peers take turns, medians are reported, and hidden states are compared. Inputs are random tokens without padding.
"""

import argparse
import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModel

from hf_deberta import HfDebertaConfig, HfDebertaModel, export_to_transformers, optimize
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, is_preset, read_fields
from hf_deberta.gpu_check import current_gpu, parse_shape, parse_size, time_interleaved

SHAPES = ("1x32", "8x128")
THEIRS = "Transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{MODEL_HELP}, or a preset such as v3-base, with random weights")
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, metavar="BxN", default=tuple(map(parse_shape, SHAPES)),
        help=f"batch and length (default: {' '.join(SHAPES)})",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=parse_size, default=7, help="turns, of which the median counts (default: 7)")
    parser.add_argument("--training", action="store_true", help="time forward and backward; by default inference")


def main(args: argparse.Namespace) -> int:
    """Print a row for each shape."""
    device = current_gpu() or torch.device("cpu")
    models = make_models(args.model, getattr(torch, args.dtype), device, args.training)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{args.model}, {args.dtype}, {'training' if args.training else 'inference'} | {machine} | {versions}")
    names = [*models, *(f"{THEIRS} / {name}" for name in models if name != THEIRS), "largest difference"]
    print("  ".join(["shape".ljust(8), *names]))
    for batch, tokens in args.shapes:
        ids = torch.randint(5, models[THEIRS].config.vocab_size, (batch, tokens), device=device)
        step = training_step if args.training else inference
        calls = {name: partial(step, model, ids) for name, model in models.items()}
        difference = largest_difference([inference(model.eval(), ids) for model in models.values()])
        for model in models.values():
            model.train(args.training)
        times = time_interleaved(calls, args.repeats, device)
        cells = [f"{times[name]:.1f} ms" for name in models]
        cells += [f"{times[THEIRS] / times[name]:.2f}" for name in models if name != THEIRS]
        row = [cell.rjust(len(name)) for cell, name in zip([*cells, f"{difference:.1e}"], names, strict=True)]
        print("  ".join([f"{batch}x{tokens}".ljust(8), *row]), flush=True)
    return 0


def make_models(name: str, dtype: torch.dtype, device: torch.device, training: bool) -> dict[str, Any]:
    """Encoders with the same weights: Transformers', ours, and on a CPU ours prepared for inference."""
    if is_preset(name):
        ours = HfDebertaModel(HfDebertaConfig.from_preset(name))
        theirs = in_tree_copy(ours)
    else:
        with checkpoint_errors(name):
            ours = HfDebertaModel.from_pretrained(name, dtype=torch.float32)
            is_ours = read_fields(name).get("model_type") == "hf_deberta"
            theirs = in_tree_copy(ours) if is_ours else AutoModel.from_pretrained(name, trust_remote_code=False)
    models = {THEIRS: theirs, "hf_deberta": ours}
    optimized = device.type == "cpu" and not training and dtype != torch.float16
    prepared = {"optimize()": optimize(ours, dtype, inplace=False)} if optimized else {}
    return {peer: model.to(device, dtype) for peer, model in models.items()} | prepared


def in_tree_copy(model: HfDebertaModel) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        export_to_transformers(model, folder)
        return AutoModel.from_pretrained(folder, trust_remote_code=False)


def inference(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).last_hidden_state


def training_step(model: Any, ids: torch.Tensor) -> None:
    model(ids).last_hidden_state.float().square().mean().backward()
    model.zero_grad()


def largest_difference(states: list[torch.Tensor]) -> float:
    """The largest difference of hidden states from those of the first peer."""
    return max((other.float() - states[0].float()).abs().max().item() for other in states[1:])
