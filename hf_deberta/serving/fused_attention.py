"""Disentangled attention of fused layers: for short texts, both position terms from one product.

Legend: B rows or documents of equal length, N tokens each, M = B N, H heads, d head size, r reach: the largest distance
in the tables, T terms (1 or 2).

Queries and keys are neighbours in the projected states [M, 3, H, d], and so are the tables, which are laid out by
distance: falling for queries, rising for keys (attention_sdpa.py). So one product [T H, M, d] @ [T H, d, 2N] has all
position terms; entry (i, N - 1 - i + j) of the first half is c2p of query i and key j, and entry (j, N - 1 - j + i)
of the second is p2c. A product computes 2N columns where N are needed, which is fastest up to
`MAX_TOKENS_IN_ONE_PRODUCT` tokens. Longer texts, masks between tokens and subsets of queries go to
`disentangled_attention`, in float32.

The scale of the scores is part of the query projection and of the tables.

Beside int8 a timing on this computer chooses the type: processors of one maker differ as well.
"""

import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

import torch

from hf_deberta.engines.attention_sdpa import cpu_attention_with_log_sum, document_lengths
from hf_deberta.engines.onednn import pad_rows
from hf_deberta.model.attention import disentangled_attention
from hf_deberta.model.attention_sdpa import distance_tables, skewed
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions

MIN_TABLE_REACH = 64  # of the tables, which grow with the longest text so far
MAX_POSITION_TERMS_NUMEL = 2**23  # numbers in the position terms of the documents that are computed together
# more columns cost less than smaller tiles up to here; bfloat16 products are faster, and their tiles not
MAX_TOKENS_IN_ONE_PRODUCT = {torch.float32: 128, torch.bfloat16: 512}

TIMED_ROWS, TIMED_HEADS, TIMED_HEAD_SIZE = 128, 12, 64  # of the attention that is timed
CALLS_PER_TURN = 3
MAX_TURNS = 6
MAX_SECONDS_OF_TURNS = 3.0  # on a busy computer, where each call waits for its threads


