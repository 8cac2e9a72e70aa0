"""Code fences of the documentation: their language, their text, and why tests do not run them."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from testing.child_process import REPOSITORY

DOCS = REPOSITORY / "docs"
COMMANDS = ("sh", "console")
"""Languages whose fences are commands."""
PAGES = tuple(sorted([*(DOCS / "get-started").glob("*.md"), *(DOCS / "how-to").glob("*.md")]))
"""Pages whose commands run in the tests."""
_FENCE = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Fence:
    """One fence of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why the tests do not run it, from ``<!-- not run: REASON -->`` on the line before; usually empty."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def fences(page: Path, *languages: str) -> list[Fence]:
    """All fences of a page, or those of some languages, in their order."""
    text = page.read_text()
    parsed = [
        Fence(
            page=page,
            line=text.count("\n", 0, match.start("indent")) + 1,
            language=match["language"],
            text=textwrap.dedent(match["text"]),
            reason=match["reason"] or "",
        )
        for match in _FENCE.finditer(text)
    ]
    return [fence for fence in parsed if not languages or fence.language in languages]


def pages() -> list[Path]:
    """All pages of the site, and the README."""
    return [REPOSITORY / "README.md", REPOSITORY / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]
