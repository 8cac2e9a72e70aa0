"""Prints what commands found: tables for people, JSON and YAML for programs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

import yaml

from lmcache_store.common.options import describe
from lmcache_store.common.terminal import is_colorful
from lmcache_store.common.text import Style, bar, table

__all__ = [
    "Style", "add_output", "answer", "bar", "describe", "document", "is_colorful", "print_problems", "table",
    "terminal_width", "wrapped",
]  # fmt: skip

_FORMATS = ("table", "json", "yaml")
_MIN_WIDTH, _MAX_WIDTH = 60, 120
_MAX_PROBLEMS = 10


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option for the format."""
    about = "format of the answer; json and yaml are for programs (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=_FORMATS, default=_FORMATS[0], help=about)


def document(value: Any, output: str) -> str:
    """Return plain data as JSON or YAML."""
    if output == "json":
        return json.dumps(value, indent=2) + "\n"  # ASCII, because texts of pods are not trusted
    return str(yaml.safe_dump(value, sort_keys=False))


def answer(output: str, lines: Iterable[str], value: Any) -> str:
    """Return the answer of a command in its format: the lines for people, or plain data."""
    return "\n".join(lines) + "\n" if output == _FORMATS[0] else document(value, output)


def print_problems(problems: Sequence[str]) -> None:
    """Print what could not be read to standard error, and not to the answer."""
    more = len(problems) - _MAX_PROBLEMS
    for problem in [*problems[:_MAX_PROBLEMS], *([f"and {more:,} more problems"] if more > 0 else [])]:
        print(problem, file=sys.stderr)


def terminal_width() -> int:
    """Return the columns to use: those of the terminal, within limits at which text is readable."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size().columns))


def wrapped(text: str, columns: int, begin: str, *, indent: int = 2) -> list[str]:
    """Return a text as lines. ``begin``: start of the first line. ``indent``: spaces before the others."""
    return wrap(
        text, columns, initial_indent=begin, subsequent_indent=" " * indent, break_on_hyphens=False,
        break_long_words=False,  # addresses stay whole, because users paste them
    )  # fmt: skip
