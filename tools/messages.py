"""Refuse clipped words and long sentences in the texts of the product.

The texts are the descriptions and rules of the CRDs, and all strings in code that read as prose: conditions,
Events, log lines, errors and help texts. Sentences of the CRDs and of the operator have at most 25 words. A
value that an f-string inserts counts as one word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tools import prose
from tools.docstrings import docstrings
from tools.sources import PRODUCT, ROOT, python_files

MAX_WORDS = 25
MIN_WORDS = 4
"""Strings with fewer words are keys, paths and labels rather than prose."""
FOLDERS = PRODUCT
LIMITED_FOLDERS = ("operator",)
"""Folders in which ``MAX_WORDS`` applies. Help texts of the sidecar's options have longer sentences."""
_TEXT_KEYS = ("description", "message")
_SCRIPT = re.compile(r"\|\||\$\(")
"""Signs of a shell script."""


def problems(name: str, text: str, *, is_limited: bool = True) -> Iterator[str]:
    """Yield a line for each problem of one text. ``is_limited``: sentences have at most ``MAX_WORDS``."""
    sentences = list(prose.split(text.replace("\n", " ")))
    for sentence in sentences:
        if is_limited and (number := prose.num_words(sentence)) > MAX_WORDS:
            yield f"{name}: {number} words, the limit is {MAX_WORDS}: {sentence[:100]}"
    yield from prose.clipped_words(name, sentences)


def crd_texts(schema: Any) -> Iterator[str]:
    """Yield the descriptions and the messages of validation rules in a CRD, or a part of it."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in _TEXT_KEYS and isinstance(value, str):
                yield value
            else:
                yield from crd_texts(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from crd_texts(item)


def code_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of a module that reads as prose, except docstrings."""
    tree = ast.parse(text)
    skipped = set(docstrings(tree))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr():
                line, value = node.lineno, "".join(map(_plain, node.values))
            case ast.Constant(value=str(value)) if (
                id(node) not in inner and (node.lineno, value) not in skipped
            ):
                line = node.lineno
            case _:
                continue
        if len(value.split()) >= MIN_WORDS and not _SCRIPT.search(value):
            yield line, value


def _plain(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "VALUE"


def all_problems() -> list[str]:
    """The problems of all CRDs and of the product's code, one line each."""
    lines = []
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        texts = crd_texts(yaml.safe_load(path.read_text()))
        lines += [line for text in texts for line in problems(f"crds/{path.name}", text)]
    for path in python_files(FOLDERS):
        name = path.relative_to(ROOT)
        for number, text in code_texts(path.read_text()):
            lines += problems(f"{name}:{number}", text, is_limited=name.parts[0] in LIMITED_FOLDERS)
    return lines
