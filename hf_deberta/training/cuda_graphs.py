"""Capture the kernels of a call as a CUDA graph, in memory that several graphs share.

>>> memory = GraphMemory(torch.device("cuda"))
>>> replay, outputs = capture(lambda: model(inputs), memory)
>>> inputs.copy_(others)
>>> replay()  # outputs are those of the other inputs
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

FAILED_GRAPHS: list[Any] = []  # see GraphMemory.abandon


class GraphMemory:
    """The stream and the pool of memory that graphs share. A small graph keeps the pool when it has no other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None  # of eager steps and of captures
        self.small_graph: Any = None

    @property
    def pool(self) -> Any:
        if self.small_graph is None:
            self.renew()
        return self.small_graph.pool()

    def renew(self) -> None:
        """Take a new pool: that of a small graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)
        self.small_graph = graph

    def abandon(self, graph: Any) -> None:
        """Undo a capture that failed: where CUDA finds it invalid, PyTorch raises before it ends anything.

        The allocator still records to the pool, and would never free memory again. The allocator of pinned memory
        (from PyTorch 2.11) does so for good, and has the address of the graph: the graph stays, and no other uses the
        pool. The random generator expects a capture, so dropout and replays raise until the next capture has ended.
        """
        FAILED_GRAPHS.append(graph)
        allocator: Any = torch._C
        with suppress(Exception):  # the first call raises if the capture has ended: then the graph releases the pool
            is_old = not hasattr(allocator, "_cuda_endAllocateToPool")  # before PyTorch 2.8
            end = allocator._cuda_endAllocateCurrentStreamToPool if is_old else allocator._cuda_endAllocateToPool
            end(torch.cuda.current_device(), self.pool)
            allocator._cuda_releasePool(torch.cuda.current_device(), self.pool)
        graph.reset()
        self.renew()


def capture(call: Callable[[], Any], memory: GraphMemory) -> tuple[Callable[[], None], Any]:
    """Return what replays the kernels of a call, and the call's results, which each replay overwrites."""
    needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()  # by the largest step so far
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < 2 * needed:  # a graph keeps its memory, and others run eagerly
        raise MemoryError(f"steps take up to {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
    graph, pool = torch.cuda.CUDAGraph(), memory.pool
    try:
        with (
            torch.cuda.stream(memory.stream),  # a capture that fails does not leave its stream
            torch.cuda.graph(graph, pool, memory.stream, capture_error_mode="thread_local"),  # other threads load data
        ):
            outputs = call()
    except Exception:
        memory.abandon(graph)
        raise
    return graph.replay, outputs
