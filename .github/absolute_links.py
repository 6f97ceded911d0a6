"""Make the relative links of a Markdown file absolute, so that they also work on PyPI.

python .github/absolute_links.py README.md https://github.com/OWNER/NAME v1.0.0
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:)([^)\s]+)\)")


def absolute_links(text: str, page: str, repository: str, revision: str) -> str:
    """Return the text with links to files and headings of this revision; images link to the file itself."""

    def absolute(match: re.Match) -> str:
        start, target = match.groups()
        kind = "raw" if start.startswith("!") else "blob"
        return f"{start}{repository}/{kind}/{revision}/{page if target.startswith('#') else ''}{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    file, repository, revision = sys.argv[1:]
    path = Path(file)
    path.write_text(absolute_links(path.read_text(encoding="utf-8"), path.name, repository, revision), encoding="utf-8")
