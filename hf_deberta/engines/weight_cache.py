"""Inference cache for tensors that depend only on weights: the projected position tables.

Projecting these tables is a large part of the work for a short sentence. A result is cached only in eval mode, without
gradients, on the CPU, and for modules that `is_unmodified_module` accepts; otherwise it is computed each time.

The cache is invalidated when a weight changes. Autograd counts most writes, but not those through `weight.data`
(`weight.data[100:700, 0:60] = 0`, `weight.data.copy_`, optimizers with flat buffers). Therefore each call reads the
weights completely and compares sums of their bits, as exact integers: see `checksums`. That costs about 2 % of a
forward pass of v3-base with 32 tokens, where the cache saves 20 %, because the layer reads most of these weights right
afterwards to project the tokens. A comparison with a copy would cost four times as much, and one with samples of the
weights would miss writes. On a GPU a comparison would have to wait for the device, so nothing is cached there.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..model.input_checks import in_captured_graph, in_transform
from ..model.slots import in_reference_mode
from .guards import has_global_hooks_or_modes, is_unmodified_module

NUMBER_OF_SUMS = 16411  # prime; many, because adding long rows is as fast as reading them
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes

Result = TypeVar("Result")


class CacheEntry(NamedTuple):
    state: tuple[Any, ...]  # see weight_state; and the epsilon of each LayerNorm
    checksums: list[torch.Tensor]  # see checksums
    inputs: tuple[object, ...]
    result: Any


# beside the modules, so that copies, pickles and models of Transformers hold nothing of this
_entries: WeakKeyDictionary[nn.Module, CacheEntry] = WeakKeyDictionary()


def from_weight_cache(
    owner: nn.Module, modules: Iterable[nn.Module], compute: Callable[[], Result], *inputs: object
) -> Result | None:
    """Replace `from_cache`: the last result for this owner, if weights and inputs (by identity) are the same."""
    if in_captured_graph():  # which cannot hold a cache
        return None
    modules = tuple(modules)
    if not can_cache(modules):
        _entries.pop(owner, None)
        return None
    weights: list[torch.Tensor] = [weight for module in modules for weight in module.parameters(recurse=False)]
    entry, state = _entries.get(owner), (*weight_state(weights), *(getattr(each, "eps", None) for each in modules))
    sums = [part for weight in weights for part in checksums(weight)]
    if (
        entry is not None
        and entry.state == state
        and all(old is new for old, new in zip(entry.inputs, inputs, strict=True))
        and all(map(torch.equal, entry.checksums, sums))
    ):
        return entry.result
    result = compute()
    _entries[owner] = CacheEntry(state, [part.clone() for part in sums], inputs, result)
    return result


def can_cache(modules: Iterable[nn.Module]) -> bool:
    """True if results of `modules` depend only on their weights, and changes of these weights are detected."""
    if (
        torch.is_grad_enabled()
        or in_reference_mode()
        or in_captured_graph()
        or in_transform()
        or has_global_hooks_or_modes()
    ):
        return False
    return all(map(is_fixed, modules))


def is_fixed(module: nn.Module) -> bool:
    """True if the module computes the same until one of its weights changes, which is detected."""
    if module.training:
        return False
    if isinstance(module, nn.Dropout | nn.Identity):
        return True
    # weights on the CPU created outside `torch.inference_mode`, in which autograd counts no writes
    return is_unmodified_module(module) and all(
        weight.device.type == "cpu" and not weight.is_inference() for weight in module.parameters(recurse=False)
    )


def weight_state(weights: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return a fingerprint of the weights: addresses, autograd's version counters, types, devices, autocast's type.

    It changes with every write that autograd counts, but not with writes through `weight.data`.
    """
    device = weights[0].device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast_dtype, *((weight.data_ptr(), weight._version, weight.dtype, weight.device) for weight in weights)


def checksums(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return integers that change with every write to the weight.

    The bits of the weight are read as integers of 64 bits, and every `NUMBER_OF_SUMS`th of them is added to the same
    sum, modulo 2^64; the integers that are left over are returned as they are. The number is prime, so the values of a
    row go to different sums, and so do those of a column: any change of one row or one column changes a sum. A change
    of more is missed only if the differences of its bits cancel to exactly 0 in every sum.
    """
    integers = as_integers(weight)
    left_over = integers.numel() % NUMBER_OF_SUMS
    if left_over == integers.numel():
        return (integers,)
    summed, rest = integers.split((integers.numel() - left_over, left_over))
    return summed.view(-1, NUMBER_OF_SUMS).sum(0), rest


def as_integers(weight: torch.Tensor) -> torch.Tensor:
    """Return the bits of the weight as a vector of integers, of 64 bits each where the weight's size allows it."""
    values = weight.detach().reshape(-1)
    size = values.element_size()
    fits = values.numel() * size % 8 == 0 and values.storage_offset() * size % 8 == 0
    return values.view(torch.int64 if fits else INTEGERS[size])
