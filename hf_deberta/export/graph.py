"""A copy of a model whose forward pass makes a good graph: constant tables, no branches on shapes.

Legend: B batch (in a packed row: documents), N tokens, T tokens of a packed row, H heads, d head size, s saturation:
the largest distance with a row of its own, W = 2N columns of the tables in use.

What differs from the model:

- Weights of linear layers are stored transposed, as MatMul reads them. Key and value are one product, and the scale is
  part of the query's weights. Runtimes prepack and quantize weights only if they are constants.
- The relative table is projected once, before the export. It is laid out by distance, -s ... s, so a forward pass reads
  the rows of its distances and computes no table. Distances beyond s share the rows of s: there is no largest length.
- In a packed row, dense products run on [1, T] and attention on [documents, longest document].
- Padding is not zeroed after each layer: no real token reads it.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hf_deberta.in_tree.attention_weights import attention_weights, concatenate_projections
from hf_deberta.model.attention_sdpa import distance_tables
from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.modeling_heads import (
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
)
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaModel, HfDebertaSelfAttention
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel
from hf_deberta.model.relative_position import LONGEST_TEXT, TableWindow, position_table
from hf_deberta.transformers_format import check_no_adapters

LOWEST = torch.finfo(torch.float32).min


class GraphLinear(nn.Module):
    """A linear layer as states @ weight + bias, with weight [K, N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight.detach().t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product = states @ self.weight
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class GraphLayout:
    """What all layers share: visible keys, the rows of the tables in use, the documents of a packed row."""

    hidden: torch.Tensor | None  # [B, 1, 1 or N, N], 0, or LOWEST for keys that are not visible
    window: torch.Tensor  # [W], the rows of distances N - 1 ... -N, the largest distance first
    from_first: torch.Tensor  # [B or 1, N], the rows of the distances from the first real token, in the same order
    tokens: torch.Tensor | None = None  # [documents, longest], the tokens of each document of a packed row
    places: torch.Tensor | None = None  # [T], the place of each token of a packed row in `tokens`


def graph_layout_of(layout: BatchLayout, saturation: int) -> GraphLayout:
    """The layout of one forward pass."""
    mask, device = layout.attention_mask, layout.device
    tokens = places = visible = None
    if mask.cu_seqlens is not None and layout.documents is not None:
        bounds = mask.cu_seqlens.long()
        length, total = cast(int, bounds.diff().max().item()), layout.length
        torch._check(length >= 1)  # torch.export then takes it for granted
        position = torch.arange(length, device=device)
        tokens = bounds[:-1, None] + position  # [documents, longest]
        visible = (tokens < bounds[1:, None])[:, None, None]
        tokens, places = tokens.clamp(max=total - 1), layout.documents[0] * length + layout.absolute_positions()[0]
        first = bounds.new_zeros(1, 1)
    else:
        length = layout.length
        position = torch.arange(length, device=device)
        if mask.mask is not None:
            visible = mask.mask[:, None, None]
        first = layout.first_token_positions()
    if mask.causal:
        causal = position[:, None] >= position
        visible = causal if visible is None else visible & causal
    window = torch.arange(1 - length, length + 1, device=device)
    return GraphLayout(
        hidden=None if visible is None else torch.where(visible, 0.0, LOWEST),
        window=window.clamp(-saturation, saturation) + saturation,
        from_first=(position - first).clamp(-saturation, saturation) + saturation,
        tokens=tokens,
        places=places,
    )


class GraphAttention(nn.Module):
    """`HfDebertaSelfAttention` with constant tables [H, 2s + 1, d], laid out by distance."""

    keys_by_falling_distance: torch.Tensor | None  # Kr, the largest distance first
    queries_by_rising_distance: torch.Tensor | None  # Qr, the smallest distance first
    p2p_by_falling_distance: torch.Tensor | None  # p2p [H, 1, 2s + 1], the largest distance first

    def __init__(self, attention: HfDebertaSelfAttention, table: torch.Tensor | None, window: TableWindow | None):
        """`table`: the whole relative table [R, hidden]; `window`: its rows."""
        super().__init__()
        weights = attention_weights(attention)
        self.heads = len(weights.query[0]) // weights.table.head_size
        self.query = GraphLinear(*weights.query)
        self.key_value = GraphLinear(*concatenate_projections(weights.key, weights.value))
        key_table = query_table = p2p = None
        positions = weights.constant_positions(table, window)
        if positions is not None:
            positions = positions.scaled(1.0, torch.float64)  # for the products of p2p
            key_table, query_table, p2p = distance_tables(positions, positions.window.saturation)
        self.register_buffer("keys_by_falling_distance", None if key_table is None else key_table.float())
        self.register_buffer("queries_by_rising_distance", None if query_table is None else query_table.float())
        self.register_buffer("p2p_by_falling_distance", None if p2p is None else p2p.flip(1)[:, None].float())

    def project_keys(
        self, states: torch.Tensor, graph_layout: GraphLayout, layout: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor, GraphLayout]:
        """Keys and values of states [B, N, hidden], or [1, T, hidden], and what `forward` needs beside them."""
        key, value = self.split(self.key_value(states), graph_layout.tokens)
        return key, value, graph_layout

    def forward(
        self,
        states: torch.Tensor,  # [B, N, hidden]; [B, 1, hidden] or [1, documents, hidden] with positions
        keys: tuple[torch.Tensor, torch.Tensor, GraphLayout],
        layout: BatchLayout,  # whose query positions, if any, are those of the first real tokens
    ) -> tuple[torch.Tensor, None]:
        """The context of the queries, and no probabilities."""
        key, value, graph_layout = keys
        query, query_positions = self.query(states), layout.attention_mask.query_positions
        if query_positions is None:
            (query,) = self.split(query, graph_layout.tokens)
        else:
            query = query.reshape(key.shape[0], 1, self.heads, -1).transpose(1, 2)
        terms = self.window_terms if query_positions is None else self.first_terms
        scores = query @ key.mT
        for term in terms(query, key, graph_layout):
            scores = scores + term
        if graph_layout.hidden is not None:
            scores = scores + graph_layout.hidden
        context = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)  # [B, N or 1, hidden]
        if graph_layout.places is not None:
            context = context.flatten(0, 1)
            context = (context if query_positions is not None else context[graph_layout.places])[None]
        return context, None

    def split(self, states: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """[B, N, parts x hidden] to parts of [B, H, N, d]; a packed row becomes one row per document."""
        if tokens is not None:
            states = states[0][tokens]
        size = self.query.weight.shape[0] // self.heads
        return states.unflatten(-1, (-1, self.heads, size)).permute(2, 0, 3, 1, 4).unbind(0)

    def window_terms(self, query: torch.Tensor, key: torch.Tensor, graph_layout: GraphLayout) -> Iterator[torch.Tensor]:
        """The position terms of all queries, each [B, H, N, N] or [H, N, N]."""
        if self.keys_by_falling_distance is not None:
            yield skewed(query @ self.keys_by_falling_distance.index_select(1, graph_layout.window).mT)
        if self.queries_by_rising_distance is not None:
            yield skewed(key @ self.queries_by_rising_distance.index_select(1, graph_layout.window).mT).mT
        if self.p2p_by_falling_distance is not None:
            p2p = self.p2p_by_falling_distance.index_select(2, graph_layout.window)
            yield skewed(p2p.expand(-1, query.shape[2], -1))

    def first_terms(self, query: torch.Tensor, key: torch.Tensor, graph_layout: GraphLayout) -> Iterator[torch.Tensor]:
        """The position terms of one query per sequence, its first real token, each [B, H, 1, N]."""
        rows = graph_layout.from_first
        if self.keys_by_falling_distance is not None:
            table = self.keys_by_falling_distance[:, rows].transpose(0, 1)  # [B or 1, H, N, d]
            yield query @ table.mT
        if self.queries_by_rising_distance is not None:
            table = self.queries_by_rising_distance.flip(1)[:, rows].transpose(0, 1)
            yield (key * table).sum(-1)[:, :, None]
        if self.p2p_by_falling_distance is not None:
            yield self.p2p_by_falling_distance[:, :, rows].permute(2, 0, 1, 3)


def skewed(product: torch.Tensor) -> torch.Tensor:
    """Entry (i, j) of the result [..., N, N] is entry (i, N - 1 - i + j) of `product` [..., N, 2N].

    The function of the same name in attention_sdpa.py branches on N, which a graph for all lengths cannot.
    """
    n = product.shape[-2]
    flat = product.flatten(-2)[..., n - 1 : n * 2 * n - 1]
    return flat.unflatten(-1, (n, 2 * n - 1))[..., :n]


class GraphEncoder(HfDebertaEncoder):
    """The encoder with `GraphAttention` in each layer; its "relative table" is the `GraphLayout`."""

    def __init__(self, encoder: HfDebertaEncoder):
        nn.Module.__init__(self)
        self.config, self.layer, self.conv = encoder.config, encoder.layer, encoder.conv
        self.distance_parameters = encoder.distance_parameters
        window = encoder.whole_table(next(encoder.parameters()).device)
        table, _ = position_table(encoder, window, LONGEST_TEXT)
        self.reach = 0 if window is None else window.saturation
        for layer in cast(Iterable[Any], self.layer):
            layer.attention.self = GraphAttention(layer.attention.self, table, window)

    def position_table(  # type: ignore[override]
        self, layout: BatchLayout, device: torch.device
    ) -> tuple[GraphLayout, BatchLayout]:
        return graph_layout_of(layout, self.reach), layout


class GraphModel(nn.Module):
    """A model with tensors as inputs and outputs, in the order of `input_names` and `output_names`."""

    def __init__(self, model: HfDebertaPreTrainedModel, packed: bool = False):
        super().__init__()
        check_model(model, packed)
        self.model = graph_copy(model)
        self.packed = packed
        self.input_names = input_names(model, packed)
        self.output_names = output_names(model)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(**dict(zip(self.input_names, inputs, strict=True)), return_dict=True)
        return tuple(output[name] for name in self.output_names)

    def example_inputs(self) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...]]:
        """Inputs to trace with, and their dynamic axes."""
        shape: tuple[int, ...] = (1, 7) if self.packed else (3, 7)
        if isinstance(self.model, HfDebertaForMultipleChoice):
            shape = (3, 2, 7)
        examples = {
            "input_ids": torch.ones(shape, dtype=torch.long),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "token_type_ids": torch.zeros(shape, dtype=torch.long),
            "cu_seq_lens_q": torch.tensor([0, 2, 4, 7], dtype=torch.int32),
            "entity_indices": torch.ones(3, 4, 5, dtype=torch.long),
        }
        inputs = tuple(examples[name] for name in self.input_names)
        dynamic = torch.export.Dim.DYNAMIC
        return inputs, tuple({axis: dynamic for axis, size in enumerate(x.shape) if size > 1} for x in inputs)


