"""When the prepared layers of an encoder may compute in place of the layers that they were made from."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_deberta.model.fast_path_guards import (
    has_global_hooks_or_modes,
    in_functorch_transform,
    in_reference_mode,
    is_tracing_or_compiling,
)
from hf_deberta.model.private_apis import is_hooked_or_patched, registered_ids, version
from hf_deberta.model.relative_table import table_modules

from .packed_layer import NoneInCopies, PackedLayer

logger = logging.get_logger(__name__)


class PreparedLayers(NoneInCopies):
    """The prepared layers of an encoder, and the state of the modules that they were made from."""

    def __init__(self, encoder: Any, layers: list[PackedLayer], bypassed: Iterable[nn.Module]):
        """`bypassed`: the modules inside the encoder's layers that prepared layers do not call."""
        modules = table_modules(encoder)
        self.layers, self.bypassed = layers, (*bypassed, encoder.layer, *modules)
        self.weights = tuple(weight for module in (encoder.layer, *modules) for weight in module.parameters())
        self.state = self.present_state(encoder)

    def present_state(self, encoder: Any) -> tuple[Any, ...]:
        """Changes if a weight is written, moved or replaced, or a module is replaced, hooked, patched or trained.

        The encoder is passed and not kept, so that it can be freed.
        """
        return (
            [*map(id, (encoder.layer, *table_modules(encoder)))],
            [registered_ids(module) for module in self.bypassed],
            [(weight.data_ptr(), 0 if weight.is_inference() else version(weight)) for weight in self.weights],
            [module.training or is_hooked_or_patched(module) for module in self.bypassed],
        )

    def is_usable(self, encoder: nn.Module, states: torch.Tensor) -> bool:
        """True if the prepared layers give what calling the layers gives."""
        if is_tracing_or_compiling() or in_reference_mode() or in_functorch_transform() or has_global_hooks_or_modes():
            return False
        reason = self.unusable_reason(encoder, states)
        if reason is not None:
            logger.warning_once(f"this model was prepared by hf_deberta.optimize, which has no effect now: {reason}")
        return reason is None

    def unusable_reason(self, encoder: nn.Module, states: torch.Tensor) -> str | None:
        if torch.is_grad_enabled():
            return "gradients are recorded; call the model under torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on; pass a dtype to hf_deberta.optimize instead"
        if states.device.type != "cpu" or states.dtype != torch.float32:
            return f"its states are {states.dtype} on {states.device}; keep the model in float32 on the CPU"
        if self.present_state(encoder) != self.state:
            return "weights or modules have changed since; call hf_deberta.optimize again"
        return None
