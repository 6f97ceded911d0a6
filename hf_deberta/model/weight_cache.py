"""Inference cache for tensors that depend only on weights: the projected position tables.

WARNING: in inference on the CPU, do not write single values of a weight through `weight.data`: the cache may miss such
a write and return the old result. Write `with torch.no_grad(): weight[3, 5] = 0`, which autograd counts.

Projecting these tables is a large part of the work for a short sentence. A result is cached only in eval mode, without
gradients, on the CPU, and for modules that `is_unmodified_module` accepts; otherwise it is computed each time.

The cache is invalidated when a weight is replaced, moved, cast or written in place. Writes that autograd does not count
(`weight.data.copy_`, optimizers with flat buffers, `weight.data[row] = 0`) are detected by comparing at least one value
of each row and column. On a GPU this comparison would have to wait for the device, so nothing is cached there.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .fast_path_guards import (
    has_global_hooks_or_modes,
    in_functorch_transform,
    in_reference_mode,
    is_tracing_or_compiling,
    is_unmodified_module,
)
from .private_apis import version

Result = TypeVar("Result")


class CacheEntry(NamedTuple):
    state: tuple[Any, ...]  # see weight_state
    samples: list[torch.Tensor]  # see sample_weights
    inputs: tuple[object, ...]
    result: Any


class WeightCache:
    """Cache of one result, together with the state of the weights that it was computed from.

    >>> cache = WeightCache()
    >>> cache.get_or_compute((layer,), lambda: layer(states), states)  # computed
    >>> cache.get_or_compute((layer,), lambda: layer(states), states)  # the same object, until `layer` changes
    """

    def __init__(self) -> None:
        self._entry: CacheEntry | None = None

    def __reduce__(self) -> tuple[type["WeightCache"], tuple[()]]:
        return WeightCache, ()  # copies and pickles start empty

    def clear(self) -> None:
        self._entry = None

    def get_or_compute(self, modules: Iterable[nn.Module], compute: Callable[[], Result], *inputs: object) -> Result:
        """Return the cached result if the weights of `modules` and the `inputs` (by identity) are unchanged."""
        weights: list[torch.Tensor] = [weight for module in modules for weight in module.parameters(recurse=False)]
        entry, state, samples = self._entry, weight_state(weights), sample_weights(weights)
        if (
            entry is not None
            and entry.state == state
            and len(entry.inputs) == len(inputs)
            and all(old is new for old, new in zip(entry.inputs, inputs, strict=True))
            and all(map(torch.equal, entry.samples, samples))
        ):
            return entry.result
        result = compute()
        self._entry = CacheEntry(state, [sample.clone() for sample in samples], inputs, result)
        return result


def can_cache(modules: Iterable[nn.Module]) -> bool:
    """True if results of `modules` depend only on their weights, and changes of these weights are detected."""
    if (
        torch.is_grad_enabled()
        or in_reference_mode()
        or is_tracing_or_compiling()
        or in_functorch_transform()
        or has_global_hooks_or_modes()
    ):
        return False
    return all(
        not module.training and is_unmodified_module(module) and has_detectable_changes(module) for module in modules
    )


def has_detectable_changes(module: nn.Module) -> bool:
    """True for weights on the CPU created outside `torch.inference_mode`, in which autograd counts no writes."""
    weights = module.parameters(recurse=False)
    return all(weight.device.type == "cpu" and not weight.is_inference() for weight in weights)


def weight_state(weights: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return a fingerprint of the weights: addresses, autograd's version counters, types, devices, autocast's type.

    It changes with every write that autograd counts, but not with writes through `weight.data`.
    """
    device = weights[0].device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast_dtype, *((weight.data_ptr(), version(weight), weight.dtype, weight.device) for weight in weights)


def sample_weights(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of at least one value of each row and each column, along diagonals."""
    return [
        weight.detach().reshape(-1)[:: diagonal_step(weight.numel() // weight.shape[-1], weight.shape[-1])]
        for weight in weights
    ]


@lru_cache(maxsize=64)
def diagonal_step(rows: int, columns: int) -> int:
    """Return a step through the values of a matrix, in row-major order, that visits each row and each column.

    >>> diagonal_step(768, 768)
    767
    """
    step = max(1, min(rows, columns - 1))
    while math.gcd(step, columns) > 1:
        step -= 1
    return step
