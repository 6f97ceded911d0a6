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
    """Load the generator beside the discriminator `name`, with options of `from_pretrained`.

    Without generator_config.json its configuration is the discriminator's, with as many layers as its weights have.
    """
    hub = {option: options[option] for option in ("cache_dir", "revision", "token") if option in options}
    if not has_file(name, WEIGHTS, **hub):
        way_out = "name another checkpoint, or in pretraining add --generator_name_or_path"
        raise InputError(f"{name} has no generator beside the discriminator ({WEIGHTS}): {way_out}")
    if has_file(name, CONFIG, **hub):
        config = HfDebertaConfig.from_pretrained(str(cached_file(name, CONFIG, **hub)), **options)
    else:
        weights = torch.load(str(cached_file(name, WEIGHTS, **hub)), map_location="meta", weights_only=True)
        layers = {layer[1] for key in weights if (layer := re.search(r"encoder\.layer\.(\d+)\.", key))}
        config = HfDebertaConfig.from_pretrained(name, **{**options, "num_hidden_layers": len(layers)})
    fields = HfDebertaConfig.__dataclass_fields__
    others = {option: value for option, value in options.items() if option == "dtype" or option not in fields}
    return HfDebertaForMaskedLM.from_pretrained(name, config=config, variant="generator", **others)
