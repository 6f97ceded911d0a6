"""Official and in-tree checkpoints <-> our parameter names.

Ours are the names of the official v2 code and of in-tree `deberta-v2`. So only three things differ elsewhere:
v1's attention (query, key and value fused head by head, biases apart), the in-tree masked-LM head, and the
`bert.` prefix of some official files.

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
from transformers import DebertaConfig, DebertaV2Config, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming


def split_heads(fused: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """v1's `in_proj` [heads * 3 * d, hidden] as query, key and value weights [hidden, hidden].

    Each head holds its d query rows, then its d key rows, then its d value rows.
    """
    by_head = fused.unflatten(0, (heads, 3, -1))
    return [by_head[:, part].flatten(0, 1).contiguous() for part in range(3)]


def fuse_heads(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """The inverse of `split_heads`, bit for bit."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2).contiguous()


class SplitHeads(ConversionOps):
    """`split_heads` for the loader of Transformers."""

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        (fused,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        return dict(zip(target_patterns, split_heads(fused, config.num_attention_heads), strict=True))

    @property
    def reverse_op(self):
        return FuseHeads()


class FuseHeads(ConversionOps):
    """`fuse_heads` for the loader of Transformers."""

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        parts = [value[0] if isinstance(value, list) else value for value in map(input_dict.get, source_patterns)]
        return {target_patterns[0]: fuse_heads(parts, config.num_attention_heads)}

    @property
    def reverse_op(self):
        return SplitHeads()


RENAMINGS = [
    (r"^bert\.", "deberta."),
    (r"attention\.self\.q_bias$", "attention.self.query_proj.bias"),
    (r"attention\.self\.v_bias$", "attention.self.value_proj.bias"),
    (r"attention\.self\.pos_proj\.", "attention.self.pos_key_proj."),
    (r"attention\.self\.pos_q_proj\.", "attention.self.pos_query_proj."),
    (r"cls\.predictions\.transform\.", "lm_predictions.lm_head."),
    (r"cls\.predictions\.decoder\.weight$", "lm_predictions.lm_head.decoder.weight"),
    (r"cls\.predictions\.bias$", "lm_predictions.lm_head.bias"),
]


def register_conversions() -> None:
    """Tell the loader of Transformers; `overwrite` because Hub code may be imported more than once."""
    attention = "attention.self."
    fused = WeightConverter(
        attention + "in_proj.weight",
        [attention + name for name in ("query_proj.weight", "key_proj.weight", "value_proj.weight")],
        operations=[SplitHeads()],
    )
    renamings = [WeightRenaming(source, target) for source, target in RENAMINGS]
    register_checkpoint_conversion_mapping("hf_deberta", [*renamings, fused], overwrite=True)


# ---- the way back ------------------------------------------------------------------------------------

# fields that mean nothing to Transformers' classes, or, attention_head_size, that they would read None from
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
    """Write a folder that Transformers loads with its own classes and no custom code, same logits.

    v1 models become model type "deberta", all others "deberta-v2". An enhanced mask decoder is kept in the file, in
    the official layout, but Transformers has none: its masked-LM logits will differ, and a warning says so. Past the
    largest relative distance Transformers reads another row of the table (`clamp_relative_distance`), and logits
    differ there. Whatever else its classes cannot express is an error. Everything is written elsewhere first, then
    moved into `folder`, where other safetensors weights are removed.
    """
    config = model.config
    if config.model_type != "hf_deberta":
        raise ValueError(f"export_to_transformers takes a HfDeberta model, not {type(model).__name__}")
    _check_expressible(model)
    fused = _is_v1(config)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_predictions.lm_head.decoder.weight", None)
    if not any(name.startswith("deberta.") for name in weights):  # the bare encoder
        weights = {f"deberta.{name}": tensor for name, tensor in weights.items()}
    weights = to_v1_layout(weights, config.num_attention_heads) if fused else _with_key_biases(weights)
    if not config.uses_mask_decoder:
        weights = _to_in_tree_lm_head(weights)
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        _in_tree_config(model, fused).save_pretrained(temporary)
        save_torch_state_dict(weights, temporary, max_shard_size=max_shard_size)
        target.mkdir(exist_ok=True)
        for stale in (*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")):
            stale.unlink()
        for file in Path(temporary).iterdir():
            shutil.move(file, target / file.name)


def _is_v1(config) -> bool:
    """Whether in-tree `deberta` can express it: own position projections, no key bias, no buckets, no table norm."""
    return not (
        config.attention_key_bias
        or config.share_att_key
        or config.position_buckets > 0
        or config.norm_rel_ebd != "none"
        or config.conv_kernel_size > 0
    )


def _check_expressible(model: PreTrainedModel) -> None:
    config = model.config
    if "p2p" in config.pos_att_type:
        raise ValueError("Transformers' DeBERTa classes have no p2p term: a model trained with it cannot be exported")
    if hasattr(model, "proj"):
        raise ValueError(
            f"Transformers has no class with the projection head of {type(model).__name__}; export its encoder, "
            "model.deberta, instead"
        )
    if type(model).__name__ == "HfDebertaForCausalLM":
        raise ValueError(
            "Transformers' DeBERTa classes see all tokens, so a causal language model cannot be exported; its weights "
            "can: save it, load it as HfDebertaForMaskedLM, and export that"
        )
    if hasattr(model, "lm_predictions") and config.uses_mask_decoder:
        warnings.warn(
            "Transformers has no enhanced mask decoder: the exported encoder gives the same states, but its masked-LM "
            "logits will differ from this model's",
            stacklevel=3,
        )


def to_v1_layout(weights: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Fuse the projections of every layer and rename what v1 names otherwise."""
    attention = "attention.self."
    back = {
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
            converted[layer + "in_proj.weight"] = fuse_heads(parts, heads)
        elif not name.endswith((attention + "key_proj.weight", attention + "value_proj.weight")):
            for ours, theirs in back.items():
                name = name.replace(ours, theirs)
            converted[name] = tensor
    return converted


def _with_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In-tree `deberta-v2` always has key biases; a model without them has zeros there."""
    added = {}
    for name, tensor in weights.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(("self.key_proj.weight", "self.pos_key_proj.weight")) and bias not in weights:
            added[bias] = tensor.new_zeros(tensor.shape[0])
    return weights | added


def _to_in_tree_lm_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ours, theirs = "lm_predictions.lm_head.", "cls.predictions."
    converted = {}
    for name, tensor in weights.items():
        inner = name.removeprefix(ours).startswith(("dense.", "LayerNorm.")) and name.startswith(ours)
        converted[name.replace(ours, theirs + "transform." if inner else theirs)] = tensor
    return converted


def _in_tree_config(model: PreTrainedModel, fused: bool):
    fields = {
        key: value for key, value in model.config.to_dict().items() if key not in FIELDS_WITHOUT_IN_TREE_EQUIVALENT
    }
    if fused:
        config_class, prefix = DebertaConfig, "Deberta"
    else:
        config_class, prefix = DebertaV2Config, "DebertaV2"
        del fields["attention_key_bias"]
    fields["legacy"] = not model.config.uses_mask_decoder
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    config = config_class(**fields)
    head = type(model).__name__.removeprefix("HfDeberta")
    # Transformers has neither the discriminator nor v1 multiple choice; their encoders load
    known = head not in ("ForPreTraining", "ForEntityChoice") and not (fused and head == "ForMultipleChoice")
    config.architectures = [prefix + (head if known else "Model")]
    return config
