"""The DeBERTa encoder: embeddings, disentangled self-attention, layers, `HfDebertaModel`.

Legend: B batch, N tokens, H heads, d head size, R rows of the relative table in use.

Parameter names are those of the official v2 code and of in-tree `deberta-v2`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .attention import AUTO, attend, attention_scale, dropout_rate
from .batch_layout import BatchLayout, check_one_document, gather, scatter, unpadded
from .configuration_hf_deberta import HfDebertaConfig
from .input_checks import EncoderKwargs, can_read_values, cast_for_products, require_tokens
from .ngram_input_encoding import NgramInputEncoding
from .pretrained_model import HfDebertaPreTrainedModel
from .relative_position import (
    RelativePositions,
    TableProjection,
    TableWindow,
    may_be_pruned,
    position_table,
    row_numbers,
    rows_of_distances,
    saturation_of,
    split_heads,
    warn_past_largest_distance,
)
from .slots import linear

logger = logging.get_logger(__name__)


class HfDebertaEmbeddings(nn.Module):
    """Word, absolute position and token type embeddings, then LayerNorm and dropout; padding is zero."""

    def __init__(self, config: HfDebertaConfig, position_embeddings: bool):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        if position_embeddings:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        if config.type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        if width != config.hidden_size:
            self.embed_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: torch.Tensor | None,  # [B, N]
        token_type_ids: torch.Tensor | None,
        layout: BatchLayout,
        inputs_embeds: torch.Tensor | None,  # [B, N, embedding]
    ) -> torch.Tensor:
        """Embeddings [B, N, hidden], with padding even if the layers compute without it."""
        layout = layout.padded or layout
        words = input_ids if inputs_embeds is None else inputs_embeds
        assert words is not None
        embeddings = self.word_embeddings(words) if words.dim() == 2 else words
        if self.config.position_biased_input:
            embeddings = embeddings + self.absolute_embeddings(layout)
        if self.config.type_vocab_size > 0:
            if token_type_ids is None:
                token_type_ids = words.new_zeros(words.shape[:2], dtype=torch.long)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        if self.config.embedding_size != self.config.hidden_size:
            embeddings = linear(self.embed_proj, embeddings)
        embeddings = self.LayerNorm(embeddings)
        if layout.token_mask is not None:
            embeddings = embeddings * layout.token_mask[..., None]
        return self.dropout(embeddings)

    def absolute_embeddings(self, layout: BatchLayout) -> torch.Tensor:
        """Absolute position embeddings [B or 1, N, embedding], which the enhanced mask decoder adds."""
        return self.position_embeddings(layout.absolute_positions(self.config.max_position_embeddings))


class ProjectedKeys(NamedTuple):
    """What attention needs of the tokens that queries attend to."""

    key: torch.Tensor  # [B, H, N, d]
    value: torch.Tensor  # [B, H, N, d]
    relative: RelativePositions | None
    states: torch.Tensor  # [B, N, hidden], the tokens' states
    inputs: torch.Tensor  # the same in the type of products: each of three projections would cast them


class HfDebertaSelfAttention(nn.Module):
    """Projections of states and of the relative table, then attention."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.share_att_key = config.share_att_key
        width, key_bias = config.hidden_size, config.attention_key_bias
        self.terms = tuple(config.pos_att_type or ()) if config.relative_attention else ()
        self.head_size = width // config.num_attention_heads
        self.scale = attention_scale(config.attention_terms, self.head_size)  # without relative attention, too
        self.query_proj = nn.Linear(width, width)
        self.key_proj = nn.Linear(width, width, bias=key_bias)
        self.value_proj = nn.Linear(width, width)
        if not self.share_att_key:
            if {"c2p", "p2p"} & set(self.terms):
                self.pos_key_proj = nn.Linear(width, width, bias=key_bias)
            if {"p2c", "p2p"} & set(self.terms):
                self.pos_query_proj = nn.Linear(width, width)
        self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self,
        states: torch.Tensor,  # [B, Q, hidden], of the queries
        keys: ProjectedKeys,
        layout: BatchLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The context [B, Q, hidden] of each query, and attention probabilities if requested."""
        query = linear(self.query_proj, keys.inputs if states is keys.states else states)
        query = split_heads(query, self.head_size)
        dropout_p = dropout_rate(self.dropout)
        context, probabilities = attend(
            query, keys.key, keys.value, keys.relative, layout.attention_mask, dropout_p, self.scale, layout.backend
        )
        return context.transpose(1, 2).flatten(2), probabilities if layout.output_attentions else None

    def project_keys(
        self, states: torch.Tensor, position_table: torch.Tensor | None, layout: BatchLayout
    ) -> ProjectedKeys:
        """Keys and values of states [B, N, hidden], and the position terms from the table [R, hidden]."""
        relative = self.table_projection().relative_positions(position_table, layout.window, layout.longest, self)
        inputs = cast_for_products(states)
        key = split_heads(linear(self.key_proj, inputs), self.head_size)
        value = split_heads(linear(self.value_proj, inputs), self.head_size)
        return ProjectedKeys(key, value, relative, states, inputs)

    def table_projection(self) -> TableProjection:
        """The projection of the relative table: with the content's matrices (v2, v3), or with its own (v1)."""
        shared, key, query = self.share_att_key, None, None
        if {"c2p", "p2p"} & set(self.terms):
            key = self.key_proj if shared else self.pos_key_proj
        if {"p2c", "p2p"} & set(self.terms):
            query = self.query_proj if shared else self.pos_query_proj
        return TableProjection(key, query, self.pos_dropout, self.head_size, self.scale, self.terms)


