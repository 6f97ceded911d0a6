"""From files to token files: file types, splits, streams, processes, reuse, and bad input."""

import gzip
import json
import os
import random
import shutil
from dataclasses import replace

import datasets
import pytest
from transformers import ByT5Tokenizer
from transformers.utils import logging

from hf_deberta.pretraining.corpus import Corpus, CorpusArguments, encode
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.errors import InputError

WORDS = ("the old man walked slowly down to a quiet harbour", "where small boats wait for wind and friends")
RNG = random.Random(0)
LINES = [" ".join(RNG.choices(" ".join(WORDS).split(), k=RNG.randrange(1, 30))) for _ in range(200)]


mapped_or_streamed = pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])


def corpus_of(*files: object, **fields) -> Corpus:
    """Return the documents of files, of which none is split off for validation by default."""
    fields = {"validation_split_percentage": 0, **fields}
    return Corpus(CorpusArguments(train_file=[str(file) for file in files], **fields))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 300, "bpe")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n\n\n", encoding="utf-8")
    return str(path)


def all_texts(corpus: Corpus, split: str) -> list[str]:
    return [text for batch in corpus.batches(split) for text in batch if text]


def test_splits_and_limits(text_file, tmp_path, caplog):
    corpus = corpus_of(text_file, validation_split_percentage=10)
    train, validation = all_texts(corpus, "train"), all_texts(corpus, "validation")
    assert train + validation == LINES and 18 <= len(validation) <= 22 and not caplog.text
    limits = {"validation_file": [text_file], "max_train_samples": 7, "max_eval_samples": 5}
    for streaming in (False, True):
        corpus = corpus_of(text_file, streaming=streaming, **limits)
        assert (all_texts(corpus, "train"), all_texts(corpus, "validation")) == (LINES[:7], LINES[:5])
    assert f"{text_file} is a training and a validation file" in caplog.text
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    corpus = corpus_of(tmp_path / "two.txt", validation_split_percentage=5)
    assert (all_texts(corpus, "train"), all_texts(corpus, "validation")) == (["one"], ["two"])


def test_documents_of_a_text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    for unit, expected in {"line": 3, "paragraph": 2, "document": 1}.items():
        assert len(all_texts(corpus_of(path, sample_by=unit), "train")) == expected


def test_token_file_is_reused(text_file, tmp_path, caplog, monkeypatch):
    """Also if the tokenizer truncates and pads now, which does not change the token ids."""
    corpus, tokenizer = corpus_of(text_file), train_tokenizer(LINES, 300, "bpe")
    first = corpus.token_file("train", tokenizer, tmp_path / "tokens")
    expected = list(encode(tokenizer, all_texts(corpus, "train")))
    assert [first.document(i).tolist() for i in range(len(first))] == expected
    monkeypatch.setattr("hf_deberta.pretraining.corpus.encode", lambda *_: pytest.fail("tokenized again"))
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding()
    corpus.token_file("train", tokenizer, tmp_path / "tokens")
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5  # unchanged for the caller
    monkeypatch.undo()
    again = corpus.token_file("train", train_tokenizer(LINES, 299, "bpe"), tmp_path / "tokens")
    assert "made from another text or tokenizer" in caplog.text
    assert again.about["fingerprint"] != first.about["fingerprint"]


@mapped_or_streamed
@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "csv", "tsv", "parquet"])
def test_a_file_that_is_replaced_and_keeps_its_time(tokenizer, tmp_path, kind, streaming):
    path, column = tmp_path / f"a.{kind}", "text" if "txt" in kind else "content"
    for text in ("man walked", "boat waits", "boat waits for wind"):  # two have the same size
        lines = {"txt": text, "txt.gz": text, "jsonl": json.dumps({column: text})}.get(kind, f"{column}\n{text}")
        if kind == "parquet":
            datasets.Dataset.from_dict({column: [text]}).to_parquet(path)
        else:
            path.write_bytes(gzip.compress(lines.encode(), mtime=0) if kind == "txt.gz" else lines.encode())
        os.utime(path, (10**9, 10**9))
        corpus = corpus_of(path, text_column=column, streaming=streaming)
        assert tokenizer.decode(corpus.token_file("train", tokenizer, tmp_path / "tokens").document(0)) == text


