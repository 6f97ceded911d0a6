"""Exact de-duplication keeps the first of equal texts, also across merges of its index, and counts the others."""

import random

import pytest

from hf_deberta.pretraining import deduplication as module
from hf_deberta.pretraining.deduplication import ExactDeduplication


@pytest.mark.parametrize("max_recent", [1, 7, 2**20])
def test_the_first_of_equal_texts_stays(monkeypatch, max_recent):
    monkeypatch.setattr(module, "MAX_RECENT", max_recent)
    rng = random.Random(0)
    texts = [str(rng.randrange(300)) for _ in range(1000)]
    deduplication = ExactDeduplication()
    batches = [texts[start : start + 50] for start in range(0, 1000, 50)]
    kept = [text for batch in deduplication.without_duplicates(batches) for text in batch]
    assert kept == list(dict.fromkeys(texts))
    duplicates = sum(map(len, texts)) - sum(map(len, kept))
    assert deduplication.counts == {"duplicates": 1000 - len(kept), "duplicate_characters": duplicates}
    assert (len(deduplication.index) > 0) == (max_recent < 300)


def test_white_space_at_the_ends_and_empty_texts():
    deduplication = ExactDeduplication()
    assert list(deduplication.without_duplicates([["a b", " a b\n", "a  b", "", " "]])) == [["a b", "a  b", "", " "]]
    assert deduplication.counts == {"duplicates": 1, "duplicate_characters": 5}
