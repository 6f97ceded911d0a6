"""The examples in the docstrings of the task modules."""

import doctest
import importlib
import pkgutil

import pytest

from hf_deberta.fine_tuning import tasks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(tasks.__path__)])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"{tasks.__name__}.{name}")).failed == 0
