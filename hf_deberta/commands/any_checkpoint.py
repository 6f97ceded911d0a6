"""Load a checkpoint in any of the three formats: official, of Transformers' own classes, or of this package."""

import pickle
from typing import Any

from transformers import PretrainedConfig

import hf_deberta
from hf_deberta.training.errors import InputError, input_errors

MODEL_HELP = "a folder, or a name on the Hub: an official DeBERTa, one of Transformers, or one of hf_deberta"
HEADS_OF_OFFICIAL_FILES = ("HfDebertaForPreTraining", "HfDebertaForMaskedLM", "HfDebertaModel")
CHECKPOINT_ERRORS = (OSError, ValueError, pickle.UnpicklingError)
MODEL_TYPES = {"hf_deberta": "hf_deberta", "deberta": "v1", "deberta-v2": "v2 or v3"}


def read_fields(name: str) -> dict[str, Any]:
    """Return the fields of config.json as they are in the file."""
    with input_errors(name, *CHECKPOINT_ERRORS):
        fields, _ = PretrainedConfig.get_config_dict(name)
    if fields.get("model_type", "deberta") not in MODEL_TYPES:
        raise InputError(f"{name} is no DeBERTa: its model type is {fields['model_type']}")
    return fields


def class_candidates(name: str, architecture: str | None = None) -> tuple[str, ...]:
    """Return the class names of hf_deberta that may hold the weights, the best first.

    Official files name no class; Transformers' classes have heads of the same names: DebertaV2ForTokenClassification.
    """
    if architecture is None:
        (architecture,) = read_fields(name).get("architectures") or [None]
        if architecture in (None, "DebertaModel", "DebertaV2Model"):  # exports may have a head that Transformers lacks
            return HEADS_OF_OFFICIAL_FILES
        architecture = "HfDeberta" + architecture.removeprefix("Hf").removeprefix("Deberta").removeprefix("V2")
    classes = [name for name in hf_deberta.__all__ if name.startswith(("HfDebertaFor", "HfDebertaModel"))]
    if architecture not in classes:
        raise InputError(f"there is no class {architecture}: name one with --architecture, of {', '.join(classes)}")
    return (architecture,)


def load_checkpoint(name: str, architecture: str | None = None) -> Any:
    """Return the model in float32, of the class of its head; a head that the file lacks is an InputError."""
    candidates = class_candidates(name, architecture)
    for candidate in candidates:
        with input_errors(name, *CHECKPOINT_ERRORS):
            options = {"dtype": "float32", "output_loading_info": True, "trust_remote_code": False}
            model, info = getattr(hf_deberta, candidate).from_pretrained(name, **options)
        missing, unread = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if not missing and not (unread and len(candidates) > 1):
            return model.eval()
    advice = "; name a class with --architecture" if architecture is None else ""
    if missing:
        raise InputError(f"{name} has no weights for {', '.join(missing[:3])} of {candidate}{advice}")
    raise InputError(f"{name} has weights of another head than {candidate} has, {', '.join(unread[:3])}{advice}")
