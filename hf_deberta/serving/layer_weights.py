"""What fused layers read of an encoder, whichever of three classes it has: this package's, or one of Transformers' two.

Legend: H heads, d head size, R rows of the relative-position table.

    table, rows = position_table(encoder)
    weights = attention_weights(encoder.layer[0].attention.self, table, rows)
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_deberta.in_tree.encoder import (
    has_fused_projection,
    has_talking_heads,
    scale_of,
    table_projection_of,
    whole_table_of,
)
from hf_deberta.model import relative_position
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer, HfDebertaSelfAttention
from hf_deberta.model.pretrained_model import unfuse_qkv
from hf_deberta.model.relative_position import LONGEST_TEXT, RelativePositions, TableProjection, TableWindow

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


class AttentionWeights(NamedTuple):
    """The parameters of one layer's attention."""

    query: WeightAndBias  # [H d, hidden], [H d]; includes the scale of the scores
    key: WeightAndBias
    value: WeightAndBias
    head_size: int
    positions: RelativePositions | None  # projected once, in float32, for queries that include the scale


def attention_weights(attention: Any, table: torch.Tensor | None, rows: TableWindow | None) -> AttentionWeights:
    """The weights of a layer's attention, for the table of `position_table`."""
    is_ours = isinstance(attention, HfDebertaSelfAttention)
    head_size = attention.head_size if is_ours else attention.attention_head_size
    scale = attention.scale if is_ours else scale_of(attention)
    positions = None
    if table is not None and rows is not None:
        projection = attention.table_projection() if is_ours else table_projection_of(attention)
        positions = constant_positions(projection, table, rows)
    (weight, bias), key, value = projections_of(attention)
    query = weight * scale, None if bias is None else bias * scale
    return AttentionWeights(query, key, value, head_size, positions)


def constant_positions(projection: TableProjection, table: torch.Tensor, rows: TableWindow) -> RelativePositions | None:
    """The position terms of a layer, projected once, for queries that include the scale; None without terms."""
    if not projection.terms:
        return None
    key, query, query_scale = projection.project(table)
    positions = RelativePositions(
        key, query, rows.rows_of_distance, rows.saturation, projection.terms, query_scale, reusable=True
    )
    return replace(positions.scaled(projection.scale, torch.float32), query_scale=1.0)


def projections_of(attention: Any) -> tuple[WeightAndBias, ...]:
    """Weight and bias of query, key and value; in-tree v1 has one weight with the three of each head."""
    if not has_fused_projection(attention):
        return tuple(map(weight_and_bias, (attention.query_proj, attention.key_proj, attention.value_proj)))
    query, key, value = unfuse_qkv(attention.in_proj.weight, attention.num_attention_heads)
    return (query, attention.q_bias), (key, None), (value, attention.v_bias)


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


def weight_and_bias(layer: nn.Linear) -> WeightAndBias:
    return layer.weight, layer.bias


def concatenate_projections(*layers: WeightAndBias) -> WeightAndBias:
    """Several projections as one; a missing bias is zero."""
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in layers]
    return torch.cat([weight for weight, _ in layers]), torch.cat(biases)


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
