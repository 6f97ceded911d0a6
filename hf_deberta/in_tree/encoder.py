"""Replacements for the methods of Transformers' encoders: the same parameters, computed by our attention.

Legend: B batch, N tokens, H heads, d head size, R rows of the relative table in use.

Each function takes the in-tree method and returns its replacement, which calls the in-tree method for everything that
it does not support. In-tree layers get a `BatchLayout` as their attention mask. The rows of the
relative table and their projections are those of `hf_deberta.model.relative_position`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import cast

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.utils import logging

from hf_deberta.engines.guards import is_tracing_or_exporting, without_dispatch_modes
from hf_deberta.engines.unpadding import unpad
from hf_deberta.model.attention import AUTO, attend, dropout_rate
from hf_deberta.model.batch_layout import BatchLayout, gather, scatter
from hf_deberta.model.input_checks import can_read_values, has_no_values
from hf_deberta.model.relative_position import (
    TableWindow,
    may_be_pruned,
    position_table,
    row_numbers,
    saturation_of,
    split_heads,
    warn_past_largest_distance,
)
from hf_deberta.model.slots import in_reference_mode, linear

from .attention_weights import InTree, has_fused_projection, table_projection_of

logger = logging.get_logger(__name__)

CPU = torch.device("cpu")

# of all models under enable()
_attn_implementation = AUTO
_clamp_relative_distance = False

_whole_tables: dict[tuple[tuple[int, int, bool], torch.device], TableWindow] = {}


def set_options(attn_implementation: str | None = None, clamp_relative_distance: bool = False) -> None:
    """Set the options of `enable()`; None keeps the implementation, for forward passes that have begun."""
    global _attn_implementation, _clamp_relative_distance
    _attn_implementation = attn_implementation or _attn_implementation
    _clamp_relative_distance = clamp_relative_distance


def present_options() -> tuple[str, bool]:
    """The options of `enable()` now: the attention implementation, and `clamp_relative_distance`."""
    return _attn_implementation, _clamp_relative_distance


def encoder_init(in_tree: Callable) -> Callable:
    def __init__(self, config) -> None:
        in_tree(self, config)
        with without_dispatch_modes():
            whole_table_of(self, torch.empty(0, device=CPU))  # the first forward may be a compiler's

    return __init__


def encoder_forward(in_tree: Callable) -> Callable:
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: torch.Tensor,  # [B, N], [B, N, N] or [B, 1, N, N]
        output_hidden_states: bool = True,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutput | tuple:
        unsupported = query_states is not None or relative_pos is not None or has_talking_heads(self)
        shared = None
        if not unsupported and not is_tracing_or_exporting():
            shared = shared_by_layers(self, hidden_states, attention_mask, output_attentions)
        if shared is None:
            buckets = getattr(self, "position_buckets", -1)
            if _clamp_relative_distance and self.relative_attention and buckets > 0 and relative_pos is None:
                largest = buckets // 2 * 2 - 1  # the official bucket of k - 1
                relative_pos = self.get_rel_pos(hidden_states, query_states).clamp(-largest, largest)
            rest = (output_hidden_states, output_attentions, query_states, relative_pos, return_dict)
            return in_tree(self, hidden_states, attention_mask, *rest)
        layout, table = shared
        hidden_states = gather(hidden_states, layout)
        states: list[torch.Tensor] = [hidden_states]
        probabilities: list[torch.Tensor | None] = []
        for i, layer in enumerate(self.layer):
            # positional arguments: with keywords, reentrant checkpointing would use the table's graph twice
            new, probability = layer(states[-1], layout, None, None, table, output_attentions)
            if i == 0 and getattr(self, "conv", None) is not None:
                token_mask = cast(torch.Tensor, layout.token_mask)  # with a convolution nothing is unpadded
                new = self.conv(hidden_states, new, token_mask.long())
            states = [*states, new] if output_hidden_states else [new]
            probabilities.append(probability)
        states = [scatter(each, layout) for each in states]
        if layout.token_mask is not None:  # zero as in an unpadded batch; LayerNorms would multiply its gradients
            states[-1] = states[-1].masked_fill(~layout.token_mask[..., None].to(states[-1].device), 0)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=cast(tuple[torch.Tensor, ...], tuple(probabilities)) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()

    return forward


def attention_forward(in_tree: Callable) -> Callable:
    @wraps(in_tree)
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: BatchLayout | torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,  # of calls by another encoder, as the next one
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,  # [R, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(attention_mask, BatchLayout):  # called by another encoder
            return in_tree(
                self, hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        layout = attention_mask
        query, key, value = _project(self, hidden_states)
        projection = table_projection_of(self)
        positions = projection.relative_positions(rel_embeddings, layout.window, layout.longest, self)
        dropout_p = dropout_rate(self.dropout)
        states, probabilities = attend(
            query, key, value, positions, layout.attention_mask, dropout_p, projection.scale, layout.backend
        )
        return states.transpose(1, 2).flatten(2), probabilities

    return forward


def _project(attention: InTree, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, H, N, d]."""
    size = attention.attention_head_size
    if not has_fused_projection(attention):
        projections = attention.query_proj, attention.key_proj, attention.value_proj
        query, key, value = (split_heads(linear(each, hidden_states), size) for each in projections)
        return query, key, value
    query, key, value = split_heads(linear(attention.in_proj, hidden_states), 3 * size).chunk(3, dim=-1)  # by head
    # biases are left in float32 by autocast, with which in-tree v1 fails
    shape = (-1, 1, size)
    query_bias, value_bias = (bias.view(shape).to(query.dtype) for bias in (attention.q_bias, attention.v_bias))
    return query + query_bias, key, value + value_bias


