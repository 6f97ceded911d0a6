"""The type of attention beside int8, by timing on this computer: processors of one maker differ as well."""

import statistics
import time
import timeit
from collections.abc import Callable
from functools import lru_cache

import torch

from hf_deberta.model.batch_layout import AttentionMask

from .fused_attention import FusedAttention

TIMED_ROWS, TIMED_HEADS, TIMED_HEAD_SIZE = 128, 12, 64  # of the attention that is timed
CALLS_PER_TURN = 3
MAX_TURNS = 6
MAX_SECONDS_OF_TURNS = 3.0  # on a busy computer, where each call waits for its threads


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of attention's products: that of the linear layers, or beside int8 the faster floating type."""
    if dtype != torch.int8:
        return dtype
    return torch.bfloat16 if bfloat16_attention_ratio(torch.get_num_threads()) < 1 else torch.float32


@lru_cache(maxsize=16)
def bfloat16_attention_ratio(threads: int) -> float:
    """Time of one text's attention in bfloat16, divided by that in float32, with so many threads.

    The types take turns, and the median of the turns' ratios counts: a computer's speed may change from turn to turn. A
    turn is several calls, of which the shortest counts. No turn begins after `MAX_SECONDS_OF_TURNS`.
    """
    # not random numbers: the caller's next ones would depend on what was timed
    projected = torch.ones(TIMED_ROWS, 3 * TIMED_HEADS * TIMED_HEAD_SIZE)

    def make_call(dtype: torch.dtype) -> Callable[[], object]:
        attention = FusedAttention(None, TIMED_HEADS, TIMED_HEAD_SIZE, dtype)
        return lambda: attention.attend_whole_texts(projected, AttentionMask(), (1, TIMED_ROWS), "sdpa")

    calls, ratios = (make_call(torch.bfloat16), make_call(torch.float32)), list[float]()
    start = time.perf_counter()
    with torch.no_grad():
        while len(ratios) < MAX_TURNS and (not ratios or time.perf_counter() - start < MAX_SECONDS_OF_TURNS):
            times = [min(timeit.repeat(call, number=1, repeat=CALLS_PER_TURN)) for call in calls]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)
