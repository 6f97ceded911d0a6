"""Load the generator of a released pair. It lies beside the discriminator, as in microsoft/deberta-v3-large:

    config.json              pytorch_model.bin              the discriminator
    generator_config.json    pytorch_model.generator.bin    the generator

>>> generator = load_released_generator("microsoft/deberta-v3-large")
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file, has_file

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.training.errors import InputError

CONFIG, WEIGHTS = "generator_config.json", "pytorch_model.generator.bin"


def load_released_generator(name: str | Path, **options: Any) -> HfDebertaForMaskedLM:
    """Load the generator beside the discriminator `name`, with options of `from_pretrained`."""
    config, fields = released_generator_config(name, **options), HfDebertaConfig.__dataclass_fields__
    others = {option: value for option, value in options.items() if option == "dtype" or option not in fields}
    return HfDebertaForMaskedLM.from_pretrained(name, config=config, variant="generator", **others)


def released_generator_config(name: str | Path, **options: Any) -> HfDebertaConfig:
    """Load the generator's configuration.

    Without generator_config.json it is the discriminator's, with as many layers as the generator's weights have.
    """
    hub = {option: options[option] for option in ("cache_dir", "revision", "token") if option in options}
    if not has_file(name, WEIGHTS, **hub):
        raise InputError(f"{name} has no generator beside the discriminator ({WEIGHTS}): name another checkpoint")
    if has_file(name, CONFIG, **hub):
        return HfDebertaConfig.from_pretrained(str(cached_file(name, CONFIG, **hub)), **options)
    weights = torch.load(str(cached_file(name, WEIGHTS, **hub)), map_location="meta", weights_only=True)
    layers = {layer[1] for key in weights if (layer := re.search(r"encoder\.layer\.(\d+)\.", key))}
    return HfDebertaConfig.from_pretrained(name, **{**options, "num_hidden_layers": len(layers)})
