"""The classes that a model's encoder, layers and embeddings have after `hf_deberta.optimize()`.

They compute with the fused layers in inference, and otherwise as the classes that they are made from, to which
`model.train()` changes them back. Copies and pickles have these classes too, and no fused layers.
"""

from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.fast_path_guards import is_unmodified_module
from hf_deberta.model.modeling_hf_deberta import (
    HfDebertaEmbeddings,
    HfDebertaEncoder,
    HfDebertaLayer,
    gather_positions,
    kept_states,
)

logger = logging.get_logger(__name__)

MAX_NUMEL_SINGLE_THREAD = 32768  # numbers that one operation of PyTorch computes on one thread
MAX_NUMEL_SHORT_TEXT = 8 * MAX_NUMEL_SINGLE_THREAD  # the states of at most 256 tokens in a model of 1024 features


@dataclass(frozen=True)
class FusedLayout(BatchLayout):
    """The metadata of a forward pass that fused layers compute."""


class UndoneByTraining(nn.Module):
    """First base of the classes below: in training mode a module has its second base as class again."""

    def train(self, mode: bool = True) -> Any:
        if not mode:
            return super().train(mode)
        for name in ("fused_layers", "fused_layer", "of_encoder"):
            vars(self).pop(name, None)
        self.__class__ = type(self).__bases__[1]
        return self.train(mode)


class OptimizedEncoder(UndoneByTraining, HfDebertaEncoder):
    fused_layers: Any = None  # FusedLayers

    def shared_by_layers(self, states: torch.Tensor, layout: BatchLayout) -> BatchLayout:
        if self.fused_layers is None or not self.fused_layers.is_usable(self, states):
            return super().shared_by_layers(states, layout)
        if layout.cache is not None:
            logger.warning_once(
                "this model was prepared by hf_deberta.optimize, which has no effect with a key-value cache"
            )
            return super().shared_by_layers(states, layout)
        values = {field.name: getattr(layout, field.name) for field in fields(layout)}
        return FusedLayout(**{**values, "relative_rows": self.whole_table()})

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden], the embeddings
        layout: BatchLayout,
        output_attentions: bool = False,
        output_hidden_states: bool | int | list[int] = False,
        skip_last: bool = False,
        query_positions: torch.Tensor | None = None,  # [B, Q]
    ) -> BaseModelOutput:
        """The output of all layers, as `HfDebertaEncoder.forward` describes it."""
        if output_attentions or not isinstance(layout, FusedLayout):
            rest = (output_attentions, output_hidden_states, skip_last, query_positions)
            return super().forward(hidden_states, layout, *rest)
        layers, backend = len(self.layer), str(self.config._attn_implementation)
        kept = kept_states(output_hidden_states, layers + 1)
        ends = layers - 1 if skip_last else layers
        last_layer_for_all_tokens = query_positions is None or layers in kept or (layers == 1 and self.conv is not None)
        states: list[torch.Tensor | None] = [hidden_states]
        states += self.fused_layers.first_layers(
            hidden_states, layout, ends if last_layer_for_all_tokens or skip_last else layers - 1, kept, backend
        )
        for i in range(len(states) - 1, ends):
            before = cast(torch.Tensor, states[-1])
            positions = None if last_layer_for_all_tokens or i < layers - 1 else query_positions
            queries = None if positions is None else gather_positions(before, positions)
            new, _ = self.layer[i](before, None, layout, queries, positions)
            if i == 0 and self.conv is not None:
                new = self.conv(hidden_states, new, layout.token_mask, layout.documents)
            states.append(new)
        last = cast(torch.Tensor, states[-1])
        returned = tuple(each if i in kept else None for i, each in enumerate(states))
        return BaseModelOutput(
            last_hidden_state=gather_positions(last, query_positions) if last_layer_for_all_tokens else last,
            hidden_states=cast(tuple[torch.Tensor, ...], returned) if kept else None,
        )


class OptimizedLayer(UndoneByTraining, HfDebertaLayer):
    fused_layer: Any = None  # FusedLayer

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        relative_table: torch.Tensor | None,  # [R, hidden]
        layout: BatchLayout,
        *queries: Any,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states of the queries, which `HfDebertaLayer.forward` describes."""
        if output_attentions or not isinstance(layout, FusedLayout):
            options["output_attentions"] = output_attentions
            return super().forward(hidden_states, relative_table, layout, *queries, **options)
        backend = self.attention.self.backend(output_attentions)
        return self.fused_layer(hidden_states, layout, *queries, backend=backend, **options), None


class OptimizedEmbeddings(UndoneByTraining, HfDebertaEmbeddings):
    """Embeddings of short texts, computed on one thread, for encoders whose layers OpenVINO computes.

    PyTorch's threads, once woken, keep cores from OpenVINO's for 2 to 5 ms (docs/log.md).
    """

    of_encoder: tuple[nn.Module, Any] | None = None  # the encoder and its FusedLayers, None in copies

    def embed(
        self,
        words: torch.Tensor,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        token_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens = (words, position_ids, token_type_ids, token_mask)
        numel = words.shape[0] * words.shape[1] * self.config.hidden_size
        if numel > MAX_NUMEL_SHORT_TEXT or not self.can_split():
            return super().embed(*tokens)
        size = max(1, MAX_NUMEL_SINGLE_THREAD * words.shape[1] // numel)
        parts = zip(*(repeat(None) if each is None else each.split(size, dim=1) for each in tokens), strict=False)
        return torch.cat([self.embed_on_one_thread(*part) for part in parts], dim=1)

    def embed_on_one_thread(self, words: Any, position_ids: Any, token_type_ids: Any, token_mask: Any) -> torch.Tensor:
        """`embed` in operations that PyTorch computes on one thread, given few enough numbers."""
        states, norm = self.sum_up(words, position_ids, token_type_ids), self.LayerNorm
        if is_unmodified_module(norm):
            states = states - states.mean(-1, keepdim=True)
            variance = states.square().mean(-1, keepdim=True)
            states = torch.addcmul(norm.bias, states * torch.rsqrt(variance + norm.eps), norm.weight)
        else:
            states = norm(states)
        return states if token_mask is None else states * token_mask[..., None]

    def can_split(self) -> bool:
        """True if OpenVINO may compute the layers of this pass."""
        encoder, fused = self.of_encoder or (None, None)
        return fused is not None and fused.is_usable(encoder, self.word_embeddings.weight)
