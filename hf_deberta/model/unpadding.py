"""Real tokens only: a padded batch, or rows of packed documents, as one row of documents side by side.

Padding is work for nobody. The real tokens are gathered once after the embedding, every layer runs on one row
[1, total], documents do not see one another, and at the end states go back to where their tokens stood. Documents
stand shortest first, so that those of one length are neighbours and are attended to together.
"""

from dataclasses import dataclass

import torch

MIN_PADDING_FRACTION = 1 / 16  # least share of padding for which a batch is unpadded
COST_OF_EXTRA_CALLS = 1e8  # what attending to the documents of one length costs in calls, in operations of dense layers


@dataclass(frozen=True)
class Unpadding:
    """Where each token of the row stood in the batch."""

    index: torch.Tensor  # [total], into batch x tokens
    lengths: tuple[int, ...]  # of the documents
    shape: tuple[int, int]  # batch, tokens

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] to [1, total, ...]."""
        return states.flatten(0, 1).index_select(0, self.index.to(states.device))[None]

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """[1, total, ...] to [B, N, ...], zeros at padding."""
        batch, tokens = self.shape
        empty = states.new_zeros(batch * tokens, *states.shape[2:])
        return empty.index_copy(0, self.index.to(states.device), states[0]).unflatten(0, self.shape)

    def first_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the row of the batch's first tokens, rising, and the batch row of each."""
        places = (self.index % self.shape[1] == 0).nonzero()[:, 0]
        return places, self.index[places] // self.shape[1]

    def cu_seqlens(self) -> torch.Tensor:
        ends = torch.tensor((0, *self.lengths), device=self.index.device).cumsum(0)
        return ends.int()


def unpadding_of_mask(token_mask: torch.Tensor, width: int) -> Unpadding | None:
    """Of right-padded rows [B, N] in a model of that width; None if padding stands elsewhere or is too little."""
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
    """Of rows of packed documents, numbered along each row: [B, N]."""
    batch, tokens = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.cat([starts, starts.new_tensor([batch * tokens])]).diff()
    return side_by_side(starts, lengths, (batch, tokens))


def side_by_side(starts: torch.Tensor, lengths: torch.Tensor, shape: tuple[int, int]) -> Unpadding:
    """Documents that begin at `starts` of the flattened batch, shortest first."""
    order = lengths.argsort(stable=True)
    starts, lengths = starts[order], lengths[order]
    before = lengths.cumsum(0) - lengths
    index = torch.arange(int(lengths.sum()), device=starts.device) + (starts - before).repeat_interleave(lengths)
    return Unpadding(index, tuple(length for length in lengths.tolist() if length > 0), shape)
