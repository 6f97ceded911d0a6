"""From files to token files: kinds of file, splits, streams, processes, what is kept, and bad input."""

import gzip
import json
import random
from dataclasses import replace

import pytest

from hf_deberta.training.corpus import Corpus, CorpusArguments, check_utf8, encode, load_tokenizer, tokenized
from hf_deberta.training.tokenizer_training import train_tokenizer

WORDS = ("the old man walked slowly down to a quiet harbour", "where small boats wait for wind and friends")
RNG = random.Random(0)
LINES = [" ".join(RNG.choices(" ".join(WORDS).split(), k=RNG.randrange(1, 30))) for _ in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 300, "bpe")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n\n\n", encoding="utf-8")
    return str(path)


def all_texts(corpus: Corpus, split: str) -> list[str]:
    assert [text for batch in corpus.batches(split) for text in batch] == list(corpus.texts(split))
    return [text for text in corpus.texts(split) if text]


def write(tmp_path, kind: str) -> str:
    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"content": line, "id": 1}) + "\n" for line in LINES), encoding="utf-8")
    elif kind in ("csv", "tsv"):
        comma = "," if kind == "csv" else "\t"
        path.write_text(f"id{comma}content\n" + "".join(f"1{comma}{line}\n" for line in LINES), encoding="utf-8")
    elif kind == "txt.gz":
        path.write_bytes(gzip.compress("\n".join(LINES).encode()))
    else:
        from datasets import Dataset

        Dataset.from_dict({"content": LINES}).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "txt.gz"])
def test_kinds_of_file(tmp_path, kind, streaming):
    column = "text" if kind == "txt.gz" else "content"
    args = CorpusArguments(
        train_file=[write(tmp_path, kind)], text_column=column, streaming=streaming, validation_split_percentage=0
    )
    assert all_texts(Corpus(args, str(tmp_path / "cache")), "train") == LINES


def test_splits_and_limits(text_file, tmp_path):
    corpus = Corpus(CorpusArguments(train_file=[text_file], validation_split_percentage=10), str(tmp_path / "cache"))
    train, validation = all_texts(corpus, "train"), all_texts(corpus, "validation")
    assert train + validation == LINES and 18 <= len(validation) <= 22
    limits = CorpusArguments(
        train_file=[text_file], validation_file=[text_file], max_train_samples=7, max_eval_samples=5
    )
    for streaming in (False, True):
        corpus = Corpus(replace(limits, streaming=streaming), str(tmp_path / "cache"))
        assert (all_texts(corpus, "train"), all_texts(corpus, "validation")) == (LINES[:7], LINES[:5])


def test_documents_of_a_text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    for unit, expected in {"line": 3, "paragraph": 2, "document": 1}.items():
        args = CorpusArguments(train_file=[str(path)], sample_by=unit, validation_split_percentage=0)
        assert len(all_texts(Corpus(args, str(tmp_path / "cache")), "train")) == expected


def test_token_file_is_made_once(text_file, tokenizer, tmp_path, caplog):
    corpus = Corpus(CorpusArguments(train_file=[text_file]), str(tmp_path / "cache"))
    first = corpus.tokens("train", tokenizer, tmp_path / "tokens")
    expected = list(encode(tokenizer, all_texts(corpus, "train")))
    assert [first.document(i).tolist() for i in range(len(first))] == expected
    made = (tmp_path / "tokens" / "train" / "about.json").stat().st_mtime_ns
    corpus.tokens("train", tokenizer, tmp_path / "tokens")
    assert (tmp_path / "tokens" / "train" / "about.json").stat().st_mtime_ns == made
    other = train_tokenizer(LINES, 280, "bpe")
    with caplog.at_level("WARNING"):
        corpus.tokens("train", other, tmp_path / "tokens")
    assert "is made anew" in caplog.text
    assert (tmp_path / "tokens" / "train" / "about.json").stat().st_mtime_ns != made


def test_processes_give_the_same(tokenizer):
    batches = [LINES[i : i + 30] for i in range(0, 200, 30)]
    assert [list(ids) for ids in tokenized(iter(batches), tokenizer, 2)] == list(tokenized(iter(batches), tokenizer))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_tokenizer_is_learnt_and_kept(text_file, tmp_path, kind):
    size = 60 if kind == "unigram" else 300
    args = CorpusArguments(train_file=[text_file], train_tokenizer=size, tokenizer_type=kind)
    corpus = Corpus(args, str(tmp_path / "cache"))
    learnt = corpus.tokenizer(tmp_path / "tokenizer", 64)
    assert len(learnt) <= size and learnt.model_max_length == 64
    corpus.arguments = replace(args, train_tokenizer=size + 1)
    assert corpus.tokenizer(tmp_path / "tokenizer", 64).get_vocab() == learnt.get_vocab()
    assert load_tokenizer(str(tmp_path / "tokenizer"))(LINES[0]) == learnt(LINES[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either --train_file or --dataset_name"),
        ({"train_file": ["a.txt"], "dataset_name": "b"}, "either --train_file or --dataset_name"),
        ({"train_file": ["a.txt"], "sample_by": "word"}, "line, paragraph or document, not 'word'"),
        ({"train_file": ["a.txt"], "tokenizer_type": "word"}, "unigram or bpe, not 'word'"),
        ({"train_file": ["a.txt"], "validation_split_percentage": 100}, r"in \[0, 100\), not 100"),
    ],
)
def test_unusable_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CorpusArguments(**arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text to train on: .*corpus.txt is empty"),
        (b"\n\n  \n", "every document is empty"),
        (b"good\nStra\xdfe\n", "is not UTF-8 text: byte 0xdf"),
        ("ü".encode()[:1], "ends in the middle of a character"),
    ],
    ids=["empty", "blank", "latin-1", "cut"],
)
def test_unusable_text(tmp_path, tokenizer, content, message):
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    args = CorpusArguments(train_file=[str(path)])
    with pytest.raises(ValueError, match=message):
        Corpus(args, str(tmp_path / "cache")).tokens("train", tokenizer, tmp_path / "tokens")
    assert not (tmp_path / "tokens" / "train").exists()


def test_unusable_files(tmp_path, text_file):
    with pytest.raises(FileNotFoundError, match=r"nothing\*.txt names no file"):
        Corpus(CorpusArguments(train_file=[str(tmp_path / "nothing*.txt")]))
    with pytest.raises(ValueError, match="all be of one kind"):
        Corpus(CorpusArguments(train_file=[text_file, write(tmp_path, "jsonl")]))
    with pytest.raises(ValueError, match="all be of one kind"):
        Corpus(CorpusArguments(train_file=[__file__]))
    with pytest.raises(ValueError, match="no column 'text' but content, id"):
        Corpus(CorpusArguments(train_file=[write(tmp_path, "jsonl")]), str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="a stream cannot be split"):
        Corpus(CorpusArguments(train_file=[text_file], streaming=True), str(tmp_path / "cache"))


def test_utf8_across_parts(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("ü" * (2**23 + 3), encoding="utf-8")
    check_utf8(str(path))
