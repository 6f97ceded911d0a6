"""Leave out documents whose text came before, while a corpus is tokenized.

Memory is 8 bytes per distinct document, twice that for a moment while an index grows: 50 million documents take 0.4 to
0.8 GB. Texts are equal if all their characters are, apart from white space at both ends. Documents that only resemble
each other stay: docs/pretraining.md names what removes them.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np

MAX_RECENT = 2**20  # hashes that wait in a set of Python until they are merged into the sorted array


class ExactDeduplication:
    """Removes texts that came before, and counts them.

    Texts are compared by 64-bit hashes: among 50 million different documents the chance that any two have the same
    hash is 1 in 15,000.

    >>> deduplication = ExactDeduplication()
    >>> list(deduplication.without_duplicates([["a", "b", "a "], ["b", "c"]]))
    [['a', 'b'], ['c']]
    >>> deduplication.counts
    {'duplicates': 2, 'duplicate_characters': 3}
    """

    def __init__(self) -> None:
        self.counts = {"duplicates": 0, "duplicate_characters": 0}
        self.index = np.empty(0, np.uint64)  # sorted
        self.recent: set[int] = set()

    def without_duplicates(self, batches: Iterable[list[str]]) -> Iterator[list[str]]:
        """Yield the batches without the texts that came before; empty texts are no duplicates."""
        for batch in batches:
            hashes = np.array([hash_of(text) for text in batch], np.uint64)
            in_index = self.is_in_index(hashes)
            texts = []
            for text, number, is_indexed in zip(batch, hashes.tolist(), in_index.tolist(), strict=True):
                if text.strip() and (is_indexed or number in self.recent):
                    self.counts["duplicates"] += 1
                    self.counts["duplicate_characters"] += len(text)
                    continue
                self.recent.add(number)
                texts.append(text)
            if len(self.recent) >= MAX_RECENT:
                self.merge()
            yield texts

    def is_in_index(self, hashes: np.ndarray) -> np.ndarray:
        """Return which hashes [B] the index contains, bool [B]."""
        if not len(self.index):
            return np.zeros(len(hashes), bool)
        places = np.minimum(np.searchsorted(self.index, hashes), len(self.index) - 1)
        return self.index[places] == hashes

    def merge(self) -> None:
        """Move the recent hashes into the index."""
        recent = np.sort(np.fromiter(self.recent, np.uint64, len(self.recent)))
        self.recent.clear()
        self.index = np.insert(self.index, np.searchsorted(self.index, recent), recent)


def hash_of(text: str) -> int:
    """Return 64 bits that are the same in each process, unlike `hash`."""
    return int.from_bytes(blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
