"""What `enable()` puts into Transformers' encoders: the same parameters, computed by `disentangled_attention`.

Legend: B batch, N tokens, H heads, d head size, R rows of the relative table in use.

Each function takes the in-tree method and returns its replacement, which hands over to it whatever it does not cover.
An `AttentionContext` goes through the in-tree layers in the place of their attention mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta.modeling_deberta import DebertaEncoder

from .attention import disentangled_attention
from .attention_context import AttentionContext
from .relative_position import may_be_pruned, rows_in_use, rows_of_distances, saturation_of

_known_rows: dict[tuple[int, int], tuple[dict[torch.device, torch.Tensor], bool, int]] = {}


def encoder_init(in_tree: Callable) -> Callable:
    def __init__(self, config) -> None:
        in_tree(self, config)
        if self.relative_attention:
            _relative_rows(self, torch.device("cpu"))  # should the first call be that of a compiler

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
        unusual = query_states is not None or relative_pos is not None or _talks(self)
        exporting = torch.compiler.is_exporting() or torch.jit.is_tracing()
        shared = None if unusual or exporting else shared_by_layers(self, hidden_states, attention_mask)
        if shared is None:
            rest = (output_hidden_states, output_attentions, query_states, relative_pos, return_dict)
            return in_tree(self, hidden_states, attention_mask, *rest)
        context, table = shared
        states, probabilities = [hidden_states], []
        for i, layer in enumerate(self.layer):
            # by position, without which reentrant checkpointing would go through the table's graph twice
            new, probability = layer(states[-1], context, None, None, table, output_attentions)
            if i == 0 and getattr(self, "conv", None) is not None:
                new = self.conv(hidden_states, new, context.token_mask.long())
            states = [*states, new] if output_hidden_states else [new]
            probabilities.append(probability)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(probabilities) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()

    return forward


def attention_forward(in_tree: Callable) -> Callable:
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: AttentionContext | torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,  # [B, N, hidden]
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,  # [R, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = attention_mask
        if not isinstance(context, AttentionContext):  # called by another encoder
            return in_tree(
                self, hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        terms = tuple(term for term in ("c2p", "p2c") if term in self.pos_att_type)
        fused = hasattr(self, "in_proj")  # v1
        counted = len(self.pos_att_type) if fused else len(terms)  # in-tree scales by the terms named, used or not
        query, key, value = _project(self, hidden_states, query_states)
        position_key = position_query = None
        if rel_embeddings is None:
            terms = ()
        else:
            table = self.pos_dropout(rel_embeddings)
            if "c2p" in terms:
                position_key = _heads(self, _position_projection(self, "key")(table))
            if "p2c" in terms:
                position_query = _heads(self, _position_projection(self, "query")(table))
        states, probabilities = disentangled_attention(
            query,
            key,
            value,
            position_key,
            position_query,
            terms=terms,
            rows_of_distance=context.rows_of_distance,
            first_row=context.first_row,
            saturation=context.saturation,
            mask=context.mask,
            scale=((1 + counted) * query.shape[-1]) ** -0.5,
            dropout_p=self.dropout.p if self.training else 0.0,
            backend="eager" if output_attentions else "sdpa",
            need_probabilities=output_attentions,
        )
        return states.transpose(1, 2).flatten(2), probabilities

    return forward


def _project(attention: nn.Module, hidden_states: torch.Tensor, query_states: torch.Tensor | None) -> tuple:
    """Query, key and value [B, H, N, d]."""
    asking = hidden_states if query_states is None else query_states
    if not hasattr(attention, "in_proj"):
        projected = attention.query_proj(asking), attention.key_proj(hidden_states), attention.value_proj(hidden_states)
        return tuple(_heads(attention, states) for states in projected)
    query, key, value = _heads(attention, attention.in_proj(hidden_states)).chunk(3, dim=-1)  # fused head by head
    if query_states is not None:
        query = _heads(attention, attention.in_proj(query_states)).chunk(3, dim=-1)[0]
    # biases are left in float32 by autocast, with which in-tree v1 fails
    shape = (attention.num_attention_heads, 1, query.shape[-1])
    query_bias, value_bias = (bias.view(shape).to(query.dtype) for bias in (attention.q_bias, attention.v_bias))
    return query + query_bias, key, value + value_bias


def _position_projection(attention: nn.Module, of: str) -> nn.Module:
    if hasattr(attention, "in_proj"):
        return attention.pos_proj if of == "key" else attention.pos_q_proj
    return getattr(attention, f"{of}_proj" if attention.share_att_key else f"pos_{of}_proj")


def _talks(encoder: nn.Module) -> bool:
    """Whether attention heads are mixed, a v1 option that no release uses."""
    of_v1 = isinstance(encoder, DebertaEncoder)
    return of_v1 and any(getattr(module, "talking_head", False) for module in encoder.modules())


def _heads(attention: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """[..., N, hidden] to [..., H, N, d]."""
    return states.unflatten(-1, (attention.num_attention_heads, -1)).transpose(-3, -2)


def layer_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, eps=self.variance_epsilon)


def _relative_rows(encoder: nn.Module, device: torch.device) -> tuple[torch.Tensor, bool, int] | None:
    """rows_of_distance, whether rows out of reach may be left out, and saturation.

    They are made once, and never in a graph. None where that comes too late, and for more buckets than distances.
    """
    distance, buckets = key = encoder.max_relative_positions, getattr(encoder, "position_buckets", -1)
    in_graph = torch.compiler.is_compiling()
    if key not in _known_rows:
        if in_graph or buckets == 1 or (buckets > 1 and buckets // 2 >= distance - 1):
            return None
        rows = rows_of_distances(distance, buckets)
        pruned = may_be_pruned(rows, buckets if buckets > 0 else distance)
        _known_rows[key] = {torch.device("cpu"): rows}, pruned, saturation_of(rows)
    on_device, pruned, saturation = _known_rows[key]
    if device in on_device:
        return on_device[device], pruned, saturation
    rows = on_device[torch.device("cpu")].to(device)
    if not in_graph:
        on_device[device] = rows
    return rows, pruned, saturation


def shared_by_layers(encoder: nn.Module, states: torch.Tensor, attention_mask: torch.Tensor) -> tuple | None:
    """What all layers need: the context, and the rows in use of the relative table [R, hidden]."""
    relative: dict[str, Any] = {"rows_of_distance": None, "first_row": 0, "saturation": None}
    table = None
    if encoder.relative_attention:
        known = _relative_rows(encoder, states.device)
        if known is None:
            return None
        rows, pruned, saturation = known
        first, last = rows_in_use(states.shape[1], encoder.rel_embeddings.num_embeddings // 2, pruned)
        table = encoder.rel_embeddings(torch.arange(first, last, device=states.device))
        table = encoder.LayerNorm(table) if hasattr(encoder, "LayerNorm") else table
        relative = {"rows_of_distance": rows, "first_row": first, "saturation": saturation}
    shape = (states.shape[0], states.shape[1])
    return AttentionContext.of(attention_mask.bool(), None, None, shape, states.device, **relative), table
