"""Choices that `hf_deberta.optimize` makes by timing on this computer: processors of one maker differ as well."""

import sys
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from transformers.utils import logging

from hf_deberta.model.attention_context import AttentionContext
from hf_deberta.model.attention_mask import AttentionMask

from .openvino_layers import OpenVinoLayers
from .packed_attention import PackedAttention
from .packed_linear import PackedLinear

logger = logging.get_logger(__name__)

ROWS, HEADS, HEAD_SIZE = 128, 12, 64  # of single products that are timed
CALLS_IN_TURN = 3
TURNS = 6
TURNS_OF_LAYERS = 2
SHORT_TEXT, LONG_BATCH = (1, 32), (8, 128)  # batch and tokens, for the choice of the runtime
TOKENS_OF_SHORT_TEXTS = 256
ALL = sys.maxsize
CLEARLY_SLOWER = 1.25  # less may be other work on the computer


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of attention's products: that of the linear layers, or beside int8 the faster floating type."""
    if dtype != torch.int8:
        return dtype
    return torch.bfloat16 if attention_is_faster_in_bfloat16(torch.get_num_threads()) else torch.float32


@lru_cache(maxsize=8)
def attention_is_faster_in_bfloat16(threads: int) -> bool:
    """Time attention of one text with products in float32 and in bfloat16."""
    projected = torch.randn(ROWS, 3 * HEADS * HEAD_SIZE)

    def attend(dtype: torch.dtype) -> Callable[[], object]:
        attention = PackedAttention(None, HEADS, HEAD_SIZE, dtype)
        return lambda: attention.attend_all(projected, AttentionMask(), (1, ROWS), "sdpa")

    return time_ratio(attend(torch.bfloat16), attend(torch.float32)) < 1


def warn_if_slower(dtype: torch.dtype) -> None:
    """Warn if products of fewer bits take longer on this processor."""
    if dtype != torch.float32 and not is_as_fast_as_float32(dtype, torch.get_num_threads()):
        logger.warning_once(
            f"products in {dtype} take longer than in float32 on this processor: hf_deberta.optimize(model) would be "
            "faster"
        )


@lru_cache(maxsize=8)
def is_as_fast_as_float32(dtype: torch.dtype, threads: int) -> bool:
    """Time one product of each type."""
    width = HEADS * HEAD_SIZE
    states, weight = torch.randn(ROWS, width), torch.randn(4 * width, width)

    def multiply(dtype: torch.dtype) -> Callable[[], object]:
        packed = PackedLinear.from_weight(weight, None, dtype)
        return lambda: packed(states)

    return time_ratio(multiply(dtype), multiply(torch.float32)) < CLEARLY_SLOWER


def most_tokens_of_openvino(many_layers: OpenVinoLayers, one_layer: OpenVinoLayers) -> int:
    """Tokens of the largest batch that OpenVINO computes faster than packed layers do.

    Many layers are timed on a short text, since reading the weights of all of them takes most of the time then.
    """
    if not openvino_is_faster(many_layers, SHORT_TEXT):
        return 0
    return ALL if openvino_is_faster(one_layer, LONG_BATCH) else TOKENS_OF_SHORT_TEXTS


def openvino_is_faster(openvino: OpenVinoLayers, shape: tuple[int, int]) -> bool:
    """Time the same layers in OpenVINO and packed, on a batch of this shape."""
    states = torch.randn(*shape, openvino.layers[0].weights.query[0].shape[1])
    context = AttentionContext.from_inputs(None, None, None, shape, states.device)

    def call_packed() -> torch.Tensor:
        new = states
        for layer in openvino.layers:
            new = layer(new, context)
        return new

    return time_ratio(lambda: openvino(states, context.attention_mask), call_packed, TURNS_OF_LAYERS) < 1


def time_ratio(call: Callable[[], object], other: Callable[[], object], turns: int = TURNS) -> float:
    """Time of `call` divided by that of `other`; they take turns, and the shortest time of each counts.

    A turn is several calls, since threads of one runtime still wait for work, and keep cores busy, while the other one
    begins.
    """
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(turns):
            for own_times, each in zip(times, (call, other), strict=True):
                for _ in range(CALLS_IN_TURN):
                    start = time.perf_counter()
                    each()
                    own_times.append(time.perf_counter() - start)
    return min(times[0]) / min(times[1])