class HfDebertaResidual(nn.Module):
    """LayerNorm(residual + dropout(dense(states))), after attention and after the feed-forward layer."""

    def __init__(self, config: HfDebertaConfig, input_size: int):
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(linear(self.dense, states)) + residual)


class HfDebertaAttention(nn.Module):
    """Self-attention and its residual connection."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.self = HfDebertaSelfAttention(config)
        self.output = HfDebertaResidual(config, config.hidden_size)

    def forward(
        self, states: torch.Tensor, keys: ProjectedKeys, layout: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states [B, Q, hidden] of the queries, and attention probabilities if requested."""
        context, probabilities = self.self(states, keys, layout)
        return self.output(context, states), probabilities


class HfDebertaIntermediate(nn.Module):
    """The inner part of the feed-forward layer."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.activation(linear(self.dense, states))


class HfDebertaLayer(GradientCheckpointingLayer):
    """One encoder layer: attention, then the feed-forward layer."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.attention = HfDebertaAttention(config)
        self.intermediate = HfDebertaIntermediate(config)
        self.output = HfDebertaResidual(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        position_table: torch.Tensor | None,  # [R, hidden]
        layout: BatchLayout,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]; `layout.for_queries` has their positions
        steps: int = 1,  # how often the layer is applied to the queries, with the same keys and values
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states of the queries, by default of all tokens, and attention probabilities if requested."""
        states = hidden_states if query_states is None else query_states
        attention = self.attention
        keys = attention.self.project_keys(hidden_states, position_table, layout)
        for _ in range(steps):
            attended, probabilities = attention(states, keys, layout)
            states = self.output(self.intermediate(attended), attended)
        return states, probabilities


class HfDebertaEncoder(nn.Module):
    """All layers, the relative-position table that they share, and the convolution after the first layer."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList([HfDebertaLayer(config) for _ in range(config.num_hidden_layers)])
        self.distance_parameters = config.max_distance, config.position_buckets, config.clamp_relative_distance
        if config.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * config.relative_span, config.hidden_size)
            # [2k + 1]; no buffer: an average of models would change integers, and `to_empty` removes values
            self.rows_of_distance = rows_of_distances(*self.distance_parameters)
            rows = row_numbers(*self.distance_parameters)
            self.can_shrink, self.saturation = may_be_pruned(rows, config.relative_span), saturation_of(rows)
            self.whole_table(self.rel_embeddings.weight.device)
        if config.norm_rel_ebd == "layer_norm":
            self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.conv = NgramInputEncoding(config) if config.conv_kernel_size > 0 else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> "HfDebertaEncoder":
        super()._apply(fn, *args, **kwargs)
        if getattr(self, "rel_embeddings", None) is not None:
            self.whole_table(fn(self.rows_of_distance).device)
        return self

    def whole_table(self, device: torch.device) -> TableWindow | None:
        """All rows of the relative table, with the row of each distance on this device; None without one."""
        if getattr(self, "rel_embeddings", None) is None:
            return None
        if self.rows_of_distance.device != device and device.type != "meta":
            with torch.inference_mode(False):  # training may follow
                self.rows_of_distance = self.rows_of_distance.to(device)
        return TableWindow(0, 2 * self.config.relative_span, self.rows_of_distance, self.saturation, self.can_shrink)

    def position_table(self, layout: BatchLayout, device: torch.device) -> tuple[torch.Tensor | None, BatchLayout]:
        """The relative table [R, hidden], and the layout with the table's rows; None without relative attention."""
        table, window = position_table(self, self.whole_table(device), layout.longest)
        return table, replace(layout, window=window)

    def forward(
        self,
        embeddings: torch.Tensor,  # [B, N, hidden]
        layout: BatchLayout,
        skip_last: bool = False,
        query_positions: torch.Tensor | None = None,  # [B or 1, Q]
    ) -> BaseModelOutput:
        """The output of all layers, or for the enhanced mask decoder, with `skip_last`, of those before the last.

        The last layer then runs only if hidden states or probabilities are requested, and `last_hidden_state` is its
        input. If the layers compute without padding, `last_hidden_state` has none either: [1, total, hidden];
        `hidden_states` have their padding. With `query_positions`, which increase along each row, `last_hidden_state`
        is [B, Q, hidden], and the last layer computes no other states unless they are requested.
        """
        hidden_states = embeddings = gather(embeddings, layout)
        table, layout = self.position_table(layout, embeddings.device)
        returned = layout.output_hidden_states
        states: list[torch.Tensor | None] = [scatter(hidden_states, layout) if 0 in returned else None]
        attentions: list[torch.Tensor] = []
        last = len(self.layer) - 1
        ends_with_convolution = last == 0 and self.conv is not None
        last_layer_for_all_tokens = layout.output_attentions or last + 1 in returned or ends_with_convolution
        for i, layer in enumerate(self.layer):
            query_states = None
            if i == last and skip_last:
                before_last = hidden_states
                if not (layout.output_attentions or returned):
                    break
            if i == last and query_positions is not None and not last_layer_for_all_tokens:
                query_positions = query_positions.expand(hidden_states.shape[0], -1)
                query_states = gather_positions(hidden_states, query_positions)
                layout = layout.for_queries(query_positions)
            hidden_states, probabilities = layer(hidden_states, table, layout, query_states)
            if i == 0 and self.conv is not None:
                hidden_states = self.conv(embeddings, hidden_states, layout.token_mask, layout.documents)
            states.append(scatter(hidden_states, layout) if i + 1 in returned else None)
            if layout.output_attentions:
                attentions.append(probabilities)
        if skip_last:
            hidden_states = before_last
        elif last_layer_for_all_tokens:
            hidden_states = gather_positions(hidden_states, query_positions)
        return BaseModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=cast(tuple[torch.Tensor, ...], tuple(states)) if returned else None,
            attentions=tuple(attentions) if layout.output_attentions else None,
        )


