"""The documentation site: the build warns of nothing, and every page and link is in place.

Links between files are also checked by tests/test_readme.py, without mkdocs.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = re.findall(r": ([\w/]+\.md)$", CONFIGURATION.partition("\nnav:\n")[2], flags=re.MULTILINE)
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("latex2mathml", "material", "mkdocs", "mkdocstrings")),
    reason="pip install '.[docs]'",
)


def test_every_page_is_in_the_navigation_once():
    written = [path.name for path in (ROOT / "docs").glob("*.md")]
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(PAGES) == sorted(written + notebooks)


def test_every_public_name_is_in_the_reference():
    import hf_deberta
    from hf_deberta import export, visualize

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {name for module in (hf_deberta, export, visualize) for name in module.__all__}
    missing = [name for name in sorted(names) if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"docs/api.md: add {', '.join(missing)}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@needs_mkdocs
def test_nothing_is_loaded_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\"\s>]*)", text), page


@needs_mkdocs
def test_notebooks_and_code_are_pages_of_the_site(site):
    def text_of(name: str) -> str:
        return (site / name / "index.html").read_text(encoding="utf-8")

    assert 'href="../source/examples/lora.py/"' in text_of("use")
    assert "def" in text_of("source/examples/lora.py")
    assert 'href="../pretrain/"' in text_of("notebooks/quickstart")
    assert 'src="data:image/png' in text_of("notebooks/attention")
    assert (site / "source" / "benchmarks" / "results" / "encoder.csv").exists()
    assert "add_argument" not in (site / "search" / "search_index.json").read_text(encoding="utf-8")


@needs_mkdocs
def test_docstrings_are_rendered(site):
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    for anchor in ("HfDebertaConfig", "HfDebertaForMaskedLM.forward", "enable", "metrics.path", "export.to_onnx"):
        assert f'id="hf_deberta.{anchor}"' in text, anchor
    assert "<blockquote>" not in text, "an example outside a code block"
    assert "<code>position_buckets</code>" in text
    assert "DeBERTa paper, table 8" in text and not re.search(r"\bP[13]\b", text)


@needs_mkdocs
@pytest.mark.parametrize("page", ["attention_triton", "disentangled_attention", "sift"])
def test_formulas_are_rendered(site, page):
    text = (site / page / "index.html").read_text(encoding="utf-8")
    assert text.count("<math") > 10 and "arithmatex" not in text
    assert "$" not in re.sub(r"<(script|code).*?</\1>", "", text, flags=re.DOTALL), "a formula that was not found"
