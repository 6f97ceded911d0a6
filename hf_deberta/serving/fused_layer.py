"""An encoder layer prepared for inference on this processor: the same numbers from fewer and faster operations.

Legend: B batch, N tokens, Q queries, M = B N rows, H heads, d head size.

Against the plain layer: query, key and value are one product; GELU, bias and residual belong to the products; weights
are laid out for oneDNN (fused_linear.py); the projected position tables are constants, laid out by distance once.

    encoder.layer[0] = FusedLayer(encoder, 0, *position_table(encoder), torch.float32)
"""

from typing import Any

import torch
from torch import nn

from hf_deberta.engines.onednn import pad_rows
from hf_deberta.in_tree.attention_weights import attention_weights, concatenate_projections, weight_and_bias
from hf_deberta.in_tree.encoder import distance_parameters, has_talking_heads, present_options, whole_table_of
from hf_deberta.model import relative_position
from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.model.relative_position import LONGEST_TEXT, TableWindow

from .fused_attention import FusedAttention, attention_dtype
from .fused_linear import FusedLinear, Int8Linear
from .inference_only import ORIGINAL, InferenceOnly, WithoutGradient, refuse, refuse_methods

# whose inner states fit into a cache; in float32 products take so long that it does not matter
MAX_FEED_FORWARD_ROWS = 256
MIN_GELU_OUTPUT = -0.17  # GELU is nowhere below


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
        rows = encoder.whole_table(next(encoder.parameters()).device)
    elif not encoder.relative_attention:
        rows = None
    else:
        rows = whole_table_of(encoder, next(encoder.parameters()))
        if rows is None or has_talking_heads(encoder):
            raise ValueError("this encoder has options that hf_deberta does not compute, so it cannot be prepared")
    return relative_position.position_table(encoder, rows, LONGEST_TEXT)


class FusedLayer(InferenceOnly):
    """In the place of an `HfDebertaLayer`, with its signature; with `query_states`, one enhanced-mask-decoder layer."""

    query: FusedLinear | None = None  # for subsets of queries, as is the next: only the last layer computes these
    key_value: FusedLinear | None = None

    def __init__(
        self, encoder: Any, number: int, table: torch.Tensor | None, rows: TableWindow | None, dtype: torch.dtype
    ):
        """Copy a layer of the encoder; those before it are fused. `table` and `rows` are those of `position_table`."""
        super().__init__()
        refuse_methods(self)
        layer = encoder.layer[number]
        self.dtype = dtype
        weights = attention_weights(layer.attention.self)
        query, key, value, head_size = weights.query, weights.key, weights.value, weights.table.head_size
        positions = weights.constant_positions(table, rows)
        self.attention = FusedAttention(positions, len(query[0]) // head_size, head_size, attention_dtype(dtype))
        sizes = output_sizes(encoder.layer[number - 1].output_norm) if number > 0 else None
        self.query_key_value = self.fuse(*concatenate_projections(query, key, value), sizes=sizes)
        if number + 1 == len(encoder.layer):
            self.query, self.key_value = self.fuse(*query), self.fuse(*concatenate_projections(key, value), sizes=sizes)
        self.attention_output = self.fuse(*weight_and_bias(layer.attention.output.dense))
        self.attention_norm = copy_norm(layer.attention.output.LayerNorm)
        inner = layer.intermediate
        self.activation = inner.activation if isinstance(layer, HfDebertaLayer) else inner.intermediate_act_fn
        # the GELU by the error function, which the products apply themselves
        self.has_gelu = getattr(self.activation, "act", self.activation) is nn.functional.gelu
        dense, sizes = weight_and_bias(inner.dense), output_sizes(self.attention_norm)
        self.intermediate = self.fuse(*dense, with_gelu=self.has_gelu, sizes=sizes)
        dense, lowest = weight_and_bias(layer.output.dense), MIN_GELU_OUTPUT if self.has_gelu else None
        self.output = self.fuse(*dense, lowest=lowest)
        self.output_norm = copy_norm(layer.output.LayerNorm)

    def fuse(
        self, weight: torch.Tensor, bias: torch.Tensor | None, with_gelu: bool = False, **of_int8: Any
    ) -> FusedLinear:
        if self.dtype == torch.int8:
            return Int8Linear(weight, bias, with_gelu, **of_int8)
        return FusedLinear(weight, bias, self.dtype, with_gelu)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        position_table: None,  # its projections are part of the layer
        layout: BatchLayout,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        steps: int = 1,
    ) -> tuple[torch.Tensor, None]:
        """New states of the queries, which `HfDebertaLayer.forward` describes; a gradient through them is an error."""
        self.check_call(hidden_states, layout.output_attentions)
        with torch.no_grad():
            states = self.compute(hidden_states, layout, query_states, steps)
        if torch.is_grad_enabled():
            states = WithoutGradient.apply(states, hidden_states, query_states)
        return states, None

    def compute(
        self, hidden_states: torch.Tensor, layout: BatchLayout, query_states: torch.Tensor | None, steps: int
    ) -> torch.Tensor:
        mask, rows, backend = layout.attention_mask, pad_rows(hidden_states.flatten(0, 1)), layout.backend
        if query_states is None and steps == 1:
            batch, tokens, _ = hidden_states.shape
            attended = self.attention.attend_whole_texts(self.query_key_value(rows), mask, (batch, tokens), backend)
            return self.feed_forward(attended, rows)[: batch * tokens].view(hidden_states.shape)
        if self.query is None or self.key_value is None:
            refuse(f"its last layers cannot be left out{ORIGINAL}")
        states = hidden_states if query_states is None else query_states
        key, value = self.attention.split(self.key_value(rows), hidden_states.shape[:2])
        for _ in range(steps):
            rows = pad_rows(states.flatten(0, 1))
            (query,) = self.attention.split(self.query(rows), states.shape[:2])
            attended = self.attention.attend_with_any_mask(query, key, value, mask, backend)
            states = self.feed_forward(attended, rows)[: states.shape[0] * states.shape[1]].view(states.shape)
        return states

    def feed_forward(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer after its attention, of rows: output projection, feed-forward network, residuals, LayerNorms."""
        if self.dtype == torch.float32 or len(attended) <= MAX_FEED_FORWARD_ROWS:
            return self.feed_forward_block(attended, residual)
        blocks = zip(attended.split(MAX_FEED_FORWARD_ROWS), residual.split(MAX_FEED_FORWARD_ROWS), strict=True)
        return torch.cat([self.feed_forward_block(*block) for block in blocks])

    def feed_forward_block(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        states = self.attention_norm(self.attention_output(attended, residual))
        inner = self.intermediate(states)
        if not self.has_gelu:
            inner = self.activation(inner.float())
        return self.output_norm(self.output(inner, states))


class FusedInTreeLayer(FusedLayer):
    """In the place of a layer of Transformers' encoders, with its signature under `enable()`."""

    def __init__(self, encoder: Any, *args: Any):
        super().__init__(encoder, *args)
        _, buckets, clamps = distance_parameters(encoder) or (0, 0, False)
        # the option of `enable()` for which the layer was made, if its rows depend on it
        self.clamps = clamps if buckets > 0 else None

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: BatchLayout,
        query_states: torch.Tensor | None = None,
        relative_pos: None = None,
        rel_embeddings: None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        if self.clamps not in (None, present_options()[1]):
            refuse(f"it computes under enable(clamp_relative_distance={self.clamps}) only: call that again")
        return super().forward(hidden_states, None, attention_mask, query_states)
