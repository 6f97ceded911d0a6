"""What depends on weights alone is computed once while a model serves, and anew when a weight has changed.

So the projected position tables, much of the work for a short sentence. A result is remembered only in eval mode
without gradients, and only for plain modules: with hooks, adapters, quantised or sharded weights, a compiler or a
tracer it is computed each time. Weights count as changed when they were replaced, moved, cast or written in place. For
writes past autograd's back (`weight.data.copy_`, optimizers with flat buffers, a row set to zero) one value of each
row and column is compared, which a device would have to be waited for: so only on the CPU is anything remembered.
Single values are to be written where autograd sees it (`with torch.no_grad(): weight[3, 5] = 0`).
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import nn

from .fast_path_guards import (
    has_global_hooks_or_modes,
    in_functorch_transform,
    is_tracing_or_compiling,
    is_unmodified_module,
)


class WeightCache:
    """A result and the weights it was computed from.

    >>> tables = Remembered()
    >>> tables.of((layer,), lambda: layer(states), states)  # computed
    >>> tables.of((layer,), lambda: layer(states), states)  # the same object, as long as `layer` is unchanged
    """

    def __init__(self):
        self._known = None

    def __reduce__(self):
        return WeightCache, ()  # copies and pickles start empty

    def forget(self) -> None:
        self._known = None

    def of(self, modules: tuple[nn.Module, ...], compute: Callable[[], object], *others: object) -> object:
        """compute(), or what it gave for the same weights and the same `others`, compared as objects."""
        weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        known, state = self._known, state_of(weights)
        if known is not None:
            old_state, old_others, samples, result = known
            same = old_state == state and len(others) == len(old_others)
            same = same and all(new is old for new, old in zip(others, old_others, strict=True))
            if same and all(map(torch.equal, samples, samples_of(weights))):
                return result
        result = compute()
        self._known = state, others, [sample.clone() for sample in samples_of(weights)], result
        return result


def can_cache(modules: Iterable[nn.Module]) -> bool:
    """Whether nothing but the weights of `modules` can influence what they compute, and no gradient is wanted."""
    if torch.is_grad_enabled() or is_tracing_or_compiling() or in_functorch_transform() or has_global_hooks_or_modes():
        return False
    return all(
        not module.training and is_unmodified_module(module) and has_visible_changes(module) for module in modules
    )


def has_visible_changes(module: nn.Module) -> bool:
    """Weights made under `torch.inference_mode` do not count their changes, and those on a device cannot be sampled."""
    weights = module.parameters(recurse=False)
    return all(weight.device.type == "cpu" and not weight.is_inference() for weight in weights)


def state_of(weights: list[torch.Tensor]) -> tuple:
    device = weights[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return autocast, *((weight.data_ptr(), weight._version, weight.dtype, weight.device) for weight in weights)


def samples_of(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of each weight at least one value of each row and each column, along diagonals."""
    return [
        weight.detach().reshape(-1)[:: diagonal_step(weight.numel() // weight.shape[-1], weight.shape[-1])]
        for weight in weights
    ]


@lru_cache(maxsize=64)
def diagonal_step(rows: int, columns: int) -> int:
    """A step through the values of a matrix, row after row, that meets each row and each column.

    >>> diagonal_step(768, 768)
    767
    """
    step = max(1, min(rows, columns - 1))
    while math.gcd(step, columns) > 1:
        step -= 1
    return step
