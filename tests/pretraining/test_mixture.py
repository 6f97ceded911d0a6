"""Several data sets as one: names with weights, shares, splits to evaluate on, and datasets that do not fit."""

from collections import Counter

import datasets
import pytest

from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.mixture import DatasetName
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me/text", DatasetName("me/text")),
        ("me/text:en", DatasetName("me/text", "en")),
        ("me/text:en:0.3", DatasetName("me/text", "en", 0.3)),
        ("me/text::2", DatasetName("me/text", None, 2.0)),
    ],
)
def test_names(text, expected):
    assert DatasetName.parse(text) == expected


@pytest.mark.parametrize("text", ["me/text:en:0", "me/text:en:-1", "me/text:en:nan", "a:b:1:2", ":en", "a:b:much"])
def test_names_that_are_wrong(text):
    with pytest.raises(InputError, match="NAME:CONFIG:WEIGHT with a weight above 0"):
        CorpusArguments(dataset_name=[text])


def test_a_folder_may_have_colons_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    assert DatasetName.parse("a:b") == DatasetName("a:b")


SPLITS = {"big": {"train": 3000, "validation": 5}, "small": {"train": 1000, "test": 7}, "other column": {"train": 10}}


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """Data sets whose texts are their own names and configurations."""

    def load_dataset(name, config, streaming=False, **options):
        column = "content" if name == "other column" else "text"
        text = datasets.Value("large_string" if name == "small" else "string")  # as Polars writes texts, and others
        splits = {
            split: datasets.Dataset.from_list(
                [{column: f"{name} {config} {split} {row}", "id": 0} for row in range(number)]
            ).cast_column(column, text)
            for split, number in SPLITS[name].items()
        }
        return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streaming else splits

    monkeypatch.setattr("datasets.load_dataset", load_dataset)


def read(*names: str, **fields) -> tuple[Corpus, Counter]:
    """Return the corpus, and how many training documents come from each data set."""
    corpus = Corpus(CorpusArguments(dataset_name=list(names), **fields))
    return corpus, Counter(text.split()[0] for batch in corpus.batches("train") for text in batch)


@pytest.mark.parametrize(("name", "fields"), [("big:en", {}), ("big", {"dataset_config_name": "en"})])
def test_one_data_set_with_a_configuration(name, fields):
    corpus, counts = read(name, **fields)
    assert counts == {"big": 3000} and next(corpus.batches("train"))[0] == "big en train 0"


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_are_shares_of_documents(streaming):
    _, counts = read("big::3", "small::1", streaming=streaming)
    assert counts["big"] / counts["small"] == pytest.approx(3, rel=0.15)
    assert 3000 in counts.values() or 1000 in counts.values()  # until the first one ends


def test_repeated_documents_are_not_evaluated():
    """The documents that are repeated are repeated in the training text alone."""
    corpus, counts = read("small:a:1", "small:b:3", stopping_strategy="all_exhausted")
    train, validation = ([*corpus.splits[split]["text"]] for split in ("train", "validation"))
    assert len(set(train)) < counts["small"] == len(train)
    assert set(train).isdisjoint(validation)
    assert Counter(text.split()[1] for text in validation) == {"a": 50, "b": 50}  # 5 % of each


def test_splits_to_evaluate_on(caplog):
    corpus, _ = read("big", "small")
    assert [len(corpus.splits[split]) for split in ("validation", "test")] == [5, 7]
    assert "big 50.0%, small 50.0% (first_exhausted)" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_to_evaluate_on_come_from_each_data_set(streaming):
    fields = {"streaming": streaming, "validation_split_percentage": 0}
    corpus, _ = read("small:a", "small:b", max_eval_samples=5, **fields)
    texts = [text for batch in corpus.batches("test") for text in batch]
    assert Counter(text.split()[1] for text in texts) == {"a": 3, "b": 2}


def test_the_mix_is_part_of_the_fingerprint():
    tokenizer = train_tokenizer(["the old man walked slowly"] * 20, 290, "bpe")
    prints = {
        read("big::3", "small::1")[0].fingerprint("train", tokenizer),
        read("big::3", "small::2")[0].fingerprint("train", tokenizer),
        read("big::3", "small::1", stopping_strategy="all_exhausted")[0].fingerprint("train", tokenizer),
    }
    assert len(prints) == 3


def test_datasets_that_do_not_fit():
    with pytest.raises(InputError, match=r"other column, train .*--text_column.*\['content', 'id'\]"):
        Corpus(CorpusArguments(dataset_name=["big", "other column"]))
