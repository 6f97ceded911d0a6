"""An encoder layer prepared for inference on this processor: the same numbers from fewer and faster operations.

Legend: B batch, N tokens, Q queries, M = B N rows, H heads, d head size.

Against the plain layer: query, key and value are one product; GELU, bias and residual belong to the products; weights
are laid out for oneDNN (fused_linear.py); the projected position tables are constants, laid out by distance once.

    weights = weights_of(layer)                      # optimize.py; for in-tree layers in_tree_layers.py
    layer = FusedLayer(weights, relative_table, rows, torch.float32, torch.float32)
    states = layer(hidden_states, layout)          # [B, N, hidden]
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.dense import pad_rows
from hf_deberta.model.relative_position import RelativePositions, RowsInUse
from hf_deberta.model.relative_table import TableProjection, relative_positions

from .fused_attention import FusedAttention, as_rows
from .fused_linear import FusedLinear

# whose inner states fit into a cache; in float32 products take so long that it does not matter
MAX_FEED_FORWARD_ROWS = 256
MIN_GELU_OUTPUT = -0.17  # GELU is nowhere below
PRODUCTS = ("query_key_value", "attention_output", "intermediate", "output")
PRODUCTS_OF_SUBSETS = ("query", "key_value")

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of an encoder layer, whatever class it has."""

    query: WeightAndBias  # [hidden, hidden], [hidden]
    key: WeightAndBias
    value: WeightAndBias
    attention_output: nn.Linear
    attention_norm: "NormWeights"
    intermediate: nn.Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    output: nn.Linear
    output_norm: "NormWeights"
    table_projection: TableProjection | None
    heads: int
    scale: float  # of the attention scores
    input_norm: "NormWeights | None"  # of the layer before, if there is one

    def scaled_query(self) -> WeightAndBias:
        """The query projection that includes the scale."""
        weight, bias = self.query
        return weight * self.scale, None if bias is None else bias * self.scale


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


class NoneInCopies:
    """An object that is None in copies and pickles of the model that holds it: oneDNN weights cannot be copied."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class FusedLayer(NoneInCopies):
    """One encoder layer; with `query_states`, one enhanced-mask-decoder layer."""

    def __init__(
        self,
        weights: LayerWeights,
        relative_table: torch.Tensor | None,  # [2s, hidden], normalised
        rows: RowsInUse | None,  # all of them
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
    ):
        self.weights, self.dtype = weights, dtype
        self.positions = constant_positions(weights.table_projection, relative_table, rows)
        head_size = weights.query[0].shape[0] // weights.heads
        self.attention = FusedAttention(self.positions, weights.heads, head_size, attention_dtype)
        self.has_gelu = is_gelu(weights.activation)

    # fused when first used: where OpenVINO computes the layer (openvino_layers.py), this may be never

    @cached_property
    def query_key_value(self) -> FusedLinear:
        projections = concatenate_projections(self.weights.scaled_query(), self.weights.key, self.weights.value)
        return self.fuse(*projections, sizes=self.input_sizes())

    @cached_property
    def query(self) -> FusedLinear:
        """For subsets of queries."""
        return self.fuse(*self.weights.scaled_query())

    @cached_property
    def key_value(self) -> FusedLinear:
        return self.fuse(*concatenate_projections(self.weights.key, self.weights.value), sizes=self.input_sizes())

    @cached_property
    def attention_output(self) -> FusedLinear:
        return self.fuse(*parameters(self.weights.attention_output))

    @cached_property
    def intermediate(self) -> FusedLinear:
        sizes = self.weights.attention_norm.sizes()
        return self.fuse(*parameters(self.weights.intermediate), with_gelu=self.has_gelu, sizes=sizes)

    @cached_property
    def output(self) -> FusedLinear:
        return self.fuse(*parameters(self.weights.output), lowest=MIN_GELU_OUTPUT if self.has_gelu else None)

    def input_sizes(self) -> torch.Tensor | None:
        return None if self.weights.input_norm is None else self.weights.input_norm.sizes()

    def fuse(self, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> FusedLinear:
        return FusedLinear.from_weight(weight, bias, self.dtype, **options)

    def fuse_all(self) -> None:
        """Fuse the products of whole texts."""
        for product in PRODUCTS:
            getattr(self, product)

    def free(self) -> None:
        """Drop fused weights, until they are used."""
        for product in (*PRODUCTS, *PRODUCTS_OF_SUBSETS):
            vars(self).pop(product, None)

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        layout: BatchLayout,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        query_positions: torch.Tensor | None = None,  # [B, Q]
        steps: int = 1,
        backend: str = "auto",
    ) -> torch.Tensor:
        """New states of the queries (by default of all tokens), [B, Q, hidden]; the arguments of `HfDebertaLayer`."""
        mask, rows = layout.attention_mask, pad_rows(hidden_states.flatten(0, 1))
        if query_states is None and steps == 1:
            batch, tokens, _ = hidden_states.shape
            attended = self.attention.attend_whole_texts(self.query_key_value(rows), mask, (batch, tokens), backend)
            return self.feed_forward(attended, rows)[: batch * tokens].view(hidden_states.shape)
        if query_positions is not None:
            mask = replace(mask, query_positions=query_positions)
        states = hidden_states if query_states is None else query_states
        key, value = self.attention.split(self.key_value(rows), hidden_states.shape[:2])
        for _ in range(steps):
            rows = pad_rows(states.flatten(0, 1))
            (query,) = self.attention.split(self.query(rows), states.shape[:2])
            attended = as_rows(self.attention.attend_with_any_mask(query, key, value, mask, backend), len(rows))
            states = self.feed_forward(attended, rows)[: states.shape[0] * states.shape[1]].view(states.shape)
        return states

    def feed_forward(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer after its attention, of rows: output projection, feed-forward network, residuals, LayerNorms."""
        if self.dtype == torch.float32 or len(attended) <= MAX_FEED_FORWARD_ROWS:
            return self.feed_forward_block(attended, residual)
        blocks = zip(attended.split(MAX_FEED_FORWARD_ROWS), residual.split(MAX_FEED_FORWARD_ROWS), strict=True)
        return torch.cat([self.feed_forward_block(*block) for block in blocks])

    def feed_forward_block(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        states = self.weights.attention_norm.normalise(self.attention_output(attended, residual))
        inner = self.intermediate(states)
        if not self.has_gelu:
            inner = self.weights.activation(inner.float())
        return self.weights.output_norm.normalise(self.output(inner, states))


def constant_positions(
    projection: TableProjection | None, table: torch.Tensor | None, rows: RowsInUse | None
) -> RelativePositions | None:
    """The position terms of a layer, projected once, for queries that include the scale."""
    if projection is None:
        return None
    positions = relative_positions(projection, table, rows, None)
    if positions is None:
        return None
    scaled = positions.with_scaled_queries(projection.scale, torch.float32)
    return replace(scaled, query_scale=1.0, reusable=True)


def concatenate_projections(*layers: WeightAndBias) -> WeightAndBias:
    """Several projections as one; a missing bias is zero."""
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in layers]
    return torch.cat([weight for weight, _ in layers]), torch.cat(biases)


def parameters(layer: nn.Linear) -> WeightAndBias:
    return layer.weight, layer.bias


def is_gelu(activation: Callable) -> bool:
    """True for the GELU by the error function, which the products apply themselves."""
    return getattr(activation, "act", activation) is nn.functional.gelu
