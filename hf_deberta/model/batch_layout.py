"""Per-forward attention metadata: masks, document boundaries, positions, rows of the relative table in use.

Legend: B batch, N tokens.

Documents of a packed row are separated by `cu_seq_lens_q`, by `position_ids` that restart (if there is no mask), or by
a mask [B, N, N] in which two neighbours do not see each other.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention_mask import AttentionMask, document_numbers
from .fast_path_guards import can_read_values
from .input_checks import check_tensors
from .relative_position import RowsInUse
from .unpadding import (
    Unpadding,
    is_right_padded,
    unpadding_of_counted_mask,
    unpadding_of_documents,
    unpadding_of_mask,
)


@dataclass(frozen=True)
class KeyValueCache:
    """Transformers' cache of keys and values in one forward pass of a causal model."""

    cache: Cache
    tokens: int  # in the cache before this pass
    _extended: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, H, N, d] and return those of all tokens.

        A layer that runs twice in a pass appends them once: the ordinary last layer beside the mask decoder.
        """
        if layer not in self._extended:
            self._extended[layer] = self.cache.update(key, value, layer)
            tokens, expected = self._extended[layer][0].shape[2], self.tokens + key.shape[2]
            if tokens != expected:
                raise ValueError(
                    f"the cache returns {tokens} keys for {expected} tokens; pass one that keeps all tokens, such as "
                    "DynamicCache"
                )
        return self._extended[layer]


@dataclass(frozen=True)
class BatchLayout:
    """Attention metadata of one forward pass, the same for all layers."""

    attention_mask: AttentionMask  # with a mask [B, N] or [B, N, N]
    token_mask: torch.Tensor | None  # bool, [B, N], False for padding
    documents: torch.Tensor | None  # [B, N], the number of each token's document
    position_ids: torch.Tensor  # [B or 1, N], as given, or counted from the start of the row or document
    in_order: bool  # True if position_ids are 0, 1, ... along each row
    relative_rows: RowsInUse | None = None  # None without relative positions
    unpadding: Unpadding | None = None  # if a batch was unpadded to one row
    padded: "BatchLayout | None" = None  # of that batch, if its lengths were not read
    cache: KeyValueCache | None = None  # then the other fields but the mask describe the new tokens only

    def to(self, device: torch.device | str, **kwargs) -> "BatchLayout":
        """This layout with its tensors on another device, for models that are spread over several."""
        rows = self.relative_rows
        return replace(
            _moved(self, device),
            attention_mask=_moved(self.attention_mask, device),
            relative_rows=None if rows is None else _moved(rows, device),
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
        check_positions(position_ids, batch, length)
        mask = token_mask = documents = lengths = longest = None
        if attention_mask is not None:
            mask = boolean_mask(attention_mask, batch, length)
            token_mask = real_tokens(mask, batch, length)
        if cu_seq_lens_q is not None:
            documents = document_numbers(cu_seq_lens_q, length)[None]
            longest = None if max_length_q is None else min(max_length_q, length)
            if can_read_values(cu_seq_lens_q):
                lengths = lengths_between(cu_seq_lens_q.tolist(), length)
                longest = longest_of(lengths, max_length_q)
        elif mask is not None and mask.dim() == 3:
            hidden_neighbours = ~(mask | mask.mT).diagonal(1, 1, 2)  # neither of the two sees the other
            documents = number_from_boundaries(hidden_neighbours)
        elif mask is None and position_ids is not None:
            documents = number_from_boundaries(position_ids.diff(dim=-1) != 1).expand(batch, -1)
        separated = documents if cu_seq_lens_q is None and (mask is None or mask.dim() == 2) else None
        in_order = position_ids is None and cu_seq_lens_q is None
        if position_ids is None:
            position_ids = torch.arange(length, device=device)[None]
            if cu_seq_lens_q is not None and documents is not None:
                first = cu_seq_lens_q[documents].long()
                if token_mask is not None:
                    first = next_real_tokens(token_mask).gather(1, first)
                position_ids = (position_ids - first).clamp(min=0)
        attention = AttentionMask(mask, separated, causal, cu_seq_lens_q, lengths, longest)
        return cls(attention, token_mask, documents, position_ids, in_order)

    @classmethod
    def with_cache(
        cls,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        shape: tuple[int, int],  # B, N
        device: torch.device,
    ) -> "BatchLayout":
        """Metadata of new tokens [B, N] of a causal model; the mask [B, K] and the keys include the cached tokens."""
        batch, length = shape
        cache = KeyValueCache(past_key_values, past_key_values.get_seq_length())
        keys = cache.tokens + length
        check_rows_of_cache(past_key_values, batch)
        if attention_mask is not None and attention_mask.shape != (batch, keys):
            raise ValueError(
                f"with a key-value cache attention_mask must be [B, K] = {(batch, keys)}, for {cache.tokens} cached "
                f"and {length} new tokens, not {tuple(attention_mask.shape)}"
            )
        check_positions(position_ids, batch, length)
        can_check = attention_mask is None and position_ids is not None and can_read_values(position_ids)
        if position_ids is not None and can_check and bool((position_ids.diff(dim=-1) != 1).any()):
            raise ValueError(
                "a key-value cache cannot hold packed rows: position_ids must rise one by one, or come with an "
                "attention_mask; for packed rows pass use_cache=False"
            )
        whole = cls.from_inputs(attention_mask, None, None, (batch, keys), device, causal=True)
        if position_ids is None:
            position_ids = whole.absolute_positions()[:, cache.tokens :]
        queries = torch.arange(cache.tokens, keys, device=device).expand(batch, -1)
        mask = replace(whole.attention_mask, causal=length > 1, query_positions=queries)  # the last token sees all
        return replace(
            whole,
            attention_mask=whole.attention_mask if cache.tokens == 0 else mask,
            token_mask=None if whole.token_mask is None else whole.token_mask[:, cache.tokens :],
            position_ids=position_ids,
            in_order=False,
            cache=cache,
        )

    def mask_of(self, query_positions: torch.Tensor | None) -> AttentionMask:
        """The attention mask of queries at positions [B, Q] among the tokens of this pass; None for all of them."""
        if query_positions is None:
            return self.attention_mask
        if self.cache is not None:
            query_positions = query_positions + self.cache.tokens
        return replace(self.attention_mask, query_positions=query_positions)

    def unpadded(self, width: int, num_real_tokens: int | None = None) -> "BatchLayout":
        """The layout of the batch as one row without padding, or without its mask if there is no padding.

        This layout if unpadding saves no time at this model width, if the row is packed, if the mask is [B, N, N], or
        if the model is causal. Where the mask cannot be read without waiting for a device, the number of real tokens
        must be given.
        """
        mask = self.attention_mask.mask
        if self.attention_mask.cu_seqlens is not None or self.attention_mask.causal:
            return self
        if mask is not None and mask.dim() == 3:
            return self
        unpadding = None
        if mask is not None and can_read_values(mask):
            check_number_of_tokens(mask, num_real_tokens)
            if bool(mask.all()):
                return replace(self, attention_mask=replace(self.attention_mask, mask=None), token_mask=None)
            unpadding = unpadding_of_mask(mask, width)
        elif mask is not None and num_real_tokens is not None:
            unpadding = unpadding_of_counted_mask(mask, num_real_tokens, width)
        elif self.documents is not None and can_read_values(self.documents):
            unpadding = unpadding_of_documents(self.documents)
        if unpadding is None:
            return self
        cu_seqlens, lengths = unpadding.cu_seqlens, unpadding.lengths
        return replace(
            self,
            attention_mask=AttentionMask(cu_seqlens=cu_seqlens, lengths=lengths, longest=unpadding.longest),
            token_mask=None,
            documents=document_numbers(cu_seqlens, unpadding.index.shape[0])[None],
            position_ids=unpadding.gather(self.position_ids.expand(unpadding.shape)),
            in_order=False,
            unpadding=unpadding,
            padded=self if lengths is None else None,
        )

    def padded_again(self) -> "BatchLayout":
        """The layout of the padded batch, for a layer with many query positions.

        Where lengths are not read, it would multiply each query of the unpadded row with the keys of all documents.
        """
        return self if self.padded is None else replace(self.padded, relative_rows=self.relative_rows)

    def absolute_positions(self) -> torch.Tensor:
        """Positions [B or 1, N] for absolute position embeddings: as given, or counted from the first real token.

        So a row that is padded on the left has the positions that it has alone. Padding between real tokens is counted,
        as relative positions count it. Documents that a mask [B, N, N] separates are counted as one row.
        """
        mask = self.token_mask
        if mask is None or not self.in_order or (can_read_values(mask) and bool(mask[:, 0].all())):
            return self.position_ids
        return (self.position_ids - first_real_tokens(mask)).clamp(min=0)

    def first_tokens(self) -> torch.Tensor:
        """Position of the first real token of each row, [B or 1, 1], or of each token's document, [B, N]."""
        if self.documents is None:
            if self.token_mask is None:
                return torch.zeros_like(self.position_ids[:1, :1])
            return first_real_tokens(self.token_mask)
        documents = self.documents.contiguous()
        starts = torch.searchsorted(documents, documents)  # document numbers never decrease
        return starts if self.token_mask is None else next_real_tokens(self.token_mask).gather(1, starts)

    def pooled_tokens(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions [B or 1, S] of the first real token of each row (S = 1), or of each document of a packed row.

        Also which of them exist, [B or 1, S]: a row of padding only has none. None if all exist.
        """
        bounds, mask = self.attention_mask.cu_seqlens, self.token_mask
        if bounds is None:
            positions = self.first_tokens()[:, :1]
            return positions, None if mask is None else mask.gather(1, positions)
        starts = bounds[None, :-1].long()
        if mask is None:
            return starts, None
        positions = next_real_tokens(mask).gather(1, starts)
        return positions, mask.gather(1, positions) & (positions < bounds[1:])

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Inputs [B, N, ...] in the layout of the layers, without padding if the batch was unpadded."""
        return states if self.unpadding is None else self.unpadding.gather(states)

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """Outputs of the layers as [B, N, ...]."""
        return states if self.unpadding is None else self.unpadding.scatter(states)

    def scatter_each(self, hidden_states: tuple[torch.Tensor | None, ...] | None) -> tuple | None:
        """The hidden states of all layers as [B, N, hidden]; None stays None."""
        return hidden_states and tuple(None if states is None else self.scatter(states) for states in hidden_states)

    def longest(self, length: int) -> int:
        """Tokens of the longest document, or, if there is no packed row, `length` and the cached tokens."""
        longest = self.attention_mask.longest
        if self.cache is not None:
            return self.cache.tokens + length
        return length if longest is None else longest


def _moved(data, device: torch.device | str):
    """A dataclass with its tensors on another device."""
    return replace(data, **{name: value.to(device) for name, value in vars(data).items() if torch.is_tensor(value)})


def boolean_mask(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The mask as bool, [B, N] or [B, N, N], from 0/1 of any type; also from [B, 1, 1, N] and [B, 1, N, N]."""
    check_tensors(attention_mask=attention_mask)
    mask = attention_mask.squeeze(1) if attention_mask.dim() == 4 and attention_mask.shape[1] == 1 else attention_mask
    mask = mask.squeeze(1) if attention_mask.dim() == 4 and mask.shape[1] == 1 else mask
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


def check_positions(position_ids: torch.Tensor | None, batch: int, length: int) -> None:
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids must be [B, N] = {(batch, length)}, not {tuple(position_ids.shape)}")


def check_rows_of_cache(cache: Cache, batch: int) -> None:
    """Raise a ValueError if a cache that is not empty holds another number of rows."""
    keys: Any = getattr(cache.layers[0], "keys", None) if cache.get_seq_length() else None
    if keys is not None and keys.dim() == 4 and keys.shape[0] != batch:  # quantized caches keep an empty vector
        raise ValueError(
            f"the key-value cache must hold the rows of this batch, {batch}, not {keys.shape[0]}; pass the cache of "
            "these rows or a new one, or change its rows with batch_repeat_interleave or batch_select_indices"
        )


def check_one_document(position_ids: torch.Tensor | None) -> None:
    """Raise a ValueError if `position_ids` pack several documents into a row: a classifier would use the first only."""
    if position_ids is not None and can_read_values(position_ids) and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids that do not rise one by one pack several documents into a row: pass their boundaries as "
            "cu_seq_lens_q to classify each document, for a row of logits per document"
        )


def check_number_of_tokens(mask: torch.Tensor, given: int | None) -> None:
    """Raise a ValueError unless `num_real_tokens`, if given, is that of right-padded rows, none of them empty."""
    if given is None:
        return
    if int(mask.sum()) != given:
        raise ValueError(
            f"num_real_tokens is {given}, but attention_mask has {int(mask.sum())} real tokens; pass its sum"
        )
    if not mask[:, 0].all() or not is_right_padded(mask):
        raise ValueError("num_real_tokens is for rows padded on the right, none of them empty; leave it out")


def longest_of(lengths: tuple[int, ...], given: int | None) -> int:
    """The length of the longest document, which `max_length_q`, if given, must not be below."""
    longest = max(lengths)
    if given is not None and given < longest:
        raise ValueError(
            f"max_length_q is {given}, but cu_seq_lens_q has a document of {longest} tokens; pass {longest} or more"
        )
    return longest


def lengths_between(bounds: list[int], length: int) -> tuple[int, ...]:
    """Lengths of the documents of a row from their boundaries."""
    if bounds[0] != 0 or bounds[-1] != length or sorted(set(bounds)) != bounds:
        raise ValueError(f"cu_seq_lens_q must rise from 0 to {length}, the tokens of the row, and is {bounds}")
    return tuple(end - begin for begin, end in itertools.pairwise(bounds))


def number_from_boundaries(boundary: torch.Tensor) -> torch.Tensor:
    """Document numbers [B, N] from [B, N - 1] flags between neighbours."""
    return nn.functional.pad(boundary.long().cumsum(-1), (1, 0))
