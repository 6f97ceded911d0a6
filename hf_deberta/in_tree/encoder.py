"""What `enable()` puts into Transformers' encoders: the same parameters, computed by `disentangled_attention`.

Legend: B batch, N tokens, H heads, d head size, R rows of the relative table in use.

Each function takes the in-tree method and returns its replacement, which hands over to it whatever it does not cover.
An `AttentionContext` goes through the in-tree layers in the place of their attention mask.
"""

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.utils import logging

from hf_deberta.model.attention import disentangled_attention
from hf_deberta.model.attention_context import AttentionContext
from hf_deberta.model.dense import dense
from hf_deberta.model.fast_path_guards import can_read_values, in_reference_mode, is_tracing_or_compiling
from hf_deberta.model.relative_position import may_be_pruned, rows_in_use, rows_of_distances, saturation_of
from hf_deberta.model.weight_cache import WeightCache, can_cache

logger = logging.get_logger(__name__)

# of in-tree modules, beside them: nothing of ours is left in a model
_remembered: WeakKeyDictionary[nn.Module, WeightCache] = WeakKeyDictionary()
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
        shared = (
            None if unusual or exporting else shared_by_layers(self, hidden_states, attention_mask, output_attentions)
        )
        if shared is None:
            rest = (output_hidden_states, output_attentions, query_states, relative_pos, return_dict)
            return in_tree(self, hidden_states, attention_mask, *rest)
        context, table = shared
        hidden_states = context.gather(hidden_states)
        states, probabilities = [hidden_states], []
        for i, layer in enumerate(self.layer):
            # by position, without which reentrant checkpointing would go through the table's graph twice
            new, probability = layer(states[-1], context, None, None, table, output_attentions)
            if i == 0 and getattr(self, "conv", None) is not None:
                new = self.conv(hidden_states, new, context.token_mask.long())
            states = [*states, new] if output_hidden_states else [new]
            probabilities.append(probability)
        states = list(map(context.scatter, states))
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
        terms = terms if rel_embeddings is not None else ()
        position_key, position_query = _position_states(self, rel_embeddings, terms)
        states, probabilities = disentangled_attention(
            query,
            key,
            value,
            position_key,
            position_query,
            terms=terms,
            rows_of_distance=context.rows_of_distance,
            first_row=context.rows[0],
            saturation=context.saturation,
            mask=context.mask,
            cu_seqlens=context.cu_seqlens,
            lengths=context.lengths,
            scale=((1 + counted) * query.shape[-1]) ** -0.5,
            dropout_p=self.dropout.p if self.dropout.training else 0.0,
            backend="eager" if output_attentions else "sdpa",
            need_probabilities=output_attentions,
        )
        return states.transpose(1, 2).flatten(2), probabilities

    return forward


def _project(attention: nn.Module, hidden_states: torch.Tensor, query_states: torch.Tensor | None) -> tuple:
    """Query, key and value [B, H, N, d]."""
    asking = hidden_states if query_states is None else query_states
    if not hasattr(attention, "in_proj"):
        given = (
            (attention.query_proj, asking),
            (attention.key_proj, hidden_states),
            (attention.value_proj, hidden_states),
        )
        return tuple(_heads(attention, dense(module, states)) for module, states in given)
    query, key, value = _heads(attention, dense(attention.in_proj, hidden_states)).chunk(3, dim=-1)  # by head
    if query_states is not None:
        query = _heads(attention, dense(attention.in_proj, query_states)).chunk(3, dim=-1)[0]
    # biases are left in float32 by autocast, with which in-tree v1 fails
    shape = (attention.num_attention_heads, 1, query.shape[-1])
    query_bias, value_bias = (bias.view(shape).to(query.dtype) for bias in (attention.q_bias, attention.v_bias))
    return query + query_bias, key, value + value_bias


def _position_states(attention: nn.Module, table: torch.Tensor | None, terms: tuple[str, ...]) -> tuple:
    """Position key and query [H, R, d], those that the terms need; remembered while a model serves."""
    projections = [_position_projection(attention, term) if term in terms else None for term in ("c2p", "p2c")]

    def compute() -> tuple[torch.Tensor | None, ...]:
        dropped = attention.pos_dropout(table) if terms else None
        return tuple(module and _heads(attention, dense(module, dropped)) for module in projections)

    modules = tuple(filter(None, projections))
    if not modules or attention.pos_dropout.training or not can_cache(modules):
        if not is_tracing_or_compiling():
            _remembered.pop(attention, None)
        return compute()
    return _remembered.setdefault(attention, WeightCache()).get_or_compute(modules, compute, table)


def _position_projection(attention: nn.Module, term: str) -> nn.Module:
    if hasattr(attention, "in_proj"):
        return attention.pos_proj if term == "c2p" else attention.pos_q_proj
    of = "key" if term == "c2p" else "query"
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


def intermediate_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.intermediate_act_fn(dense(self.dense, hidden_states))


def output_forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    return self.LayerNorm(self.dropout(dense(self.dense, hidden_states)) + input_tensor)


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


def shared_by_layers(
    encoder: nn.Module, states: torch.Tensor, attention_mask: torch.Tensor, output_attentions: bool = True
) -> tuple | None:
    """What all layers need: the context, and rows of the relative table [R, hidden].

    Attention probabilities, and the convolution, want the batch with its padding.
    """
    shape = (states.shape[0], states.shape[1])
    context = AttentionContext.of(attention_mask.bool(), None, None, shape, states.device)
    if can_read_values(states) and bool((context.token_mask.any(1) & ~context.token_mask[:, 0]).any()):
        logger.warning_once(
            "rows are padded on the left, and Transformers' DeBERTa classifiers read the first place, which is padding "
            "there: set tokenizer.padding_side = 'right'"
        )
    unpads = can_read_values(states) and not in_reference_mode()
    if unpads and not output_attentions and getattr(encoder, "conv", None) is None:
        context = context.unpadded(states.shape[-1])
    if not encoder.relative_attention:
        return context, None
    known = _relative_rows(encoder, states.device)
    if known is None:
        return None
    rows_of_distance, pruned, saturation = known
    table_rows = encoder.rel_embeddings.num_embeddings
    norm = getattr(encoder, "LayerNorm", None)
    modules = (encoder.rel_embeddings,) if norm is None else (encoder.rel_embeddings, norm)
    projections = [
        _position_projection(layer.attention.self, term)
        for layer in encoder.layer
        for term in ("c2p", "p2c")
        if term in layer.attention.self.pos_att_type
    ]
    whole = can_cache([*modules, *projections])
    rows = rows_in_use(
        context.longest(shape[1]), table_rows // 2, pruned and not whole and not is_tracing_or_compiling()
    )

    def compute() -> torch.Tensor:
        table = encoder.rel_embeddings(torch.arange(*rows, device=states.device))
        return table if norm is None else norm(table)

    table = _remembered.setdefault(encoder, WeightCache()).get_or_compute(modules, compute) if whole else compute()
    return replace(context, rows_of_distance=rows_of_distance, rows=rows, saturation=saturation), table
