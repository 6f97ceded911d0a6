"""The classes that a model's encoder, layers and embeddings have after `hf_deberta.optimize()`.

They compute with the fused layers in inference, and otherwise as the classes that they are made from, to which
`model.train()` changes them back. Copies and pickles have these classes too, and no fused layers.
"""

from collections import deque
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hf_deberta.engines.guards import is_unmodified_module
from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.modeling_hf_deberta import HfDebertaEmbeddings, HfDebertaEncoder, HfDebertaLayer, kept_states
from hf_deberta.model.relative_position import TableWindow

MAX_NUMEL_SINGLE_THREAD = 32768  # numbers that one operation of PyTorch computes on one thread
MAX_NUMEL_SHORT_TEXT = 8 * MAX_NUMEL_SINGLE_THREAD  # the states of at most 256 tokens in a model of 1024 features


@dataclass(frozen=True)
class FusedWindow(TableWindow):
    """In place of the window of a layout whose layers are fused: these have projected tables of their own."""

    # states that OpenVINO has computed, from the first layer on; each layer takes one, None if it is not requested
    computed: deque[Any] | None = None


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
        whole = self.whole_table() or TableWindow(0, 0, torch.empty(0), 0, can_shrink=False)
        return replace(layout, window=FusedWindow(**vars(whole)))

    def position_table(self, layout: BatchLayout) -> torch.Tensor | None:
        is_fused = isinstance(layout.window, FusedWindow) and layout.window.computed is not None
        return None if is_fused or not self.config.relative_attention else super().position_table(layout)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden], the embeddings
        layout: BatchLayout,
        output_attentions: bool = False,
        output_hidden_states: bool | int | list[int] = False,
        skip_last: bool = False,
        query_positions: torch.Tensor | None = None,  # [B, Q]
    ) -> BaseModelOutput:
        """The output of all layers, as `HfDebertaEncoder.forward` describes it; OpenVINO may compute them before."""
        if isinstance(layout.window, FusedWindow) and not output_attentions:
            layers, backend = len(self.layer), str(self.config._attn_implementation)
            kept = kept_states(output_hidden_states, layers + 1)
            needs_last = not skip_last and (query_positions is None or layers in kept)
            computed = self.fused_layers.first_layers(
                hidden_states, layout, layers if needs_last else layers - 1, kept, backend
            )
            layout = replace(layout, window=replace(layout.window, computed=deque(computed)))
        return super().forward(
            hidden_states, layout, output_attentions, output_hidden_states, skip_last, query_positions
        )


class OptimizedLayer(UndoneByTraining, HfDebertaLayer):
    fused_layer: Any = None  # FusedLayer

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        position_table: torch.Tensor | None,  # [R, hidden]
        layout: BatchLayout,
        *queries: Any,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states of the queries, which `HfDebertaLayer.forward` describes."""
        if output_attentions or not isinstance(layout.window, FusedWindow):
            options["output_attentions"] = output_attentions
            return super().forward(hidden_states, position_table, layout, *queries, **options)
        if layout.window.computed:
            return layout.window.computed.popleft(), None
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
        encoder, fused = self.of_encoder or (None, None)
        if fused is None or numel > MAX_NUMEL_SHORT_TEXT or not fused.is_usable(encoder, self.word_embeddings.weight):
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