def has_talking_heads(encoder: nn.Module) -> bool:
    """True if attention heads are mixed, a v1 option that no release uses."""
    of_v1 = isinstance(encoder, DebertaEncoder)
    return of_v1 and any(getattr(module, "talking_head", False) for module in encoder.modules())


def layer_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, eps=self.variance_epsilon)


def intermediate_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.intermediate_act_fn(linear(self.dense, hidden_states))


def output_forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    return self.LayerNorm(self.dropout(linear(self.dense, hidden_states)) + input_tensor)


def whole_table_of(encoder: InTree, states: torch.Tensor) -> TableWindow | None:
    """All rows of an encoder's table, with the row of each distance on the device of `states`.

    None for more buckets than distances, and if the first call is in a graph.
    """
    key, device, in_graph = distance_parameters(encoder), states.device, torch.compiler.is_compiling()
    if key is None:
        return None
    if not in_graph and has_no_values(states):
        return _make_whole_table(*key, device)  # fake tensors belong to one mode: they are not cached
    if (key, device) in _whole_tables:
        return _whole_tables[key, device]
    if in_graph:  # models that were made while enabled have a table on the CPU
        on_cpu = _whole_tables.get((key, CPU))
        return on_cpu and replace(on_cpu, rows_of_distance=on_cpu.rows_of_distance.to(device))
    with without_dispatch_modes():  # models may be made under FakeTensorMode
        _whole_tables[key, device] = _make_whole_table(*key, device)
    return _whole_tables[key, device]


def distance_parameters(encoder: InTree) -> tuple[int, int, bool] | None:
    """The arguments of `row_numbers`; None without relative attention, and for more buckets than distances."""
    if not encoder.relative_attention:
        return None
    distance, buckets = encoder.max_relative_positions, getattr(encoder, "position_buckets", -1)
    clamp = _clamp_relative_distance and buckets > 0  # without buckets the rows are the same
    return None if buckets == 1 or (buckets > 1 and buckets // 2 >= distance - 1) else (distance, buckets, clamp)


def _make_whole_table(distance: int, buckets: int, clamp: bool, device: torch.device) -> TableWindow:
    rows, span = row_numbers(distance, buckets, clamp), buckets if buckets > 0 else distance
    rows_of_distance = torch.tensor(rows, device=device)
    return TableWindow(0, 2 * span, rows_of_distance, saturation_of(rows), may_be_pruned(rows, span))


def shared_by_layers(
    encoder: InTree,
    states: torch.Tensor,
    attention_mask: torch.Tensor,
    output_attentions: bool,
) -> tuple[BatchLayout, torch.Tensor | None] | None:
    """The attention metadata and the relative table [R, hidden] of all layers; None if this is not supported.

    A batch is not unpadded for attention probabilities and for the convolution, which need its padding.
    """
    shape = (states.shape[0], states.shape[1])
    layout = BatchLayout.from_inputs(attention_mask.bool(), None, None, shape, states.device)
    mask = layout.token_mask
    if mask is not None and can_read_values(states) and bool((mask.any(1) & ~mask[:, 0]).any()):
        logger.warning_once(
            "rows are padded on the left, and Transformers' DeBERTa classifiers read the first position, which is "
            "padding there: set tokenizer.padding_side = 'right'"
        )
    unpads = can_read_values(states) and not in_reference_mode()
    if unpads and not output_attentions and getattr(encoder, "conv", None) is None:
        layout = unpad(layout, states.shape[-1])
    backend = "eager" if output_attentions else _attn_implementation
    layout = replace(layout, backend=backend, output_attentions=output_attentions)
    warn_past_largest_distance(layout.longest, distance_parameters(encoder), "hf_deberta.enable")
    if getattr(encoder, "rel_embeddings", None) is None:  # no relative attention, or hf_deberta.optimize() took it
        return layout, None
    whole = whole_table_of(encoder, states)
    if whole is None:
        return None
    table, window = position_table(encoder, whole, layout.longest)
    return replace(layout, window=window), table
