"""Convert PEFT adapters of Transformers' `deberta` (v1), whose attention is one module, to models of this package.

    in_proj = [q_1; k_1; v_1; q_2; k_2; ...], the rows of each head  ->  query_proj, key_proj, value_proj

Adapters of `deberta-v2` (v2 and v3) need no conversion, their modules have our names.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_deberta.model.pretrained_model import RENAMINGS, unfuse_qkv

FUSED, PARTS = "in_proj", ("query_proj", "key_proj", "value_proj")
COPIED = ("lora_A",)  # parameters of the input of in_proj
SPLIT = ("lora_B", "lora_magnitude_vector")  # parameters of its output, a row each
MODULES = {FUSED: PARTS, "pos_proj": ("pos_key_proj",), "pos_q_proj": ("pos_query_proj",)}


def convert_adapter(source: str | Path, target: str | Path, num_attention_heads: int) -> None:
    """Read the adapter of a v1 model in the folder `source`, and write one with equal outputs to the folder `target`.

    LoRA and DoRA are supported; ValueError for others. IA3 cannot be: it scales the output of `in_proj`, to which v1
    adds biases afterwards, and our projections include them. `num_attention_heads` is the model's, 12 for base.
    """
    source, target = Path(source), Path(target)
    config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "adapter_model.safetensors").items():
        weights |= _converted(name, weight, num_attention_heads)
    for key in ("target_modules", "feedforward_modules", "modules_to_save", "exclude_modules"):
        if config.get(key):
            config[key] = _converted_modules(key, config[key])
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            config[key] = {new: n for name, n in config[key].items() for new in _converted_modules(key, [name])}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as unfinished:
        save_file(weights, Path(unfinished) / "adapter_model.safetensors", metadata={"format": "pt"})
        (Path(unfinished) / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            (Path(unfinished) / file).replace(target / file)


def _converted(name: str, weight: torch.Tensor, heads: int) -> dict[str, torch.Tensor]:
    """Return a parameter of the adapter under our names."""
    if f".{FUSED}." not in name:
        for pattern, replacement in RENAMINGS:
            name = re.sub(pattern, replacement, name)
        return {name: weight}
    kind = name.partition(f".{FUSED}.")[2].partition(".")[0]
    if kind not in COPIED + SPLIT:
        raise ValueError(f"{name}: only LoRA and DoRA adapters of {FUSED} can be converted, which have no {kind}")
    parts = [weight.clone() for _ in PARTS] if kind in COPIED else unfuse_qkv(weight, heads)
    return {name.replace(f".{FUSED}.", f".{part}."): each for part, each in zip(PARTS, parts, strict=True)}


def _converted_modules(key: str, modules: Any) -> list[str]:
    """Return the names of our modules; a name may begin with those of outer modules, `self.in_proj`."""
    if not isinstance(modules, list):
        raise ValueError(f"{key} must be a list of names to be converted, not {modules!r:.200}")
    parts = [module.rpartition(".") for module in modules]
    converted = [outer + dot + new for outer, dot, name in parts for new in MODULES.get(name, (name,))]
    if any(FUSED in name for name in converted):
        raise ValueError(f"{key} must have names of modules to be converted, not {modules!r:.200}")
    return converted
