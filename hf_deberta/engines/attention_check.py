"""Check of the Triton kernels on the device at hand: a small attention call against the reference.

Legend: B batch, H heads, N tokens, d head size, T tokens of a tile, k the largest distance.

Tiles are near (distances have rows of their own), far (all distances share a row) or between the two, and full or
ragged at the end of a row or of its padding. The call has several of each: rows of a little more than four tiles, a
table that ends at two tiles, and a second row with padding and a hole. Other masks, causality and dropout are checked
where a call has them; calls with fewer terms, or without far tiles, compile less of the same. The reference runs in
float64 on the CPU, from the same rounded inputs, and drops what the kernels drop: `kept_probabilities` reads that off
their results.
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
MASKS = ("padding", "documents", "packed", "pairs")  # of tokens, numbers, boundaries of one row, [B, N, N]
INPUTS = ("query", "key", "value", "position_key", "position_query")
DROPOUT = 0.25  # any rate that keeps and drops many
MAX_SHARE_ERROR = 0.02  # of the dropped probabilities: six standard deviations in the interpreter, more on GPUs

Attend = Callable[..., Result]  # has the parameters of a backend


class KernelVariant(NamedTuple):
    """What is checked once: each combination is compiled on its own."""

    device: torch.device
    dtype: torch.dtype
    tf32: bool  # if products of float32 are computed in tf32
    head_size: int
    training: bool  # forward and backward
    mask: str = MASKS[0]
    causal: bool = False
    dropout: bool = False

    @property
    def precision(self) -> str:
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")

    @property
    def tolerance(self) -> float:
        """The largest error that rounding explains, relative to the largest entry of a tensor."""
        return ROUNDINGS[self.precision] * EPSILONS[self.precision]

    def __str__(self) -> str:
        words = [self.precision, f"heads of {self.head_size}", "training" if self.training else "inference"]
        words += [self.mask] if self.mask != MASKS[0] else []
        words += [name for name in ("causal", "dropout") if getattr(self, name)]
        return ", ".join(words)


def uses_tf32(dtype: torch.dtype) -> bool:
    from .attention_triton_operator import products_use_tf32  # imported late: only a GPU needs it

    return dtype == torch.float32 and products_use_tf32()


def triton_errors(kernel: KernelVariant) -> dict[str, float]:
    """Errors of the Triton backend by name: of the context and, in training, of the gradient of each input.

    An error is the largest difference from the reference, divided by the largest entry of the reference.
    """
    from .attention_triton_operator import launches  # imported late: only a GPU needs it

    tile = launches(kernel.dtype, kernel.device)[0]
    batch = 1 if kernel.mask == "packed" else 2
    inputs = [tensor.to(kernel.dtype) for tensor in check_inputs(batch, tile, kernel.head_size)]

    def results(attend: Attend, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        mask = check_mask(tile, kernel, device)
        return compute_results(attend, [each.to(device, dtype) for each in inputs], mask, tile, kernel.training)

    triton, reference, errors = BACKENDS["triton"].attend, BACKENDS["eager"].attend, {}
    if kernel.dropout:
        triton, mask = with_dropout(triton, kernel.device), check_mask(tile, kernel, kernel.device)
        kept = kept_probabilities(triton, [each.to(kernel.device) for each in inputs], mask, tile)
        reference = with_probabilities_dropped(reference, ~kept.cpu())
        visible = mask.visible(kept.shape[-1], kernel.device)
        assert visible is not None
        share_error = abs(1 - float(kept.sum() / visible.expand_as(kept).sum()) - DROPOUT)
        if share_error > MAX_SHARE_ERROR:
            errors["the share of dropped probabilities"] = share_error / DROPOUT
    expected = results(reference, torch.float64, torch.device("cpu"))
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


def check_mask(tile: int, kernel: KernelVariant, device: torch.device) -> AttentionMask:
    """All tokens of the first row are real; of the second about half, with a hole in the first tile.

    Documents have more than a tile, and none begins with one.
    """
    tokens, size = 4 * tile + tile // 2 + 1, tile + tile // 2 - 1
    if kernel.mask == "packed":
        boundaries = torch.tensor([*range(0, tokens, size), tokens], device=device)
        return AttentionMask(causal=kernel.causal, cu_seqlens=boundaries, longest=size)
    real = torch.ones(2, tokens, dtype=torch.bool, device="cpu")
    real[1, 2 * tile + 5 :] = False
    real[1, 3] = False
    positions = torch.arange(tokens, device="cpu")
    if kernel.mask == "pairs":
        seen = (positions[:, None] + 2 * positions) % 5 > 0
        return AttentionMask((seen & real[:, :, None] & real[:, None, :]).to(device), causal=kernel.causal)
    documents = (positions // size).expand(2, -1).to(device) if kernel.mask == "documents" else None
    return AttentionMask(real.to(device), documents, kernel.causal)


def compute_results(
    attend: Attend, inputs: list[torch.Tensor], mask: AttentionMask, tile: int, training: bool
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