class FusedAttention:
    """The attention of one layer, from its projected states to the context, for inference on the CPU."""

    def __init__(self, positions: RelativePositions | None, heads: int, head_size: int, dtype: torch.dtype):
        """`positions` are in float32, and their queries include the scale; `dtype` is that of products."""
        self.positions, self.heads, self.head_size, self.dtype = positions, heads, head_size, dtype
        terms = () if positions is None else positions.terms
        self.terms = tuple(term for term in ("c2p", "p2c") if term in terms)  # in the order of queries and keys
        self.tables: torch.Tensor | None = None  # [T H, d, 2r + 1]

    def attend_whole_texts(
        self,
        projected: torch.Tensor,  # [M or more, 3 H d], query, key and value of each token, and rows from `pad_rows`
        mask: AttentionMask,
        shape: tuple[int, int],  # B, N
        backend: str,
    ) -> torch.Tensor:
        """The context of all tokens, as many rows as `projected` has; rows that are no token are zero."""
        groups = self.equal_short_texts(mask, shape, backend)
        if groups is None:
            query, key, value = self.split(projected, shape)
            return self.attend_with_any_mask(query, key, value, mask, backend)
        context = projected.new_empty(len(projected), self.heads * self.head_size, dtype=self.dtype)
        projected, row, document = projected.to(self.dtype), 0, 0
        for length, documents in groups:
            rows = slice(row, row + documents * length)
            visible = None if mask.mask is None else mask.mask[document : document + documents]
            by_head = context[rows].view(documents, length, self.heads, self.head_size)
            by_head.copy_(self.attend_equal_short_texts(projected[rows], length, visible))
            row, document = rows.stop, document + documents
        context[row:] = 0
        return context

    def equal_short_texts(
        self, mask: AttentionMask, shape: tuple[int, int], backend: str
    ) -> list[tuple[int, int]] | None:
        """Length and number of neighbouring texts that are computed together.

        None if only `attend_with_any_mask` can compute them.
        """
        if backend not in ("auto", "sdpa") or (self.positions is not None and "p2p" in self.positions.terms):
            return None
        if mask.is_padding_only or (mask.mask is None and not mask.is_structured):
            lengths: tuple[int, ...] | None = (shape[1],) * shape[0]
        else:
            lengths = document_lengths(mask)
        if lengths is None or max(lengths) > MAX_TOKENS_IN_ONE_PRODUCT[self.dtype]:
            return None
        groups = []
        for length, run in groupby(lengths):
            texts, at_once = len(list(run)), max(1, MAX_POSITION_TERMS_NUMEL // (4 * self.heads * length**2))
            groups += [(length, min(at_once, texts - first)) for first in range(0, texts, at_once)]
        return groups

    def attend_equal_short_texts(
        self,
        projected: torch.Tensor,  # [B N, 3 H d]
        length: int,
        visible: torch.Tensor | None,  # [B, N], False for padding
    ) -> torch.Tensor:
        """The context [B, N, H, d] of texts of equal length."""
        query, key, value = self.split(projected, (len(projected) // length, length))
        bias = None
        if self.positions is not None:
            bias = self.position_bias(projected, length)
        if visible is not None:
            masked = ~visible[:, None, None]
            bias = query.new_zeros(masked.shape, dtype=torch.float32) if bias is None else bias
            bias = bias.masked_fill(masked, torch.finfo(bias.dtype).min)
        context, _ = cpu_attention_with_log_sum(query, key, value, bias)
        context = context.transpose(1, 2)
        return context if visible is None else context * visible[..., None, None]

    def position_bias(self, projected: torch.Tensor, length: int) -> torch.Tensor:
        """c2p + p2c, [B, H, N, N] of float32."""
        terms, heads = self.terms, self.heads
        first, end = (0 if "c2p" in terms else heads), (2 * heads if "p2c" in terms else heads)
        states = projected.view(len(projected), 3 * heads, self.head_size)[:, first:end].transpose(0, 1)
        products = torch.bmm(states, self.window(length)).view(len(terms), heads, -1, length, 2 * length)
        by_term = [skewed(each.transpose(0, 1), length) for each in products]
        if terms == ("p2c",):
            return by_term[0].mT.float()
        bias = projected.new_empty(by_term[0].shape, dtype=torch.float32)
        return torch.add(by_term[0], by_term[1].mT, out=bias) if len(terms) == 2 else bias.copy_(by_term[0])

    def window(self, length: int) -> torch.Tensor:
        """The tables for texts of this length, [T H, d, 2N]."""
        tables = self.tables  # read once: another thread may replace it by a smaller one
        if tables is None or (tables.shape[2] - 1) // 2 < length:
            tables = self.tables = self.laid_out_tables(max(MIN_TABLE_REACH, 2 ** (length - 1).bit_length()))
        reach = (tables.shape[2] - 1) // 2
        return tables[:, :, reach - length + 1 : reach + length + 1]

    def laid_out_tables(self, reach: int) -> torch.Tensor:
        positions = self.positions
        assert positions is not None
        tables = distance_tables(positions, reach)
        parts = [
            table for table in (tables.keys_by_falling_distance, tables.queries_by_rising_distance) if table is not None
        ]
        return torch.cat(parts).mT.to(self.dtype).contiguous()

    def split(self, projected: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The parts of projected states, each [B, H, N, d]; `shape` is B, N."""
        batch, tokens = shape
        rows = projected[: batch * tokens]
        return rows.view(batch, tokens, -1, self.heads, self.head_size).permute(2, 0, 3, 1, 4).unbind(0)

    def attend_with_any_mask(
        self,
        query: torch.Tensor,  # [B, H, Q, d]
        key: torch.Tensor,  # [B, H, N, d]
        value: torch.Tensor,
        mask: AttentionMask,
        backend: str,
    ) -> torch.Tensor:
        """The context for all masks and lengths, in float32: rows [B Q, H d], and zeros that `pad_rows` adds."""
        query, key, value = query.float(), key.float(), value.float()
        context, _ = disentangled_attention(query, key, value, self.positions, mask, scale=1.0, backend=backend)
        return pad_rows(context.transpose(1, 2).flatten(2).flatten(0, 1))


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of attention's products: that of the linear layers, or beside int8 the faster floating type."""
    if dtype != torch.int8:
        return dtype
    return torch.bfloat16 if bfloat16_attention_ratio(torch.get_num_threads()) < 1 else torch.float32


@lru_cache(maxsize=16)
def bfloat16_attention_ratio(threads: int) -> float:
    """Time of one text's attention in bfloat16, divided by that in float32, with so many threads.

    The types take turns, and the median of the turns' ratios counts: a computer's speed may change from turn to turn. A
    turn is several calls, of which the shortest counts. No turn begins after `MAX_SECONDS_OF_TURNS`.
    """
    # not random numbers: the caller's next ones would depend on what was timed
    projected = torch.ones(TIMED_ROWS, 3 * TIMED_HEADS * TIMED_HEAD_SIZE)

    def make_call(dtype: torch.dtype) -> Callable[[], object]:
        attention = FusedAttention(None, TIMED_HEADS, TIMED_HEAD_SIZE, dtype)
        return lambda: attention.attend_whole_texts(projected, AttentionMask(), (1, TIMED_ROWS), "sdpa")

    calls, ratios = (make_call(torch.bfloat16), make_call(torch.float32)), list[float]()
    start = time.perf_counter()
    with torch.no_grad():
        while len(ratios) < MAX_TURNS and (not ratios or time.perf_counter() - start < MAX_SECONDS_OF_TURNS):
            times = [min(timeit.repeat(call, number=1, repeat=CALLS_PER_TURN)) for call in calls]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)
