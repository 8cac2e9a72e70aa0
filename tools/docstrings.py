"""Refuse docstrings whose first line is the tail of a sentence: rules 7 and 8 of the standard.

A first line is a verb phrase or a noun phrase. "Of the calling thread." needs a word before it to be
understood; "Processor time of the calling thread." does not. A string below an assignment counts as a
docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.sources import ROOT, reworded_files

TAILS = frozenset((
    "as", "by", "from", "of", "over", "to", "until",
    "what", "where", "which", "who", "whoever", "whose", "whatever",
    "that", "those", "it", "its", "they", "them", "their", "none", "such", "so",
))  # fmt: skip
"""First words of a clause that has no subject or hides it."""
LOWER_CASE = re.compile(
    r"`|\W|\w*[A-Z0-9/_]|bool\b|float\b|int\b|kopf\b|torch\b|etcd\b|helm\b|kubectl\b|make\b"
)
"""Beginnings that are right in lower case: code, and proper names such as vLLM."""


def problem(docstring: str) -> str | None:
    """The reason why a docstring begins badly, or None if its first line is a phrase."""
    line = docstring.strip().split("\n")[0]
    first = re.match(r"[\w']*", line)
    word = first[0] if first else ""
    if word.lower() in TAILS:
        return f"begins with {word!r}: begin with a noun or a verb"
    if line and line[0].islower() and not LOWER_CASE.match(line.split()[0]):
        return f"begins with {word!r} in lower case"
    return None


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, its definitions, fields and constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def problems(path: str, text: str) -> Iterator[str]:
    """Yield a line for each docstring of one module that begins badly."""
    for line, docstring in docstrings(ast.parse(text)):
        if reason := problem(docstring):
            yield f"{path}:{line} {reason}: {docstring.strip().splitlines()[0][:80]}"


def all_problems(files: Iterable[Path] | None = None) -> list[str]:
    """The problems of all checked folders, one line each."""
    paths = reworded_files() if files is None else files
    return [line for path in paths for line in problems(str(path.relative_to(ROOT)), path.read_text())]
