"""A Triton kernel for the loss over the vocabulary on a GPU, in place of six passes over the logits of a chunk.

Legend: M tokens of a chunk, V vocabulary size.

A program reads the logits of a token twice and writes them once: first the loss, the most likely token and a sampled
one; then, over the logits, the residual softmax(logits) - (1 at the label), from which products give the gradients.
"""

from math import gcd

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # columns that a program reads at once: 16 a thread
LOWEST = tl.constexpr(-3.0e38)  # below all logits, and finite: the difference of two is 0, not NaN


@triton.jit
def first_column(best, column, vocabulary_size):
    """The smallest of the columns that hold the largest number."""
    return tl.min(tl.where(best == tl.max(best, 0), column, vocabulary_size), 0)


@triton.jit
def vocabulary_kernel(
    logits, labels,  # [M, V], [M]
    seed,  # [1], for samples
    losses, predictions, samples,  # [M]
    vocabulary_size, inverse_temperature,
    SAMPLES: tl.constexpr, RESIDUAL: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, most likely and sampled token of one token, and its residual in place of its logits."""
    token = tl.program_id(0)
    vocabulary_size = vocabulary_size // DIVISOR * DIVISOR  # tells the compiler how many columns one load may read
    logits += token.to(tl.int64) * vocabulary_size
    label = tl.load(labels + token)
    lane = tl.arange(0, BLOCK)
    # each lane has its own maximum, sum and columns, which are joined after the loop
    largest, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    best_draw, drawn = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.int32)
    likely = tl.zeros([BLOCK], tl.int32)
    if SAMPLES:
        key = (tl.load(seed) << 32) + token
    for start in range(0, vocabulary_size, BLOCK):
        column = start + lane
        inside = column < vocabulary_size
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        total = total * tl.exp(largest - higher) + tl.exp(x - higher)
        likely = tl.where(x > largest, column, likely)
        largest = higher
        if SAMPLES:  # the Gumbel-max trick
            u = tl.rand(key, column) + 2**-32  # never 0
            # -log(1 - u), by its series where 1 - u would round
            exponential = tl.where(u < 1e-3, u * (1 + u * (0.5 + u / 3)), -tl.log(1 - u))
            draw = x * inverse_temperature - tl.log(exponential)
            drawn = tl.where((draw > best_draw) & inside, column, drawn)
            best_draw = tl.where(inside, tl.maximum(best_draw, draw), best_draw)
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    # a label that does not exist makes the loss NaN
    at_label = tl.load(logits + tl.maximum(label, 0), mask=label < vocabulary_size, other=float("nan")).to(tl.float32)
    tl.store(losses + token, tl.where(label >= 0, log_sum - at_label, 0.0))
    tl.store(predictions + token, first_column(largest, likely, vocabulary_size))
    if SAMPLES:
        tl.store(samples + token, first_column(best_draw, drawn, vocabulary_size))
    if RESIDUAL:
        for start in range(0, vocabulary_size, BLOCK):
            column = start + lane
            inside = column < vocabulary_size
            x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
            residual = tl.exp(x - log_sum) - tl.where(column == label, 1.0, 0.0)
            tl.store(logits + column, residual.to(logits.dtype.element_ty), mask=inside)


def losses_and_residual(
    logits: torch.Tensor,  # [M, V], contiguous
    labels: torch.Tensor,  # [M], a negative label is ignored
    sampling_temperature: float | None,
    needs_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return losses, predictions and samples [M]; with `needs_residual`, write the residual over the logits."""
    tokens, vocabulary_size = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    predictions = torch.empty(tokens, dtype=torch.int64, device=logits.device)
    samples = torch.empty_like(predictions) if sampling_temperature else predictions
    seed = torch.randint(2**31, (1,), device=logits.device) if sampling_temperature else predictions
    with torch.cuda.device_of(logits):
        vocabulary_kernel[(tokens,)](
            logits, labels.contiguous(), seed, losses, predictions, samples, vocabulary_size,
            1 / (sampling_temperature or 1), SAMPLES=bool(sampling_temperature), RESIDUAL=needs_residual,
            DIVISOR=gcd(vocabulary_size, 8), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses, predictions, None if sampling_temperature is None else samples
