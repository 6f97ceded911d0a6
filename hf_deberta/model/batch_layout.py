"""Per-forward attention metadata: masks, document boundaries, positions, rows of the relative table in use.

Legend: B batch, N tokens, H heads, Q queries, K keys, d head size.

Documents of a packed row are separated by `cu_seq_lens_q`, by `position_ids` that restart (if there is no mask), or by
a mask [B, N, N] in which two neighbours do not see each other.
"""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from .configuration_hf_deberta import HfDebertaConfig
from .input_checks import can_read_values, check_positions, check_tensors, in_captured_graph
from .relative_position import TableWindow
from .slots import replaceable

Result = TypeVar("Result")


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see, and the positions of the queries.

    The default is full attention of every position to every position.

    Args:
        mask: boolean, True for visible. With [B, K], padding is not visible and sees nothing; with [B, K, K],
            entry [b, i, j] lets position i see position j. The context of a query that sees nothing is zero.
        documents: [B, K], the number of each token's document, which never decreases along a row. Documents do not see
            one another.
        causal: no token sees those after it.
        cu_seqlens: [documents + 1], boundaries of the documents of a packed row, with B = 1, instead of `documents`.
        lengths: lengths of these documents, if they are available without waiting for a device.
        longest: the largest of these lengths, or a bound for it, if available; `lengths` imply it.
        query_positions: [B, Q], positions of the queries in the key sequence; by default query i is at position i.
    """

    mask: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    causal: bool = False
    cu_seqlens: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    longest: int | None = None
    query_positions: torch.Tensor | None = None
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_padding_only(self) -> bool:
        """True if the mask only separates real tokens from padding."""
        return self.mask is not None and self.mask.dim() == 2 and not self.is_structured

    @property
    def is_structured(self) -> bool:
        """True if what a token may see also depends on its position: in documents, or causally."""
        return self.documents is not None or self.cu_seqlens is not None or self.causal

    def compute_once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, computed once for all layers; in a captured graph it is computed each time.

        The key holds all that the result depends on beside this mask. Tensors are compared by identity.

        >>> mask.compute_once(("documents", length), lambda: document_numbers(mask.cu_seqlens, length))
        """
        if in_captured_graph():
            return compute()
        key = torch.is_inference_mode_enabled(), key  # autograd cannot save tensors that were made in inference mode
        if (kept := self._computed.get(key)) is None:
            kept = self._computed[key] = (compute(),)  # in a tuple: the result may be None
        return kept[0]

    def visible(self, keys: int, device: torch.device) -> torch.Tensor | None:
        """Which key each query may see, [B or 1, 1, Q, K] of bool; None if every query sees every key."""
        return self.compute_once(("visible", keys, device), lambda: self._visible(keys, device))

    def _visible(self, keys: int, device: torch.device) -> torch.Tensor | None:
        conditions = []
        if self.mask is not None and self.mask.dim() == 3:
            conditions.append(self._at_queries(self.mask))
        elif self.mask is not None:
            conditions.append(self._at_queries(self.mask[:, :, None]) & self.mask[:, None, :])
        documents = self.documents if self.cu_seqlens is None else document_numbers(self.cu_seqlens, keys)[None]
        if documents is not None:
            conditions.append(self._at_queries(documents[:, :, None]) == documents[:, None, :])
        if self.causal:
            position = torch.arange(keys, device=device)[None]
            conditions.append(self._at_queries(position[:, :, None]) >= position[:, None, :])
        if not conditions:
            return None
        visible = conditions[0]
        for condition in conditions[1:]:
            visible = visible & condition
        return visible[:, None]

    def _at_queries(self, values: torch.Tensor) -> torch.Tensor:
        """Values [B or 1, Q, ...] of the queries from those of all positions [B or 1, K, ...]."""
        if self.query_positions is None:
            return values
        batch = max(values.shape[0], self.query_positions.shape[0])
        index = self.query_positions[:, :, None].expand(batch, -1, values.shape[2])
        return values.expand(batch, -1, -1).gather(1, index)

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Raise a ValueError if shapes or types do not fit query [B, H, Q, d] and key [B, H, K, d]."""
        batch, queries, keys = key.shape[0], query.shape[2], key.shape[2]
        positions, mask = self.query_positions, self.mask
        if positions is None and queries != keys:
            raise ValueError(f"{queries} queries for {keys} keys need query_positions [B, Q]")
        if positions is not None and positions.shape != (batch, queries):
            raise ValueError(f"query_positions must be [B, Q] = {(batch, queries)}, not {tuple(positions.shape)}")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, True for visible, not {mask.dtype}")
        if mask is not None and tuple(mask.shape) not in ((batch, keys), (batch, keys, keys)):
            raise ValueError(
                f"mask must be [B, K] = {(batch, keys)} or [B, K, K] = {(batch, keys, keys)}, not {tuple(mask.shape)}"
            )
        documents = self.documents
        if documents is not None and tuple(documents.shape) not in ((batch, keys), (1, keys)):
            raise ValueError(f"documents must be [B, K] = {(batch, keys)}, not {tuple(documents.shape)}")
        if self.cu_seqlens is not None and batch != 1:
            raise ValueError(f"cu_seqlens describes one packed row, not a batch of {batch}")


def document_numbers(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Document number of each token, [length]: boundaries [0, 2, 5] give 0 0 1 1 1."""
    position = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)


