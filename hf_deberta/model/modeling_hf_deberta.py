"""The DeBERTa encoder: embeddings, disentangled self-attention, layers, `HfDebertaModel`.

Legend: B batch, N tokens, H heads, d head size, R rows of the relative table in use.

Parameter names are those of the official v2 code and of in-tree `deberta-v2`.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import can_return_tuple

from .attention import disentangled_attention
from .attention_context import AttentionContext, any_outside, check_one_document
from .configuration_hf_deberta import HfDebertaConfig
from .dense import dense
from .fast_path_guards import can_read_values, is_tracing_or_compiling
from .ngram_input_encoding import NgramInputEncoding
from .pretrained_model import HfDebertaPreTrainedModel
from .relative_position import may_be_pruned, rows_in_use, rows_of_distances, saturation_of
from .weight_cache import WeightCache, can_cache


class HfDebertaEmbeddings(nn.Module):
    def __init__(self, config: HfDebertaConfig, position_embeddings: bool):
        super().__init__()
        width = config.embedding_size
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
        position_ids: torch.Tensor,  # [B or 1, N]
        in_order: bool,
        token_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,  # [B, N, embedding]
    ) -> torch.Tensor:
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.position_biased_input:
            embeddings = embeddings + self.positions(position_ids, in_order)
        if self.config.type_vocab_size > 0:
            if token_type_ids is None:
                token_type_ids = embeddings.new_zeros(embeddings.shape[:2], dtype=torch.long)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        if self.config.embedding_size != self.config.hidden_size:
            embeddings = dense(self.embed_proj, embeddings)
        embeddings = self.LayerNorm(embeddings)
        if token_mask is not None:
            embeddings = embeddings * token_mask[..., None]
        return self.dropout(embeddings)

    def positions(self, position_ids: torch.Tensor, in_order: bool) -> torch.Tensor:
        """Absolute position embeddings [..., embedding]; `in_order`: positions are 0, 1, ... along each row."""
        known = self.config.max_position_embeddings
        if (in_order and position_ids.shape[-1] > known) or any_outside(position_ids, known):
            longest = int(position_ids.max()) + 1
            raise ValueError(
                f"absolute positions are known up to max_position_embeddings = {known}, and this input reaches "
                f"{longest}; shorten it, or train with a larger max_position_embeddings"
            )
        return self.position_embeddings(position_ids)


class HfDebertaSelfAttention(nn.Module):
    """Projections of content and of the relative table, then `disentangled_attention`."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.config = config
        width, key_bias = config.hidden_size, config.attention_key_bias
        self.terms = tuple(config.pos_att_type) if config.relative_attention else ()
        self.scale = (config.attention_terms * width // config.num_attention_heads) ** -0.5
        self.query_proj = nn.Linear(width, width)
        self.key_proj = nn.Linear(width, width, bias=key_bias)
        self.value_proj = nn.Linear(width, width)
        if not config.share_att_key:
            if {"c2p", "p2p"} & set(self.terms):
                self.pos_key_proj = nn.Linear(width, width, bias=key_bias)
            if {"p2c", "p2p"} & set(self.terms):
                self.pos_query_proj = nn.Linear(width, width)
        self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.weight_cache = WeightCache()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden], keys and values
        relative_table: torch.Tensor | None,  # [R, hidden]
        context: AttentionContext,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        query_positions: torch.Tensor | None = None,  # [B, Q]
        memory: tuple | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple]:
        """States [B, Q, hidden], probabilities, and the memory: projections that do not depend on queries."""
        if memory is None:
            memory = self.project_memory(hidden_states, relative_table)
        key, value, position_key, position_query = memory
        query = self._heads(dense(self.query_proj, hidden_states if query_states is None else query_states))
        states, probabilities = disentangled_attention(
            query,
            key,
            value,
            position_key,
            position_query,
            terms=self.terms,
            rows_of_distance=context.rows_of_distance,
            first_row=context.rows[0],
            saturation=context.saturation,
            query_positions=query_positions,
            mask=context.mask,
            cu_seqlens=context.cu_seqlens,
            lengths=context.lengths,
            scale=self.scale,
            dropout_p=self.dropout.p if self.dropout.training else 0.0,
            backend=self.config._attn_implementation,
            need_probabilities=output_attentions,
        )
        return states.transpose(1, 2).flatten(2), probabilities, memory

    def project_memory(self, hidden_states: torch.Tensor, relative_table: torch.Tensor | None) -> tuple:
        """Key and value [B, H, N, d], position key and query [H, R, d]."""
        position_key = position_query = None
        if self.terms and self.caches_position_tables():
            projections = tuple(filter(None, self.position_projections()))
            position_key, position_query = self.weight_cache.of(
                projections, lambda: self.project_table(relative_table), relative_table
            )
        elif self.terms:
            self.weight_cache.forget()
            position_key, position_query = self.project_table(relative_table)
        key, value = dense(self.key_proj, hidden_states), dense(self.value_proj, hidden_states)
        return self._heads(key), self._heads(value), position_key, position_query

    def project_table(self, relative_table: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Position key and query [H, R, d], those that the terms need."""
        table = self.pos_dropout(relative_table)
        return tuple(module and self._heads(dense(module, table)) for module in self.position_projections())

    def position_projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        """What makes position keys of the relative table, for c2p and p2p, and position queries, for p2c and p2p."""
        shared, terms = self.config.share_att_key, set(self.terms)
        for_key = self.key_proj if shared else getattr(self, "pos_key_proj", None)
        for_query = self.query_proj if shared else getattr(self, "pos_query_proj", None)
        return for_key if {"c2p", "p2p"} & terms else None, for_query if {"p2c", "p2p"} & terms else None

    def caches_position_tables(self) -> bool:
        return not self.pos_dropout.training and can_cache(filter(None, self.position_projections()))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """[..., N, hidden] to [..., H, N, d]."""
        return states.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(-3, -2)


class HfDebertaResidual(nn.Module):
    """LayerNorm(residual + dropout(dense(states))), after attention and after the feed-forward part."""

    def __init__(self, config: HfDebertaConfig, input_size: int):
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(dense(self.dense, states)) + residual)


class HfDebertaAttention(nn.Module):
    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.self = HfDebertaSelfAttention(config)
        self.output = HfDebertaResidual(config, config.hidden_size)


class HfDebertaIntermediate(nn.Module):
    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.activation(dense(self.dense, states))


class HfDebertaLayer(GradientCheckpointingLayer):
    """One encoder layer; with `query_states`, one enhanced-mask-decoder layer."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.attention = HfDebertaAttention(config)
        self.intermediate = HfDebertaIntermediate(config)
        self.output = HfDebertaResidual(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        relative_table: torch.Tensor | None,  # [R, hidden]
        context: AttentionContext,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        query_positions: torch.Tensor | None = None,  # [B, Q]
        steps: int = 1,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states of the queries (by default of all tokens), and attention probabilities.

        With `steps`, the layer is applied so often to the queries, with the same keys and values, which are
        projected once.
        """
        memory = None
        for _ in range(steps):
            residual = hidden_states if query_states is None else query_states
            attended, probabilities, memory = self.attention.self(
                hidden_states, relative_table, context, query_states, query_positions, memory, output_attentions
            )
            attended = self.attention.output(attended, residual)
            query_states = self.output(self.intermediate(attended), attended)
        return query_states, probabilities


class HfDebertaEncoder(nn.Module):
    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList([HfDebertaLayer(config) for _ in range(config.num_hidden_layers)])
        if config.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * config.relative_span, config.hidden_size)
            rows = self.compute_rows_of_distance()
            self.register_buffer("rows_of_distance", rows, persistent=False)
            self.pruned = may_be_pruned(rows, config.relative_span)
            self.saturation = saturation_of(rows)
            self.weight_cache = WeightCache()
        if config.norm_rel_ebd == "layer_norm":
            self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.conv = NgramInputEncoding(config) if config.conv_kernel_size > 0 else None

    def compute_rows_of_distance(self) -> torch.Tensor:
        config = self.config
        rows = rows_of_distances(config.max_distance, config.position_buckets, config.clamp_relative_distance)
        return rows.clone()

    def init_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds; `HfDebertaPreTrainedModel._init_weights` calls this."""
        if self.config.relative_attention:
            init.copy_(self.rows_of_distance, self.compute_rows_of_distance())

    def relative_rows(self, length: int) -> dict:
        """What an `AttentionContext` has to know of the relative table for sequences of so many tokens."""
        if not self.config.relative_attention:
            return {"rows_of_distance": None, "rows": (0, 0), "saturation": None}
        rows = self.rows_in_use(length)
        return {"rows_of_distance": self.rows_of_distance, "rows": rows, "saturation": self.saturation}

    def rows_in_use(self, length: int) -> tuple[int, int]:
        """Rows to project: those in use, or all where they are projected once and remembered."""
        # a captured graph must hold for other lengths
        pruned = self.pruned and not is_tracing_or_compiling() and not self.caches_position_tables()
        return rows_in_use(length, self.config.relative_span, pruned)

    def caches_position_tables(self) -> bool:
        return can_cache(self.table_modules()) and all(x.attention.self.caches_position_tables() for x in self.layer)

    def table_modules(self) -> tuple[nn.Module, ...]:
        normed = self.config.norm_rel_ebd == "layer_norm"
        return (self.rel_embeddings, self.LayerNorm) if normed else (self.rel_embeddings,)

    def relative_table(self, context: AttentionContext) -> torch.Tensor | None:
        """The rows of the relative table that the context names, [R, hidden]; one object while it is remembered."""
        if not self.config.relative_attention:
            return None

        def compute() -> torch.Tensor:
            table = self.rel_embeddings(torch.arange(*context.rows, device=self.rows_of_distance.device))
            return self.LayerNorm(table) if self.config.norm_rel_ebd == "layer_norm" else table

        whole = context.rows == (0, self.rel_embeddings.num_embeddings)
        if whole and can_cache(self.table_modules()):
            return self.weight_cache.of(self.table_modules(), compute)
        self.weight_cache.forget()
        return compute()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden], the embeddings
        context: AttentionContext,
        output_attentions: bool = False,
        output_hidden_states: bool | int | list[int] = False,
        skip_last: bool = False,
        asked: torch.Tensor | None = None,  # [B, Q]
    ) -> BaseModelOutput:
        """All layers, or all but the last, which the enhanced mask decoder applies in its own way.

        With `asked`, positions that rise along each row, `last_hidden_state` is theirs [B, Q, hidden], and the last
        layer computes no others unless they are wanted. `output_hidden_states` may name indices, as in Transformers;
        the other states are then None.
        """
        embeddings = hidden_states
        relative_table = self.relative_table(context)
        kept = kept_states(output_hidden_states, len(self.layer) + 1)
        states, attentions = [hidden_states if 0 in kept else None], []
        last = len(self.layer) - 1
        needs_all = output_attentions or last + 1 in kept or (last == 0 and self.conv is not None)
        for i, layer in enumerate(self.layer[:-1] if skip_last else self.layer):
            queries = ()
            if i == last and asked is not None and not needs_all:
                queries = gather_positions(hidden_states, asked), asked
            hidden_states, probabilities = layer(
                hidden_states, relative_table, context, *queries, output_attentions=output_attentions
            )
            if i == 0 and self.conv is not None:
                hidden_states = self.conv(embeddings, hidden_states, context.token_mask, context.documents)
            states.append(hidden_states if i + 1 in kept else None)
            if output_attentions:
                attentions.append(probabilities)
        if needs_all:
            hidden_states = gather_positions(hidden_states, asked)
        return BaseModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=tuple(states) if kept else None,
            attentions=tuple(attentions) if output_attentions else None,
        )


