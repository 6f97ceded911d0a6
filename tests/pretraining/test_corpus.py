"""From files to token files: kinds of file, splits, streams, processes, what is kept, and bad input."""

import gzip
import json
import random
from dataclasses import replace

import datasets
import pytest
from transformers import ByT5Tokenizer

from hf_deberta.pretraining.corpus import Corpus, CorpusArguments, check_utf8, encode, tokenized
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.tokenization_hf_deberta import load_tokenizer

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


@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
def test_a_quotation_mark_in_a_tsv_is_a_letter(tmp_path, streaming):
    texts, path = ['"not closed', "and on", 'said "so"'], tmp_path / "corpus.tsv"
    path.write_text("text\tid\n" + "".join(f"{text}\t1\n" for text in texts), encoding="utf-8")
    args = CorpusArguments(train_file=[str(path)], streaming=streaming, validation_split_percentage=0)
    assert all_texts(Corpus(args, str(tmp_path / "cache")), "train") == texts


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


def test_made_anew_on_request(text_file, tokenizer, tmp_path):
    corpus = Corpus(CorpusArguments(train_file=[text_file]), str(tmp_path / "cache"))
    corpus.tokens("train", tokenizer, tmp_path / "tokens")
    (tmp_path / "tokens" / "train" / "tokens.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match="damaged"):
        corpus.tokens("train", tokenizer, tmp_path / "tokens")
    assert len(corpus.tokens("train", tokenizer, tmp_path / "tokens", anew=True)) == len(all_texts(corpus, "train"))


def test_truncation_and_padding_make_no_other_tokens(text_file, tmp_path):
    corpus = Corpus(CorpusArguments(train_file=[text_file]), str(tmp_path / "cache"))
    tokenizer = train_tokenizer(LINES, 300, "bpe")
    plain = corpus.fingerprint("train", tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding()
    assert corpus.fingerprint("train", tokenizer) == plain
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5  # the caller's stays
    assert corpus.fingerprint("train", train_tokenizer(LINES, 299, "bpe")) != plain


def test_a_tokenizer_written_in_python(text_file, tmp_path):
    corpus = Corpus(CorpusArguments(train_file=[text_file]), str(tmp_path / "cache"))
    first = corpus.tokens("train", ByT5Tokenizer(), tmp_path / "tokens")
    assert first.document(0).tolist() == ByT5Tokenizer()(LINES[0], add_special_tokens=False)["input_ids"]
    assert corpus.fingerprint("train", ByT5Tokenizer()) == first.about["made_of"]
    assert corpus.fingerprint("train", ByT5Tokenizer(extra_ids=7)) != first.about["made_of"]


def test_a_data_set_that_changes_is_tokenised_again(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    found = []
    for text in ("one two\nthree\nfour\n", "one six\nthree\nfour\n"):
        (tmp_path / "data" / "train.txt").write_text(text, encoding="utf-8")
        args = CorpusArguments(dataset_name=str(tmp_path / "data"), max_train_samples=1)
        for _ in range(2):
            corpus = Corpus(args, str(tmp_path / "cache"))
            train = corpus.tokens("train", tokenizer, tmp_path / "tokens")
            assert tokenizer.decode(train.document(0)) == text.splitlines()[0]
            found.append([train.about["made_of"], corpus.fingerprint("validation", tokenizer)])
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]
    args = replace(args, streaming=True, validation_split_percentage=0)
    Corpus(args, str(tmp_path / "cache")).fingerprint("train", tokenizer)


def test_the_token_goes_to_the_hub(monkeypatch):
    asked = {}

    def load_dataset(*names, **options):
        asked.update(options, names=names)
        return {"train": datasets.Dataset.from_dict({"text": LINES})}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    Corpus(CorpusArguments(dataset_name="me/private"), "cache", "hf_secret")
    assert asked == {"names": ("me/private", None), "token": "hf_secret", "streaming": False, "cache_dir": "cache"}


def test_files_are_not_read_again_for_what_is_there(text_file, tokenizer, tmp_path, monkeypatch):
    args = CorpusArguments(train_file=[text_file])
    Corpus(args, str(tmp_path / "cache")).tokens("train", tokenizer, tmp_path / "tokens")
    monkeypatch.setattr("hf_deberta.pretraining.corpus.check_utf8", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr("hf_deberta.pretraining.corpus.tokenized", lambda *_: pytest.fail("tokenised again"))
    Corpus(args, str(tmp_path / "cache")).tokens("train", tokenizer, tmp_path / "tokens")


def test_processes_give_the_same(tokenizer):
    batches = [LINES[i : i + 30] for i in range(0, 200, 30)]
    assert [list(ids) for ids in tokenized(iter(batches), tokenizer, 2)] == list(tokenized(iter(batches), tokenizer))


def test_processes_run_ahead_only_so_far(tokenizer):
    """Else ids that nobody has written yet would fill the memory."""
    read = []

    def batches():
        for line in LINES:
            read.append(line)
            yield [line]

    found = tokenized(batches(), tokenizer, 2)
    first = next(found)
    assert first.tolist() == encode(tokenizer, LINES[:1])[0] and len(read) <= 8
    found.close()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_tokenizer_is_learnt_and_kept(text_file, tmp_path, kind):
    size = 60 if kind == "unigram" else 300
    args = CorpusArguments(train_file=[text_file], train_tokenizer=size, tokenizer_type=kind)
    corpus = Corpus(args, str(tmp_path / "cache"))
    learnt = corpus.tokenizer(tmp_path / "tokenizer", 64)
    assert len(learnt) <= size and learnt.model_max_length == 64
    assert corpus.tokenizer(tmp_path / "tokenizer", 64).get_vocab() == learnt.get_vocab()
    corpus.arguments = replace(args, train_tokenizer=size + 1)
    with pytest.raises(ValueError, match=f"learnt with --train_tokenizer {size}: ask for the same to go on"):
        corpus.tokenizer(tmp_path / "tokenizer", 64)
    other = "bpe" if kind == "unigram" else "unigram"
    corpus.arguments = replace(args, tokenizer_type=other)
    with pytest.raises(ValueError, match=f"learnt with --tokenizer_type {kind}: ask for the same"):
        corpus.tokenizer(tmp_path / "tokenizer", 64)
    assert load_tokenizer(str(tmp_path / "tokenizer"))(LINES[0]) == learnt(LINES[0])


def test_a_corpus_of_few_words_goes_on_with_what_it_gave(text_file, tmp_path):
    corpus = Corpus(CorpusArguments(train_file=[text_file], train_tokenizer=4000), str(tmp_path / "cache"))
    first = corpus.tokenizer(tmp_path / "tokenizer", 64)
    assert len(first) < 4000 and corpus.tokenizer(tmp_path / "tokenizer", 64).get_vocab() == first.get_vocab()


def test_two_processes_learn_a_tokenizer(text_file, tmp_path, monkeypatch):
    args = CorpusArguments(train_file=[text_file], train_tokenizer=300, tokenizer_type="bpe")
    corpus, folder = Corpus(args, str(tmp_path / "cache")), tmp_path / "out" / "tokenizer"

    def slow(*given):
        monkeypatch.setattr("hf_deberta.pretraining.corpus.train_tokenizer", train_tokenizer)
        corpus.tokenizer(folder, 64)  # the other one
        return train_tokenizer(*given)

    monkeypatch.setattr("hf_deberta.pretraining.corpus.train_tokenizer", slow)
    assert len(corpus.tokenizer(folder, 64)) == 300
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]


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


def test_transformers_name_for_one_document_a_row():
    assert CorpusArguments(train_file=["a.txt"]).pack
    assert not CorpusArguments(train_file=["a.txt"], line_by_line=True).pack


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


@pytest.mark.parametrize("learns", [False, True], ids=["tokenised", "learnt from"])
@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_what_is_not_utf8_is_named(tmp_path, tokenizer, kind, streaming, learns):
    rows = {"txt": "good\nStraße\n", "jsonl": '{"text": "good"}\n{"text": "Straße"}\n', "csv": "text\ngood\nStraße\n"}
    path = tmp_path / f"corpus.{kind}"
    path.write_bytes(rows[kind].encode("latin-1"))
    args = CorpusArguments(
        train_file=[str(path)],
        streaming=streaming,
        validation_split_percentage=0,
        train_tokenizer=300,
        tokenizer_type="bpe",
    )
    with pytest.raises(ValueError, match=rf"corpus\.{kind} is not UTF-8 text: byte 0xdf"):
        corpus = Corpus(args, str(tmp_path / "cache"))
        if learns:
            corpus.tokenizer(tmp_path / "tokenizer", 64)
        else:
            corpus.tokens("train", tokenizer, tmp_path / "tokens")


def test_unusable_files(tmp_path, text_file):
    with pytest.raises(FileNotFoundError, match=r"nothing\*.txt names no file"):
        Corpus(CorpusArguments(train_file=[str(tmp_path / "nothing*.txt")]))
    with pytest.raises(ValueError, match="all be of one kind"):
        Corpus(CorpusArguments(train_file=[text_file, write(tmp_path, "jsonl")]))
    with pytest.raises(ValueError, match="all be of one kind"):
        Corpus(CorpusArguments(train_file=[__file__]))
    with pytest.raises(ValueError, match="all be of one kind"):  # they differ in what parts columns
        Corpus(CorpusArguments(train_file=[write(tmp_path, "csv"), write(tmp_path, "tsv")], text_column="content"))
    with pytest.raises(ValueError, match="no column 'text' but content, id"):
        Corpus(CorpusArguments(train_file=[write(tmp_path, "jsonl")]), str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="a stream cannot be split"):
        Corpus(CorpusArguments(train_file=[text_file], streaming=True), str(tmp_path / "cache"))


def test_utf8_across_parts(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("ü" * (2**23 + 3), encoding="utf-8")
    check_utf8(str(path))
