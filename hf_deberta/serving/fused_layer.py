"""An encoder layer prepared for inference on this processor: the same numbers from fewer and faster operations.

Legend: B batch, N tokens, Q queries, M = B N rows, H heads, d head size.

Against the plain layer: query, key and value are one product; GELU, bias and residual belong to the products; weights
are laid out for oneDNN (fused_linear.py); the projected position tables are constants, laid out by distance once.

    weights = layer_weights(encoder.layer[0], None, *position_table(encoder))
    layer = FusedLayer(weights, torch.float32, torch.float32)
    states = layer(hidden_states, layout)          # [B, N, hidden]
"""

from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_deberta.engines.onednn import pad_rows
from hf_deberta.model.batch_layout import BatchLayout

from .fused_attention import FusedAttention
from .fused_linear import FusedLinear
from .layer_weights import LayerWeights, concatenate_projections

# whose inner states fit into a cache; in float32 products take so long that it does not matter
MAX_FEED_FORWARD_ROWS = 256
MIN_GELU_OUTPUT = -0.17  # GELU is nowhere below


class NoneInCopies:
    """An object that is None in copies and pickles of the model that holds it: oneDNN weights cannot be copied."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class FusedLayer(NoneInCopies):
    """One encoder layer; with `query_states`, one enhanced-mask-decoder layer."""

    def __init__(self, weights: LayerWeights, dtype: torch.dtype, attention_dtype: torch.dtype):
        self.weights, self.dtype = weights, dtype
        self.attention = FusedAttention(weights.positions, weights.heads, weights.head_size, attention_dtype)
        # the GELU by the error function, which the products apply themselves
        self.has_gelu = getattr(weights.activation, "act", weights.activation) is nn.functional.gelu
        projections = concatenate_projections(weights.scaled_query(), weights.key, weights.value)
        self.query_key_value = self.fuse(*projections, sizes=weights.input_sizes)
        self.attention_output = self.fuse(*weights.attention_output)
        sizes = weights.attention_norm.sizes()
        self.intermediate = self.fuse(*weights.intermediate, with_gelu=self.has_gelu, sizes=sizes)
        self.output = self.fuse(*weights.output, lowest=MIN_GELU_OUTPUT if self.has_gelu else None)

    @cached_property  # for subsets of queries, as is the next: fused when first used
    def query(self) -> FusedLinear:
        return self.fuse(*self.weights.scaled_query())

    @cached_property
    def key_value(self) -> FusedLinear:
        return self.fuse(*concatenate_projections(self.weights.key, self.weights.value), sizes=self.weights.input_sizes)

    def fuse(self, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> FusedLinear:
        return FusedLinear.from_weight(weight, bias, self.dtype, **options)

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        layout: BatchLayout,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        steps: int = 1,
        backend: str = "auto",
    ) -> torch.Tensor:
        """New states of the queries (by default of all tokens), [B, Q, hidden]; the arguments of `HfDebertaLayer`."""
        mask, rows = layout.attention_mask, pad_rows(hidden_states.flatten(0, 1))
        if query_states is None and steps == 1:
            batch, tokens, _ = hidden_states.shape
            attended = self.attention.attend_whole_texts(self.query_key_value(rows), mask, (batch, tokens), backend)
            return self.feed_forward(attended, rows)[: batch * tokens].view(hidden_states.shape)
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
        states = self.weights.attention_norm.normalise(self.attention_output(attended, residual))
        inner = self.intermediate(states)
        if not self.has_gelu:
            inner = self.weights.activation(inner.float())
        return self.weights.output_norm.normalise(self.output(inner, states))