@mapped_or_streamed
def test_texts_are_those_of_the_file(tmp_path, streaming):
    """Dates stay texts; other columns may differ from file to file; a file without the column of the text is named."""
    files = {
        "a.csv": "id,text\n1,2024-05-06T07:08:09Z\n", "b.csv": "text,more,id\n007,x,2\none\rtwo,,3\n", "c.csv": "",
        "a.jsonl": '{"text": "2024-05-06T07:08:09Z", "x": 1}\n',
        "b.jsonl": '{"x": "y", "text": "007"}\n{"text": null}\n',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())

    def texts(pattern: str) -> list[str]:
        return all_texts(corpus_of(tmp_path / pattern, streaming=streaming), "train")

    assert texts("*.csv") == ["2024-05-06T07:08:09Z", "007", "one\rtwo"]
    assert texts("*.jsonl") == ["2024-05-06T07:08:09Z", "007"]
    for name, content, message in (
        ("d.csv", "id,x\n1,2\n", "d.csv has no column 'text'; it has id, x: .*--text_column"),
        ("d.jsonl", '{"text": "x"}\n{"text": 5}\n', "d.jsonl, row 2: 'text' must be text, not a number, 5: .*--text_c"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=message):
            texts(f"*{name[1:]}")


@mapped_or_streamed
def test_progress_is_shown(text_file, tokenizer, tmp_path, capsys, streaming):
    """Also in scripts, which hide the bars of loading; with the remaining time unless the documents are a stream."""
    logging.disable_progress_bar()
    datasets.enable_progress_bars()
    corpus = corpus_of(text_file, streaming=streaming)
    capsys.readouterr()
    corpus.token_file("train", tokenizer, tmp_path / "tokens")
    shown = capsys.readouterr().err.split("\r")[-1]
    assert shown.startswith("tokenizing train: 202 documents" if streaming else "tokenizing train: 100%")
    assert streaming or "202/202" in shown
    assert "documents/s" in shown


def test_a_tokenizer_written_in_python(text_file, tmp_path):
    corpus = corpus_of(text_file)
    first = corpus.token_file("train", ByT5Tokenizer(), tmp_path / "tokens")
    assert first.document(0).tolist() == ByT5Tokenizer()(LINES[0], add_special_tokens=False)["input_ids"]
    assert corpus.fingerprint("train", ByT5Tokenizer()) == first.about["fingerprint"]
    assert corpus.fingerprint("train", ByT5Tokenizer(extra_ids=7)) != first.about["fingerprint"]


def test_changed_data_set_is_tokenized_again(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    fingerprints, of_streams = [], set()
    for text in ("one two\nthree\nfour\n", "one six\nthree\nfour\n"):
        (tmp_path / "data" / "train.txt").write_text(text, encoding="utf-8")
        args = CorpusArguments(dataset_name=[str(tmp_path / "data")], max_train_samples=1)
        for _ in range(2):
            corpus = Corpus(args)
            train = corpus.token_file("train", tokenizer, tmp_path / "tokens")
            assert tokenizer.decode(train.document(0)) == text.splitlines()[0]
            fingerprints.append([train.about["fingerprint"], corpus.fingerprint("validation", tokenizer)])
            stream = Corpus(replace(args, streaming=True, validation_split_percentage=0))
            of_streams.add(stream.fingerprint("train", tokenizer))
    assert fingerprints[0] == fingerprints[1] and fingerprints[2] == fingerprints[3]
    assert fingerprints[0][0] != fingerprints[2][0] and fingerprints[0][1] != fingerprints[2][1]
    assert len(of_streams) == 2


@mapped_or_streamed
def test_a_data_set_saved_to_disk(tmp_path, streaming):
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk(tmp_path / "saved")
    args = CorpusArguments(dataset_name=[str(tmp_path / "saved")], validation_split_percentage=0, streaming=streaming)
    assert all_texts(Corpus(args), "train") == LINES


def test_the_token_goes_to_the_hub(monkeypatch):
    received = {}

    def load_dataset(*names, **options):
        received.update(options, names=names)
        return {"train": datasets.Dataset.from_dict({"text": LINES})}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    Corpus(CorpusArguments(dataset_name=["me/private"]), "cache", "hf_secret")
    assert received == {"names": ("me/private", None), "token": "hf_secret", "streaming": False, "cache_dir": "cache"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "trained_with.json"])
def test_a_damaged_trained_tokenizer(text_file, tmp_path, name):
    corpus = corpus_of(text_file, train_tokenizer=300, tokenizer_type="bpe")
    corpus.train_tokenizer(tmp_path / "tokenizer", 64)
    content = (tmp_path / "tokenizer" / name).read_bytes()
    for damaged in (b"", b"[]", b"\xff", content[:-9]):
        (tmp_path / "tokenizer" / name).write_bytes(damaged)
        with pytest.raises(InputError, match="tokenizer .remove it to train the tokenizer again"):
            corpus.train_tokenizer(tmp_path / "tokenizer", 64)
    shutil.rmtree(tmp_path / "tokenizer")
    corpus.train_tokenizer(tmp_path / "tokenizer", 64)
    assert (tmp_path / "tokenizer" / name).read_bytes() == content


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_tokenizer_is_trained_once(text_file, tmp_path, kind):
    size = 60 if kind == "unigram" else 300
    corpus = corpus_of(text_file, train_tokenizer=size, tokenizer_type=kind)
    trained = corpus.train_tokenizer(tmp_path / "tokenizer", 64)
    assert len(trained) <= size and trained.model_max_length == 64
    assert corpus.train_tokenizer(tmp_path / "tokenizer", 64).get_vocab() == trained.get_vocab()
    for changed, flag in (
        ({"train_tokenizer": size + 1, "tokenizer_type": kind}, f"--train_tokenizer {size}"),
        ({"train_tokenizer": size, "tokenizer_type": "other"}, f"--tokenizer_type {kind}"),
    ):
        with pytest.raises(InputError, match=f"trained with {flag}: "):
            corpus_of(text_file, **changed).train_tokenizer(tmp_path / "tokenizer", 64)
    assert load_tokenizer(str(tmp_path / "tokenizer"))(LINES[0]) == trained(LINES[0])


def test_two_processes_train_a_tokenizer(text_file, tmp_path, monkeypatch):
    corpus, folder = corpus_of(text_file, train_tokenizer=300, tokenizer_type="bpe"), tmp_path / "out" / "tokenizer"

    def slow(*arguments):
        monkeypatch.setattr("hf_deberta.pretraining.corpus.train_tokenizer", train_tokenizer)
        corpus.train_tokenizer(folder, 64)  # the other process
        return train_tokenizer(*arguments)

    monkeypatch.setattr("hf_deberta.pretraining.corpus.train_tokenizer", slow)
    assert len(corpus.train_tokenizer(folder, 64)) == 300
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("arguments", [{}, {"train_file": ["a.txt"], "dataset_name": ["b"]}])
def test_bad_arguments(arguments):
    with pytest.raises(InputError, match="either --train_file or --dataset_name"):
        CorpusArguments(**arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corpus.txt is empty"),
        (b"\n\n\n", "corpus.txt: there is no text for .*train: every document is empty"),
        (b"good\nStra\xdfe\n", "corpus.txt, line 2: .* byte 0xdf in position 4"),
        ("good\nü".encode()[:-1], "corpus.txt, line 2: .* byte 0xc3 in position 0"),
    ],
    ids=["empty", "blank", "latin-1", "cut"],
)
def test_bad_text(tmp_path, tokenizer, content, message):
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        corpus_of(path, validation_split_percentage=5).token_file("train", tokenizer, tmp_path / "tokens")
    assert not (tmp_path / "tokens" / "train").exists()


