"""Unpadding: a padded batch, or rows of packed documents, as one row of documents without padding.

Legend: B batch, N tokens, total: real tokens of the batch.

The real tokens are gathered once after the embedding, every layer runs on one row [1, total] of documents that do not
see one another, and the final states are scattered back to [B, N]. On the CPU, documents are sorted by length, so that
attention handles those of equal length as one batch. On a device their lengths stay there, and so does their order.
"""

from dataclasses import dataclass, replace

import torch

from ..model.batch_layout import AttentionMask, BatchLayout, document_numbers
from ..model.configuration_hf_deberta import HfDebertaConfig
from ..model.input_checks import can_read_values, in_captured_graph, in_transform

DENSE_OPERATIONS = 24  # of the linear layers of one layer, for each token and each square of the width
MIN_PADDING_FRACTION = 1 / 16  # of a batch, to unpad it
COST_OF_EXTRA_CALLS = 1e8  # of attention per length of documents, in operations of dense layers
# The same on devices, by counted bytes and launches, not by measured times. There the backend sdpa pads documents again
# for attention: 4 more launches per layer, 8 in training. At 600 TFLOP/s, 2e9 operations take 3 us, as a launch does.
MIN_PADDING_FRACTION_ON_DEVICES = 1 / 8
COST_OF_EXTRA_LAUNCHES = 1e10
TOKEN_BUCKETS = 8  # `round_up` gives so many numbers between a power of two and the next


