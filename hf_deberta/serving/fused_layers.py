"""When the fused layers of an encoder may compute in place of the layers that they were made from."""

from collections.abc import Iterable
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_deberta.engines.guards import has_global_hooks_or_modes, hooks, in_functorch_transform, registries
from hf_deberta.model.input_checks import in_captured_graph
from hf_deberta.model.relative_position import table_modules
from hf_deberta.model.slots import in_reference_mode

from .fused_layer import FusedLayer, NoneInCopies

logger = logging.get_logger(__name__)

SAMPLE_SIZE = 16  # numbers of each weight: a cache line of float32
GOLDEN_RATIO = 0.618034  # its multiples, without their whole parts, are spread evenly between 0 and 1


class FusedLayers(NoneInCopies):
    """The fused layers of an encoder, and the state of the modules that they were made from."""

    def __init__(self, encoder: Any, layers: list[FusedLayer], bypassed: Iterable[nn.Module]):
        """`bypassed`: the modules inside the encoder's layers that fused layers do not call."""
        modules = table_modules(encoder)
        self.layers, self.bypassed = layers, (*bypassed, encoder.layer, *modules)
        self.called = tuple(encoder.layer)
        weights = [weight for module in (encoder.layer, *modules) for weight in module.parameters()]
        self.weights = tuple(weights)
        self.counted = tuple(weight for weight in weights if not weight.is_inference())  # their writes are counted
        samples = [sample_of(weight, i * GOLDEN_RATIO % 1) for i, weight in enumerate(weights)]
        # of the table a number of each row: training changes the rows of the distances that it has seen
        samples += [table.detach()[:, 0] for module in modules for table in module.parameters() if table.dim() == 2]
        self.samples, self.sampled = samples, torch.cat(samples).view(torch.int32)
        self.registries = tuple(registry for module in self.bypassed for registry in registries(module))
        self.hooks = tuple(chain.from_iterable(map(hooks, self.bypassed)))
        self.state: tuple[Any, ...] = ()  # set when the layers have their new class, which their `train()` takes away

    def has_same_samples(self) -> bool:
        """False if a whole weight was written, also by those whose writes autograd does not count.

        PEFT merges adapters by `weight.data +=`, fused optimizers and NumPy write without a count. Reading all weights
        would take as long as the forward pass, so only `SAMPLE_SIZE` numbers of each are compared, bit by bit.
        """
        return torch.equal(torch.cat(self.samples).view(torch.int32), self.sampled)

    def present_state(self, encoder: Any) -> tuple[Any, ...]:
        """Changes if a write to a weight is counted, a weight is moved or replaced, or a module is replaced or altered.

        Alterations are hooks, a `forward` of its own, another class and training mode. The encoder is passed and not
        kept, so that it can be freed. This runs in each forward pass, when Python's objects have left the processor's
        caches, hence `map` and not comprehensions.
        """
        return (
            [*map(id, (encoder.layer, *table_modules(encoder)))],
            [*map(id, chain.from_iterable(map(dict.values, self.registries)))],
            [*map(torch.Tensor.data_ptr, self.weights)],
            [*map(attrgetter("_version"), self.counted)],
            [*map(type, chain(self.bypassed, self.called))],
            any(map(attrgetter("training"), self.bypassed)),
            any(self.hooks) or any_is_patched(self.bypassed),
        )

    def is_usable(self, encoder: nn.Module, states: torch.Tensor) -> bool:
        """True if the fused layers give what calling the layers gives."""
        if in_captured_graph() or in_reference_mode() or in_functorch_transform() or has_global_hooks_or_modes():
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
        if self.present_state(encoder) != self.state or not self.has_same_samples():
            return "weights or modules have changed since; call hf_deberta.optimize again"
        return None


def sample_of(weight: torch.Tensor, place: float) -> torch.Tensor:
    """Neighbouring numbers of a row, at a place from 0 (the first) to 1, as a view that shows later writes."""
    values = weight.detach()
    while values.dim() > 1:
        values = values[int(place * (len(values) - 1))]
    first = int(place * max(len(values) - SAMPLE_SIZE, 0))
    return values[first : first + SAMPLE_SIZE]


def any_is_patched(modules: tuple[nn.Module, ...]) -> bool:
    """True if one of the modules has a `forward` of its own, beside that of its class."""
    return any(map(contains, map(vars, modules), repeat("forward")))
