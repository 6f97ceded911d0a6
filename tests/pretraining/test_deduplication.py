"""Exact de-duplication keeps the first of equal texts, also across merges of its index, and counts the others."""

import json
import random

import pytest

from hf_deberta.pretraining import deduplication as module
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.deduplication import ExactDeduplication
from hf_deberta.pretraining.tokenizer_training import train_tokenizer


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


def test_a_token_file_without_duplicates(tmp_path):
    lines = ["the old man", "a quiet harbour", "the old man", "small boats", "the old man"]
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer(lines, 290, "bpe")
    prints = []
    for deduplicate in (False, True):
        args = CorpusArguments(train_file=[str(path)], validation_split_percentage=0, deduplicate=deduplicate)
        corpus = Corpus(args, str(tmp_path / "cache"))
        tokens = corpus.token_file("train", tokenizer, tmp_path / f"tokens {deduplicate}")
        texts = [tokenizer.decode(tokens.document(number)) for number in range(len(tokens))]
        assert texts == (list(dict.fromkeys(lines)) if deduplicate else lines)
        prints.append(tokens.about["fingerprint"])
    assert prints[0] != prints[1]
    about = json.loads((tmp_path / "tokens True" / "train" / "about.json").read_text())
    assert (about["duplicates"], about["duplicate_characters"], about["documents"]) == (2, 22, 3)
