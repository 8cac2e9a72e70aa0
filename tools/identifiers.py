"""Refuse clipped words and repeated types in the names of Python code: rule 11 of the standard.

A name is split at ``_`` and at capital letters. ``CLIPPED`` lists words that no name may contain, ``VAGUE``
lists words that may not be a name on their own. In the product, no two public types may have the same name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.sources import PRODUCT, ROOT, python_files, reworded_files

CLIPPED = {
    **dict.fromkeys(("told", "tell", "tells"), "reported, sent, send"),
    **dict.fromkeys(("brought", "bring", "brings"), "loaded, fetched, promoted"),
    **dict.fromkeys(("gone", "goes"), "deleted, missing, evicted, ended"),
    **dict.fromkeys(("come", "comes", "came"), "arrive, start, return"),
    **dict.fromkeys(("rests", "stays"), "idle, remains, or a noun"),
    **dict.fromkeys(("whoever", "whatever", "somebody", "nobody", "others", "it"), "name the actor or thing"),
    "seen": "observed, received, known",
    "kept": "cached, retained",
    "own": "name the owner or the part",
    "news": "change, update",
    "anew": "again",
    "beside": "next to, background",
    "let_go": "release",
}
"""Words, or pairs of words, that no name may contain, with words of the field in their place."""
VAGUE = {
    **dict.fromkeys(("one", "some", "most", "found"), "name the thing"),
    "at": "time, position, index",
    "bare": "name what is missing",
}
"""Words that need a noun: ``num_found`` and ``asked_at`` are clear, ``found`` and ``at`` are not."""
SENTENCE_WORDS = frozenset(("comes", "it", "others", "own", "stays"))
"""Words that the name of a test may contain, because it is a sentence with a subject and a verb."""
ALLOWED = {
    ("operator", "last_seen"): "Kubernetes shows the time of an Event under this name",
    ("sidecar", "kept_seconds"): "public parameter of lmcache_store.curves.Sampler",
    ("sidecar", "found"): "the rows that Index.find found, a type of the arena's contracts",
}
"""Folders and names that contain a clipped word, each with the reason why the name is right there."""
_TYPE_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def words(name: str) -> list[str]:
    """The words of a name in lower case: ``_num_rows`` and ``NumRows`` are ``["num", "rows"]``."""
    return [word.lower() for word in _WORD_START.sub("_", name).split("_") if word]


def problem(name: str, folder: str = "") -> str | None:
    """The clipped word of a name with better ones, or None if the name is clear."""
    parts = words(name)
    if (folder, "_".join(parts)) in ALLOWED:
        return None
    pairs = ("_".join(pair) for pair in itertools.pairwise(parts))
    is_sentence = parts[:1] == ["test"] and parts[1:2] != ["it"]
    allowed = SENTENCE_WORDS if is_sentence else frozenset[str]()
    clipped = [(word, CLIPPED[word]) for word in [*parts, *pairs] if word in CLIPPED and word not in allowed]
    if len(parts) == 1 and parts[0] in VAGUE:
        clipped.append((parts[0], VAGUE[parts[0]]))
    return "; ".join(f"{word!r} ({better})" for word, better in clipped) or None


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each name that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str()):
                yield node.lineno, str(node.asname)


def problems(path: str, text: str) -> Iterator[str]:
    """Yield a line for each unclear name of one module, including the module's own name."""
    names = {(0, Path(path).stem), *defined_names(ast.parse(text))}
    for line, name in sorted(names):
        if reason := problem(name, path.split("/")[0]):
            yield f"{path}:{line} {name}: {reason}"


def public_types(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each public class and type alias at the top level of a module.

    The result of a call, such as a type variable, is no alias.
    """
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not isinstance(value, ast.Call):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                pass
            case _:
                continue
        if _TYPE_NAME.fullmatch(name):
            yield node.lineno, name


def repeated_types(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each public type whose name another type has. ``texts``: modules by path."""
    places = defaultdict[str, list[str]](list)
    for path, text in texts.items():
        for line, name in public_types(ast.parse(text)):
            places[name].append(f"{path}:{line}")
    for name, (first, *repeated) in places.items():
        for place in repeated:
            yield f"{place} {name}: {first} has a type of this name: say which idea it is"


def all_problems(files: Iterable[Path] | None = None) -> list[str]:
    """The problems of all checked folders, one line each."""
    paths = reworded_files() if files is None else files
    names = [line for path in paths for line in problems(str(path.relative_to(ROOT)), path.read_text())]
    product = python_files(PRODUCT) if files is None else ()
    return names + list(repeated_types({str(path.relative_to(ROOT)): path.read_text() for path in product}))
