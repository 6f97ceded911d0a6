"""Which keys each query of an attention call may see.

Legend: B batch, H heads, Q queries, K keys, d head size.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .fast_path_guards import is_tracing_or_compiling

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
        if is_tracing_or_compiling():
            return compute()
        key = torch.is_inference_mode_enabled(), key  # autograd cannot save tensors that were made in inference mode
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]

    def visible(self, keys: int, device: torch.device) -> torch.Tensor | None:
        """Which key each query may see, [B or 1, 1, Q, K] of bool; None if every query sees every key."""
        return self.compute_once(("visible", keys, device), lambda: self._visible(keys, device))

    def _visible(self, keys: int, device: torch.device) -> torch.Tensor | None:
        conditions = []
        if self.mask is not None and self.mask.dim() == 3:
            conditions.append(self._at_queries(self.mask))
        elif self.mask is not None:
            conditions.append(self._at_queries(self.mask[:, :, None]) & self.mask[:, None, :])
        if self.documents is not None:
            conditions.append(self._at_queries(self.documents[:, :, None]) == self.documents[:, None, :])
        if self.cu_seqlens is not None:
            document = document_numbers(self.cu_seqlens, keys)[None]
            conditions.append(self._at_queries(document[:, :, None]) == document[:, None, :])
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

    def has_sorted_queries(self) -> bool:
        """True if query positions never decrease along a row."""
        return self.query_positions is None or bool((self.query_positions.diff() >= 0).all())

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
