"""Code fences of the documentation: their language, their text, what they print, and why tests skip them.

A page shows the output of a command in a fence that directly follows the command. Readers of the page do not
see the reasons in comments::

    <!-- not run: needs a GPU -->
    ```sh
    kubectl get nodes
    ```
    <!-- not compared: the test has other nodes -->
    ```text title="Output"
    NAME     STATUS
    …
    ```

`difference` defines which outputs match.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from testing.child_process import REPOSITORY

DOCS = REPOSITORY / "docs"
COMMANDS = ("sh", "console")
"""Languages whose fences are commands."""
PAGES = tuple(sorted([*(DOCS / "get-started").glob("*.md"), *(DOCS / "how-to").glob("*.md")]))
"""Pages whose commands run in the tests."""
_FENCE = re.compile(
    r"(?:^[ ]*<!-- not (?:run|compared): (?P<reason>[^\n]+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)(?P<title>[^\n]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_OUTPUT = ' title="Output"'
_OMITTED = "…"
_NUMBER = r"\d+(?:[.,]\d+)*"
_VARIABLE = {
    r"\b(?:\d+[smhd])+\b": r"(?:\d+[smhd])+",
    _NUMBER: _NUMBER,
    "  +": "  +",
    "█+": "█+",
    _OMITTED: ".*",
}
"""Parts of an expected line, and what they match in a printed line."""
_PARTS = re.compile("|".join(f"({part})" for part in _VARIABLE))


@dataclass(frozen=True)
class Fence:
    """One fence of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why the tests do not run or compare it, from the comment on the line before; usually empty."""
    is_output: bool = False
    output: "Fence | None" = None
    """The output that the page shows."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def fences(page: Path, *languages: str) -> list[Fence]:
    """All fences of a page, or those of some languages, in their order."""
    text = page.read_text()
    matches = list(_FENCE.finditer(text))
    parsed = [
        Fence(
            page=page,
            line=text.count("\n", 0, match.start("indent")) + 1,
            language=match["language"],
            text=textwrap.dedent(match["text"]),
            reason=match["reason"] or "",
            is_output=match["title"] == _OUTPUT,
        )
        for match in matches
    ]
    for index, (match, following) in enumerate(pairwise(matches)):
        if parsed[index + 1].is_output and not text[match.end() : following.start()].strip():
            parsed[index] = replace(parsed[index], output=parsed[index + 1])
    return [fence for fence in parsed if not languages or fence.language in languages]


def output(page: str, command: str) -> str:
    """The output that a page of ``docs`` shows below the commands with this text."""
    (shown,) = [fence.output for fence in fences(DOCS / page, *COMMANDS) if command in fence.text]
    assert shown, f"{page} shows no output of {command}"
    return shown.text


def difference(expected: str, printed: str, translated: Callable[[str], str] = str) -> str:
    """Compare an output with the one that a page shows; returns a diff, or nothing if they match.

    Numbers match any number, ages such as ``2m30s`` any age, bars of charts any bar, and gaps between columns
    any gap. ``…`` matches a part of a line, or as a line of its own any number of lines. Everything else must
    be equal, apart from blank lines and spaces at the ends of lines. ``translated`` replaces the placeholders
    of a line. NAME may also be the heading of a column, which stays.
    """
    actual = _lines(printed)
    position, may_skip = 0, False
    for line in _lines(expected):
        if line.strip() == _OMITTED:
            may_skip = True
            continue
        candidates = range(position, len(actual) if may_skip else min(position + 1, len(actual)))
        forms = {line, translated(line)}
        matching = (i for i in candidates if any(_matches(form, actual[i]) for form in forms))
        if (index := next(matching, None)) is None:
            return _diff(actual, position, line)
        position, may_skip = index + 1, False
    return "" if may_skip or position == len(actual) else _diff(actual, position, "(no more lines)")


def _lines(text: str) -> list[str]:
    return [line.expandtabs().rstrip() for line in text.splitlines() if line.strip()]


def _matches(expected: str, printed: str) -> bool:
    patterns = list(_VARIABLE.values())
    regex, end = "", 0
    for part in _PARTS.finditer(expected):
        assert part.lastindex
        regex += re.escape(expected[end : part.start()]) + patterns[part.lastindex - 1]
        end = part.end()
    return re.fullmatch(regex + re.escape(expected[end:]), printed) is not None


def _diff(printed: list[str], position: int, expected: str) -> str:
    """All printed lines. The first that differs stands below the expected line."""
    marked = [f"{'+' if index == position else ' '} {line}" for index, line in enumerate(printed)]
    return "\n".join([*marked[:position], f"- {expected}", *marked[position:]])


def pages() -> list[Path]:
    """All pages of the site, and the README."""
    return [REPOSITORY / "README.md", REPOSITORY / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]
