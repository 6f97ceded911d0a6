"""The documentation site: the build warns of nothing, every page and link is in place, and a browser shows it whole.

Links between files are also checked by tests/test_readme.py, without mkdocs.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = re.findall(r": ([\w/]+\.md)$", CONFIGURATION.partition("\nnav:\n")[2], flags=re.MULTILINE)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("latex2mathml", "material", "mkdocs", "mkdocstrings")),
    reason="pip install '.[docs]'",
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium (on Debian: apt-get install chromium) and pip install playwright",
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


LAYOUT_FAULTS = """() => {
    const faults = [], wider = element => element.scrollWidth > element.clientWidth;
    if (wider(document.documentElement)) faults.push("the page is wider than the window");
    for (const element of document.querySelectorAll("pre, pre > code, .formula"))
        if (wider(element)) faults.push("cut: " + element.textContent);
    for (const element of document.querySelectorAll(".md-typeset__scrollwrap"))
        if (wider(element)) faults.push("a table is cut: " + element.textContent.trim());
    for (const image of document.querySelectorAll("article img"))
        if (!image.naturalWidth) faults.push("no picture: " + image.alt);
    const titles = [...document.querySelectorAll("article h1, article h2")];
    if (new Set(titles.map(title => getComputedStyle(title).color)).size > 1)
        faults.push("a title is paler than a heading");
    return faults.map(fault => fault.slice(0, 80));
}"""


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """The address of a server of the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM)


@needs_mkdocs
@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (400, "dark")])
def test_a_browser_shows_every_page_whole(site, address, browser, width, scheme):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    faults = {}
    for path in sorted(site.rglob("index.html")):
        page = path.parent.relative_to(site).as_posix()
        tab.goto(f"{address}{page}/")
        if found := tab.evaluate(LAYOUT_FAULTS) + errors:
            faults[page] = found
        errors.clear()
    tab.close()
    assert not faults
