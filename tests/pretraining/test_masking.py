"""Masking: the official generator draw by draw, the unbiased one by its statistics."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_deberta.model.losses import IGNORED
from hf_deberta.pretraining.masking import Masking, Vocabulary, choose_words, number_words, official_units
from hf_deberta.training.errors import InputError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "case10_ngram_mask.json").read_text(encoding="utf-8"))
TOKENS = GOLDEN["stub_tokenizer"]["vocab_in_id_order"]
ID = {token: i for i, token in enumerate(TOKENS)}
SPECIAL = np.array([token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]") for token in TOKENS])
BEGINS = SPECIAL | np.array([token.startswith("▁") for token in TOKENS])
STUB = Vocabulary(ID["[MASK]"], SPECIAL, BEGINS, np.flatnonzero(~SPECIAL), np.zeros_like(SPECIAL))


def text(length: int, rng: random.Random) -> np.ndarray:
    """A row of made-up words of one to three pieces."""
    row = []
    while len(row) < length - 2:
        pieces = rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0]
        row += [f"▁w{rng.randrange(150)}", *(f"s{rng.randrange(80)}" for _ in range(pieces - 1))]
    return np.array([ID[token] for token in ("[CLS]", *row[: length - 2], "[SEP]")])


@pytest.mark.parametrize("example", GOLDEN["exact_examples"], ids=lambda x: f"{x['max_gram']} {x['rng'][14:-1]}")
def test_official_generator_draw_by_draw(example):
    masking = Masking(STUB, max_ngram=example["max_gram"], generator="official")
    ids = np.array([ID[token] for token in example["tokens"]])
    seed = int(example["rng"].removeprefix("random.Random(").removesuffix(")"))
    masked, labels = masking._official(ids, random.Random(seed))
    assert [TOKENS[i] for i in masked] == example["masked_tokens"]
    assert np.where(labels == IGNORED, 0, labels).tolist() == example["labels"]


@pytest.mark.slow
@pytest.mark.parametrize("max_ngram", [1, 3])
def test_unbiased_masks_every_position_equally(max_ngram):
    masking, rng, samples = Masking(STUB, max_ngram=max_ngram), random.Random(1), 4000
    by_position, by_pieces = np.zeros(128), {1: [0, 0], 2: [0, 0], 3: [0, 0]}
    for i in range(samples):
        ids = text(128, rng)
        masked, labels = masking(ids, (7, 0, i))
        chosen = labels != IGNORED
        by_position += chosen
        assert (labels[chosen] == ids[chosen]).all() and (masked[~chosen] == ids[~chosen]).all()
        positions, word = number_words(ids, STUB, whole_words=True)
        for w in range(word[-1] + 1):
            of_word = chosen[positions[word == w]]
            assert of_word.all() or not of_word.any()
            by_pieces[len(of_word)][0] += of_word[0]
            by_pieces[len(of_word)][1] += 1
    assert by_position[0] == by_position[-1] == 0
    rate = by_position[1:-1] / samples
    # five standard deviations of a share of 15 % over so many rows
    assert np.abs(rate - 0.15).max() < 5 * (0.15 * 0.85 / samples) ** 0.5
    for hits, words in by_pieces.values():
        assert hits / words == pytest.approx(0.15, abs=0.004)


def test_unbiased_fates_and_spans():
    masking, rng = Masking(STUB, max_ngram=3), random.Random(2)
    fates, chosen_total = {"mask": 0, "same": 0}, 0
    for i in range(1500):
        ids = text(128, rng)
        masked, labels = masking(ids, (1, 2, i))
        chosen = labels != IGNORED
        chosen_total += chosen.sum()
        fates["mask"] += (masked[chosen] == STUB.mask_token_id).sum()
        fates["same"] += (masked[chosen] == ids[chosen]).sum()
        assert not SPECIAL[masked[chosen & (masked != STUB.mask_token_id)]].any()
    assert fates["mask"] / chosen_total == pytest.approx(0.8, abs=0.01)
    assert fates["same"] / chosen_total == pytest.approx(0.1, abs=0.01)  # and one in 230 random words is the same


@pytest.mark.parametrize("words", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("max_ngram", [1, 2, 5])
def test_the_number_of_masked_words_is_exact(words, max_ngram):
    rng = np.random.default_rng(0)
    counts = [choose_words(words, 0.3, max_ngram, rng).sum() for _ in range(2000)]
    assert set(counts) <= {int(0.3 * words), int(0.3 * words) + 1}
    assert np.mean(counts) == pytest.approx(0.3 * words, abs=0.06)


def test_the_same_key_gives_the_same_mask():
    ids = text(64, random.Random(3))
    for generator in ("unbiased", "official"):
        masking = Masking(STUB, generator=generator)
        again = masking(ids, (0, 1, 2))
        assert all((a == b).all() for a, b in zip(masking(ids, (0, 1, 2)), again, strict=True))
        assert any((masking(ids, other)[1] != again[1]).any() for other in ((0, 1, 3), (0, 2, 2), (1, 1, 2)))


def test_rows_without_words():
    for generator in ("unbiased", "official"):
        masking = Masking(STUB, generator=generator)
        for ids in (np.array([ID["[CLS]"], ID["[SEP]"]]), np.array([], dtype=np.int64)):
            masked, labels = masking(ids, (0, 0, 0))
            assert (masked == ids).all() and (labels == IGNORED).all()


def test_text_without_spaces():
    pieces = ["[UNK]", "▁中", "国", "ค", "ั", "カー", "▁가", "나", "▁w", "a", "[MASK]"]
    vocabulary = Vocabulary.from_tokenizer(tokenizer(pieces, unk_token="[UNK]", mask_token="[MASK]"))
    ids = np.arange(1, 9)
    assert number_words(ids, vocabulary, whole_words=True)[1].tolist() == [0, 1, 2, 2, 3, 4, 4, 5]
    assert number_words(ids, vocabulary, whole_words=False)[1].tolist() == list(range(8))
    assert [len(unit) for unit in official_units(ids, vocabulary, whole_words=True)] == [5, 2, 1]  # as released
    for length, words in ((10, [0] * 10), (11, list(range(11)))):  # of DNA
        ids = np.array([8, *[9] * (length - 1), 8, 9])
        assert number_words(ids, vocabulary, whole_words=True)[1].tolist() == [*words, *[words[-1] + 1] * 2]


def tokenizer(pieces: list[str], **special) -> PreTrainedTokenizerFast:
    model = models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def test_vocabulary_of_a_tokenizer():
    special = {"unk_token": "[UNK]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer(["[PAD]", "[UNK]", "Ġa", "b", "▁c", ",", "—", "...", "[MASK]"], **special)
    )
    assert vocabulary.begins_word.tolist() == [True, True, True, False, True, True, True, False, True]
    assert vocabulary.special.tolist() == [True, True, *[False] * 6, True]
    assert vocabulary.replacements.tolist() == list(range(2, 8)) and vocabulary.mask_token_id == 8
    assert Vocabulary.from_tokenizer(tokenizer(["[PAD]", "[UNK]", "a", "b", "[MASK]"], **special)).begins_word.all()
    word_pieces = tokenizer(["[PAD]", "[UNK]", "a", "##b", "##c", "▁", "##,", "[MASK]"], **special)  # "▁" of a picture
    begins = [True, True, True, False, False, True, False, True]
    assert Vocabulary.from_tokenizer(word_pieces).begins_word.tolist() == begins


def test_letters_that_stand_for_bytes():
    """Punctuation is what a piece means: "¡" and "»" are halves of letters, "âĢĶ" is a dash, "Ċ" ends a line."""
    from hf_deberta.pretraining.tokenizer_training import train_tokenizer

    trained = train_tokenizer(["cafábc — un café\n\u2014 no"] * 30, 290, "bpe")
    vocabulary = Vocabulary.from_tokenizer(trained)
    for text, words in {"cafábc": 1, " cafá cafû": 2, "caf—abc": 2, "caf,abc\nb": 3, "日本": 1}.items():
        ids = np.array(trained(text, add_special_tokens=False)["input_ids"])
        assert number_words(ids, vocabulary, whole_words=True)[1].max() + 1 == words, text
    pieces = ["[UNK]", "Ġa", "¡", "âĢĶ", "Ċ", "âĢĶâĢĶ", "[MASK]"]
    vocabulary = Vocabulary.from_tokenizer(tokenizer(pieces, unk_token="[UNK]", mask_token="[MASK]"))
    assert vocabulary.begins_word.tolist() == [True, True, False, True, True, False, True]
    letters = Vocabulary.from_tokenizer(
        tokenizer(["[UNK]", "▁a", "¡", "Ġ", "[MASK]"], unk_token="[UNK]", mask_token="[MASK]")
    )
    assert letters.begins_word[2]  # no bytes where words begin with "▁"
    with pytest.raises(InputError, match="mask token"):
        Vocabulary.from_tokenizer(tokenizer(["[UNK]", "a"], unk_token="[UNK]"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generator": "bert"}, "unbiased or official, not 'bert'"),
        ({"mlm_probability": 0}, "between 0 and 1, not 0"),
        ({"mlm_probability": 1.5}, "between 0 and 1"),
        ({"max_ngram": 0}, "1 or more, not 0"),
        ({"mask_prob": 0.95}, "shares of the chosen tokens"),
    ],
)
def test_unusable_settings(settings, message):
    with pytest.raises(InputError, match=message):
        Masking(STUB, **settings)
