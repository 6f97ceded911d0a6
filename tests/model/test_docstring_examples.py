"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "attention",
    "causal_language_model",
    "configuration_hf_deberta",
    "enhanced_mask_decoder",
    "linear_cross_entropy",
    "modeling_heads",
    "modeling_hf_deberta",
    "relative_position",
    "replaced_token_detection",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"hf_deberta.model.{name}"))
    assert result.attempted > 0 and result.failed == 0
