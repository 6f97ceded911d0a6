"""Write a model in the format of Transformers' own DeBERTa classes, which load it without custom code.

Our parameter names are those of in-tree `deberta-v2`. In-tree `deberta` (v1) has the attention's query, key and value
in one matrix, head by head, with separate biases, and both have another masked-LM head.

    >>> from hf_deberta import HfDebertaForSequenceClassification, export_to_transformers
    >>> model = HfDebertaForSequenceClassification.from_pretrained("microsoft/deberta-v3-base")
    >>> export_to_transformers(model, "for-plain-transformers")
"""

import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import DebertaConfig, DebertaV2Config, PreTrainedConfig, PreTrainedModel

import hf_deberta.model
from hf_deberta.model.pretrained_model import AUTO_MAP, fuse_qkv

# fields that Transformers' classes do not have; attention_head_size they have, but cannot read as None
FIELDS_WITHOUT_IN_TREE_EQUIVALENT = (
    "auto_map",
    "model_type",
    "transformers_version",
    "clamp_relative_distance",
    "sparse_prediction",
    "unpad_inputs",
    "attention_head_size",
)


def export_to_transformers(model: PreTrainedModel, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write the model to a folder that Transformers loads with its own classes, without custom code.

    v1 models get the model type "deberta", all others "deberta-v2". Raise ValueError for a model that these classes
    cannot express. The tokenizer is not written: call `tokenizer.save_pretrained(folder)`. Hidden states and logits are
    the same, with two exceptions:

    - Transformers has no enhanced mask decoder, so masked-LM logits differ, and a warning is issued. The file contains
      the decoder's weights in the official layout, so `HfDebertaForMaskedLM` can load them again.
    - Past the largest relative distance, Transformers reads another row of the table (see `clamp_relative_distance`).

    All files are written to a temporary folder first and then moved into `folder`, where they replace other
    safetensors weights.
    """
    config = model.config
    if config.model_type != "hf_deberta":
        raise ValueError(f"export_to_transformers takes a HfDeberta model, not {type(model).__name__}")
    weights = official_weights(model)
    _warn_of_mask_decoder(model)
    if not config.uses_mask_decoder:
        weights = _to_in_tree_lm_head(weights)
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        in_tree_config(model).save_pretrained(temporary)
        save_torch_state_dict(weights, temporary, max_shard_size=max_shard_size)
        target.mkdir(exist_ok=True)
        for stale in (*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")):
            stale.unlink()
        for file in Path(temporary).iterdir():
            shutil.move(file, target / file.name)


def official_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights under their official names, which those of Transformers' classes are but for the LM head."""
    _check_exportable(model)
    config = model.config
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_predictions.lm_head.decoder.weight", None)
    if not any(name.startswith("deberta.") for name in weights):  # an encoder without a head
        weights = {f"deberta.{name}": tensor for name, tensor in weights.items()}
    return to_v1_layout(weights, config.num_attention_heads) if _is_v1(config) else _add_key_biases(weights)


def convert_folder(folder: str | Path, model_class: type[PreTrainedModel]) -> None:
    """Rewrite a saved model of this package in the format of Transformers, without source files and its model card."""
    target = Path(folder)
    export_to_transformers(model_class.from_pretrained(folder, trust_remote_code=False), folder)
    sources = [target / path.name for path in Path(hf_deberta.model.__file__).parent.glob("*.py")]
    for path in (target / "README.md", *sources):
        path.unlink(missing_ok=True)


def require_transformers_class(model: PreTrainedModel) -> None:
    """Raise ValueError if Transformers has no class for the model with its head; warn if masked-LM logits differ."""
    _check_exportable(model)
    _warn_of_mask_decoder(model)
    if _head_in_transformers(model) == "Model" and hasattr(model, "deberta"):
        raise ValueError(f"Transformers' DeBERTa classes have no head like that of {type(model).__name__}")


def _is_v1(config: PreTrainedConfig) -> bool:
    """Return whether in-tree `deberta` can express the model."""
    return not (
        config.attention_key_bias
        or config.share_att_key
        or config.position_buckets > 0
        or config.norm_rel_ebd != "none"
        or config.conv_kernel_size > 0
    )


def _check_exportable(model: PreTrainedModel) -> None:
    """Raise ValueError if Transformers' classes cannot express the model."""
    check_no_adapters(model)
    kind = type(model)
    if f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}" not in AUTO_MAP.values():
        raise ValueError(
            f"Transformers has no class like {kind.__name__}, which is not of this package; export its encoder "
            "(model.deberta), or of torch.compile(model) the model"
        )
    if "p2p" in model.config.pos_att_type:
        raise ValueError("Transformers' DeBERTa classes have no p2p term, so a model with it cannot be exported")
    if hasattr(model, "proj"):
        raise ValueError(
            f"Transformers has no class with the projection head of {type(model).__name__}; export its encoder "
            "(model.deberta) instead"
        )
    if type(model).__name__ == "HfDebertaForCausalLM":
        raise ValueError(
            "Transformers' DeBERTa classes have no causal attention, so a causal language model cannot be exported; to "
            "export its weights, save it, load it as HfDebertaForMaskedLM, and export that"
        )


