"""Rows of a token file: every token once, documents separated, the same in any order of access."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_deberta.model.losses import IGNORED
from hf_deberta.pretraining.masking import Masking, Vocabulary
from hf_deberta.pretraining.packing import RowCollator, TokenRows, bound_of_predictions, packed_rows, single_rows
from hf_deberta.pretraining.token_file import TokenFile
from hf_deberta.training.errors import InputError

CLS, SEP, PAD, MASK = 1, 2, 0, 3
TOKENIZER = SimpleNamespace(cls_token_id=CLS, sep_token_id=SEP, pad_token_id=PAD)
SPECIAL = np.arange(100) < 4
MASKING = Masking(Vocabulary(MASK, SPECIAL, np.ones(100, bool), np.arange(4, 100), np.zeros(100, bool)))


def corpus(sizes: list[int]) -> TokenFile:
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 100, sum(sizes)).astype(np.uint16)
    return TokenFile(tokens, np.cumsum(sizes), {"tokens": sum(sizes)})


SIZES = {
    "one short": [3],
    "one long": [1000],
    "exactly full": [14, 14, 14],
    "one short of full": [13, 13, 1, 13],
    "leaves two": [12, 12, 5],
    "many": np.random.default_rng(1).integers(1, 60, 300).tolist(),
    "tiny": [1] * 50,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("length", [10, 16, 64])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "single"])
def test_every_token_is_in_one_row(sizes, length, pack):
    tokens = corpus(sizes)
    rows = TokenRows(tokens, TOKENIZER, length, None, pack)
    pieces = [rows.pieces(i) for i in range(len(rows))]
    assert (np.concatenate([p for row in pieces for p in row]) == tokens.tokens).all()
    for i, row in enumerate(pieces):
        assert all(len(piece) for piece in row) and (pack or len(row) == 1)
        expected = [part for piece in row for part in (CLS, *piece, SEP)]
        left = length - len(expected)
        assert left >= 0
        if pack and i + 1 < len(rows):
            assert left < 8 + 2  # nothing more than a short piece was left out
        item = rows[i]
        assert item["input_ids"].tolist() == expected + [PAD] * (left if pack else 0)
        starts = item["input_ids"] == CLS
        labels = np.where(starts | (item["input_ids"] == PAD), IGNORED, item["input_ids"])
        assert (item["labels"] == labels).all()
        if pack:
            positions = item["position_ids"]
            assert (positions[len(expected) :] == 0).all() and (starts == (positions == 0))[: len(expected)].all()
            assert ((np.diff(positions) == 1) | (positions[1:] == 0)).all()


def test_masks_depend_on_seed_epoch_and_row_alone():
    tokens = corpus(SIZES["many"])
    rows = TokenRows(tokens, TOKENIZER, 64, MASKING, seed=3)
    again = TokenRows(tokens, TOKENIZER, 64, MASKING, seed=3)
    number = len(rows)
    for index in (5, number + 5, 2 * number):
        assert all((rows[index][name] == again[index][name]).all() for name in rows[index])
    first, next_epoch = rows[5], rows[number + 5]
    original = np.where(first["labels"] == IGNORED, first["input_ids"], first["labels"])
    assert (original == np.where(next_epoch["labels"] == IGNORED, next_epoch["input_ids"], next_epoch["labels"])).all()
    assert (first["labels"] != next_epoch["labels"]).any()
    assert (first["labels"] != TokenRows(tokens, TOKENIZER, 64, MASKING, seed=4)[5]["labels"]).any()


def test_collator_pads_single_documents():
    rows = TokenRows(corpus([5, 9, 3]), TOKENIZER, 24, MASKING, pack=False)
    batch = RowCollator(PAD)([rows[0], rows[1]])
    assert batch.pop("max_predictions_per_row") == (batch["labels"] != IGNORED).sum(1).max()  # of 11 tokens, any number
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), (2, 11)
    )
    assert batch["attention_mask"].sum(1).tolist() == [7, 11]
    assert (batch["input_ids"][0, 7:] == PAD).all() and (batch["labels"][0, 7:] == IGNORED).all()


def test_bound_of_predictions():
    labels = torch.full((2, 64), IGNORED)
    for labelled, bound in ((0, 0), (1, 4), (4, 4), (5, 8), (64, 64)):
        labels[1, :labelled] = 7
        assert bound_of_predictions(labels) == bound


def test_long_documents_are_cut():
    assert single_rows(np.array([10, 30, 31]), 12).tolist() == [[0, 0], [1, 0], [1, 10], [2, 0]]
    assert packed_rows(np.array([10, 30, 31]), 12).tolist() == [[0, 0], [1, 0], [1, 10], [2, 0]]


def test_mean_context_length():
    """In the last case a row has room for 6 + 2 tokens of the second document after 10 + 2 of the first."""
    for sizes, length, pieces in (
        ([8, 8], 10, [10, 10]), ([3, 8], 10, [5, 10]), ([10, 20, 5], 22, [12, 10, 14, 7])
    ):  # fmt: skip
        rows = TokenRows(corpus(sizes), TOKENIZER, length, None)
        assert [len(piece) + 2 for row in range(len(rows)) for piece in rows.pieces(row)] == pieces
        assert rows.mean_context_length() == pytest.approx(sum(size**2 for size in pieces) / sum(pieces))


def test_rows_need_special_tokens_and_a_minimum_length():
    tokenizer = SimpleNamespace(cls_token_id=None, sep_token_id=SEP, pad_token_id=None)
    with pytest.raises(InputError, match="a tokenizer with cls_token, pad_token"):
        TokenRows(corpus([5]), tokenizer, 16, None)
    with pytest.raises(InputError, match="--max_seq_length must be at least 10, not 9"):
        TokenRows(corpus([5]), TOKENIZER, 9, None)
