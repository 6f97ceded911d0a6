"""What the documentation site changes in pages and docstrings, see mkdocs.yml."""

import html as html_escapes
import os
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)
SECTION = re.compile(r"^([A-Z][^\n]*):\n((?:    .*\n?)+)", re.MULTILINE)
FIELD = re.compile(r"^    (\w+)( \(.*?\))?: ", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link files outside docs/ at the repository; without its address, show their text only."""

    def link(match: re.Match) -> str:
        text, target = match.groups()
        path = Path(os.path.normpath(f"docs/{target.partition('#')[0]}"))
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_path} links to {target}, which does not exist")
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path})" if config.repo_url else f"`{path}`"

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Write formulas as MathML, which browsers show without a script."""

    def formula(match: re.Match) -> str:
        return convert(html_escapes.unescape(match[2]), display="inline" if match[1] == "span" else "block")

    return FORMULA.sub(formula, html)


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

    return EXAMPLE.sub(example, SECTION.sub(fields, docstring + "\n"))


class DocstringsAsMarkdown(griffe.Extension):
    """Applies `as_markdown` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