def _warn_of_mask_decoder(model: PreTrainedModel) -> None:
    if hasattr(model, "lm_predictions") and model.config.uses_mask_decoder:
        warnings.warn(
            "Transformers has no enhanced mask decoder: the exported encoder gives the same hidden states, but its "
            "masked-LM logits will differ",
            stacklevel=3,
        )


def check_no_adapters(model: torch.nn.Module) -> None:
    """Raise ValueError for adapters of PEFT, whose layers wrap the model's own: an export would leave them out."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            raise ValueError(f"{name} has an adapter: export what merge_and_unload() of PEFT returns")


def to_v1_layout(weights: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Return the weights in the layout of v1: fused projections, and its own names for biases and position tables."""
    attention = "attention.self."
    v1_names = {
        attention + "query_proj.bias": attention + "q_bias",
        attention + "value_proj.bias": attention + "v_bias",
        attention + "pos_key_proj.": attention + "pos_proj.",
        attention + "pos_query_proj.": attention + "pos_q_proj.",
    }
    converted = {}
    for name, tensor in weights.items():
        if name.endswith(attention + "query_proj.weight"):
            layer = name.removesuffix("query_proj.weight")
            parts = [weights[f"{layer}{part}_proj.weight"] for part in ("query", "key", "value")]
            converted[layer + "in_proj.weight"] = fuse_qkv(parts, heads)
        elif not name.endswith((attention + "key_proj.weight", attention + "value_proj.weight")):
            for ours, theirs in v1_names.items():
                name = name.replace(ours, theirs)
            converted[name] = tensor
    return converted


def _add_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with zeros for missing key biases, which in-tree `deberta-v2` always has."""
    added = {}
    for name, tensor in weights.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(("self.key_proj.weight", "self.pos_key_proj.weight")) and bias not in weights:
            added[bias] = tensor.new_zeros(tensor.shape[0])
    return weights | added


def _to_in_tree_lm_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with the in-tree names of the masked-LM head."""
    ours, theirs = "lm_predictions.lm_head.", "cls.predictions."
    converted = {}
    for name, tensor in weights.items():
        in_transform = name.startswith((ours + "dense.", ours + "LayerNorm."))
        converted[name.replace(ours, theirs + "transform." if in_transform else theirs)] = tensor
    if theirs + "decoder.weight" in converted:  # untied: Transformers has two biases, and uses this one
        converted[theirs + "decoder.bias"] = converted[theirs + "bias"].clone()
    return converted


def in_tree_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of Transformers' own class for this model."""
    is_v1 = _is_v1(model.config)
    config_class: type[PreTrainedConfig] = DebertaConfig if is_v1 else DebertaV2Config
    fields = {
        key: value for key, value in model.config.to_dict().items() if key not in FIELDS_WITHOUT_IN_TREE_EQUIVALENT
    }
    if not is_v1:
        del fields["attention_key_bias"]
    fields["legacy"] = not model.config.uses_mask_decoder
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    config = config_class(**fields)
    head = _head_in_transformers(model)
    if head == "ForQuestionAnswering":
        config.num_labels = 2  # Transformers' head has as many outputs, and a checkpoint of NLI three labels
    config.architectures = [("Deberta" if is_v1 else "DebertaV2") + head]
    return config


def _head_in_transformers(model: PreTrainedModel) -> str:
    """Return the end of the name of Transformers' class; that of the encoder if there is none with this head."""
    head = type(model).__name__.removeprefix("HfDeberta")
    lacking = ("ForPreTraining", "ForEntityChoice", *["ForMultipleChoice"] * _is_v1(model.config))
    return "Model" if head in lacking else head
