"""delta(i, j): which row of the relative-position table stands between two tokens.

Legend: k largest distance, s rows per side (buckets, or k), N tokens.

A distance is `query - key`. With s log buckets (half of them exact, half logarithmic up to k) or plain
clipping, it becomes a row in [0, 2s); row s is distance 0. Everything below is integers computed once.
"""

import math
from functools import lru_cache

import torch


def log_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket in (-buckets, buckets) of a signed distance.

    Distances up to `buckets // 2` are their own bucket. The float32 arithmetic, with the divisor a
    Python double, is part of the definition: released weights were trained with its rounding.
    """
    middle = buckets // 2
    magnitude = distance.abs().clamp(min=middle - 1).to(torch.float32)
    logarithmic = torch.ceil(float32_log(magnitude / middle) / math.log((max_distance - 1) / middle) * (middle - 1))
    far = distance.sign() * (logarithmic.to(torch.long) + middle)
    return torch.where(distance.abs() <= middle, distance, far)


def float32_log(x: torch.Tensor) -> torch.Tensor:
    """ln x, the same to the last bit on every processor, which torch.log is not.

    With x = 2^e m and 1 <= m < 2 it is e ln 2 + ln m, each rounded to float32. So written it gives all official tables,
    also the two in which torch.log, on Intel, rounds the farthest distance the other way (docs/log.md).
    """
    half, exponent = torch.frexp(x)
    return (exponent - 1).to(torch.float32) * math.log(2) + torch.log(2 * half.double()).to(torch.float32)


@lru_cache(maxsize=64)
def rows_of_distances(max_distance: int, buckets: int = 0, clamp: bool = True) -> torch.Tensor:
    """Table row for each distance in [-k, k], as a tensor of 2k + 1 integers.

    A distance beyond k is read as k: see `rows_between`. With buckets the official code clamps to
    k - 1 first, so that the two ends equal their neighbours; without buckets -k has row 0 for itself.
    `clamp=False` is in-tree Transformers, which lets -k and beyond fall on row 0 with buckets as well.

    >>> rows_of_distances(4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 7]
    """
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")  # also where models start on "meta"
    span = max_distance
    if buckets > 0:
        span = buckets
        clamped = distance.clamp(-(max_distance - 1), max_distance - 1)
        bucket = log_bucket(clamped, buckets, max_distance)
        if not clamp:
            bucket[0] = -span
        distance = bucket
    return (distance + span).clamp(0, 2 * span - 1)


def saturation_of(rows_of_distance: torch.Tensor) -> int:
    """The distance from which on, on either side, rows are those of the ends: 506 for 256 buckets up to 512.

    >>> saturation_of(rows_of_distances(512, 256))
    506
    """
    k = (rows_of_distance.shape[0] - 1) // 2
    ends = rows_of_distance[-1], rows_of_distance[0]
    changing = [
        (side != end).sum() for side, end in zip((rows_of_distance[k:], rows_of_distance[: k + 1]), ends, strict=True)
    ]
    return int(max(changing))


def rows_between(
    query_positions: torch.Tensor,  # [..., Q]
    key_positions: torch.Tensor,  # [..., K]
    rows_of_distance: torch.Tensor,  # [2k + 1]
) -> torch.Tensor:
    """delta(i, j) for every pair: [..., Q, K]."""
    k = (rows_of_distance.shape[0] - 1) // 2
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    return rows_of_distance[distance.clamp(-k, k) + k]


def rows_in_use(length: int, span: int, pruned: bool = True) -> tuple[int, int]:
    """[first, last) rows that sequences of `length` tokens can reach; the rest need no projection.

    `pruned=False` is the whole table, for the few whose rows outrun the distance, see `may_be_pruned`.

    >>> rows_in_use(32, 256)
    (225, 288)
    """
    if not pruned:
        return 0, 2 * span
    return max(span - length + 1, 0), min(span + length, 2 * span)


def may_be_pruned(rows_of_distance: torch.Tensor, span: int) -> bool:
    """Whether a distance of n never reaches further than n rows.

    So it is with all released tables. Logarithmic buckets spread a narrow range of distances over more
    rows than it has (64 buckets up to distance 64), and then short sequences use far rows.
    """
    k = (rows_of_distance.shape[0] - 1) // 2
    distance = torch.arange(-k, k + 1, device=rows_of_distance.device)
    return bool(((rows_of_distance - span).abs() <= distance.abs()).all())
