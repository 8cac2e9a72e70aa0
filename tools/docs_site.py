"""Hook of MkDocs that adapts the documents of the repository to the site (``mkdocs.yml``).

The documents are written for GitHub. The hook makes four things work on the site, too:

- **Pages at the top of the repository** (``TOP_PAGES``) appear on the site. Links between them and ``docs/``
  stay valid.
- **Links to other files of the repository**, such as ``../../examples/cpu.yaml``, lead to its web page.
- **Lists** of GitHub's Markdown need neither a blank line before them nor an indentation of four spaces.
- **Boxes** of GitHub's Markdown (``> [!NOTE]``, ``> [!TIP]`` and ``> [!WARNING]``) become those of the theme.

A ``*.md`` in the navigation stands for the pages of its folder that the navigation does not name.
"""

from __future__ import annotations

import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
TOP_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BRANCH = "main"
SEARCH_BOOSTS = {"get-started": 3, "how-to": 4, "concepts": 2, "operations": 3, "runbooks": 1.5, "adr": 0.5}
"""How much more a folder's pages count in the search: steps come before reasons."""
_REASONS = re.compile(r"^ *<!-- not (run|compared): .* -->\n", re.MULTILINE)
"""Comments that say why the tests skip the commands or the output below (``tests/harness/fences.py``)."""
_CODE_OR_LINK = re.compile(
    r"(?P<code>^[ \t]*(?P<fence>```+|~~~+).*?^[ \t]*(?P=fence)[ \t]*$|(?P<ticks>`+)[^\n]*?(?P=ticks))"
    r"|(?<=\]\()(?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?(?=\))",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_BOX = re.compile(
    r"^(?P<indent> *)> \[!(?P<kind>\w+)\]\n(?P<text>(?:(?P=indent)>.*(?:\n|\Z))+)", re.MULTILINE
)
_ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)(?=\S)")


# -- hooks, which MkDocs calls
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each ``*.md`` in the navigation."""
    if config.nav is not None:
        named = set(_paths(config.nav))
        config.nav = _with_pages(config.nav, Path(config.docs_dir), named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository, and the program that draws the diagrams."""
    from mkdocs.structure.files import File

    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "assets/mermaid.js", abs_src_path=os.environ["MERMAID_SCRIPT"]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert the Markdown of one page. The first page has no side menu: it would have one entry."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(posixpath.dirname(page.file.src_uri), 1)}
    pages = {file.src_uri for file in files}
    text = with_site_links(_REASONS.sub("", markdown), page.file.src_uri, pages, config.repo_url or "")
    return with_boxes(with_markdown_lists(text))


# -- navigation
def _paths(nav: Any) -> Iterator[str]:
    """All paths in a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _paths(entry)


def _with_pages(nav: Any, docs: Path, named: set[str]) -> Any:
    """A navigation in which pages stand for each pattern."""
    if isinstance(nav, dict):
        return {title: _with_pages(entry, docs, named) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            names = (path.relative_to(docs).as_posix() for path in sorted(docs.glob(entry)))
            entries += [name for name in names if name not in named]
        else:
            entries.append(_with_pages(entry, docs, named))
    return entries


# -- links
def with_site_links(markdown: str, page: str, pages: set[str], repository: str) -> str:
    """Point relative links at pages of the site, or else at files of the repository.

    Args:
        markdown: Text with links as on GitHub.
        page: Path of the page on the site, without ``docs/``.
        pages: Paths of all files of the site.
        repository: URL of the repository's web page.

    Links to files that do not exist stay as they are: the strict build reports them.
    """
    folder = posixpath.dirname(page if page in TOP_PAGES else f"{DOCS}/{page}")

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or ":" in target or target.startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, unquote(target)))
        for name in (path, f"{path}/README.md", f"{path}/index.md"):
            on_site = name if name in TOP_PAGES else name.removeprefix(f"{DOCS}/")
            if on_site in pages and (on_site != name or name in TOP_PAGES):
                return posixpath.relpath(on_site, posixpath.dirname(page) or ".") + anchor
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{repository.rstrip('/')}/{kind}/{BRANCH}/{path}{anchor}"

    return _CODE_OR_LINK.sub(replaced, markdown)


# -- boxes
def with_boxes(markdown: str) -> str:
    """Convert the boxes of GitHub's Markdown to admonitions of Python-Markdown."""

    def replaced(match: re.Match[str]) -> str:
        text = with_markdown_lists(re.sub(r"^ *> ?", "", match["text"], flags=re.MULTILINE))
        return textwrap.indent(
            f"!!! {match['kind'].lower()}\n\n{textwrap.indent(text, ' ' * 4)}\n", match["indent"]
        )

    return _BOX.sub(replaced, markdown)


# -- lists
def with_markdown_lists(markdown: str) -> str:
    """Convert the lists of GitHub's Markdown to those of Python-Markdown.

    GitHub needs no blank line before a list, and takes the indentation of an item's content from the
    item's marker. Python-Markdown needs the blank line, and four spaces for each level.
    """
    lines: list[str] = []
    levels: list[int] = []  # columns at which the contents of the open items begin
    fence, shift, is_list, depth = "", 0, False, 0  # the last two: of the line with which the block begins
    for line in markdown.splitlines():
        if fence or not line.strip():
            lines.append(_shifted(line, shift))
            if fence and line.strip() == fence:
                fence = ""
                lines.append("")
            continue
        indent = len(line) - len(line.lstrip())
        item, opening = _ITEM.match(line), _FENCE.match(line)
        is_first = not lines or not lines[-1]  # of its block: no text is before it, or a blank line
        if item or opening or is_first:  # else it continues a paragraph
            while levels and indent < levels[-1]:
                levels.pop()
            shift = 4 * len(levels) - (levels[-1] if levels else 0)
        if not is_first and (opening or (item and (not is_list or len(levels) < depth))):
            lines.append("")
            is_first = True
        if is_first:
            is_list, depth = item is not None, len(levels)
        if opening:
            fence = opening[1]
        if item:
            levels.append(item.end())
            shift = 4 * len(levels) - item.end()
            lines.append(" " * (4 * len(levels) - 4) + item[2].ljust(4) + line[item.end() :])
        else:
            lines.append(_shifted(_with_plain_pipes(line), shift))
    return "\n".join(lines) + "\n"


def _with_plain_pipes(line: str) -> str:
    """A line of a table whose code has no escaped pipes: Python-Markdown shows the backslash."""
    if not line.startswith("|"):
        return line
    return re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)


def _shifted(line: str, columns: int) -> str:
    """A line with other indentation; it loses at most the spaces that it has."""
    if columns >= 0:
        return " " * columns + line if line.strip() else ""
    return line[min(-columns, len(line) - len(line.lstrip())) :]
