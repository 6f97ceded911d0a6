"""Unpadding: a padded batch, or rows of packed documents, as one row of documents without padding.

Legend: B batch, N tokens, total: real tokens of the batch.

The real tokens are gathered once after the embedding, every layer runs on one row [1, total] of documents that do not
see one another, and the final states are scattered back to [B, N]. Documents are sorted by length, so that attention
handles those of equal length as one batch.
"""

from dataclasses import dataclass

import torch

MIN_PADDING_FRACTION = 1 / 16  # of a batch, to unpad it
COST_OF_EXTRA_CALLS = 1e8  # of attention per length of documents, in operations of dense layers


@dataclass(frozen=True)
class Unpadding:
    """The position of each token of the row in the batch."""

    index: torch.Tensor  # [total], into B x N
    lengths: tuple[int, ...]  # of the documents
    shape: tuple[int, int]  # B, N

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
        positions = (self.index % self.shape[1] == 0).nonzero()[:, 0]
        return positions, self.index[positions] // self.shape[1]

    def cu_seqlens(self) -> torch.Tensor:
        """Document boundaries, [documents + 1]."""
        ends = torch.tensor((0, *self.lengths), device=self.index.device).cumsum(0)
        return ends.int()


def unpadding_of_mask(token_mask: torch.Tensor, width: int) -> Unpadding | None:
    """Return the `Unpadding` of right-padded rows from their mask [B, N].

    None for other padding, or if unpadding saves no time at this model width.
    """
    batch, tokens = token_mask.shape
    lengths = token_mask.sum(1)
    real = int(lengths.sum())
    padding = batch * tokens - real
    saved = 24 * width**2 * padding  # per layer
    if (
        real == 0
        or padding < MIN_PADDING_FRACTION * batch * tokens
        or saved < COST_OF_EXTRA_CALLS * lengths.unique().numel()
    ):
        return None
    if not torch.equal(token_mask, torch.arange(tokens, device=token_mask.device) < lengths[:, None]):
        return None
    starts = torch.arange(batch, device=token_mask.device) * tokens
    return side_by_side(starts, lengths, (batch, tokens))


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
    return Unpadding(index, tuple(length for length in lengths.tolist() if length > 0), shape)
