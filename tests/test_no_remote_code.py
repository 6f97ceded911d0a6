"""Code beside a checkpoint never runs without --trust_remote_code: not after a "y" either."""

import ast
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fine_tuning_models import run_script
from fine_tuning_models import save_models as save_tiny_models

from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.pretraining.arguments import NewModelArguments

ROOT = Path(__file__).parents[1]
FOLDERS = ("fine_tuning", "pretraining", "training", "demos", "export", "serving")
PACKAGE_FILES = [path for name in FOLDERS for path in sorted((ROOT / "hf_deberta" / name).rglob("*.py"))]
FILES = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "examples").glob("*.py")), *PACKAGE_FILES]
# Not load_dataset: `datasets` runs no code of a repository since version 4, the oldest that pyproject.toml allows.
LOADING_CALLS = {"from_pretrained", "load_tokenizer", "load_deberta_tokenizer"}
OPTIONS_WITH_FLAG = ("load_options()", "hub_options()", "'trust_remote_code': False")  # see test_options_hold_the_flag
# classes of this package never look for code (see test_hostile_folder); GLiNER has no flag, and its example says so
WITHOUT_CODE = ("HfDeberta", "GLiNER")


def holds_flag(code: str) -> bool:
    return any(option in code for option in OPTIONS_WITH_FLAG)


def calls_without_flag(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the loading calls that pass trust_remote_code neither by name nor in their options."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        with_flag = [node for each in assignments if holds_flag(ast.unparse(each.value)) for node in ast.walk(each)]
        names = {node.id for node in with_flag if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            receiver, _, name = ast.unparse(call.func).rpartition(".")
            if name not in LOADING_CALLS or receiver.startswith(WITHOUT_CODE):
                continue
            if call.args and ast.unparse(call.args[0]) == "model_args":  # task_model.load_tokenizer(model_args)
                continue
            options = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
            by_name = any(keyword.arg == "trust_remote_code" for keyword in call.keywords)
            if not by_name and not any(code in names or holds_flag(code) for code in options):
                yield call


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_loading_call_says_whether_code_may_run(path):
    calls = calls_without_flag(ast.parse(path.read_text(encoding="utf-8")))
    missing = [f"{path.name}:{call.lineno}: {ast.unparse(call)}" for call in calls]
    assert not missing, "pass trust_remote_code: without it Transformers asks, and runs the code after a 'y'"


def test_a_call_without_the_flag_is_detected():
    source = (
        "def f():\n    a = AutoTokenizer.from_pretrained(x)\n    o = args.load_options()\n    g.from_pretrained(x, **o)"
    )
    assert [call.lineno for call in calls_without_flag(ast.parse(source))] == [2]


def test_options_hold_the_flag():
    assert NewModelArguments().hub_options()["trust_remote_code"] is False
    assert ModelArguments("x").load_options()["trust_remote_code"] is False
    assert ModelArguments("x", trust_remote_code=True).load_options()["trust_remote_code"] is True


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, Path]:
    """A model folder whose configurations name code, and the file that this code writes."""
    folder = tmp_path_factory.mktemp("hostile")
    words = ["the old man walked slowly down to a quiet harbour"] * 50
    save_tiny_models(folder, words)
    model, sentinel = folder / "ours", folder / "executed"
    (model / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').write('!')\nclass Evil: ...\n")
    auto_map = {
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "config.json": dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForMaskedLM"), "evil.Evil"),
    }
    for name, classes in auto_map.items():
        fields = json.loads((model / name).read_text())
        # of an unknown type: for known ones Transformers takes its own class and does not ask
        fields |= {"auto_map": classes, "tokenizer_class" if "tokenizer" in name else "model_type": "Evil"}
        (model / name).write_text(json.dumps(fields))
    (folder / "corpus.txt").write_text("\n".join(words))
    (folder / "rows.jsonl").write_text('{"sentence": "a", "label": 0}\n{"sentence": "b", "label": 1}\n' * 4)
    return model, sentinel


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run_mlm.py", "run_rtd.py", "run_glue.py"])
def test_scripts_on_a_hostile_folder(hostile, tmp_path, monkeypatch, script):
    """With "y" on the standard input, and with a code that would be found."""
    model, sentinel = hostile
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    flags = {
        "run_mlm.py": ["--model_name_or_path", model, "--train_file", model.parent / "corpus.txt"],
        "run_rtd.py": ["--discriminator_name_or_path", model, "--generator_name_or_path", model, "--train_file",
                       model.parent / "corpus.txt"],
        "run_glue.py": ["--model_name_or_path", model, "--train_file", model.parent / "rows.jsonl"],
    }[script]  # fmt: skip
    with pytest.raises(SystemExit, match=f"^{script}: .*add --trust_remote_code"):
        run_script(script, *flags, "--output_dir", tmp_path / "out", "--use_cpu", "--max_steps", 1)
    assert not sentinel.exists() and not any((tmp_path / "out").iterdir())
