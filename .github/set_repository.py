"""Write the repository's address into what PyPI shows: the links of the README and of the project.

python .github/set_repository.py https://github.com/OWNER/NAME v1.0.0

No file of the repository holds its address: workflows take it from GitHub.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:)([^)\s]+)\)")
SCRIPTS = "[project.scripts]\n"  # the table of pyproject.toml before which the links are added


def absolute_links(text: str, page: str, repository: str, revision: str) -> str:
    """Return the text with links to files and headings of this revision; images link to the file itself."""

    def absolute(match: re.Match) -> str:
        start, target = match.groups()
        kind = "raw" if start.startswith("!") else "blob"
        return f"{start}{repository}/{kind}/{revision}/{page if target.startswith('#') else ''}{target})"

    return LINK.sub(absolute, text)


def add_project_links(text: str, repository: str, revision: str) -> str:
    """Return pyproject.toml with the links of the project's page."""
    changelog = f"{repository}/blob/{revision}/CHANGELOG.md"
    links = f'[project.urls]\nRepository = "{repository}"\nChangelog = "{changelog}"\nIssues = "{repository}/issues"\n'
    return text.replace(SCRIPTS, f"{links}\n{SCRIPTS}")


if __name__ == "__main__":
    repository, revision = sys.argv[1:]
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), readme.name, repository, revision), "utf-8")
    project.write_text(add_project_links(project.read_text(encoding="utf-8"), repository, revision), "utf-8")