def check_model(model: HfDebertaPreTrainedModel, packed: bool) -> None:
    """Raise an error for models that cannot be exported as they are."""
    if not isinstance(model, HfDebertaPreTrainedModel):
        raise TypeError(
            f"only models of hf_deberta can be exported, not {type(model).__name__}; load the checkpoint with the "
            "HfDebertaFor... class of its head"
        )
    check_no_adapters(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}; export a float32 model on the CPU: "
                "model.float().cpu()"
            )
    if packed and isinstance(model, HfDebertaForMultipleChoice | HfDebertaForEntityChoice):
        raise ValueError(f"{type(model).__name__} does not support packed rows; export it with packed=False")


def input_names(model: HfDebertaPreTrainedModel, packed: bool) -> list[str]:
    """The inputs of the graph."""
    names = ["input_ids", "cu_seq_lens_q" if packed else "attention_mask"]
    if model.config.type_vocab_size > 0:
        names.append("token_type_ids")
    if isinstance(model, HfDebertaForEntityChoice):
        names.append("entity_indices")
    return names


def output_names(model: HfDebertaPreTrainedModel) -> list[str]:
    """The outputs of the graph, named as the model's."""
    if isinstance(model, HfDebertaModel):
        return ["last_hidden_state"]
    return ["start_logits", "end_logits"] if isinstance(model, HfDebertaForQuestionAnswering) else ["logits"]


def graph_copy(model: HfDebertaPreTrainedModel) -> HfDebertaPreTrainedModel:
    """A copy of the model in eval mode that shares the tensors which it does not replace."""
    tensors = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    with torch.no_grad():
        base = cast(HfDebertaModel, model.base_model)
        base.encoder = GraphEncoder(base.encoder)
        replace_linear_layers(model)
    return model


def replace_linear_layers(module: nn.Module) -> None:
    """Replace each nn.Linear inside the module by a `GraphLinear`."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, GraphLinear(child.weight, child.bias))
        else:
            replace_linear_layers(child)
