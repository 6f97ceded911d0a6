"""What the documentation site changes in pages and docstrings, see mkdocs.yml."""

import html as html_escapes
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
FENCE = "`" * 8  # longer than any fence inside a file that is shown
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
FLAG = re.compile(r"--?\w[\w-]*")
PAPER = re.compile(r"\b(P1|P3)('s)?")
PAPERS = {"P1": "DeBERTa paper", "P3": "DeBERTaV3 paper"}  # as docstrings abbreviate them
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)
SECTION = re.compile(r"^([A-Z][^\n]*):\n((?:    .*\n?)+)", re.MULTILINE)
FIELD = re.compile(r"^    (\w+)( \(.*?\))?: ", re.MULTILINE)


def on_files(files: Any, config: Any) -> None:
    """Add the notebooks, all results, and the files that pages link to: code and text as pages, others as they are."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    linked = {name for page in pages for _, name, _ in LINK.findall(page)}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    results = {f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks" / "results").glob("*.csv")}
    for name in sorted(linked | notebooks | results):
        path, shown_at = ROOT / name, site_path(name)
        if path.suffix == ".ipynb":
            files.append(File.generated(config, shown_at, content=notebook_page(path)))
        elif path.suffix == ".py":
            files.append(File.generated(config, shown_at, content=code_page(path), inclusion=InclusionLevel.NOT_IN_NAV))
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8").replace("](../../docs/", "](../../../")
            files.append(File.generated(config, shown_at, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        elif path.is_file():
            files.append(File.generated(config, shown_at, abs_src_path=str(path)))


def site_path(name: str) -> str:
    """Return where the site has a file of the repository."""
    path = Path(name)
    if path.suffix == ".ipynb":
        return f"{path.with_suffix('.md')}"
    return f"source/{path}.md" if path.suffix == ".py" else f"source/{path}"


def code_page(path: Path) -> str:
    """Return a Python file as Markdown; the search leaves it out."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# `{path.name}`\n\n`{path.relative_to(ROOT)}`\n\n"
    return f"{head}{FENCE}python\n{path.read_text(encoding='utf-8')}{FENCE}\n"


def notebook_page(path: Path) -> str:
    """Return a notebook with its outputs as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell))


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell's text, or its code and each output."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source.replace("](../docs/", "](../").replace(".ipynb)", ".md)")
        return
    yield f"{FENCE}python\n{source}\n{FENCE}"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![Output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
        else:
            text = "".join(output.get("text") or data["text/plain"]).rstrip()
            yield f"{FENCE}{{.text .output}}\n{text}\n{FENCE}"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link files outside docs/ at their copies in the site; of folders, show the name."""

    def link(match: re.Match) -> str:
        text, name, anchor = match.groups(default="")
        if not (ROOT / name).exists():
            raise ValueError(f"{page.file.src_path} links to ../{name}, which does not exist")
        return f"`{name}`" if (ROOT / name).is_dir() else f"[{text}]({site_path(name)}{anchor})"

    if page.file.generated_by:
        return markdown
    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Write formulas as MathML, which browsers show without a script, and keep each flag on one line."""

    def formula(match: re.Match) -> str:
        latex = html_escapes.unescape(match[2])
        if match[1] == "span":
            return convert(latex)
        return f'<div class="formula">{convert(latex, display="block")}</div>'

    def code(match: re.Match) -> str:
        return FLAG.sub(r'<span class="flag">\g<0></span>', match[0])

    return INLINE_CODE.sub(code, FORMULA.sub(formula, html))


def as_markdown(docstring: str) -> str:
    """Return a docstring with its examples as code blocks and its fields as lists."""

    def fields(match: re.Match) -> str:
        title, body = match.groups()
        if not FIELD.search(body):
            return match[0]
        return f"**{title}**\n\n" + FIELD.sub(r"- `\1`\2: ", body) + "\n"

    def example(match: re.Match) -> str:
        lines = [line.removeprefix(match[1]) for line in match[0].splitlines()]
        return "\n```pycon\n" + "\n".join(lines) + "\n```\n"

    def paper(match: re.Match) -> str:
        return f"the {PAPERS[match[1]]}'s" if match[2] else f"{PAPERS[match[1]]},"

    return EXAMPLE.sub(example, SECTION.sub(fields, PAPER.sub(paper, docstring) + "\n"))


class DocstringsAsMarkdown(griffe.Extension):
    """Applies `as_markdown` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
