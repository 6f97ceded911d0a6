"""What fused layers read of an encoder, whichever of three classes it has, beside `attention_weights`."""

from typing import Any

import torch
from torch import nn

from hf_deberta.in_tree.encoder import has_talking_heads, whole_table_of
from hf_deberta.model import relative_position
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.model.relative_position import LONGEST_TEXT, TableWindow


def activation_of(layer: Any) -> Any:
    """The activation of the feed-forward layer, a function or a module."""
    inner = layer.intermediate
    return inner.activation if isinstance(layer, HfDebertaLayer) else inner.intermediate_act_fn


def copy_norm(norm: Any) -> nn.LayerNorm:
    """A copy of `nn.LayerNorm`, or of in-tree v1's own class, that is not trained."""
    epsilon = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
    copy = nn.LayerNorm(norm.weight.shape, epsilon, dtype=norm.weight.dtype, device=norm.weight.device)
    copy.load_state_dict(norm.state_dict())
    return copy.requires_grad_(False)


def output_sizes(norm: nn.LayerNorm) -> torch.Tensor:
    """The root mean square of each output: weight x + bias, where x has mean 0 and mean square 1."""
    return torch.hypot(norm.weight, norm.bias)


def position_table(encoder: Any) -> tuple[torch.Tensor | None, TableWindow | None]:
    """The whole relative-position table [R, hidden], normalised, and its rows; None without relative attention."""
    if isinstance(encoder, HfDebertaEncoder):
        rows = encoder.whole_table()
    elif not encoder.relative_attention:
        rows = None
    else:
        rows = whole_table_of(encoder, next(encoder.parameters()))
        if rows is None or has_talking_heads(encoder):
            raise ValueError("this encoder has options that hf_deberta does not compute, so it cannot be prepared")
    return relative_position.position_table(encoder, rows, LONGEST_TEXT)
