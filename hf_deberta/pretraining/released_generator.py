"""The generator of a released pair, which lies beside the discriminator, as in microsoft/deberta-v3-base:

    config.json              pytorch_model.bin              the discriminator
    generator_config.json    pytorch_model.generator.bin    the generator

>>> generator = load_released_generator("microsoft/deberta-v3-base")
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM

CONFIG, WEIGHTS = "generator_config.json", "pytorch_model.generator.bin"


def load_released_generator(name: str | Path, **loading: Any) -> HfDebertaForMaskedLM:
    """The generator beside the discriminator `name`, by options of `from_pretrained`."""
    config, fields = released_generator_config(name, **loading), HfDebertaConfig.__dataclass_fields__
    rest = {option: value for option, value in loading.items() if option == "dtype" or option not in fields}
    return HfDebertaForMaskedLM.from_pretrained(name, config=config, variant="generator", **rest)


def released_generator_config(name: str | Path, **loading: Any) -> HfDebertaConfig:
    """Its configuration; where there is no file of it the discriminator's, with as many layers as the weights have."""
    hub = {option: loading[option] for option in ("cache_dir", "revision", "token") if option in loading}
    find = partial(cached_file, name, _raise_exceptions_for_missing_entries=False, **hub)
    weights = find(WEIGHTS)
    if weights is None:
        raise ValueError(
            f"{name} holds no generator beside the discriminator, {WEIGHTS}: say where it is (--generator_name_or_path)"
        )
    file = find(CONFIG)
    if file is not None:
        return HfDebertaConfig.from_pretrained(file, **loading)
    names = torch.load(weights, map_location="meta", weights_only=True)
    layers = {layer[1] for name in names if (layer := re.search(r"encoder\.layer\.(\d+)\.", name))}
    return HfDebertaConfig.from_pretrained(name, **{**loading, "num_hidden_layers": len(layers)})