def gather_positions(states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """states [B, N, hidden] at positions [B, Q]; all of them if None."""
    if positions is None:
        return states
    return states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))


def kept_states(output_hidden_states: bool | int | list[int], states: int) -> set[int]:
    """Which of so many hidden states to return; indices may count from the end."""
    if isinstance(output_hidden_states, bool):
        return set(range(states)) if output_hidden_states else set()
    indices = [output_hidden_states] if isinstance(output_hidden_states, int) else output_hidden_states
    return {index % states for index in indices}


class HfDebertaModel(HfDebertaPreTrainedModel):
    """The encoder without a head.

    >>> from hf_deberta import HfDebertaConfig, HfDebertaModel
    >>> model = HfDebertaModel(HfDebertaConfig.from_preset("tiny"))
    >>> model(torch.tensor([[1, 5, 2]])).last_hidden_state.shape
    torch.Size([1, 3, 32])

    A row may hold several documents (`cu_seq_lens_q`, or `position_ids` that restart and no mask): they do
    not see one another. `attention_mask` may be [B, N], or [B, N, N] with entry [b, i, j] letting i see j.
    Padding is left out of all layers where that pays (`config.unpad_inputs`); its states are then zeros.
    """

    def __init__(self, config: HfDebertaConfig, decoder_positions: bool = False):
        """`decoder_positions`: make the absolute position embeddings that an enhanced mask decoder adds."""
        super().__init__(config)
        self.embeddings = HfDebertaEmbeddings(config, config.position_biased_input or decoder_positions)
        self.encoder = HfDebertaEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,  # [B, N]
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> BaseModelOutput:
        """`first_token_only`: of the last layer, the first real token's state alone, [B, 1, hidden], for classifiers.

        With `cu_seq_lens_q` it is that of each document, [1, documents, hidden].
        """
        wanted = self.wanted(output_attentions, output_hidden_states)
        embeddings, context = self.embed(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seq_lens_q,
            unpad=self.unpads(*wanted),
        )
        if first_token_only and attention_mask is None and cu_seq_lens_q is None:
            check_one_document(position_ids)
        if not first_token_only:
            encoded = self.encoder(embeddings, context, *wanted)
            encoded.last_hidden_state = context.scatter(encoded.last_hidden_state)
        elif context.unpadding is not None:
            places, rows = context.unpadding.first_tokens()
            encoded = self.encoder(embeddings, context, *wanted, asked=places[None])
            first = encoded.last_hidden_state
            empty = first.new_zeros(context.unpadding.shape[0], 1, first.shape[-1])
            encoded.last_hidden_state = empty.index_copy(0, rows.to(first.device), first[0][:, None])
        else:
            asked = context.first_tokens() if cu_seq_lens_q is None else cu_seq_lens_q[None, :-1].long()
            encoded = self.encoder(embeddings, context, *wanted, asked=asked.expand(embeddings.shape[0], -1))
        encoded.hidden_states = context.scatter_each(encoded.hidden_states)
        return encoded

    def unpads(self, output_attentions: bool, output_hidden_states: bool | int | list[int]) -> bool:
        """Whether padding may be left out: by wish, and where a backend handles documents one by one.

        Not where a gradient may be wanted at hidden states, which would be copies. On the CPU, where it is measured.
        """
        seen = output_attentions or (output_hidden_states is not False and torch.is_grad_enabled())
        config, weight = self.config, self.embeddings.word_embeddings.weight
        wanted = config.unpad_inputs and config._attn_implementation in ("sdpa", "triton")
        return wanted and not seen and can_read_values(weight)

    def wanted(
        self, output_attentions: bool | None, output_hidden_states: bool | int | list[int] | None
    ) -> tuple[bool, bool | int | list[int]]:
        """What to return besides the last state: the arguments, or the configuration where they are None."""
        config = self.config
        return (
            config.output_attentions if output_attentions is None else output_attentions,
            config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )

    def embed(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        unpad: bool = False,
        causal: bool = False,
    ) -> tuple[torch.Tensor, AttentionContext]:
        """Embeddings and the context the layers need; all input checks are here.

        Embeddings are [B, N, hidden]; with `unpad` they may be one row [1, total, hidden] of real tokens, which
        `context.scatter` puts back. `causal`: no token sees those after it; nothing is unpadded then.
        """
        batch, length, device = self._check_inputs(input_ids, token_type_ids, inputs_embeds)
        if input_ids is not None and cu_seq_lens_q is None and position_ids is None:  # packed rows have no mask
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        context = AttentionContext.of(attention_mask, position_ids, cu_seq_lens_q, (batch, length), device, causal)
        embeddings = self.embeddings(
            input_ids,
            token_type_ids,
            context.position_ids,
            context.in_order,
            context.token_mask,
            inputs_embeds,
        )
        context = (context.unpadded(self.config.hidden_size) if unpad else context).with_mask_of_documents()
        context = replace(context, **self.encoder.relative_rows(context.longest(length)))
        return context.gather(embeddings), context

    def _check_inputs(self, input_ids, token_type_ids, inputs_embeds) -> tuple[int, int, torch.device]:
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"give either input_ids or inputs_embeds, not {given}")
        tensor, rank = (input_ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
        if tensor.dim() != rank or tensor.numel() == 0:
            name, shape = ("input_ids", "[B, N]") if rank == 2 else ("inputs_embeds", "[B, N, embedding]")
            raise ValueError(f"{name} must be {shape} with at least one row and one token, not {tuple(tensor.shape)}")
        words = self.embeddings.word_embeddings.num_embeddings
        if input_ids is not None and any_outside(input_ids, words):
            raise ValueError(
                f"input_ids must lie in [0, {words}), the vocabulary of this model, and reach from "
                f"{int(input_ids.min())} to {int(input_ids.max())}; use the tokenizer that belongs to it, or "
                "resize_token_embeddings"
            )
        types = self.config.type_vocab_size
        if token_type_ids is not None and types > 0 and any_outside(token_type_ids, types):
            raise ValueError(f"token_type_ids must lie in [0, {types}), and reach up to {int(token_type_ids.max())}")
        return tensor.shape[0], tensor.shape[1], tensor.device