@dataclass(frozen=True)
class Unpadding:
    """The position of each token of the row in the batch."""

    index: torch.Tensor  # [total], into B x N; for tokens beyond the real ones, of padding
    cu_seqlens: torch.Tensor  # [documents + 1], boundaries of the documents in the row
    shape: tuple[int, int]  # B, N
    lengths: tuple[int, ...] | None = None  # of the documents, ascending; None if they are the rows of the batch
    is_real: torch.Tensor | None = None  # [total], False for tokens beyond the real ones; None if there are none

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Return the real tokens of states [B, N, ...] as one row [1, total, ...]."""
        return states.flatten(0, 1).index_select(0, self.index.to(states.device))[None]

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of a row [1, total, ...] as a batch [B, N, ...], with zeros at padding."""
        batch, tokens = self.shape
        index = self.index
        if self.is_real is not None:  # the others go to one more row, which is dropped
            index = torch.where(self.is_real, index, batch * tokens)
        empty = states.new_zeros(batch * tokens + (self.is_real is not None), *states.shape[2:])
        filled = empty.index_copy(0, index.to(states.device), states[0])
        return filled[: batch * tokens].unflatten(0, (batch, tokens))

    def first_token_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of the batch's first tokens in the row, ascending, and the batch row of each."""
        batch, tokens = self.shape
        if self.lengths is None:
            return self.cu_seqlens[:batch].long(), torch.arange(batch, device=self.index.device)
        positions = (self.index % tokens == 0).nonzero()[:, 0]
        return positions, self.index[positions] // tokens

    def order_in_batch(self, labelled: torch.Tensor) -> torch.Tensor:
        """Return the order in which the labelled tokens of the row [1, total] stand in the batch."""
        return self.index.to(labelled.device)[labelled[0]].argsort()

    def scatter_pooled(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [1, S, hidden] at `first_token_positions` as [B, 1, hidden], zero for rows without a token."""
        _, rows = self.first_token_positions()
        empty = states.new_zeros(self.shape[0], 1, states.shape[-1])
        return empty.index_copy(0, rows.to(states.device), states[0][:, None])


def unpadded_where_faster(
    layout: BatchLayout,
    config: HfDebertaConfig,
    returns_states: bool,
    num_real_tokens: int | None,
) -> BatchLayout:
    """Replace `unpadded`: enabled in the configuration, supported by the backend, no states returned.

    States at padding would be copies, without the gradients of the layers. Outside of the CPU the number of real tokens
    must be given.
    """
    if returns_states or not config.unpad_inputs or config._attn_implementation not in ("auto", "sdpa", "triton"):
        return layout
    if in_captured_graph() or in_transform():
        return layout
    return unpad(layout, config.hidden_size, num_real_tokens)


def unpad(layout: BatchLayout, width: int, num_real_tokens: int | None = None) -> BatchLayout:
    """The layout of the batch as one row without padding, or without its mask if there is no padding.

    The same layout if unpadding saves no time at this model width, if the row is packed, if the mask is [B, N, N], or
    if the model is causal. Where the mask cannot be read without waiting for a device, the number of real tokens must
    be given.
    """
    mask = layout.attention_mask.mask
    if layout.attention_mask.cu_seqlens is not None or layout.attention_mask.causal:
        return layout
    if mask is not None and mask.dim() == 3:
        return layout
    unpadding = None
    if mask is not None and can_read_values(mask):
        if num_real_tokens is not None:
            check_number_of_tokens(mask, num_real_tokens)
        if bool(mask.all()):
            return replace(layout, attention_mask=replace(layout.attention_mask, mask=None), token_mask=None)
        unpadding = unpadding_of_mask(mask, width)
    elif mask is not None and num_real_tokens is not None:
        unpadding = unpadding_of_counted_mask(mask, num_real_tokens, width)
    elif layout.documents is not None and can_read_values(layout.documents):
        unpadding = unpadding_of_documents(layout.documents)
    return layout if unpadding is None else layout_of_row(layout, unpadding)


def layout_of_row(layout: BatchLayout, unpadding: Unpadding) -> BatchLayout:
    """The layout of the batch as one row of its real tokens."""
    bounds, total, lengths = unpadding.cu_seqlens, unpadding.index.shape[0], unpadding.lengths
    longest = unpadding.shape[1] if lengths is None else lengths[-1]
    return replace(
        layout,
        attention_mask=AttentionMask(cu_seqlens=bounds, lengths=lengths, longest=longest),
        token_mask=None,
        documents=document_numbers(bounds, total)[None],
        position_ids=None,
        length=total,
        longest=longest,
        unpadding=unpadding,
        padded=layout,
    )


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
        or DENSE_OPERATIONS * width**2 * padding < COST_OF_EXTRA_CALLS * lengths.unique().numel()
    ):
        return None
    if not is_right_padded(token_mask):
        return None
    starts = torch.arange(batch, device=token_mask.device) * tokens
    return side_by_side(starts, lengths, (batch, tokens))


def unpadding_of_counted_mask(token_mask: torch.Tensor, real: int, width: int) -> Unpadding | None:
    """Return the `Unpadding` of right-padded rows with at least one token each, `real` tokens in all.

    Their lengths are not read, so that nothing waits for the device. The number may be that of `round_up`: the tokens
    beyond the real ones are padding, in documents of their own. None if unpadding saves too little at this width.
    """
    batch, tokens = token_mask.shape
    padding = batch * tokens - real
    if (
        padding < MIN_PADDING_FRACTION_ON_DEVICES * batch * tokens
        or DENSE_OPERATIONS * width**2 * padding < COST_OF_EXTRA_LAUNCHES
    ):
        return None
    lengths = token_mask.sum(1)
    ends = lengths.cumsum(0)
    # no document is longer than a row
    others = ends[-1] + tokens * torch.arange(1, -(-real // TOKEN_BUCKETS // tokens) + 1, device=ends.device)
    cu_seqlens = torch.nn.functional.pad(torch.cat([ends, others.clamp(max=real)]), (1, 0)).int()
    position = torch.arange(real, device=ends.device)
    is_real = position < ends[-1]
    row = torch.searchsorted(ends, position, right=True).clamp(max=batch - 1)
    any_padding = lengths.argmin() * tokens + tokens - 1
    return Unpadding(
        torch.where(is_real, row * tokens + position - cu_seqlens[row], any_padding),
        cu_seqlens,
        (batch, tokens),
        is_real=is_real,
    )


def round_up(tokens: int) -> int:
    """Return the next of a few numbers of tokens, at most an eighth more: batches then have few different sizes.

    >>> round_up(1250), round_up(1281)
    (1280, 1408)
    """
    step = max(1, 2 ** (tokens - 1).bit_length() // 2 // TOKEN_BUCKETS)
    return -(-tokens // step) * step


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


def check_number_of_tokens(mask: torch.Tensor, num_real_tokens: int) -> None:
    """Raise a ValueError unless the number fits the mask, of right-padded rows, none of them empty."""
    real = int(mask.sum())
    if not real <= num_real_tokens <= round_up(real):
        raise ValueError(
            f"num_real_tokens is {num_real_tokens}, but attention_mask has {real} real tokens; pass its sum"
        )
    if not mask[:, 0].all() or not is_right_padded(mask):
        raise ValueError("num_real_tokens is for rows padded on the right, none of them empty; leave it out")
