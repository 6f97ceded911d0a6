"""Fused layers (hf_deberta.optimize) for Transformers' own encoders, used while `enable()` is on."""

import torch
from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

from hf_deberta.in_tree.enable import enable, is_enabled
from hf_deberta.in_tree.encoder import (
    InTree,
    distance_parameters,
    distance_rows_of,
    has_fused_projection,
    has_talking_heads,
    prepared_encoders,
    scale_of,
    table_projection_of,
)
from hf_deberta.model.relative_position import RowsInUse
from hf_deberta.model.relative_table import relative_table, table_modules

from .fused_layer import FusedLayer, LayerWeights, NormWeights, WeightAndBias
from .fused_layers import FusedLayers


def is_in_tree_encoder(module: nn.Module) -> bool:
    return isinstance(module, (DebertaEncoder, DebertaV2Encoder))


def prepare_in_tree(encoder: InTree, dtype: torch.dtype, attention_dtype: torch.dtype) -> FusedLayers:
    """Prepare each layer of an in-tree encoder."""
    table = rows = None
    if encoder.relative_attention:
        distances = distance_rows_of(encoder, next(encoder.parameters()))
        if distances is None or has_talking_heads(encoder):
            raise ValueError("this encoder has options that hf_deberta does not compute, so it cannot be prepared")
        rows = RowsInUse(0, 2 * distances.span, distances.of_distance, distances.saturation)
        table = relative_table(table_modules(encoder), rows, None)
    layers = [
        FusedLayer(weights_of(layer, before), table, rows, dtype, attention_dtype)
        for before, layer in zip([None, *encoder.layer], encoder.layer, strict=False)
    ]
    return FusedLayers(encoder, layers, list(encoder.layer.modules())[1:])


def use_in_tree(encoder: InTree, prepared: FusedLayers) -> None:
    """Let the fused layers compute in place of the encoder's, and switch `enable()` on."""
    prepared_encoders[encoder] = prepared, distance_parameters(encoder)
    if not is_enabled():
        enable()


def weights_of(layer: InTree, before: InTree | None) -> LayerWeights:
    """The weights of a layer; `before` is the one before it."""
    attention = layer.attention.self
    query, key, value = projections_of(attention)
    return LayerWeights(
        query=query,
        key=key,
        value=value,
        attention_output=layer.attention.output.dense,
        attention_norm=NormWeights.from_module(layer.attention.output.LayerNorm),
        intermediate=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        output=layer.output.dense,
        output_norm=NormWeights.from_module(layer.output.LayerNorm),
        table_projection=table_projection_of(attention) if attention.relative_attention else None,
        heads=attention.num_attention_heads,
        scale=scale_of(attention),
        input_norm=None if before is None else NormWeights.from_module(before.output.LayerNorm),
    )


def projections_of(attention: InTree) -> tuple[WeightAndBias, WeightAndBias, WeightAndBias]:
    """Weight and bias of query, key and value."""
    if not has_fused_projection(attention):
        layers = attention.query_proj, attention.key_proj, attention.value_proj
        query, key, value = ((layer.weight, layer.bias) for layer in layers)
        return query, key, value
    by_head = attention.in_proj.weight.unflatten(0, (attention.num_attention_heads, 3, -1))
    weights = [part.flatten(0, 1) for part in by_head.unbind(1)]
    return (weights[0], attention.q_bias), (weights[1], None), (weights[2], attention.v_bias)
