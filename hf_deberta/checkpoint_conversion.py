"""Official and in-tree checkpoints <-> our parameter names.

Ours are the names of the official v2 code and of in-tree `deberta-v2`. So only three things differ elsewhere:
v1's attention (query, key and value fused head by head, biases apart), the in-tree masked-LM head, and the
`bert.` prefix of some official files.
"""

import torch
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
