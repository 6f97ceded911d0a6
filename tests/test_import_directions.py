"""Who may import whom, and the Hub's import rules for every file that travels there."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_deberta"
FILES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "__init__.py")
NO_SIBLINGS = {"configuration_hf_deberta", "relative_position", "checkpoint_conversion", "batch_loss"}
NO_SIBLINGS |= {"tokenization_hf_deberta", "interception", "unpadding"}
MODEL = {"attention_context", "dense", "interception", "modeling_hf_deberta", "configuration_hf_deberta", "batch_loss"}
MAY_IMPORT = {
    **{name: set() for name in NO_SIBLINGS},
    "ngram_input_encoding": {"configuration_hf_deberta"},
    "attention_reference": {"relative_position"},
    "attention_sdpa": {"interception", "relative_position"},
    "attention_triton": {"interception", "attention_triton_forward", "attention_triton_backward"},
    "attention_triton_forward": set(),
    "attention_triton_backward": {"attention_triton_forward"},
    "dense": {"interception"},
    "linear_cross_entropy": {"batch_loss", "dense", "interception"},
    "remembered": {"interception"},
    "attention": {"interception", "relative_position", "attention_reference", "attention_sdpa", "attention_triton"},
    "attention_context": {"attention", "interception", "unpadding"},
    "modeling_hf_deberta": {
        "attention",
        "attention_context",
        "checkpoint_conversion",
        "configuration_hf_deberta",
        "dense",
        "hub_export",
        "interception",
        "ngram_input_encoding",
        "relative_position",
        "remembered",
    },
    "modeling_heads": MODEL,
    "enhanced_mask_decoder": {*MODEL, "linear_cross_entropy"},
    "causal_language_model": {"attention_context", "batch_loss", "enhanced_mask_decoder"},
    "replaced_token_detection": MODEL,
    "in_tree_encoder": {
        "attention",
        "attention_context",
        "dense",
        "interception",
        "relative_position",
        "remembered",
    },
    "in_tree_masked_lm": {"batch_loss", "configuration_hf_deberta", "in_tree_encoder"},
    "enable": {"in_tree_encoder", "in_tree_masked_lm", "tokenization_hf_deberta"},
    "hub_export": {
        "causal_language_model",
        "configuration_hf_deberta",
        "enhanced_mask_decoder",
        "modeling_heads",
        "modeling_hf_deberta",
        "replaced_token_detection",
    },
}
# what is there wherever Transformers is
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", "safetensors", "tokenizers"}


def imports(path, node=None):
    """Every import below `node`, those in a try block apart: the Hub's scanner lets them be missing."""
    for child in ast.iter_child_nodes(node or ast.parse(path.read_text())):
        if isinstance(child, ast.Try):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from imports(path, child)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_siblings(path):
    found = {node.module for node in imports(path) if isinstance(node, ast.ImportFrom) and node.level}
    assert path.stem in MAY_IMPORT, f"say in MAY_IMPORT whom {path.name} may import"
    assert found <= MAY_IMPORT[path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_form_the_hub_can_follow(path):
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
    code_lines = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"\s*from\s+\.\w+\s+import", line):
            assert number in code_lines, f"{path.name}:{number} looks like an import to the Hub's scanner"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_else_is_needed(path):
    for node in imports(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        for name in names:
            top = name.partition(".")[0]
            assert top in ALWAYS_THERE or top in __import__("sys").stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "training").glob("*.py")), ids=lambda path: path.stem)
def test_training_stays_home(path):
    """It imports the package by its name, and neither scripts nor tests; nothing that travels imports it."""
    for node in imports(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        assert not getattr(node, "level", 0), ast.unparse(node)
        assert not any(name.startswith(("run_", "tests", "hf_deberta.tasks")) for name in names), names


def test_no_drawers():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in ("utils", "common", "base")]
