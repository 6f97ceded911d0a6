"""Tiny checkpoints and rows for the examples."""

import random
from pathlib import Path

import pytest
from example_rows import NAMES, WORDS, sentiment_rows
from fine_tuning_models import write_json_lines
from transformers import set_seed

from hf_deberta import HfDebertaConfig, HfDebertaModel, HfDebertaTokenizer, export_to_transformers
from hf_deberta.pretraining.tokenizer_training import train_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """An untrained encoder of this package, with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    rng = random.Random(0)
    texts = [" ".join(rng.choices([*WORDS, *NAMES, "good", "bad"], k=8)) for _ in range(320)]
    tokenizer = train_tokenizer(texts, 60)
    tokenizer.save_pretrained(folder)
    set_seed(0)
    config = HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256)
    HfDebertaModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def in_tree_model(tiny_model) -> Path:
    """The same as a checkpoint of Transformers."""
    folder = tiny_model.parent / "in-tree"
    export_to_transformers(HfDebertaModel.from_pretrained(tiny_model), folder)
    HfDebertaTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentiment(tmp_path_factory) -> list[str]:
    """Flags with files of 320 and 64 rows."""
    folder = tmp_path_factory.mktemp("sentiment")
    train = write_json_lines(folder / "train.jsonl", sentiment_rows(320, 1))
    validation = write_json_lines(folder / "dev.jsonl", sentiment_rows(64, 2))
    return ["--train_file", str(train), "--validation_file", str(validation)]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
