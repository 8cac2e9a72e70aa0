"""Options as people write them, in a YAML file, a variable or a flag.

A **reader** makes a value of an option's text, and raises ValueError that says what is wrong with the text
and what to write instead. All sources go through the same readers, so a mistake reads the same wherever it
was made, but for the source's own name of the option in front. Nothing here repeats a whole file: there may
be a password in it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

Reader: TypeAlias = Callable[[str], Any]

ENV_PREFIX = "LMCACHE_"

_NUMBER = re.compile(r"-?[0-9]*\.?[0-9]*(e[-+]?[0-9]+)?")
"""Its signs only: Python would also take ``1_0``, blanks and the digits of any script."""


def number(kind: type[int] | type[float], low: float, high: float, what: str) -> Reader:
    """Make a reader of numbers from ``low`` to ``high``; ``what`` completes "… is not"."""

    def read_number(text: str) -> float:
        try:
            value = kind(text) if _NUMBER.fullmatch(text) else kind(low) - 1
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:  # NaN neither
            raise ValueError(f"{text!r} is not {what}")
        return value

    return read_number


def switch(text: str) -> bool:
    """Read true or false."""
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def one_of(*choices: str) -> Reader:
    """Make a reader of a few words."""

    def read_word(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read_word


def checked(check: Callable[[str], object]) -> Reader:
    """Make a reader of text that ``check`` raises no ValueError for."""

    def read_text(text: str) -> str:
        check(text)
        return text

    return read_text


class Source(NamedTuple):
    """One place where options stand."""

    name_of: Callable[[str], str]
    """What an option is called there."""
    values: Mapping[str, object]
    """What it says, by the options' own names; None: nothing."""


def variable_of(name: str) -> str:
    """Return the environment's name of an option."""
    return ENV_PREFIX + name.upper()


def environment(names: Iterable[str], environ: Mapping[str, str]) -> Source:
    """Return the options that environment variables set."""
    return Source(variable_of, {name: environ.get(variable_of(name)) for name in names})


def read_values(
    readers: Mapping[str, Reader], sources: Collection[Source]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options that are set, and a sentence for each that can't be used.

    Of several sources the first that has an option counts.
    """
    values: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, reader in readers.items():
        for source in sources:
            if (text := source.values.get(name)) is None:
                continue
            try:
                if not isinstance(text, str):
                    raise ValueError("this must be a single value")
                values[name] = reader(text)
            except ValueError as error:
                mistakes.append(f"{source.name_of(name)}: {error}")
            break
    return values, mistakes


def read_yaml(path: str, content: str | bytes) -> dict[str, Any]:
    """Return a file's keys and values as they are written: readers know what they mean. Raises ValueError."""
    import yaml  # a twentieth of the sidecar's start, for those who have a file

    try:
        loaded = yaml.load(content, yaml.BaseLoader)  # makes nothing but text
    except (yaml.YAMLError, RecursionError) as error:
        # The parser's own words may quote the file, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f", look at line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path} is not YAML{where}") from None
    if not isinstance(loaded or {}, dict):
        raise ValueError(f"{path} must hold keys and values, as in 'memory_size: 4Gi'")
    return loaded or {}


def unknown_keys(path: str, keys: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Sentences; a key that is no word may be anything, even a secret on the wrong side of a colon."""
    for key in keys:
        if key in known:
            continue
        if not re.fullmatch(r"[\w-]{1,64}", key):
            yield f"{path}: a key that is no word is ignored"
            continue
        nearest = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        yield f"{path}: key {key!r} is unknown, and ignored{hint}"
