"""Batches are filled by tokens, in order; a cancelled request and a failing batch stop nothing else.

test_serve has the full queue.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from token_batcher import TokenBatcher


def rows_of(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length} for length in lengths]


class Recorder:
    """Computes the length of each row, and keeps the lengths of each batch."""

    def __init__(self):
        self.batches: list[list[int]] = []

    def __call__(self, rows):
        lengths = [len(row["input_ids"]) for row in rows]
        self.batches.append(lengths)
        if 13 in lengths:
            raise RuntimeError("13 tokens")
        return [[float(length)] for length in lengths]


def run(requests, max_tokens=10, max_wait=0.0, cancel=()):
    """Submit the requests in order before the first batch is computed; return their results and the batches."""

    async def serve():
        compute = Recorder()
        batcher = TokenBatcher(compute, max_tokens, 1000, max_wait)
        answers = [asyncio.create_task(batcher.submit(rows_of(*lengths))) for lengths in requests]
        await asyncio.sleep(0)
        for number in cancel:
            answers[number].cancel()
        await asyncio.sleep(0)
        with ThreadPoolExecutor(1) as thread:
            task = asyncio.create_task(batcher.run(thread))
            results = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 20)
            task.cancel()
        assert batcher.waiting_tokens == 0 and not batcher.queue
        return results, compute.batches

    return asyncio.run(serve())


def test_batches_hold_as_many_tokens_as_allowed():
    results, batches = run([[4, 3], [3, 2, 5], [1], [2, 2]])
    assert batches == [[4, 3, 3], [2, 5, 1, 2], [2]]
    assert results == [[[4.0], [3.0]], [[3.0], [2.0], [5.0]], [[1.0]], [[2.0], [2.0]]]


def test_a_longer_text_is_computed_alone():
    assert run([[2], [25], [3, 3]])[1] == [[2], [25], [3, 3]]


def test_an_idle_model_waits_until_a_batch_is_full():
    """The waiting time is longer than the test may take."""
    assert run([[4], [6]], max_wait=60)[1] == [[4, 6]]


def test_an_idle_model_does_not_wait_longer_than_allowed():
    assert run([[4]], max_wait=0.01)[1] == [[4]]


def test_rows_of_a_cancelled_request_are_not_computed():
    results, batches = run([[4], [3, 3], [5]], cancel=[1])
    assert isinstance(results[1], asyncio.CancelledError)
    assert batches == [[4], [5]] or batches == [[4, 5]]


def test_a_batch_that_fails_does_not_stop_the_next():
    results, batches = run([[4], [13], [5]])
    assert isinstance(results[1], RuntimeError)
    assert results[::2] == [[[4.0]], [[5.0]]] and batches == [[4], [13], [5]]


@pytest.mark.parametrize("cancel", [[0], [0, 1]])
def test_a_queue_of_cancelled_requests_is_emptied(cancel):
    results, batches = run([[4], [5]], cancel=cancel)
    assert batches == ([] if len(cancel) == 2 else [[5]])
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == len(cancel)
