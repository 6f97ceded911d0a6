"""The private methods of Trainer that we use exist, and are listed in one place."""

import ast
from pathlib import Path

import pytest
from transformers import Trainer

from hf_deberta.training.private_trainer_apis import PRIVATE_TRAINER_METHODS

PACKAGE = Path(__file__).parents[2] / "hf_deberta"
FILES = [path for folder in ("training", "pretraining", "fine_tuning") for path in (PACKAGE / folder).rglob("*.py")]


@pytest.mark.parametrize("name", PRIVATE_TRAINER_METHODS)
def test_installed_transformers_has_the_method(name):
    assert callable(getattr(Trainer, name, None)), f"Trainer.{name} is missing: {PRIVATE_TRAINER_METHODS[name]}"


def test_every_private_method_in_use_is_listed():
    used = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                used.add(node.name)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    private = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    assert used & private == set(PRIVATE_TRAINER_METHODS)
