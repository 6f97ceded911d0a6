"""Folders of the package import in one direction, and `hf_deberta/model/` follows the rules of the Hub."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_deberta"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
MODEL = sorted((PACKAGE / "model").glob("*.py"))
# folder or file -> what it may import besides itself
MAY_IMPORT = {
    "model": set(),
    "engines": {"model"},
    "tokenization_hf_deberta": set(),
    "transformers_format": {"hf_deberta", "model"},
    "gpu_check": {"engines", "model"},
    "question_answering": {"fine_tuning", "training"},
    "visualize": {"hf_deberta", "engines", "model", "training"},
    "__main__": set(),
    "commands": {
        *("hf_deberta", "gpu_check", "visualize", "engines", "model", "training", "pretraining", "demos"),
        *("serving", "tokenization_hf_deberta", "transformers_format"),
    },
    "export": {"hf_deberta", "engines", "in_tree", "model", "transformers_format", "commands"},  # of its own command
    "in_tree": {"engines", "model", "tokenization_hf_deberta"},
    "serving": {"engines", "model", "in_tree"},
    "training": {"hf_deberta", "engines", "model", "transformers_format"},
    "pretraining": {"hf_deberta", "engines", "model", "tokenization_hf_deberta", "training"},
    "fine_tuning": {"hf_deberta", "model", "tokenization_hf_deberta", "training", "metrics"},
    "metrics": set(),
    "demos": {"hf_deberta", "engines", "model", "tokenization_hf_deberta", "pretraining"},
}
MATHEMATICS = {"configuration_hf_deberta", "input_checks", "losses", "relative_position", "slots"}
# dependencies of Transformers
ALWAYS_INSTALLED = {"numpy", "torch", "transformers", "huggingface_hub", "safetensors", "tokenizers"}


def imports(path: Path, node: ast.AST | None = None) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run: not those under TYPE_CHECKING, nor those in a try block, which may be missing."""
    for child in ast.iter_child_nodes(node or ast.parse(path.read_text())):
        if isinstance(child, ast.Try) or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from imports(path, child)


def imported_modules(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.level:
            parts = path.relative_to(PACKAGE.parent).parts[: -node.level]
            names.add(".".join((*parts, *filter(None, [node.module]))))
        else:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_folders_import_in_one_direction(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported_modules(path):
        top, _, rest = name.partition(".")
        assert not top.startswith(("run_", "tests", "demo")), f"{path.name} imports the script {name}"
        if top == "hf_deberta":
            folder = rest.partition(".")[0] or "hf_deberta"
            assert folder in {own, *MAY_IMPORT[own]}, f"{own} must not import {name}"


@pytest.mark.parametrize("path", MODEL, ids=lambda path: path.stem)
def test_model_files_follow_the_rules_of_the_hub(path):
    """Siblings are imported as `from .x import y`, and everything else is installed with Transformers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
    code_lines = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"\s*from\s+\.\w+\s+import", line):
            assert number in code_lines, f"{path.name}:{number} looks like an import to the Hub's scanner"
    for name in imported_modules(path):
        top = name.partition(".")[0]
        assert top in {"hf_deberta", *ALWAYS_INSTALLED, *sys.stdlib_module_names}, f"{path.name} imports {name}"


def test_mathematics_imports_no_model():
    siblings = {path.stem: {name.rpartition(".")[2] for name in imported_modules(path)} for path in MODEL}
    for name in MATHEMATICS:
        assert not siblings[name] & set(siblings) - MATHEMATICS, name


def test_model_files_have_no_import_circle():
    """An import inside a function counts, one under TYPE_CHECKING does not."""
    stems = {path.stem for path in MODEL}
    siblings = {path.stem: {name.rpartition(".")[2] for name in imported_modules(path)} & stems for path in MODEL}
    TopologicalSorter(siblings).prepare()  # CycleError names the files of a circle


@pytest.mark.slow
def test_a_model_on_the_cpu_imports_neither_kernels_nor_libraries_of_others():
    """Those of `evaluate` import all pipelines of Transformers, which takes seconds."""
    code = (
        "import sys, torch; from hf_deberta import HfDebertaConfig, HfDebertaModel; "
        "model = HfDebertaModel(HfDebertaConfig.from_preset('tiny')); "
        "model(torch.tensor([[1, 2, 3]])).last_hidden_state.sum().backward(); "
        "assert model.config._attn_implementation == 'auto'; "
        "unwanted = {'hf_deberta.engines.attention_triton', 'peft', 'evaluate'} & set(sys.modules); "
        "assert not unwanted, unwanted"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_DEBERTA_ATTENTION"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_no_utility_modules():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in ("utils", "common", "base")]
