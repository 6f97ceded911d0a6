"""The weights of a layer's attention, whichever of three classes it has: this package's, or one of Transformers' two.

Legend: H heads, d head size, R rows of the relative-position table.

    weights = attention_weights(encoder.layer[0].attention.self)
    positions = weights.constant_positions(table, rows)
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_deberta.model.attention import attention_scale
from hf_deberta.model.modeling_hf_deberta import HfDebertaSelfAttention
from hf_deberta.model.pretrained_model import unfuse_qkv
from hf_deberta.model.relative_position import RelativePositions, TableProjection, TableWindow

InTree = Any  # a module of Transformers (here also of this package), whose attributes have no types
WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


class AttentionWeights(NamedTuple):
    """The parameters of one layer's attention."""

    query: WeightAndBias  # [H d, hidden], [H d]; includes the scale of the scores
    key: WeightAndBias
    value: WeightAndBias
    table: TableProjection  # and head size, scale and position terms

    def constant_positions(self, table: torch.Tensor | None, rows: TableWindow | None) -> RelativePositions | None:
        """The position terms, projected once in float32, for queries that include the scale; None without terms."""
        if table is None or rows is None or not self.table.terms:
            return None
        positions = self.table.project(table, rows).scaled(self.table.scale, torch.float32)
        return replace(positions, query_scale=1.0)


def attention_weights(attention: InTree) -> AttentionWeights:
    """The weights of an attention module of this package or of Transformers."""
    table = table_projection_of(attention)
    (weight, bias), key, value = _projections_of(attention)
    query = weight * table.scale, None if bias is None else bias * table.scale
    return AttentionWeights(query, key, value, table)


def table_projection_of(attention: InTree) -> TableProjection:
    """The projection of the relative table by a layer: its own matrices in v1, usually the content's in v2 and v3."""
    if isinstance(attention, HfDebertaSelfAttention):
        return attention.table_projection()
    terms = tuple(term for term in ("c2p", "p2c") if term in attention.pos_att_type)
    if has_fused_projection(attention):
        names = ("pos_proj", "pos_q_proj")
        terms_in_scale = attention.pos_att_type  # v1 counts terms that it lacks
    else:
        names = ("key_proj", "query_proj") if attention.share_att_key else ("pos_key_proj", "pos_query_proj")
        terms_in_scale = terms
    size = attention.attention_head_size
    scale = attention_scale(1 + len(terms_in_scale), size)
    if not attention.relative_attention:  # such a layer lacks the modules
        return TableProjection(key=None, query=None, dropout=nn.Identity(), head_size=size, scale=scale, terms=())
    return TableProjection(
        key=getattr(attention, names[0]) if "c2p" in terms else None,
        query=getattr(attention, names[1]) if "p2c" in terms else None,
        dropout=attention.pos_dropout,
        head_size=size,
        scale=scale,
        terms=terms,
    )


def has_fused_projection(attention: InTree) -> bool:
    """True for Transformers' v1, where one matrix projects to query, key and value of each head."""
    return hasattr(attention, "in_proj")


def _projections_of(attention: InTree) -> tuple[WeightAndBias, ...]:
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
