"""Load the inputs and outputs of the official code, and write its weights as folders for `from_pretrained`."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "golden"


def tensors(case: str) -> dict[str, torch.Tensor]:
    """Return the weights ("w/..."), inputs ("in/...") and outputs ("out/...") of a case by name."""
    return load_file(FOLDER / f"{case}.safetensors")


def info(case: str) -> dict:
    with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
        return json.loads(file.metadata()["info"])


def official_config(case: str) -> dict:
    return json.loads((FOLDER / f"{case}.json").read_text())


def write_checkpoint(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint as the official releases have it; those of v1 have the model_type "deberta"."""
    if any(".in_proj." in key for key in weights):
        config = {**config, "model_type": "deberta"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def checkpoint(case: str, folder: Path, **extra) -> Path:
    """Write the checkpoint of a case, with extra fields in its configuration, and return its folder."""
    weights = {key[2:]: value for key, value in tensors(case).items() if key.startswith("w/")}
    return write_checkpoint(folder / case, {**official_config(case), **extra}, weights)


def load(model_class, case: str, folder: Path, **extra):
    """Return the model of a case in eval mode; every weight must load and none may be missing."""
    model, report = model_class.from_pretrained(checkpoint(case, folder, **extra), output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    return model.eval()


def part(all_tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names start with `prefix`, without it."""
    return {key[len(prefix) :]: value for key, value in all_tensors.items() if key.startswith(prefix)}
