"""The offsets of named entities cut the right words out of a text."""

import random
from unittest import mock

import ner_offsets
import pytest
import torch
from example_rows import NAMES, WORDS
from transformers import DataCollatorForTokenClassification, set_seed

from hf_deberta import HfDebertaForTokenClassification, HfDebertaTokenizer

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
TAGS = {"Ann": "B-PER", "Lee": "I-PER", "Rome": "B-LOC"}
TEXT = "Ann Lee was (so) in (Rome). Rome,  was Ann\u00a0Lee: 'Rome!'"


@pytest.fixture
def tagger(tiny_model) -> str:
    """Write a model that knows three names, trained on words."""
    set_seed(0)
    rng, rows = random.Random(0), []
    texts = [rng.choices([*WORDS, *NAMES], k=8) for _ in range(320)]
    tokenizer = HfDebertaTokenizer.from_pretrained(tiny_model, model_max_length=32)
    model = HfDebertaForTokenClassification.from_pretrained(tiny_model, id2label=dict(enumerate(LABELS)))
    for words in texts:
        row = tokenizer(words, is_split_into_words=True)
        before = [None, *row.word_ids()]
        labels = [
            LABELS.index(TAGS.get(words[word], "O")) if word is not None and word != last else -100
            for last, word in zip(before, row.word_ids(), strict=False)
        ]
        rows.append({**row, "labels": labels})
    collate, optimizer = DataCollatorForTokenClassification(tokenizer), torch.optim.AdamW(model.parameters(), 5e-3)
    for start in range(0, len(rows), 8):
        model(**collate(rows[start : start + 8])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("tagger")
    tokenizer.save_pretrained("tagger")
    return "tagger"


def test_offsets(tagger, tmp_path, capsys):
    long = "a plot was quite so " * 30 + "Rome ."
    (tmp_path / "texts.txt").write_text(f"{TEXT}\n\n{long}\n", encoding="utf-8")
    first, second, third = ner_offsets.main(["--model", tagger, "--texts", "texts.txt", "--stride", "8"])
    cut = [(TEXT[entity["start"] : entity["end"]], entity["type"]) for entity in first]
    expected = [("Ann Lee", "PER"), ("Rome", "LOC"), ("Rome", "LOC"), ("Ann\u00a0Lee", "PER"), ("Rome", "LOC")]
    assert cut == expected and not second
    assert [long[entity["start"] : entity["end"]] for entity in third] == ["Rome"]
    assert capsys.readouterr().out.splitlines()[0].split("\t")[:4] == ["1", "0", "7", "PER"]


def test_offsets_inside_a_word_become_those_of_the_word():
    """As the pipeline gives them for unknown letters within a word, or twice for a character that is several tokens."""
    text = "In Ann-Marie."
    entities = [{"entity_group": "PER", "score": 1.0, "start": start, "end": 12} for start in (5, 9)]  # "n - Mar"
    (entity,) = ner_offsets.find_entities(mock.Mock(return_value=[entities]), text)
    assert text[entity["start"] : entity["end"]] == "Ann-Marie"
