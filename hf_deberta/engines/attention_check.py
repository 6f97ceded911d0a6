"""Check of the Triton kernels on the device at hand: small attention calls against the reference, with gradients.

Legend: B batch, H heads, N tokens, d head size, T tokens of a tile, k the largest distance.

Tiles are near (distances have rows of their own), far (all distances share a row) or between the two, and full or
ragged at the end of a row or of its padding. A call has several of each: rows of a little more than four tiles, a table
that ends at two tiles, and a second row with padding and a hole. `CALLS` have each kind of mask, causality and dropout;
calls with fewer terms, or without far tiles, compile less of the same. The reference runs in float64 on the CPU, from
the same rounded inputs, and drops what the kernels drop: `kept_probabilities` reads that off their results.
"""

from collections.abc import Callable
from math import log2
from typing import NamedTuple

import torch

from ..model.attention import BACKENDS, Result
from ..model.batch_layout import AttentionMask
from ..model.relative_position import RelativePositions, rows_of_distances

# Largest allowed error, relative to the largest entry of a tensor, as a multiple of the rounding error of the type.
# Correct kernels have 1 (float16) and 8 (float32, whose sums are no finer than its results) in the interpreter, and
# inputs that are cut to tf32 give 3. A wrong row, tile, mask or end of a row gives the context an error of 0.2 or more.
ROUNDINGS = {"float16": 4, "bfloat16": 4, "tf32": 8, "float32": 64}
EPSILONS = {"float16": 2**-10, "bfloat16": 2**-7, "tf32": 2**-10, "float32": 2**-23}
INPUTS = ("query", "key", "value", "position_key", "position_query")
DROPOUT = 0.25  # any rate that keeps and drops many
MAX_SHARE_ERROR = 0.02  # of the dropped probabilities: six standard deviations in the interpreter, more on GPUs

Attend = Callable[..., Result]  # has the parameters of a backend


class CheckedCall(NamedTuple):
    """What differs between the calls of a check."""

    mask: str  # padding with document numbers, boundaries of one row, or [B, N, N]
    causal: bool
    dropout: bool


# documents and padding have the same kernels; unpadded training has packed rows and dropout
CALLS = (
    CheckedCall("documents", causal=False, dropout=False),
    CheckedCall("packed", causal=False, dropout=True),
    CheckedCall("pairs", causal=True, dropout=True),
)


class KernelVariant(NamedTuple):
    """What is checked once."""

    device: torch.device
    dtype: torch.dtype
    head_size: int

    @property
    def precision(self) -> str:
        from .attention_triton_operator import products_use_tf32  # imported late: only a GPU needs it

        is_tf32 = self.dtype == torch.float32 and products_use_tf32()
        return "tf32" if is_tf32 else str(self.dtype).removeprefix("torch.")

    @property
    def tolerance(self) -> float:
        """The largest error that rounding explains, relative to the largest entry of a tensor."""
        return ROUNDINGS[self.precision] * EPSILONS[self.precision]

    def __str__(self) -> str:
        return f"{self.precision}, heads of {self.head_size}"


def triton_errors(kernel: KernelVariant) -> dict[str, float]:
    """Errors of the Triton backend by name: of the context and of the gradient of each input, in each of `CALLS`.

    An error is the largest difference from the reference, divided by the largest entry of the reference.
    """
    return {f"{name} ({call.mask})": error for call in CALLS for name, error in errors_in_call(kernel, call).items()}


