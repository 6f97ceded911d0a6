"""A linear layer prepared for inference on this processor: its weight is packed once, in the order oneDNN reads it.

Legend: M rows of states, K inputs, N outputs.

    packed = PackedLinear.from_weight(linear.weight, linear.bias, torch.bfloat16, gelu=True)
    packed(states)                 # gelu(states @ weight^T + bias), [M, N]
    packed(states, residual)       # states @ weight^T + bias + residual, [M, N]

Products of few rows spend most of their time reading the weight, so a weight in the right order, or of fewer bits, is
what makes short texts fast. Three kinds, by the type of their factors; sums are in float32 in all of them:

- float32: oneDNN, or PyTorch's own product where that was faster (see `prefers_packed`).
- bfloat16: oneDNN. The result has bfloat16 too, except that a residual is added in float32.
- int8: weights with a scale per output, states with one scale and offset for the whole matrix, chosen in each call.
"""

from abc import ABC, abstractmethod

import torch

from hf_deberta.model.private_apis import (
    onednn_int8_linear,
    onednn_linear,
    onednn_linear_with_sum,
    pack_int8_weight,
    pack_weight,
    to_uint8,
)

INT8_LEVELS = 127  # weights are in [-127, 127]
UINT8_LEVELS = 254  # states are in [0, 255]; one level is left for rounding the offset


class PackedLinear(ABC):
    """`act(states @ weight^T + bias)`, or with a residual added to it."""

    @staticmethod
    def from_weight(
        weight: torch.Tensor,  # [N, K], float32
        bias: torch.Tensor | None,  # [N]
        dtype: torch.dtype,
        with_gelu: bool = False,
    ) -> "PackedLinear":
        """The prepared layer whose products have factors of `dtype`: float32, bfloat16 or int8."""
        kinds: dict[torch.dtype, type[_Packed]] = {
            torch.float32: _Float32Linear,
            torch.bfloat16: _BFloat16Linear,
            torch.int8: _Int8Linear,
        }
        return kinds[dtype](weight.detach(), None if bias is None else bias.detach(), with_gelu)

    @abstractmethod
    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[M, K] to [M, N]; `residual` is float32 [M, N], and only for layers without GELU."""


class _Packed(PackedLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, with_gelu: bool):
        self.bias = bias
        self.activation = "gelu" if with_gelu else "none"


class _Float32Linear(_Packed):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, with_gelu: bool):
        super().__init__(weight, bias, with_gelu)
        self.packed = pack_weight(weight)

    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is not None:
            return onednn_linear_with_sum(states.float(), residual, self.packed, self.bias)
        return onednn_linear(states.float(), self.packed, self.bias, self.activation)


class _BFloat16Linear(_Packed):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, with_gelu: bool):
        super().__init__(weight, None if bias is None else bias.bfloat16(), with_gelu)
        self.packed = pack_weight(weight.bfloat16())

    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        product = onednn_linear(states.bfloat16(), self.packed, self.bias, self.activation)
        return product if residual is None else residual + product


class _Int8Linear(_Packed):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, with_gelu: bool):
        super().__init__(weight, bias, with_gelu)
        largest = weight.abs().amax(1)
        self.scale = torch.where(largest > 0, largest, 1.0) / INT8_LEVELS  # [N]
        self.zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)
        integers = (weight / self.scale[:, None]).round().to(torch.int8)
        self.packed = pack_int8_weight(integers)

    def __call__(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        integers, scale, offset = quantized(states.float())
        return onednn_int8_linear(
            integers, scale, offset, self.packed, self.scale, self.zero_points, self.bias, residual, self.activation
        )


def quantized(states: torch.Tensor) -> tuple[torch.Tensor, float, int]:
    """States as uint8, with scale and offset: states = scale * (integers - offset).

    The offset is a whole number, so that 0 stays 0.
    """
    low, high = (float(bound) for bound in torch.aminmax(states))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / UINT8_LEVELS or 1.0
    offset = round(-low / scale)
    return to_uint8(states, scale, offset), scale, offset
