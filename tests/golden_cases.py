"""Official tensors: load one case as a folder that `from_pretrained` reads, and its inputs and outputs."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "golden"


def tensors(case: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / f"{case}.safetensors")


def info(case: str) -> dict:
    with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
        return json.loads(file.metadata()["info"])


def official_config(case: str) -> dict:
    return json.loads((FOLDER / f"{case}.json").read_text())


def write_checkpoint(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder in the official form; v1 weights say model_type "deberta", as released v1 files do."""
    if any(".in_proj." in key for key in weights):
        config = {**config, "model_type": "deberta"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def checkpoint(case: str, folder: Path, **extra) -> Path:
    weights = {key[2:]: value for key, value in tensors(case).items() if key.startswith("w/")}
    return write_checkpoint(folder / case, {**official_config(case), **extra}, weights)


def load(model_class, case: str, folder: Path, **extra):
    """The case's weights through `from_pretrained`, in eval mode, with nothing missing and nothing unexpected."""
    model, report = model_class.from_pretrained(checkpoint(case, folder, **extra), output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    return model.eval()


def part(all_tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key[len(prefix) :]: value for key, value in all_tensors.items() if key.startswith(prefix)}