def errors_in_call(kernel: KernelVariant, call: CheckedCall) -> dict[str, float]:
    from .attention_triton_operator import launches  # imported late: only a GPU needs it

    tile = launches(kernel.dtype, kernel.device)[0]
    batch = 1 if call.mask == "packed" else 2
    inputs = [tensor.to(kernel.dtype) for tensor in check_inputs(batch, tile, kernel.head_size)]

    def results(attend: Attend, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        mask = check_mask(tile, call, device)
        return compute_results(attend, [each.to(device, dtype) for each in inputs], mask, tile)

    triton, reference, errors = BACKENDS["triton"].attend, BACKENDS["eager"].attend, {}
    if call.dropout:
        triton, mask = with_dropout(triton, kernel.device), check_mask(tile, call, kernel.device)
        kept = kept_probabilities(triton, [each.to(kernel.device) for each in inputs], mask, tile)
        reference = with_probabilities_dropped(reference, ~kept.cpu())
        visible = mask.visible(kept.shape[-1], kernel.device)
        assert visible is not None
        share_error = abs(1 - float(kept.sum() / visible.expand_as(kept).sum()) - DROPOUT)
        if share_error > MAX_SHARE_ERROR:
            errors["the share of dropped probabilities"] = share_error / DROPOUT
    expected = results(reference, torch.float64, torch.device("cpu"))
    for _ in range(2):  # Triton's own launch of each kernel, then the one that all later calls have, see `Kernel`
        computed = results(triton, kernel.dtype, kernel.device)
    return errors | {name: relative_error(computed[name], tensor) for name, tensor in expected.items()}


def with_dropout(attend: Attend, device: torch.device) -> Attend:
    """The backend with the same draws of dropout in each call."""

    def attend_and_drop(*call) -> Result:
        generators = torch.cuda.default_generators
        (generators[device.index or 0] if device.type == "cuda" else torch.default_generator).manual_seed(0)
        return attend(*call[:5], DROPOUT, call[6])

    return attend_and_drop


def with_probabilities_dropped(attend: Attend, dropped: torch.Tensor) -> Attend:
    """The reference with dropout of given probabilities [B, H, N, N]."""

    def attend_and_drop(query, key, value, *call) -> Result:
        _, probabilities = attend(query, key, value, *call)
        assert probabilities is not None
        return probabilities.masked_fill(dropped, 0) / (1 - DROPOUT) @ value, None

    return attend_and_drop


def kept_probabilities(attend: Attend, inputs: list[torch.Tensor], mask: AttentionMask, tile: int) -> torch.Tensor:
    """Which probabilities dropout keeps, [B, H, N, N]: of equal ones, as contexts of values that are unit vectors."""
    zeros = [torch.zeros_like(tensor) for tensor in inputs]
    tokens, head_size = zeros[0].shape[2:]
    units = torch.eye(tokens, device=zeros[0].device, dtype=zeros[0].dtype)
    units = torch.nn.functional.pad(units, (0, -tokens % head_size))  # [N, channels]
    kept = []
    for values in units.split(head_size, 1):
        zeros[2] = values.expand_as(zeros[2])
        kept.append(compute_results(attend, zeros, mask, tile, training=False)["the context"] != 0)
    return torch.cat(kept, -1)[..., :tokens]


def check_inputs(batch: int, tile: int, head_size: int) -> list[torch.Tensor]:
    """Query, key and value [B, H, N, d] and both tables [H, 2 * k, d] of random numbers."""
    generator = torch.Generator().manual_seed(0)
    heads, tokens = 2, 4 * tile + tile // 2 + 1
    shapes = [(batch, heads, tokens, head_size)] * 3 + [(heads, 2 * tile, head_size)] * 2
    return [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]


def check_mask(tile: int, call: CheckedCall, device: torch.device) -> AttentionMask:
    """All tokens of the first row are real; of the second about half, with a hole in the first tile.

    There are two documents: one of more than a tile, and one with far tiles, which begins inside of a tile.
    """
    tokens, size = 4 * tile + tile // 2 + 1, tile + tile // 2 - 1
    if call.mask == "packed":
        boundaries = torch.tensor([0, size, tokens], device=device)
        return AttentionMask(causal=call.causal, cu_seqlens=boundaries, longest=tokens - size)
    real = torch.ones(2, tokens, dtype=torch.bool, device="cpu")
    real[1, 2 * tile + 5 :] = False
    real[1, 3] = False
    positions = torch.arange(tokens, device="cpu")
    if call.mask == "pairs":
        seen = (positions[:, None] + 2 * positions) % 5 > 0
        return AttentionMask((seen & real[:, :, None] & real[:, None, :]).to(device), causal=call.causal)
    return AttentionMask(real.to(device), (positions >= size).long().expand(2, -1).to(device), call.causal)


def compute_results(
    attend: Attend, inputs: list[torch.Tensor], mask: AttentionMask, tile: int, training: bool = True
) -> dict[str, torch.Tensor]:
    """The context and, in training, gradients by name of a weighted sum of it."""
    leaves = [tensor.detach().requires_grad_(training) for tensor in inputs]
    rows = rows_of_distances(2 * tile, tile).to(leaves[0].device)
    positions = RelativePositions.from_tables(leaves[3], leaves[4], rows)
    # a power of two, which rounds nothing; scores so favour some keys, which shows more errors than nearly equal ones
    scale = 2.0 ** -int(log2(leaves[0].shape[-1]) / 2 - 0.5)
    context, _ = attend(*leaves[:3], positions, mask, 0.0, scale)
    results = {"the context": context.detach()}
    if training:
        weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(1), device="cpu")
        gradients = torch.autograd.grad(context, leaves, weight.to(context))
        results |= {f"the gradient of {name}": part for name, part in zip(INPUTS, gradients, strict=True)}
    return results


def relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, divided by the largest entry; nan if there is a NaN."""
    return float((computed.cpu().double() - expected).abs().max() / expected.abs().max())
