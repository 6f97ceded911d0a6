"""Which keys each query of an attention call may see.

Legend: B batch, H heads, Q queries, K keys, d head size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see, and the positions of the queries.

    The default is full attention of every position to every position.

    Args:
        mask: boolean, True for visible. With [B, K], padding is not visible and sees nothing; with [B, K, K],
            entry [b, i, j] lets position i see position j. The context of a query that sees nothing is zero.
        cu_seqlens: [documents + 1], boundaries of the documents of a packed row, with B = 1. Documents do not see
            one another.
        lengths: lengths of these documents, if they are available without waiting for a device.
        query_positions: [B, Q], positions of the queries in the key sequence; by default query i is at position i.
    """

    mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    query_positions: torch.Tensor | None = None

    @property
    def is_padding_only(self) -> bool:
        """True if the mask only separates real tokens from padding."""
        return self.mask is not None and self.mask.dim() == 2 and self.cu_seqlens is None

    def visible(self, keys: int) -> torch.Tensor | None:
        """Which key each query may see, [B or 1, 1, Q, K] of bool; None if every query sees every key."""
        visible = None
        if self.mask is not None:
            visible = self.mask if self.mask.dim() == 3 else self.mask[:, :, None] & self.mask[:, None, :]
        if self.cu_seqlens is not None:
            document = document_numbers(self.cu_seqlens, keys)
            same_document = (document[:, None] == document[None, :])[None]
            visible = same_document if visible is None else visible & same_document
        if visible is None:
            return None
        if self.query_positions is not None:
            batch = max(visible.shape[0], self.query_positions.shape[0])
            index = self.query_positions[:, :, None].expand(batch, -1, keys)
            visible = visible.expand(batch, -1, -1).gather(1, index)
        return visible[:, None]

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
        if self.cu_seqlens is not None and batch != 1:
            raise ValueError(f"cu_seqlens describes one packed row, not a batch of {batch}")


def document_numbers(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Document number of each token, [length]: boundaries [0, 2, 5] give 0 0 1 1 1."""
    position = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
