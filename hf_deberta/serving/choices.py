"""Choices that `hf_deberta.optimize` makes by timing on this computer: processors of one maker differ as well."""

import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from hf_deberta.model.batch_layout import AttentionMask, BatchLayout

from .fused_attention import FusedAttention
from .openvino_layers import OpenVinoLayers

TimedCall = Callable[[], object]

TIMED_ROWS, TIMED_HEADS, TIMED_HEAD_SIZE = 128, 12, 64  # of the attention that is timed
CALLS_PER_TURN = 3
MAX_TURNS = 6
MAX_TURNS_OF_LAYERS = 3
MAX_SECONDS_OF_TURNS = 3.0  # on a busy computer, where each call waits for its threads
# batch and tokens, for the choice of the runtime
SHORT_TEXT_SHAPE, TEXT_SHAPE, LONG_BATCH_SHAPE = (1, 32), (1, 128), (8, 128)
UNLIMITED_TOKENS = sys.maxsize
MAX_TIME_RATIO_OF_OPENVINO = 1.05


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of attention's products: that of the linear layers, or beside int8 the faster floating type."""
    if dtype != torch.int8:
        return dtype
    return torch.bfloat16 if bfloat16_attention_ratio(torch.get_num_threads()) < 1 else torch.float32


@lru_cache(maxsize=16)
def bfloat16_attention_ratio(threads: int) -> float:
    """Time of one text's attention in bfloat16, divided by that in float32, with so many threads."""
    # not random numbers: the caller's next ones would depend on what was timed
    projected = torch.ones(TIMED_ROWS, 3 * TIMED_HEADS * TIMED_HEAD_SIZE)

    def make_call(dtype: torch.dtype) -> TimedCall:
        attention = FusedAttention(None, TIMED_HEADS, TIMED_HEAD_SIZE, dtype)
        return lambda: attention.attend_whole_texts(projected, AttentionMask(), (1, TIMED_ROWS), "sdpa")

    return time_ratio(make_call(torch.bfloat16), make_call(torch.float32))


def choose_max_openvino_tokens(openvino: OpenVinoLayers) -> int:
    """Tokens of the largest batch that OpenVINO computes faster than fused layers do.

    Many layers are timed on short texts, since reading the weights of all of them takes much of the time then.
    """
    last, max_tokens = len(openvino.layers) - 1, 0
    many, one = range(max(1, last)), range(last, last + 1)
    for shape, part, tokens in (
        (SHORT_TEXT_SHAPE, many, 64),
        (TEXT_SHAPE, many, 256),
        (LONG_BATCH_SHAPE, one, UNLIMITED_TOKENS),
    ):
        if not openvino_is_faster(openvino, part, shape):
            break
        max_tokens = tokens
    return max_tokens


def openvino_is_faster(openvino: OpenVinoLayers, part: range, shape: tuple[int, int]) -> bool:
    """True if OpenVINO computes a batch of this shape as fast as PyTorch, or nearly (`MAX_TIME_RATIO_OF_OPENVINO`).

    It needs less memory where it computes all batches, and with int8 it changes fewer labels.
    """
    states = torch.ones(*shape, openvino.layers[0].weights.query[0].shape[1])
    layout = BatchLayout.from_inputs(None, None, None, shape, states.device)

    def call_fused() -> torch.Tensor:
        new = states
        for i in part:
            new = openvino.layers[i](new, layout)
        return new

    ratio = time_ratio(lambda: openvino.compute(part, states, layout.attention_mask), call_fused, MAX_TURNS_OF_LAYERS)
    return ratio < MAX_TIME_RATIO_OF_OPENVINO


def time_ratio(call: TimedCall, other: TimedCall, turns: int = MAX_TURNS) -> float:
    """Time of `call` divided by that of `other`; they take turns, and the median of the turns' ratios counts.

    A turn is several calls, of which the shortest counts, since threads of one runtime still wait for work, and keep
    cores busy, while the other one begins. A computer's speed may change from turn to turn. No turn begins after
    `MAX_SECONDS_OF_TURNS`.
    """
    ratios: list[float] = []
    start = time.perf_counter()
    with torch.no_grad():
        while len(ratios) < turns and (not ratios or time.perf_counter() - start < MAX_SECONDS_OF_TURNS):
            times = [min(call_time(each) for _ in range(CALLS_PER_TURN)) for each in (call, other)]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def call_time(call: TimedCall) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
