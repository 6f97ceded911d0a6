"""What all layers of one forward pass share: which tokens are real, who sees whom, and which rows lie between them.

Legend: B batch, N tokens, k the largest relative distance.

Documents of a packed row are told apart by `cu_seq_lens_q`, by `position_ids` that restart where there is no mask, or
by a mask [B, N, N] in which two neighbours do not see one another.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from .attention import documents_of
from .fast_path_guards import can_read_values, is_tracing_or_compiling
from .unpadding import Unpadding, unpadding_of_documents, unpadding_of_mask


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one forward pass share: who sees whom, and which rows lie between them."""

    mask: torch.Tensor | None  # bool, [B, N] real tokens or [B, N, N] who sees whom
    token_mask: torch.Tensor | None  # bool, [B, N] real tokens
    cu_seqlens: torch.Tensor | None  # [documents + 1] of one packed row
    lengths: tuple[int, ...] | None  # of these documents, where they could be looked at
    documents: torch.Tensor | None  # [B, N], equal within a document
    position_ids: torch.Tensor  # [B or 1, N], absolute, within a document
    in_order: bool  # whether these are 0, 1, ... along each row
    rows_of_distance: torch.Tensor | None = None  # [2k + 1]
    rows: tuple[int, int] = (0, 0)  # of the whole table, the first one in use and the one after the last
    saturation: int | None = None  # the distance from which on rows are those of the ends
    unpadding: Unpadding | None = None  # where tokens stood, if the row was made of a batch

    def to(self, device: torch.device | str, **kwargs) -> "AttentionContext":
        """On another device, where a model is spread over several."""
        moved = {name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **moved)

    @classmethod
    def of(
        cls,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None,
        shape: tuple[int, int],  # B, N
        device: torch.device,
        causal: bool = False,
    ) -> "AttentionContext":
        """From what a user gives, checked; `causal`: no token sees those after it."""
        batch, length = shape
        check_positions(position_ids, batch, length)
        mask = token_mask = documents = lengths = None
        if attention_mask is not None:
            mask = boolean_mask(attention_mask, batch, length)
            token_mask = real_tokens(mask, batch, length)
        if cu_seq_lens_q is not None:
            documents = documents_of(cu_seq_lens_q, length)[None]
            lengths = None if is_tracing_or_compiling() else lengths_between(cu_seq_lens_q.tolist(), length)
        elif mask is not None and mask.dim() == 3:
            strangers = ~(mask | mask.mT).diagonal(1, 1, 2)  # neither neighbour sees the other
            documents = number_from_boundaries(strangers)
        elif mask is None and position_ids is not None:
            documents = number_from_boundaries(position_ids.diff(dim=-1) != 1).expand(batch, -1)
        if causal:
            mask = causal_mask(mask, documents, batch, length, device)
        in_order = position_ids is None and cu_seq_lens_q is None
        if position_ids is None:
            position_ids = torch.arange(length, device=device)[None]
            if cu_seq_lens_q is not None:
                position_ids = position_ids - cu_seq_lens_q[documents]
        return cls(mask, token_mask, cu_seq_lens_q, lengths, documents, position_ids, in_order)

    def unpadded(self, width: int) -> "AttentionContext":
        """The same for real tokens alone in one row of documents; itself if that gains nothing at this width."""
        if self.cu_seqlens is not None or (self.mask is not None and self.mask.dim() == 3):
            return self
        if self.mask is not None:
            unpadding = unpadding_of_mask(self.mask, width)
        else:
            unpadding = None if self.documents is None else unpadding_of_documents(self.documents)
        if unpadding is None:
            return self
        cu_seqlens = unpadding.cu_seqlens()
        return replace(
            self,
            mask=None,
            token_mask=None,
            cu_seqlens=cu_seqlens,
            lengths=unpadding.lengths,
            documents=documents_of(cu_seqlens, int(cu_seqlens[-1]))[None],
            position_ids=unpadding.gather(self.position_ids.expand(unpadding.shape)),
            in_order=False,
            unpadding=unpadding,
        )

    def with_mask_of_documents(self) -> "AttentionContext":
        """For layers that know packed rows by a mask [B, N, N] only."""
        if self.documents is None or self.mask is not None or self.cu_seqlens is not None:
            return self
        return replace(self, mask=self.documents[:, :, None] == self.documents[:, None, :])

    def first_tokens(self) -> torch.Tensor:
        """[B or 1, 1]: where each row begins, which is not its first place where padding is on the left."""
        if self.token_mask is None:
            return torch.zeros_like(self.position_ids[:1, :1])
        return self.token_mask.int().argmax(-1, keepdim=True)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """What was given as [B, N, ...] in the layout of the layers."""
        return states if self.unpadding is None else self.unpadding.gather(states)

    def scatter(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """What the layers made, as [B, N, ...]."""
        return states if self.unpadding is None or states is None else self.unpadding.scatter(states)

    def scatter_each(self, hidden_states: tuple | None) -> tuple | None:
        """`scatter` for the states of all layers, where they were asked for."""
        return hidden_states and tuple(map(self.scatter, hidden_states))

    def longest(self, length: int) -> int:
        """Tokens of the longest sequence in rows of `length` tokens."""
        return length if self.lengths is None else max(self.lengths)


def boolean_mask(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """[B, N] or [B, N, N] of bool, from 0/1 of any type; [B, 1, 1, N] and [B, 1, N, N] are taken as such."""
    mask = attention_mask.squeeze(1) if attention_mask.dim() == 4 and attention_mask.shape[1] == 1 else attention_mask
    mask = mask.squeeze(1) if attention_mask.dim() == 4 and mask.shape[1] == 1 else mask
    if tuple(mask.shape) not in ((batch, length), (batch, length, length)):
        raise ValueError(
            f"attention_mask must be [B, N] = {(batch, length)} or [B, N, N] = {(batch, length, length)}, "
            f"not {tuple(attention_mask.shape)}"
        )
    if mask.is_floating_point() and mask.dim() == 3:
        raise ValueError("an attention_mask [B, N, N] must be boolean or integer, 1 for what may be seen, not additive")
    if mask.is_floating_point() and can_read_values(mask) and bool((mask < 0).any()):
        raise ValueError(
            f"an attention_mask has 1 for real tokens and 0 for padding, and this one holds {float(mask.min()):g}: "
            "turn an additive mask into attention_mask == 0"
        )
    return mask.bool()


def causal_mask(
    mask: torch.Tensor | None, documents: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    """[B, N, N] of bool: who sees whom where each token sees itself and those before it, of its own document."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    if mask is not None and mask.dim() == 3:
        return visible & mask  # which tells documents apart itself
    if mask is not None:
        visible = visible & mask[:, :, None] & mask[:, None, :]
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])
    return visible


def real_tokens(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """[B, N] of bool: tokens that are not padding; in a mask [B, N, N], those that anyone sees."""
    mask = boolean_mask(attention_mask, batch, length)
    return mask if mask.dim() == 2 else mask.any(1)


def check_positions(position_ids: torch.Tensor | None, batch: int, length: int) -> None:
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids must be [B, N] = {(batch, length)}, not {tuple(position_ids.shape)}")


def check_one_document(position_ids: torch.Tensor | None) -> None:
    """For classifiers: of documents that `position_ids` pack into a row, the first alone would be judged."""
    if position_ids is not None and can_read_values(position_ids) and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids that do not rise one by one pack several documents into a row, and a classifier judges each: "
            "pass their boundaries as cu_seq_lens_q, for a row of logits per document"
        )


def lengths_between(bounds: list[int], length: int) -> tuple[int, ...]:
    """Lengths of the documents of a row, from where they begin and end."""
    if bounds[0] != 0 or bounds[-1] != length or sorted(set(bounds)) != bounds:
        raise ValueError(f"cu_seq_lens_q must rise from 0 to the {length} tokens of the row, and is {bounds}")
    return tuple(end - begin for begin, end in itertools.pairwise(bounds))


def number_from_boundaries(boundary: torch.Tensor) -> torch.Tensor:
    """Document numbers [B, N] from [B, N - 1] flags between neighbours."""
    return nn.functional.pad(boundary.long().cumsum(-1), (1, 0))


def any_outside(ids: torch.Tensor, size: int) -> bool:
    """Whether an id is not in [0, size)."""
    return can_read_values(ids) and (bool((ids < 0).any()) or bool((ids >= size).any()))
