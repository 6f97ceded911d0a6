"""A CUDA graph on a CPU, for tests: record the operators of a call, and replay them on the same memory.

Like a CUDA graph it knows addresses, not Python: it fails where Python reads a value, reads inputs where they were when
it was recorded, and ignores whatever Python would decide anew. It also fails if memory that it reads was freed.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import masking_utils

from hf_deberta.engines import onednn
from hf_deberta.training import graphed_steps

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")  # which read masks


class Recorder(TorchDispatchMode):
    """Records operators with their arguments and results, as tensors of its own with the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()  # the memory of results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        by_mask = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in READS or by_mask:
            raise RuntimeError(f"{name} would wait for the device in a graph")
        outside = [each for each in map(memory_of, tensors_in((args, kwargs))) if each not in self.made]
        results = func(*args, **kwargs)
        self.made.update(each for each in map(memory_of, tensors_in(results)) if each not in outside)
        if not func.is_view:
            self.calls.append((func, *(tree_map(alias, part) for part in (args, kwargs, results))))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        own = Counter(memory_of(tensor) for call in self.calls for tensor in tensors_in(call))
        for memory in own.keys() - self.made:
            if torch._C._storage_Use_Count(memory) <= own[memory] + 1:  # Python's storage counts too
                raise RuntimeError("the graph reads memory that was freed")
        for func, args, kwargs, results in self.calls:
            again = func(*args, **kwargs)
            for fixed, new in zip(tensors_in(results), tensors_in(again), strict=True):
                if fixed.data_ptr() != new.data_ptr():
                    fixed.copy_(new)


def alias(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def record(call, pool=None, stream=None):
    """Take the place of `graphed_steps.capture`."""
    with torch.random.fork_rng([]), Recorder() as recorder:  # a GPU draws nothing while it records
        outputs = call()
    return recorder.replay, outputs


def use_recorded_graphs(monkeypatch):
    """Compute as on a GPU that replays recorded graphs: values are not read, and oneDNN is not used."""
    monkeypatch.setattr(graphed_steps, "capture", record)
    monkeypatch.setattr(graphed_steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(onednn, "prefers_onednn", lambda: False)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a GPU captures
    for name, module in [*sys.modules.items()]:
        if name.startswith("hf_deberta") and hasattr(module, "can_read_values"):
            monkeypatch.setattr(module, "can_read_values", lambda tensor: False)
