"""A queue that fills batches by tokens instead of rows. Texts differ in length, so rows say little about the work.

>>> batcher = TokenBatcher(compute, max_tokens=2048, max_waiting_tokens=65536, max_wait=0.005)
>>> task = asyncio.create_task(batcher.run(ThreadPoolExecutor(1)))  # compute(rows) runs in that thread
>>> results = await batcher.submit([tokenizer("a text"), tokenizer("another")])
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

Row = dict[str, list[int]]  # what a tokenizer returns for one text or one pair


class QueueFull(Exception):
    """The rows of a request do not fit into the queue."""


@dataclass
class QueuedRow:
    row: Row
    result: asyncio.Future[list[float]]
    arrival: float

    @property
    def tokens(self) -> int:
        return len(self.row["input_ids"])


class TokenBatcher:
    """A bounded queue of rows of all requests, computed in order, in batches of at most `max_tokens` real tokens."""

    def __init__(
        self,
        compute: Callable[[list[Row]], list[list[float]]],
        max_tokens: int,
        max_waiting_tokens: int,
        max_wait: float,  # seconds
    ):
        self.compute, self.max_wait = compute, max_wait
        self.max_tokens, self.max_waiting_tokens = max_tokens, max_waiting_tokens
        self.queue: deque[QueuedRow] = deque()
        self.waiting_tokens = 0  # tokens in the queue
        self.changed = asyncio.Event()

    async def submit(self, rows: list[Row]) -> list[list[float]]:
        """Return the results of the rows, which may lie in several batches. Cancelling it cancels its rows."""
        loop = asyncio.get_running_loop()
        queued = [QueuedRow(row, loop.create_future(), time.monotonic()) for row in rows]
        tokens = sum(row.tokens for row in queued)
        if self.waiting_tokens + tokens > self.max_waiting_tokens:
            raise QueueFull
        self.queue.extend(queued)
        self.waiting_tokens += tokens
        self.changed.set()
        return await asyncio.gather(*(row.result for row in queued))

    async def run(self, thread: Executor) -> None:
        """Compute batch after batch in a thread until cancelled. If one fails, its requests get the error."""
        while True:
            await self.wait_for_rows()
            batch = self.take_batch()
            rows = [queued.row for queued in batch]
            try:
                results = await asyncio.get_running_loop().run_in_executor(thread, self.compute, rows) if rows else []
            except Exception as error:
                for queued in batch:
                    if not queued.result.done():
                        queued.result.set_exception(error)
                continue
            for queued, result in zip(batch, results, strict=True):
                if not queued.result.done():  # else its request has been given up
                    queued.result.set_result(result)

    async def wait_for_rows(self) -> None:
        """Wait for the first row, then until a batch is full or the first row has waited for `max_wait`."""
        while not self.queue:
            self.changed.clear()
            await self.changed.wait()
        end = self.queue[0].arrival + self.max_wait
        while self.waiting_tokens < self.max_tokens and (remaining := end - time.monotonic()) > 0:
            self.changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), remaining)

    def take_batch(self) -> list[QueuedRow]:
        """Remove rows from the front of the queue: at least one, and no more than `max_tokens` allows."""
        batch: list[QueuedRow] = []
        tokens = 0
        while self.queue and (not batch or tokens + self.queue[0].tokens <= self.max_tokens):
            queued = self.queue.popleft()
            self.waiting_tokens -= queued.tokens
            if not queued.result.done():
                batch.append(queued)
                tokens += queued.tokens
        return batch
