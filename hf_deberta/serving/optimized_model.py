"""The classes that a model's encoder and layers have after `hf_deberta.optimize()`.

They compute with the fused layers in inference, and otherwise as the classes that they are made from, to which
`model.train()` changes them back. Copies and pickles have these classes too, and no fused layers.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.model.relative_position import TableWindow


@dataclass(frozen=True)
class FusedWindow(TableWindow):
    """In place of the window of a layout whose layers are fused: these have projected tables of their own."""

    needs_table: bool = True  # False while the encoder calls all its layers, without attention probabilities


class UndoneByTraining(nn.Module):
    """First base of the classes below: in training mode a module has its second base as class again."""

    def train(self, mode: bool = True) -> Any:
        if not mode:
            return super().train(mode)
        for name in ("fused_layers", "fused_layer"):
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
        needs_table = not isinstance(layout.window, FusedWindow) or layout.window.needs_table
        return super().position_table(layout) if needs_table and self.config.relative_attention else None

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden], the embeddings
        layout: BatchLayout,
        output_attentions: bool = False,
        *flags: Any,
        **options: Any,
    ) -> BaseModelOutput:
        """The output of all layers, as `HfDebertaEncoder.forward` describes it."""
        if isinstance(layout.window, FusedWindow) and not output_attentions:
            layout = replace(layout, window=replace(layout.window, needs_table=False))
        return super().forward(hidden_states, layout, output_attentions, *flags, **options)


class OptimizedLayer(UndoneByTraining, HfDebertaLayer):
    fused_layer: Any = None  # FusedLayer

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        position_table: torch.Tensor | None,  # [R, hidden]
        layout: BatchLayout,
        query_states: torch.Tensor | None = None,  # [B, Q, hidden]
        steps: int = 1,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New states of the queries, which `HfDebertaLayer.forward` describes."""
        if output_attentions or not isinstance(layout.window, FusedWindow):
            return super().forward(hidden_states, position_table, layout, query_states, steps, output_attentions)
        backend = self.attention.self.backend(output_attentions)
        return self.fused_layer(hidden_states, layout, query_states, steps, backend), None
