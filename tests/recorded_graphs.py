"""A CUDA graph on a CPU, for tests: record the operators of a call, and replay them on the same memory.

Like a CUDA graph it knows addresses, not Python: it fails where Python reads a value, reads inputs where they were when
it was recorded, and ignores whatever Python would decide anew. It also fails if memory that it reads was freed.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")


class Recorder(TorchDispatchMode):
    """Records operators with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()  # addresses of the results
        self.read: dict[int, StorageWeakRef] = {}  # memory from outside, by its address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        boolean_index = (
            name.startswith("aten::index")
            and any(index is not None and index.dtype == torch.bool for index in args[1] if torch.is_tensor(index))
            if name in ("aten::index", "aten::index_put_", "aten::index_put")
            else False
        )
        if name in READS or boolean_index:
            raise RuntimeError(f"{name} would wait for the device in a graph")
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.made:
                self.read.setdefault(storage.data_ptr(), StorageWeakRef(storage))
        results = func(*args, **kwargs)
        self.made.update(tensor.untyped_storage().data_ptr() for tensor in tensors_in(results))
        if not func.is_view:
            # detached tensors with the same memory: the caller may move its own to other memory
            self.calls.append((func, *(tree_map(alias, part) for part in (args, kwargs, results))))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            again = func(*args, **kwargs)
            for fixed, new in zip(tensors_in(results), tensors_in(again), strict=True):
                if fixed.data_ptr() != new.data_ptr():
                    fixed.copy_(new)


def alias(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def record(call, pool=None):
    """Replace `graphed_steps.capture`."""
    with torch.random.fork_rng([]), Recorder() as recorder:  # a GPU draws nothing while it records
        outputs = call()
    return recorder.replay, outputs