@dataclass(frozen=True)
class BatchLayout:
    """Attention metadata of one forward pass, the same for all layers."""

    attention_mask: AttentionMask  # with a mask [B, N] or [B, N, N]
    token_mask: torch.Tensor | None  # bool, [B, N], False for padding
    documents: torch.Tensor | None  # [B, N], the number of each token's document
    position_ids: torch.Tensor | None  # [B or 1, N], as given, or counted from the start of each document
    length: int  # N
    longest: int  # tokens of the longest sequence: a document, or the row
    device: torch.device
    backend: str = "auto"  # of attention
    output_attentions: bool = False  # return probabilities; the backend is then "eager"
    output_hidden_states: frozenset[int] = frozenset()  # indices of the states to return; 0: the embeddings
    window: TableWindow | None = None  # of the relative table; None without relative positions
    unpadding: Any = None  # engines.unpadding.Unpadding, if the layers compute one row of real tokens
    padded: "BatchLayout | None" = None  # the batch [B, N], if so

    def to(self, device: torch.device | str, **kwargs) -> "BatchLayout":
        """This layout with its tensors on another device: Accelerate calls this if layers are on several devices."""
        return replace(
            _moved(self, device),
            device=torch.device(device),
            attention_mask=_moved(self.attention_mask, device),
            window=None if self.window is None else _moved(self.window, device),
        )

    @classmethod
    def from_inputs(
        cls,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None,
        shape: tuple[int, int],  # B, N
        device: torch.device,
        causal: bool = False,
        max_length_q: int | None = None,
    ) -> "BatchLayout":
        """Metadata from a model's inputs, which are checked; `causal`: no token sees those after it."""
        batch, length = shape
        check_tensors(position_ids=position_ids, cu_seq_lens_q=cu_seq_lens_q)
        if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(f"position_ids must be [B, N] = {(batch, length)}, not {tuple(position_ids.shape)}")
        if cu_seq_lens_q is not None and batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one packed row, not a batch of {batch}")
        mask = token_mask = documents = lengths = longest = None
        if attention_mask is not None:
            mask = boolean_mask(attention_mask, batch, length)
            token_mask = mask if mask.dim() == 2 else mask.any(1)
        if cu_seq_lens_q is not None:
            documents = document_numbers(cu_seq_lens_q, length)[None]
            longest = None if max_length_q is None else min(max_length_q, length)
            if can_read_values(cu_seq_lens_q):
                lengths = lengths_between(cu_seq_lens_q.tolist(), length, max_length_q)
                longest = max(lengths)
        elif mask is not None and mask.dim() == 3:
            hidden_neighbours = ~(mask | mask.mT).diagonal(1, 1, 2)  # neither of the two sees the other
            documents = number_from_boundaries(hidden_neighbours)
        elif mask is None and position_ids is not None:
            documents = number_from_boundaries(position_ids.diff(dim=-1) != 1).expand(batch, -1)
        separated = documents if cu_seq_lens_q is None and mask is None else None  # by the boundaries or the mask
        if position_ids is None and cu_seq_lens_q is not None and documents is not None:
            first = cu_seq_lens_q[documents].long()
            if token_mask is not None:
                first = next_real_tokens(token_mask).gather(1, first)
            position_ids = (torch.arange(length, device=device) - first).clamp(min=0)
        attention = AttentionMask(mask, separated, causal, cu_seq_lens_q, lengths, longest)
        longest = length if longest is None else longest
        return cls(attention, token_mask, documents, position_ids, length, longest, device)

    def for_queries(self, positions: torch.Tensor | None) -> "BatchLayout":
        """This layout for queries at positions [B, Q]; None for all of them."""
        return replace(self, attention_mask=replace(self.attention_mask, query_positions=positions))

    def absolute_positions(self, limit: int | None = None) -> torch.Tensor:
        """Positions [B or 1, N] for absolute position embeddings: as given, or counted from the first real token.

        So a row that is padded on the left has the positions that it has alone. Padding between real tokens is counted,
        as relative positions count it. Documents that a mask [B, N, N] separates are counted as one row. A ValueError
        if positions reach the `limit`, the number of position embeddings.
        """
        position_ids = self.position_ids
        if self.padded is not None:
            position_ids = gather(self.padded.absolute_positions().expand(self.unpadding.shape), self)
        if limit is not None:
            check_positions(position_ids, self.length, limit)
        if position_ids is not None:
            return position_ids
        positions, mask = torch.arange(self.length, device=self.device)[None], self.token_mask
        if mask is None or (can_read_values(mask) and bool(mask[:, 0].all())):
            return positions
        return (positions - first_real_tokens(mask)).clamp(min=0)

    def first_token_positions(self) -> torch.Tensor:
        """Position of the first real token of each row, [B or 1, 1], or of each token's document, [B, N]."""
        if self.documents is None:
            if self.token_mask is None:
                return torch.zeros(1, 1, dtype=torch.long, device=self.device)
            return first_real_tokens(self.token_mask)
        documents = self.documents.contiguous()
        starts = torch.searchsorted(documents, documents)  # document numbers never decrease
        return starts if self.token_mask is None else next_real_tokens(self.token_mask).gather(1, starts)

    def pooled_positions(self) -> torch.Tensor:
        """Positions [B or 1, S] of the first real token of each row (S = 1), or of each document of a packed row."""
        if self.unpadding is not None:
            return self.unpadding.first_token_positions()[0][None]
        bounds, mask = self.attention_mask.cu_seqlens, self.token_mask
        if bounds is None:
            return self.first_token_positions()[:, :1]
        starts = bounds[None, :-1].long()
        return starts if mask is None else next_real_tokens(mask).gather(1, starts)

    def scatter_pooled(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States [B or 1, S, hidden] at `pooled_positions`, zero where a row or document has no real token."""
        if self.unpadding is not None:
            return self.unpadding.scatter_pooled(states)
        bounds, mask = self.attention_mask.cu_seqlens, self.token_mask
        if mask is None:
            return states
        exist = mask.gather(1, positions)
        if bounds is not None:
            exist = exist & (positions < bounds[1:])
        return states.masked_fill(~exist[..., None].to(states.device), 0)


@replaceable
def unpadded(
    layout: BatchLayout,
    config: HfDebertaConfig,
    returns_states: bool,  # hidden states to which gradients may be requested, or attention probabilities
    num_real_tokens: int | None,
) -> BatchLayout:
    """The layout in which the layers compute; an engine leaves padding out where that saves time."""
    return layout


def gather(states: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Inputs [B, N, ...] as the layers read them: without padding [1, total, ...], or as they are."""
    return states if layout.unpadding is None else layout.unpadding.gather(states)


def scatter(states: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Outputs of the layers as [B, N, ...]."""
    return states if layout.unpadding is None else layout.unpadding.scatter(states)


def _moved(data, device: torch.device | str):
    """A dataclass with its tensors on another device."""
    return replace(data, **{name: value.to(device) for name, value in vars(data).items() if torch.is_tensor(value)})


def boolean_mask(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The mask as bool, [B, N] or [B, N, N], from 0/1 of any type; also from [B, 1, 1, N] and [B, 1, N, N]."""
    check_tensors(attention_mask=attention_mask)
    mask = attention_mask.squeeze(1) if attention_mask.dim() == 4 and attention_mask.shape[1] == 1 else attention_mask
    mask = mask.squeeze(1) if attention_mask.dim() == 4 and mask.shape[1] == 1 else mask
    if mask.dim() > 1 and mask.shape[0] == 1 < batch:  # one mask for all rows
        mask = mask.expand(batch, *mask.shape[1:])
    if tuple(mask.shape) not in ((batch, length), (batch, length, length)):
        raise ValueError(
            f"attention_mask must be [B, N] = {(batch, length)} or [B, N, N] = {(batch, length, length)}, "
            f"not {tuple(attention_mask.shape)}"
        )
    if mask.is_floating_point() and mask.dim() == 3:
        raise ValueError("an attention_mask [B, N, N] must be boolean or integer, 1 for visible, not additive")
    if mask.is_floating_point() and can_read_values(mask) and bool((mask < 0).any()):
        raise ValueError(
            f"attention_mask must be 1 for real tokens and 0 for padding, and holds {float(mask.min()):g}: "
            "replace an additive mask by attention_mask == 0"
        )
    return mask.bool()


def real_tokens(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """True for tokens that are not padding, [B, N]; with a mask [B, N, N], for tokens that at least one token sees."""
    mask = boolean_mask(attention_mask, batch, length)
    return mask if mask.dim() == 2 else mask.any(1)


def first_real_tokens(token_mask: torch.Tensor) -> torch.Tensor:
    """Position of each row's first real token, [B, 1]; 0 if there is none."""
    return token_mask.int().argmax(-1, keepdim=True)


def next_real_tokens(token_mask: torch.Tensor) -> torch.Tensor:
    """Position of the first real token at or after each position, [B, N]; the last position if there is none."""
    last = token_mask.shape[1] - 1
    positions = torch.arange(last + 1, device=token_mask.device).expand_as(token_mask)
    return positions.masked_fill(~token_mask, last).flip(-1).cummin(-1).values.flip(-1)


def check_one_document(position_ids: torch.Tensor | None) -> None:
    """Raise a ValueError if `position_ids` pack several documents into a row: a classifier would use the first only."""
    if position_ids is not None and can_read_values(position_ids) and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids that do not rise one by one pack several documents into a row: pass their boundaries as "
            "cu_seq_lens_q to classify each document, for a row of logits per document"
        )


def lengths_between(bounds: list[int], length: int, max_length_q: int | None) -> tuple[int, ...]:
    """Lengths of the documents of a row from their boundaries; none may be above `max_length_q`."""
    if bounds[0] != 0 or bounds[-1] != length or sorted(set(bounds)) != bounds:
        raise ValueError(f"cu_seq_lens_q must rise from 0 to {length}, the tokens of the row, and is {bounds}")
    lengths = tuple(end - begin for begin, end in itertools.pairwise(bounds))
    if max_length_q is not None and max_length_q < max(lengths):
        raise ValueError(
            f"max_length_q is {max_length_q}, but cu_seq_lens_q has a document of {max(lengths)} tokens; pass "
            f"{max(lengths)} or more"
        )
    return lengths


def number_from_boundaries(boundary: torch.Tensor) -> torch.Tensor:
    """Document numbers [B, N] from [B, N - 1] flags between neighbours."""
    return nn.functional.pad(boundary.long().cumsum(-1), (1, 0))
