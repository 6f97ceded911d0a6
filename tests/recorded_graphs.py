"""A CUDA graph on a CPU, for tests: record the operators of a call, and replay them on the same memory.

Like a CUDA graph it knows addresses, not Python: it fails where Python reads a value, reads inputs where they were when
it was recorded, and ignores whatever Python would decide anew. It also fails if memory that it reads was freed.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
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


def record(call, memory=None):
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


class SimulatedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self, captures):
        self.captures, self.held_pool, self.recorder = captures, None, None

    def pool(self):
        return self.held_pool

    def replay(self):
        self.captures.draw()
        self.recorder.replay()

    def reset(self):
        if self.held_pool is not None:
            self.captures.release_pool(0, self.held_pool)
        self.held_pool = None

    def __del__(self):
        self.reset()


class SimulatedCaptures:
    """What PyTorch 2.11 notes of captures, and what a failed one leaves: `capture_end` checks CUDA's answer first."""

    def __init__(self, monkeypatch):
        self.default = self.current_stream = SimpleNamespace(wait_stream=lambda other: None)
        self.references = Counter()  # by pool
        self.recording, self.recording_pinned = [], []  # pools to which allocators record
        self.generator_captures = self.stream_captures = False
        dropout = functional.dropout
        attributes = {
            "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "CUDAGraph": lambda: SimulatedGraph(self),
            "current_stream": lambda: self.current_stream,
            "mem_get_info": lambda: (0, 0),
            "stream": self.stream,
            "graph": self.graph,
        }
        attributes |= {name: lambda: 0 for name in ("current_device", "max_memory_allocated", "memory_allocated")}
        for name, value in {**attributes, "memory_reserved": lambda: 0}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        monkeypatch.setattr(functional, "dropout", lambda *args, **kwargs: self.draw() or dropout(*args, **kwargs))

    def draw(self):
        if self.generator_captures != self.stream_captures:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def end_allocation(self, device, pool):
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release_pool(self, device, pool):
        self.references[pool] -= 1
        assert self.references[pool] >= 0

    @contextmanager
    def stream(self, stream):
        previous, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = previous

    @contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        previous, self.current_stream = self.current_stream, stream
        assert pool is None or self.references[pool] > 0
        pool = pool or (len(self.references) + 1, 0)
        self.references[pool] += 1
        for pools in (self.recording, self.recording_pinned):
            if pool in pools:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            pools.append(pool)
        self.generator_captures = self.stream_captures = True
        try:
            with torch.random.fork_rng([]), Recorder() as graph.recorder:
                yield
        except Exception:
            for tensor in tensors_in([call[-1] for call in graph.recorder.calls]):
                if memory_of(tensor) in graph.recorder.made and tensor.is_floating_point():
                    tensor.fill_(torch.nan)  # a capture computes nothing
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            self.stream_captures = False
        self.end_allocation(0, pool)
        self.recording_pinned.remove(pool)
        self.generator_captures, self.current_stream, graph.held_pool = False, previous, pool