@pytest.mark.parametrize("trains_tokenizer", [False, True], ids=["tokenize", "train tokenizer"])
def test_a_stream_that_is_not_utf8_is_named(tmp_path, tokenizer, trains_tokenizer):
    path = tmp_path / "corpus.txt"
    path.write_bytes("good\nStraße\n".encode("latin-1"))
    corpus = corpus_of(path, streaming=True, train_tokenizer=300, tokenizer_type="bpe")
    with pytest.raises(InputError, match=r"corpus\.txt, line 2: .* byte 0xdf"):
        if trains_tokenizer:
            corpus.train_tokenizer(tmp_path / "tokenizer", 64)
        else:
            corpus.token_file("train", tokenizer, tmp_path / "tokens")


def test_bad_files(tmp_path, text_file):
    for name in ("nothing*.txt", "."):
        with pytest.raises(InputError, match=r"no file matches .*; for the files of a folder write 'FOLDER/\*'"):
            corpus_of(tmp_path / name)
    table, other = tmp_path / "a.csv", tmp_path / "a.tsv"  # their columns are separated differently
    table.write_text("text\nx\n")
    other.write_text("text\nx\n")
    for files in ([text_file, table], [__file__], [table, other]):
        with pytest.raises(InputError, match="the same type"):
            corpus_of(*files)
    with pytest.raises(InputError, match="a stream cannot be split"):
        corpus_of(text_file, streaming=True, validation_split_percentage=5)


@mapped_or_streamed
def test_files_without_rows(tmp_path, tokenizer, streaming):
    (tmp_path / "corpus.csv").write_text("text\n")
    with pytest.raises(InputError, match=r"^\S*corpus.csv: there (are no rows|is no text for)"):
        corpus = corpus_of(tmp_path / "corpus.csv", streaming=streaming)
        corpus.token_file("train", tokenizer, tmp_path / "tokens")


@mapped_or_streamed
def test_only_the_text_of_parquet_is_read(tmp_path, streaming):
    """Other columns may differ from file to file, as the metadata of datatrove do."""
    for shard, metadata in enumerate(({"url": "http://a"}, {"score": "high", "lang": {"name": "en"}}, None)):
        rows = [{"text": f"document {shard} {row}", "metadata": metadata} for row in range(3)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"000_{shard:05d}.parquet")
    corpus = corpus_of(tmp_path / "*.parquet", streaming=streaming)
    assert all_texts(corpus, "train") == [f"document {shard} {row}" for shard in range(3) for row in range(3)]


def test_a_token_file_without_duplicates(tokenizer, tmp_path):
    lines = ["the old man", "a quiet harbour", "the old man", "small boats", "the old man"]
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    about = []
    for deduplicate, expected in ((False, lines), (True, list(dict.fromkeys(lines)))):
        corpus = corpus_of(tmp_path / "corpus.txt", deduplicate=deduplicate)
        tokens = corpus.token_file("train", tokenizer, tmp_path / "tokens")
        assert [tokenizer.decode(tokens.document(number)) for number in range(len(tokens))] == expected
        about.append(tokens.about)
    assert about[0]["fingerprint"] != about[1]["fingerprint"]
    assert (about[1]["duplicates"], about[1]["duplicate_characters"], about[1]["documents"]) == (2, 22, 3)
