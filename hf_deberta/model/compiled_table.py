"""The projected position tables in graphs that torch.compile builds for inference on the CPU.

Legend: H heads, d head size, R rows of the table in use.

A graph would project the whole table in each call, although the projection depends on weights only. Therefore it calls
an operator, which is opaque to compilers: it keeps the projection of all rows in a `WeightCache` and returns a copy of
those that the length needs. The weights are inputs of the operator, so that a graph with other weights is right, too.
"""

import re
from threading import Lock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from .fast_path_guards import in_reference_mode, is_tracing_or_exporting, is_unmodified_module
from .weight_cache import WeightCache

# the operator is registered by module name: a copy of this file from the Hub must not replace that of the package
OPERATORS = re.sub(r"\W", "_", __name__.rpartition(".")[0])

# by the address of a projection's weight, epsilon and heads; an entry is dropped after its weight has been freed
_caches: dict[tuple[int, float, int], tuple[StorageWeakRef, WeightCache]] = {}
_lock = Lock()  # around changes of `_caches`


def can_call_operators(modules: tuple[nn.Module, ...]) -> bool:
    """True while torch.compile builds a graph for inference in which operators may replace calls of `modules`.

    torch.export and torch.jit.trace are excluded: their graphs leave the process.
    """
    return (
        torch.compiler.is_compiling()
        and not is_tracing_or_exporting()
        and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or in_reference_mode())
        and all(not module.training and is_unmodified_module(module) for module in modules)
        and all(weight.device.type == "cpu" for module in modules for weight in module.parameters(recurse=False))
    )


@torch.library.custom_op(f"{OPERATORS}::project_table", mutates_args=())
def project_table(
    table: list[torch.Tensor],  # the embedding [rows, hidden], then weight and bias of its LayerNorm if there is one
    layer: list[torch.Tensor],  # weight [H d, hidden] and bias of the projection
    epsilon: float,  # of the LayerNorm
    heads: int,
    scale: float,
    first: int,
    rows: int,
) -> torch.Tensor:
    """Return rows [first, first + rows) of the projected table times `scale`, [H, R, d], as a new tensor."""

    def compute() -> torch.Tensor:
        states = table[0]
        if len(table) > 1:
            weight, bias = table[1:]
            states = functional.layer_norm(states, states.shape[-1:], weight, bias, epsilon)
        return functional.linear(states, *layer).unflatten(-1, (heads, -1)).transpose(0, 1)

    weights = [*table, *layer]
    detectable = not any(weight.is_inference() for weight in weights)
    whole = cache_of(layer[0], epsilon, heads).get_or_compute_weights(weights, compute) if detectable else compute()
    result = whole.new_empty(heads, rows, whole.shape[-1])
    return torch.mul(whole[:, first : first + rows], scale, out=result)


@project_table.register_fake
def _(table, layer, epsilon, heads, scale, first, rows):
    return layer[0].new_empty(heads, rows, layer[0].shape[0] // heads)


def cache_of(weight: torch.Tensor, epsilon: float, heads: int) -> WeightCache:
    """Return the cache for this weight; a new one drops those of freed weights."""
    key = weight.data_ptr(), epsilon, heads
    with _lock:
        entry = _caches.get(key)
        if entry is None or entry[0].expired():
            for freed in [key for key, (storage, _) in _caches.items() if storage.expired()]:
                del _caches[freed]
            entry = StorageWeakRef(weight.untyped_storage()), WeightCache()
            _caches[key] = entry
    return entry[1]
