"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "model.attention",
    "model.causal_language_model",
    "model.configuration_hf_deberta",
    "model.enhanced_mask_decoder",
    "engines.linear_cross_entropy",
    "engines.onednn",
    "engines.unpadding",
    "fine_tuning.recipes",
    "model.modeling_heads",
    "model.modeling_hf_deberta",
    "model.relative_position",
    "model.replaced_token_detection",
    *(f"pretraining.{name}" for name in ("deduplication", "mixture", "recipes")),
    *(f"fine_tuning.tasks.{name}" for name in ("expand_rows", "glue", "ner", "race", "superglue")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"hf_deberta.{name}"))
    assert result.attempted > 0 and result.failed == 0
