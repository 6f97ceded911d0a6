"""The wheel and the source distribution: built offline, complete, and used from another folder."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_deberta
from hf_deberta_command import TRAIN_PACKAGES

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/someone/hf_deberta"


def run(*command: object, cwd: Path) -> str:
    """Run a command in a folder, without this copy of the package on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files in the repository, because builds write into the source folder."""
    if not (ROOT / ".git").exists():
        pytest.skip("the source distribution is built from the repository")
    folder = tmp_path_factory.mktemp("package") / "source"
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def unpacked(source) -> Path:
    """The unpacked source distribution."""
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(source.parent)!r})"
    run(sys.executable, "-c", build, cwd=source)
    shutil.rmtree(source / "hf_deberta.egg-info")
    shutil.unpack_archive(next(source.parent.glob("*.tar.gz")), source.parent)
    return next(source.parent.glob("hf_deberta-*/"))


@pytest.mark.slow
def test_source_distribution_is_complete_and_its_tests_run(source, unpacked):
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert not [str(file) for file in files if not (unpacked / file).exists()]
    tests = ["tests/test_import_directions.py", "tests/model/test_relative_position.py"]
    output = run(
        sys.executable, "-m", "pytest", "-n", "0", *tests, "-k", "rules_of_the_hub or log_buckets", cwd=unpacked
    )
    assert re.search(r"[1-9]\d* passed.* [1-9]\d* deselected", output), output[-500:]


@pytest.mark.slow
def test_wheel_in_an_environment_of_its_own(source, unpacked, tmp_path):
    """The other packages are those of this environment."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path,
        ".", cwd=unpacked)  # fmt: skip
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (folder,) = (environment / "lib").glob("python*/site-packages")
    (folder / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--ignore-installed", next(tmp_path.glob("*.whl")), cwd=tmp_path)  # fmt: skip
    run(environment / "bin" / "hf-deberta", "glue", "--demo", "--use_cpu", "--max_steps", 1,
        "--max_train_samples", 32, "--max_eval_samples", 8, "--max_predict_samples", 8, cwd=elsewhere)  # fmt: skip
    assert "eval_accuracy" in (elsewhere / "demo_output" / "glue" / "all_results.json").read_text()
    installed = {str(path.relative_to(folder)) for path in (folder / "hf_deberta").rglob("*.py")}
    assert installed == {str(path.relative_to(source)) for path in (source / "hf_deberta").rglob("*.py")}


def test_the_versions_of_python_that_are_claimed_are_those_of_the_workflow():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/tests.yml").read_text())
    assert re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"])) == workflow
    assert project["requires-python"] == f">={workflow[0]}"
    extras = str(project["optional-dependencies"])
    assert "python_version" not in extras  # pip would leave out such a package without a word


@pytest.mark.slow
def test_only_training_needs_the_extra_train():
    """Models, enable() and optimize() work without its packages, and a script says what is missing."""
    code = """
import sys
from hf_deberta_command import TRAIN_PACKAGES, main
missing = {*TRAIN_PACKAGES, "pyarrow", "pandas"} - {"filelock"}  # which huggingface_hub needs
sys.modules.update(dict.fromkeys(missing))  # an import of None fails
import torch
import transformers
import hf_deberta
model = hf_deberta.HfDebertaModel(hf_deberta.HfDebertaConfig.from_preset("tiny")).eval()
hf_deberta.optimize(model)(torch.tensor([[1, 2, 3]]))
config = transformers.DebertaV2Config(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
with hf_deberta.enable():
    transformers.DebertaV2Model(config)(torch.tensor([[1, 2, 3]]))
main(["glue", "--demo"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "hf-deberta glue: glue needs datasets, evaluate, scipy, sentencepiece, sklearn: run "
        "pip install '.[train]' in a copy of the repository, with Python 3.11 or later"
    )
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    names = [re.match("[a-z-]+", line)[0].replace("scikit-learn", "sklearn") for line in extra]
    assert sorted(names) == sorted(TRAIN_PACKAGES)


def test_no_page_installs_an_unpublished_name():
    """Who registers it owns all who paste the line. CONTRIBUTING.md says what to change with the first release."""
    named = re.compile(r"pip install [^\n]*\bhf[-_]deberta\b")
    pages = [ROOT / name for name in run("git", "ls-files", cwd=ROOT).splitlines()]
    pages = [page for page in pages if page.suffix in (".md", ".py", ".ipynb", ".yml", ".toml") and page.exists()]
    assert len(pages) > 300
    assert not [page for page in pages if page != Path(__file__) and named.search(page.read_text(encoding="utf-8"))]


def test_version_is_the_same_everywhere():
    """In __init__.py, which pyproject.toml reads, for citations, and at the top of the changelog."""
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [hf_deberta.__version__]
    newest = re.search(
        r"^## \[(.+)\] - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest and newest[1] == hf_deberta.__version__


def test_address_of_the_repository_is_added_to_the_project():
    script = runpy.run_path(str(ROOT / ".github" / "set_repository.py"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(script["add_project_links"](text, REPOSITORY, "v1"))["project"]
    assert project.pop("urls") == {
        "Repository": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/v1/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    assert project == tomllib.loads(text)["project"]


def test_links_of_the_readme_become_absolute():
    absolute_links = runpy.run_path(str(ROOT / ".github" / "set_repository.py"))["absolute_links"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", absolute_links(text, "README.md", REPOSITORY, "v1"))
    assert len(links) == len(re.findall(r"\]\([^)\s]+\)", text)) and all(link.startswith("https://") for link in links)
    assert f"{REPOSITORY}/blob/v1/docs/serving.md" in links and f"{REPOSITORY}/blob/v1/docs/load.md#go-back" in links
    page = "![a](docs/a.png) [b](#b) [c](http://c) [d](e/f.md#g)"
    assert absolute_links(page, "P.md", REPOSITORY, "v1") == (
        f"![a]({REPOSITORY}/raw/v1/docs/a.png) [b]({REPOSITORY}/blob/v1/P.md#b) [c](http://c) "
        f"[d]({REPOSITORY}/blob/v1/e/f.md#g)"
    )
