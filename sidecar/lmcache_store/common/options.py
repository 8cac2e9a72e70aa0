"""Parsing of options from YAML files, environment variables and flags.

A **reader** converts the text of an option to a value. It raises ValueError, which says what is wrong with
the text and what to write instead. All sources use the same readers, so a mistake has the same message
everywhere, after the source's name of the option. No message quotes a whole file, because a file may contain
a password.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple, TypeAlias

ValueReader: TypeAlias = Callable[[str], Any]

ENV_PREFIX = "LMCACHE_"

_NUMBER = re.compile(r"-?[0-9]*\.?[0-9]*(e[-+]?[0-9]+)?")
"""Spelling of a number. Stricter than Python, which also accepts ``1_0``, blanks and digits of any script."""


def number(kind: type[int] | type[float], low: float, high: float, what: str) -> ValueReader:
    """Return a reader of numbers from ``low`` to ``high``; its message is "… is not" and ``what``."""

    def read_number(text: str) -> float:
        try:
            value = kind(text) if _NUMBER.fullmatch(text) else kind(low) - 1
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:  # also refuses NaN
            raise ValueError(f"{text!r} is not {what}")
        return value

    return read_number


SECONDS = number(float, 0, 3600, "a number of seconds from 0 to 3600")


def switch(text: str) -> bool:
    """Parse true or false."""
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def one_of(*choices: str) -> ValueReader:
    """Return a reader that accepts only ``choices``."""

    def read_word(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read_word


def checked(check: Callable[[str], object]) -> ValueReader:
    """Return a reader of text for which ``check`` does not raise ValueError."""

    def read_text(text: str) -> str:
        check(text)
        return text

    return read_text


class Parser(argparse.ArgumentParser):
    """A command line without abbreviations. For a mistyped option or choice it suggests the nearest one."""

    passes_unknown = False
    """Whether ``parse_known_args`` returns unknown arguments. Otherwise they are an error."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.allow_abbrev = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments. Returns the values, and the unknown arguments if this command passes them."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.passes_unknown:
            self.error(about_unknown(unknown, self._option_string_actions))
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggestion(value, action.choices or ())
            raise


def about_unknown(words: Iterable[str], options: Iterable[str]) -> str:
    """Return a message about arguments that a command with these options does not know.

    It has the names of options only, because a value may be a secret.
    """
    names = sorted({found[0] for word in words if (found := re.match(r"--[\w-]*|-.$", word))})
    known = [*options]
    mistakes = [f"argument {name} is unknown{suggestion(name, known)}" for name in names]
    return ", ".join(mistakes) or "too many arguments"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest known one, if one is near."""
    nearest = difflib.get_close_matches(word, [*known], n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def describe(parser: argparse.ArgumentParser, about: str, epilog: str, *examples: str) -> None:
    """Set the texts before and after the options in a command's help. Their line breaks stay.

    ``examples`` are arguments of the command.
    """
    calls = "".join(f"\n  {parser.prog} {each}" for each in examples)
    parser.description, parser.epilog = about, f"{epilog}\n\nexamples:{calls}".lstrip()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def setting(default: object, reader: ValueReader, /, **metadata: object) -> Any:
    """Return a dataclass field whose value ``reader`` parses."""
    return field(default=default, metadata={"reader": reader, **metadata})


def readers_of(settings: type[Any]) -> dict[str, ValueReader]:
    """Return the readers of a dataclass whose fields are made by ``setting``, by the fields' names."""
    return {declared.name: declared.metadata["reader"] for declared in fields(settings)}


class Source(NamedTuple):
    """One source of options, such as a file."""

    name_of: Callable[[str], str]
    """Function that returns the source's name of an option."""
    values: Mapping[str, object]
    """Values by the options' own names; None if an option is not set."""


def variable_of(name: str) -> str:
    """Return the name of the environment variable of an option."""
    return ENV_PREFIX + name.upper()


def environment(names: Iterable[str], environ: Mapping[str, str]) -> Source:
    """Return the environment variables of the options ``names`` as a source."""
    return Source(variable_of, {name: environ.get(variable_of(name)) for name in names})


def read_values(
    readers: Mapping[str, ValueReader], sources: Collection[Source]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of all options that are set, and one message for each invalid value.

    If several sources set an option, the first one counts.
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
    """Return the keys and values of a YAML file as text, which readers then parse. Raises ValueError."""
    import yaml  # imported late: the import takes a twentieth of the sidecar's start, and few need it

    try:
        loaded = yaml.load(content, yaml.BaseLoader)  # this loader creates only text, lists and dictionaries
    except (yaml.YAMLError, RecursionError) as error:
        # The parser's message may quote the file, which may contain a password.
        mark = getattr(error, "problem_mark", None)
        place = f", look at line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path} is not YAML{place}") from None
    if not isinstance(loaded or {}, dict):
        raise ValueError(f"{path} must hold keys and values, as in 'memory_size: 4Gi'")
    return loaded or {}


def unknown_keys(path: str, keys: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yield one message for each key that is not in ``known``.

    A key with unusual characters is not quoted, because it may be a secret on the wrong side of a colon.
    """
    for key in keys:
        if key in known:
            continue
        if not re.fullmatch(r"[\w-]{1,64}", key):
            yield f"{path}: a key with characters other than letters, digits, _ and - is ignored"
            continue
        yield f"{path}: key {key!r} is unknown, and ignored{suggestion(key.replace('-', '_'), known)}"
