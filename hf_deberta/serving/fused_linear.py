"""A linear layer prepared for inference on this processor: its weight is laid out once as oneDNN reads it.

Legend: M rows of states, K inputs, N outputs.

    linear = FusedLinear(linear.weight, linear.bias, torch.bfloat16, with_gelu=True)
    linear(states)                 # gelu(states @ weight^T + bias), [M, N]
    linear(states, residual)       # states @ weight^T + bias + residual, [M, N]

Products of few rows spend most of their time reading the weight, so a weight in the right order, or of fewer bits, is
what makes short texts fast. Three kinds, by the type of their factors; sums are in float32 in all of them:

- float32: oneDNN.
- bfloat16: oneDNN. The result has bfloat16 too, except that a residual is added in float32.
- int8: weights with a scale per output, states with a scale per row, chosen in each call. With one scale for all rows,
  the few tokens with very large values leave the others few levels (benchmarks/log.md), and the answer for a text would
  depend on its neighbours in the batch. Inputs that are always large, as LayerNorm makes some, would leave the other
  inputs of their row few levels: states are divided, and weights multiplied, by the root of an input's usual size.
  Processors without VNNI add pairs of products in 16 bits, so weights have half the levels there (`weight_levels`).
"""

from functools import cache

import torch
from torch.nn.functional import gelu

from hf_deberta.engines.onednn import (
    onednn_int8_linear,
    onednn_linear,
    onednn_linear_with_sum,
    pack_int8_weight,
    pack_weight,
    to_uint8,
)

INT8_LEVELS = 127  # weights and states of both signs are in [-127, 127]
INT8_LEVELS_WITHOUT_VNNI = 64  # of weights: a pair of products, 2 * 255 * 64, fits into 16 bits
UINT8_LEVELS, UINT8_MIDDLE = 255, 128  # states are in [0, 255]; of numbers of both signs, 0 is in the middle
MIN_INPUT_SIZE = 1e-6  # of an input
MIN_ROW_MAXIMUM = 1e-30  # of a row's largest number, so that a row of zeros has a scale


class FusedLinear:
    """`act(states @ weight^T + bias)`, or with a residual added to it, from factors of float32 or bfloat16."""

    def __init__(
        self,
        weight: torch.Tensor,  # [N, K], float32
        bias: torch.Tensor | None,  # [N]
        dtype: torch.dtype,
        with_gelu: bool = False,
    ):
        self.bias = None if bias is None else bias.detach().to(dtype, copy=True)
        self.dtype, self.activation = dtype, "gelu" if with_gelu else "none"
        self.onednn_weight = pack_weight(weight.detach().to(dtype))

    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[M, K] to [M, N]; `residual` is float32 [M, N], and only for layers without GELU."""
        states = states.to(self.dtype)
        if residual is not None and self.dtype == torch.float32:
            return onednn_linear_with_sum(states, residual, self.onednn_weight, self.bias)
        product = onednn_linear(states, self.onednn_weight, self.bias, self.activation)
        return product if residual is None else residual + product


class Int8Linear(FusedLinear):
    """One scale for each row of states; the offset is the same for all."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        with_gelu: bool = False,
        lowest: float | None = None,  # a bound of all states, if there is one near zero: numbers below have no levels
        sizes: torch.Tensor | None = None,  # [K], or the usual sizes of the inputs
    ):
        self.lowest, self.with_gelu = lowest, with_gelu
        self.factors = None if sizes is None else sizes.detach().clamp(min=MIN_INPUT_SIZE).rsqrt()  # [K], of states
        weight = weight.detach() if self.factors is None else weight.detach() / self.factors
        integers, self.scale = int8_weight(weight, weight_levels())
        self.zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self.onednn_weight = pack_int8_weight(integers)
        self.summand = weight.new_zeros(len(weight)) if bias is None else bias.detach().clone()  # [N]
        if lowest is not None:  # states - lowest are multiplied, so lowest times the sums of the weights is missing
            self.summand = self.summand + lowest * self.multiply(weight.new_ones(1, weight.shape[1]).byte(), 0)[0]

    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        integers, scale, offset = self.quantized(states.float())
        product = self.multiply(integers, offset)
        if residual is not None:
            return torch.addcmul(residual, product, scale).add_(self.summand)
        product = torch.addcmul(self.summand, product, scale)
        return gelu(product) if self.with_gelu else product

    def multiply(self, integers: torch.Tensor, offset: int) -> torch.Tensor:
        """(integers - offset) @ weight^T, [M, N] of float32."""
        return onednn_int8_linear(integers, offset, self.onednn_weight, self.scale, self.zero_points)

    def quantized(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """States, or states - lowest, as uint8, with a scale per row [M, 1] and the offset."""
        if self.factors is not None:
            states = states * self.factors
        if self.lowest is None:
            largest = torch.linalg.vector_norm(states, torch.inf, 1, keepdim=True)
            scale = largest.clamp_(min=MIN_ROW_MAXIMUM) / INT8_LEVELS
            return to_uint8(states / scale, UINT8_MIDDLE), scale, UINT8_MIDDLE
        scale = (states.amax(1, keepdim=True) - self.lowest).clamp_(min=MIN_ROW_MAXIMUM) / UINT8_LEVELS
        return to_uint8(torch.addcmul(-self.lowest / scale, states, 1 / scale), 0), scale, 0


def int8_weight(weight: torch.Tensor, levels: int = INT8_LEVELS) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as int8, in [-levels, levels], and the scale of each output [N]."""
    largest = weight.abs().amax(1)
    scale = torch.where(largest > 0, largest, 1.0) / levels
    return (weight / scale[:, None]).round().to(torch.int8), scale


@cache
def weight_levels() -> int:
    """The largest number of an int8 weight, by a product that shows whether this processor cuts sums off."""
    states = torch.full((1, 64), UINT8_LEVELS, dtype=torch.uint8)
    onednn_weight = pack_int8_weight(torch.full((64, 64), INT8_LEVELS, dtype=torch.int8))
    product = onednn_int8_linear(states, 0, onednn_weight, torch.ones(64), torch.zeros(64, dtype=torch.int64))
    return INT8_LEVELS if product[0, 0] == 64 * UINT8_LEVELS * INT8_LEVELS else INT8_LEVELS_WITHOUT_VNNI
