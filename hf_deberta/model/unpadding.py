"""Unpadding: a padded batch, or rows of packed documents, as one row of documents without padding.

Legend: B batch, N tokens, total: real tokens of the batch.

The real tokens are gathered once after the embedding, every layer runs on one row [1, total] of documents that do not
see one another, and the final states are scattered back to [B, N]. On the CPU, documents are sorted by length, so that
attention handles those of equal length as one batch. On a device their lengths stay there, and so does their order.
"""

from dataclasses import dataclass

import torch

MIN_PADDING_FRACTION = 1 / 16  # of a batch, to unpad it
COST_OF_EXTRA_CALLS = 1e8  # of attention per length of documents, in operations of dense layers
# The same on devices, by counted bytes and launches, not by measured times. There the backend sdpa pads documents again
# for attention: 4 more launches per layer, 8 in training. At 600 TFLOP/s, 2e9 operations take 3 us, as a launch does.
MIN_PADDING_FRACTION_ON_DEVICES = 1 / 8
COST_OF_EXTRA_LAUNCHES = 1e10


@dataclass(frozen=True)
class Unpadding:
    """The position of each token of the row in the batch."""

    index: torch.Tensor  # [total], into B x N
    cu_seqlens: torch.Tensor  # [documents + 1], boundaries of the documents in the row
    shape: tuple[int, int]  # B, N
    lengths: tuple[int, ...] | None = None  # of the documents, ascending; None if they are the rows of the batch

    @property
    def longest(self) -> int:
        """The length of the longest document, or a bound for it."""
        return self.shape[1] if self.lengths is None else self.lengths[-1]

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Return the real tokens of states [B, N, ...] as one row [1, total, ...]."""
        return states.flatten(0, 1).index_select(0, self.index.to(states.device))[None]

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of a row [1, total, ...] as a batch [B, N, ...], with zeros at padding."""
        batch, tokens = self.shape
        empty = states.new_zeros(batch * tokens, *states.shape[2:])
        return empty.index_copy(0, self.index.to(states.device), states[0]).unflatten(0, self.shape)

    def first_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the batch's first tokens in the row, ascending, and the batch row of each."""
        if self.lengths is None:
            return self.cu_seqlens[:-1].long(), torch.arange(self.shape[0], device=self.index.device)
        positions = (self.index % self.shape[1] == 0).nonzero()[:, 0]
        return positions, self.index[positions] // self.shape[1]


def dense_operations(tokens: int, width: int) -> int:
    """Return the operations of the linear layers of one layer, for so many tokens."""
    return 24 * width**2 * tokens


def is_right_padded(token_mask: torch.Tensor) -> bool:
    """Return whether the real tokens of each row come first, from a mask [B, N] of bool."""
    position = torch.arange(token_mask.shape[1], device=token_mask.device)
    return torch.equal(token_mask, position < token_mask.sum(1, keepdim=True))


def unpadding_of_mask(token_mask: torch.Tensor, width: int) -> Unpadding | None:
    """Return the `Unpadding` of right-padded rows from their mask [B, N].

    None for other padding, or if unpadding saves no time at this model width.
    """
    batch, tokens = token_mask.shape
    lengths = token_mask.sum(1)
    real = int(lengths.sum())
    padding = batch * tokens - real
    if (
        real == 0
        or padding < MIN_PADDING_FRACTION * batch * tokens
        or dense_operations(padding, width) < COST_OF_EXTRA_CALLS * lengths.unique().numel()
    ):
        return None
    if not is_right_padded(token_mask):
        return None
    starts = torch.arange(batch, device=token_mask.device) * tokens
    return side_by_side(starts, lengths, (batch, tokens))


def unpadding_of_counted_mask(token_mask: torch.Tensor, real: int, width: int) -> Unpadding | None:
    """Return the `Unpadding` of right-padded rows with at least one token each, `real` tokens in all.

    Their lengths are not read, so that nothing waits for the device. None if unpadding saves too little at this width.
    """
    batch, tokens = token_mask.shape
    padding = batch * tokens - real
    if (
        padding < MIN_PADDING_FRACTION_ON_DEVICES * batch * tokens
        or dense_operations(padding, width) < COST_OF_EXTRA_LAUNCHES
    ):
        return None
    ends = token_mask.sum(1).cumsum(0)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
    position = torch.arange(real, device=token_mask.device)
    row = torch.searchsorted(ends, position, right=True).clamp(max=batch - 1)  # a wrong number must not index outside
    index = row * tokens + position - cu_seqlens[row]
    return Unpadding(index.clamp(max=batch * tokens - 1), cu_seqlens, (batch, tokens))


def unpadding_of_documents(documents: torch.Tensor) -> Unpadding:
    """Return the `Unpadding` of rows of packed documents from the document number of each token, [B, N]."""
    batch, tokens = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.cat([starts, starts.new_tensor([batch * tokens])]).diff()
    return side_by_side(starts, lengths, (batch, tokens))


def side_by_side(starts: torch.Tensor, lengths: torch.Tensor, shape: tuple[int, int]) -> Unpadding:
    """Return the `Unpadding` that puts documents into one row, shortest first; they begin at `starts` of [B * N]."""
    order = lengths.argsort(stable=True)
    starts, lengths = starts[order], lengths[order]
    before = lengths.cumsum(0) - lengths
    index = torch.arange(int(lengths.sum()), device=starts.device) + (starts - before).repeat_interleave(lengths)
    lengths = lengths[lengths > 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return Unpadding(index, cu_seqlens, shape, tuple(lengths.tolist()))
