"""docs/migrate.md: our names and flags in its tables exist, and each class of Transformers has a counterpart."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import transformers

import hf_deberta
from hf_deberta.commands import mlm, rtd
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.model.input_checks import EncoderKwargs
from hf_deberta.pretraining.arguments import MaskingArguments, PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments

PAGE = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("## From Transformers' classes")[2]
OURS = [cells.split(" | ")[-1] for cells in re.findall(r"^\| (.*) \|$", TABLES, flags=re.MULTILINE)]  # the last column
PARSED = (ModelArguments, DataArguments, SiftArguments, FineTuningArguments, mlm.ModelArguments, rtd.PairArguments)
PARSED += (CorpusArguments, MaskingArguments, PretrainingArguments)
FLAGS = {field.name for kind in PARSED for field in dataclasses.fields(kind)}


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_flags_exist():
    named = {flag for cell in OURS for flag in re.findall(r"--(\w+)", cell)}
    assert len(named) > 20
    assert not named - FLAGS


def test_classes_exist():
    """A class is public, or its cell names its module."""
    count = 0
    for cell in OURS:
        modules = [importlib.import_module(name) for name in in_code(cell) if name.startswith("hf_deberta.")]
        for name in re.findall(r"`([A-Z]\w+[a-z])`", cell):
            assert any(hasattr(module, name) for module in modules or [hf_deberta]), cell
            count += 1
    assert count > 12


def test_fields_and_arguments_exist():
    fields = {field.name for field in dataclasses.fields(hf_deberta.HfDebertaConfig)}
    assert {"clamp_relative_distance", "token_classifier"} == {
        text.split("=")[0] for cell in OURS for text in in_code(cell) if "=" in text
    }
    assert fields > {"clamp_relative_distance", "token_classifier"}
    (arguments,) = [cell for cell in OURS if "token_type_ids" in cell]
    known = {*inspect.signature(hf_deberta.HfDebertaModel.forward).parameters, *EncoderKwargs.__annotations__}
    assert set(in_code(arguments)) <= known


def test_names_of_weights():
    """The third column of the rows on v1's weights, for a configuration of v1."""
    config = hf_deberta.HfDebertaConfig.from_preset("tiny", share_att_key=False, pos_att_type=["c2p", "p2c"])
    weights = " ".join(hf_deberta.HfDebertaModel(config).state_dict())
    rows = [cell for cell in OURS if "_proj" in cell]
    assert len(rows) == 2
    assert [name for row in rows for name in in_code(row) if f".{name}." not in weights] == []


@pytest.mark.parametrize("prefix", ["Deberta", "DebertaV2"])
def test_each_class_of_transformers_has_a_counterpart(prefix):
    kinds = ("Config", "Model", "Tokenizer", "For[A-Z].*")
    theirs = [name for name in dir(transformers) if re.fullmatch(f"{prefix}({'|'.join(kinds)})", name)]
    assert len(theirs) >= 7
    for name in theirs:
        assert hasattr(hf_deberta, f"HfDeberta{name.removeprefix(prefix)}"), name
