"""The weights of an encoder layer, whichever of three classes it has: this package's, or one of Transformers' two.

Legend: H heads, d head size, R rows of the relative-position table.

    table, rows = position_table(encoder)
    weights = layer_weights(encoder.layer[1], encoder.layer[0], table, rows)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.model.pretrained_model import unfuse_qkv
from hf_deberta.model.relative_position import RelativePositions, TableProjection, TableWindow

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


class NormWeights(NamedTuple):
    """The parameters of a LayerNorm."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    @classmethod
    def from_module(cls, norm: Any) -> "NormWeights":
        """The parameters of `nn.LayerNorm`, or of in-tree v1's own class."""
        epsilon = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
        return cls(norm.weight, norm.bias, epsilon)

    def sizes(self) -> torch.Tensor:
        """The root mean square of each output: weight x + bias, where x has mean 0 and mean square 1."""
        return torch.hypot(self.weight, self.bias)

    def normalise(self, states: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(states, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of an encoder layer."""

    query: WeightAndBias  # [H d, hidden], [H d]
    key: WeightAndBias
    value: WeightAndBias
    attention_output: WeightAndBias
    attention_norm: NormWeights
    intermediate: WeightAndBias
    activation: Callable[[torch.Tensor], torch.Tensor]
    output: WeightAndBias
    output_norm: NormWeights
    input_sizes: torch.Tensor | None  # [hidden], of the layer before, if there is one; see `NormWeights.sizes`
    head_size: int
    scale: float  # of the attention scores
    positions: RelativePositions | None  # projected once, in float32, for queries that include the scale

    @property
    def heads(self) -> int:
        return self.query[0].shape[0] // self.head_size

    def scaled_query(self) -> WeightAndBias:
        """The query projection that includes the scale."""
        weight, bias = self.query
        return weight * self.scale, None if bias is None else bias * self.scale


def layer_weights(layer: Any, before: Any, table: torch.Tensor | None, rows: TableWindow | None) -> LayerWeights:
    """The weights of a layer; `before` is the layer before it or None, and the table is that of `position_table`."""
    attention, is_ours = layer.attention.self, isinstance(layer, HfDebertaLayer)
    if is_ours:
        activation, head_size, scale = layer.intermediate.activation, attention.head_size, attention.scale
    else:
        activation, head_size = layer.intermediate.intermediate_act_fn, attention.attention_head_size
        scale = scale_of(attention)
    positions = None
    if table is not None and rows is not None:
        projection = attention.table_projection() if is_ours else table_projection_of(attention)
        positions = constant_positions(projection, table, rows)
    query, key, value = projections_of(attention)
    return LayerWeights(
        query=query,
        key=key,
        value=value,
        attention_output=weight_and_bias(layer.attention.output.dense),
        attention_norm=NormWeights.from_module(layer.attention.output.LayerNorm),
        intermediate=weight_and_bias(layer.intermediate.dense),
        activation=activation,
        output=weight_and_bias(layer.output.dense),
        output_norm=NormWeights.from_module(layer.output.LayerNorm),
        input_sizes=None if before is None else NormWeights.from_module(before.output.LayerNorm).sizes(),
        head_size=head_size,
        scale=scale,
        positions=positions,
    )


def constant_positions(projection: TableProjection, table: torch.Tensor, rows: TableWindow) -> RelativePositions | None:
    """The position terms of a layer, projected once, for queries that include the scale; None without terms."""
    if not projection.terms:
        return None
    key, query, query_scale = projection.project(table)
    positions = RelativePositions(
        key, query, rows.rows_of_distance, rows.saturation, projection.terms, query_scale, reusable=True
    )
    return replace(positions.with_scaled_queries(projection.scale, torch.float32), query_scale=1.0)


def projections_of(attention: Any) -> tuple[WeightAndBias, ...]:
    """Weight and bias of query, key and value; in-tree v1 has one weight with the three of each head."""
    if not has_fused_projection(attention):
        return tuple(map(weight_and_bias, (attention.query_proj, attention.key_proj, attention.value_proj)))
    query, key, value = unfuse_qkv(attention.in_proj.weight, attention.num_attention_heads)
    return (query, attention.q_bias), (key, None), (value, attention.v_bias)


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
    return None if rows is None else relative_position.position_table(encoder, rows), rows