def gather_positions(states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """States [B, Q, hidden] at positions [B or 1, Q] of states [B, N, hidden]; all states if positions are None."""
    if positions is None:
        return states
    return states.gather(1, positions[..., None].expand(states.shape[0], -1, states.shape[-1]))


def indices_of_states(output_hidden_states: bool | int | list[int] | None, states: int) -> frozenset[int]:
    """Indices of the hidden states to return, out of `states`; negative indices count from the end."""
    if output_hidden_states is None or isinstance(output_hidden_states, bool):
        return frozenset(range(states) if output_hidden_states else ())
    indices = [output_hidden_states] if isinstance(output_hidden_states, int) else output_hidden_states
    return frozenset(index % states for index in indices)


class HfDebertaModel(HfDebertaPreTrainedModel):
    """The encoder without a head.

    >>> from hf_deberta import HfDebertaConfig, HfDebertaModel
    >>> model = HfDebertaModel(HfDebertaConfig.from_preset("tiny"))
    >>> model(torch.tensor([[1, 5, 2]])).last_hidden_state.shape
    torch.Size([1, 3, 32])

    `attention_mask` may be [B, N], or [B, N, N], where entry [b, i, j] lets token i see token j. A row may hold several
    documents, which do not see one another: pass `cu_seq_lens_q`, or `position_ids` that restart and no mask. Batches
    with much padding are computed without it (`config.unpad_inputs`); states of padding are then zero. Absolute
    positions count from the first real token of a row, unless `position_ids` are passed.
    """

    def __init__(self, config: HfDebertaConfig, decoder_positions: bool = False):
        """`decoder_positions`: create the absolute position embeddings that an enhanced mask decoder adds."""
        super().__init__(config)
        self.embeddings = HfDebertaEmbeddings(config, config.position_biased_input or decoder_positions)
        self.encoder = HfDebertaEncoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,  # [B, N]
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs: Unpack[EncoderKwargs],
    ) -> BaseModelOutput:
        """Return the last hidden states [B, N, hidden].

        With `first_token_only`, for classifiers, return only the state of each row's first real token, [B, 1, hidden],
        or of each document's, [1, documents, hidden]: zero, without a gradient, for a row of padding only.

        `output_attentions` and `output_hidden_states` are as in Transformers, by default those of the configuration.
        If the latter are indices, the other states are None.

        `cu_seq_lens_q` are the document boundaries [documents + 1] of a packed row, with B = 1. `max_length_q` is the
        length of its longest document. Pass it on a GPU: without it a document may be as long as the row, because
        reading the boundaries would wait for the device.

        `num_real_tokens` is the sum of an `attention_mask` [B, N] whose rows are padded on the right, none of them
        empty, or up to an eighth more, by `engines.unpadding.round_up`. With it a GPU leaves out padding too: it need
        not wait until the mask can be read. A wrong number gives wrong outputs or a failed assertion of the device
        there, and a ValueError on the CPU. Saved folders without the package hf_deberta ignore it.
        """
        layout = self.batch_layout(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        embeddings = self.embeddings(input_ids, token_type_ids, layout, inputs_embeds)
        if first_token_only and attention_mask is None and kwargs.get("cu_seq_lens_q") is None:
            check_one_document(position_ids)
        if first_token_only:
            positions = layout.pooled_positions()
            encoded = self.encoder(embeddings, layout, query_positions=positions)
            encoded.last_hidden_state = layout.scatter_pooled(encoded.last_hidden_state, positions)
        else:
            encoded = self.encoder(embeddings, layout)
            encoded.last_hidden_state = scatter(encoded.last_hidden_state, layout)
        return encoded

    def batch_layout(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        causal: bool = False,
        **kwargs: Any,  # those of `forward`; others are ignored
    ) -> BatchLayout:
        """Check the inputs; return the attention metadata of all layers. `causal`: no token sees those after it."""
        # a wrapper, such as PEFT's, may have no num_embeddings
        words = getattr(self.embeddings.word_embeddings, "num_embeddings", self.config.vocab_size)
        tokens = require_tokens(self.config, words, input_ids, token_type_ids, inputs_embeds)
        cu_seq_lens_q, num_real_tokens = kwargs.get("cu_seq_lens_q"), kwargs.get("num_real_tokens")
        has_no_mask = attention_mask is None and cu_seq_lens_q is None and position_ids is None  # packed rows need none
        if input_ids is not None and has_no_mask and can_read_values(input_ids):
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        shape = tokens.shape[0], tokens.shape[1]
        layout = BatchLayout.from_inputs(
            attention_mask, position_ids, cu_seq_lens_q, shape, tokens.device, causal, kwargs.get("max_length_q")
        )
        output_attentions, output_hidden_states = kwargs.get("output_attentions"), kwargs.get("output_hidden_states")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        backend = str(self.config._attn_implementation)
        if output_attentions and backend not in (AUTO, "eager"):
            logger.warning_once(f"backend {backend!r} has no attention probabilities: output_attentions uses 'eager'")
        layout = replace(
            layout,
            backend="eager" if output_attentions else backend,
            output_attentions=bool(output_attentions),
            output_hidden_states=indices_of_states(output_hidden_states, len(self.encoder.layer) + 1),
        )
        returns_states = layout.output_attentions or (bool(layout.output_hidden_states) and torch.is_grad_enabled())
        layout = unpadded(layout, self.config, returns_states, num_real_tokens)
        if self.config.relative_attention and not layout.attention_mask.causal:  # the rows are those of later tokens
            warn_past_largest_distance(layout.longest, self.encoder.distance_parameters, "from_pretrained")
        return layout
