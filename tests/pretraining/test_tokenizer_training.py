"""Trained tokenizers: DeBERTa's special tokens, text round trips, sampling of a large corpus, and bad input."""

import pytest
from transformers import AutoTokenizer

from hf_deberta.pretraining import tokenizer_training
from hf_deberta.pretraining.tokenizer_training import subsample_lines, train_tokenizer
from hf_deberta.training.errors import InputError

LINES = [
    "The old man walked slowly down to the harbour, where small boats were waiting.",
    "Naïve façades — and 2,000 other things — cost £5 (or less) in the old harbour!",
    "Small men, old boats; slower harbours. Where were the other things?",
] * 10


@pytest.mark.parametrize(("kind", "size"), [("unigram", 60), ("bpe", 320)])
def test_special_tokens_and_text(kind, size, tmp_path):
    tokenizer = train_tokenizer(LINES, size, kind)
    assert len(tokenizer) == size
    names = ("pad", "cls", "sep", "unk", "mask")
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == [0, 1, 2, 3, size - 1]
    pair = tokenizer("The old man", "small boats")
    ids = pair["input_ids"]
    assert (ids[0], ids[-1], ids.count(2)) == (1, 2, 2) and pair["token_type_ids"][-1] == 1
    for line in LINES[:3]:
        assert tokenizer.decode(tokenizer(line)["input_ids"], skip_special_tokens=True).strip() == line
    before, after = tokenizer.tokenize("The old"), tokenizer.tokenize(" walked")
    masked = tokenizer.tokenize("The old [MASK] walked")
    assert masked[: len(before)] == before and masked[len(before) + 1 :] == after and "[MASK]" in masked[len(before)]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(LINES[1]) == tokenizer(LINES[1])


def test_long_texts_are_read_completely():
    tokenizer = train_tokenizer(["\n".join(LINES[:3]) * 200 + " Ωmega " * 9 + "x" * 9000], 90, "unigram")
    assert tokenizer.tokenize("Ω") == ["▁", "Ω"]


def test_a_large_corpus_is_sampled(monkeypatch, caplog):
    lines = [f"{i:04d}" for i in range(2000)]
    assert list(subsample_lines(lines, 8000)) == lines and not caplog.text
    found = list(subsample_lines(lines, 1000))
    assert 100 < len(found) <= 250 and found == sorted(found) == list(subsample_lines(iter(lines), 1000))
    assert {line[0] for line in found} == {"0", "1"}  # from all parts
    assert min(sum(a <= int(x) < a + 500 for x in found) for a in range(0, 2000, 500)) > 15
    monkeypatch.setattr(tokenizer_training, "MAX_LINE_LENGTH", 10)
    assert len("".join(subsample_lines(["".join(lines)], 1000))) in range(400, 1001)  # within one line too
    caplog.clear()
    monkeypatch.setattr(tokenizer_training, "MAX_CHARACTERS", 300)
    train_tokenizer(["the old man\n" * 50] * 3, 20, "unigram")
    assert caplog.text.count("of the corpus's 1,650 characters") == 1


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "failure", [OSError(5, "the disk is gone"), ValueError("bad row"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")]
)
def test_an_error_while_reading_is_raised_unchanged(kind, failure):
    def texts():
        yield from LINES
        raise failure from KeyError("why")

    with pytest.raises(type(failure)) as raised:
        train_tokenizer(texts(), 300, kind)
    assert raised.value is failure and isinstance(failure.__cause__, KeyError)


def test_a_small_corpus_gives_fewer_tokens(caplog):
    with caplog.at_level("WARNING"):
        assert len(train_tokenizer(LINES, 4000, "unigram")) < 200
    assert "instead of 4000" in caplog.text


@pytest.mark.parametrize(
    ("texts", "size", "kind", "message"),
    [
        (LINES, 260, "bpe", "a vocabulary of 260 is too small for this corpus: .* are 261"),
        (LINES, 20, "unigram", "no unigram vocabulary of 20 .*19 vs 4"),
        ([], 300, "bpe", "the corpus is empty"),
        (["", "\n"], 300, "unigram", "no unigram vocabulary of 300 could be trained on 0 texts"),
    ],
)
def test_bad_input(texts, size, kind, message):
    with pytest.raises(InputError, match=message):
        train_tokenizer(texts, size, kind)
