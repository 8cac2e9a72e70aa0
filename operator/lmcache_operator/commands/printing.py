"""Prints what commands found: tables for people, JSON and YAML for programs.

Pure but for `is_colorful` and `terminal_width`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any, TextIO

import yaml

FORMATS = ("table", "json", "yaml")
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_BAR = "█"
_MIN_WIDTH, _MAX_WIDTH = 60, 120


def describe(parser: argparse.ArgumentParser, about: str, epilog: str) -> None:
    """Set the texts before and after the options in a command's help. Their line breaks stay."""
    parser.description, parser.epilog = about, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option for the format."""
    about = "format of the answer; json and yaml are for programs (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=FORMATS, default=FORMATS[0], help=about)


def is_colorful(stream: TextIO) -> bool:
    """Whether to use colors: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def document(value: Any, output: str) -> str:
    """Return plain data as JSON or YAML."""
    if output == "json":
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


class Style:
    """Colors of a terminal; without color, all texts stay as they are."""

    def __init__(self, has_colors: bool) -> None:
        self._has_colors = has_colors

    def paint(self, text: str, color: str) -> str:
        """Return the text in a color: bold, dim, red, green or yellow."""
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self._has_colors and text else text

    def title(self, text: str) -> str:
        """Return the title of a part."""
        return self.paint(text, "bold")


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Return lines with aligned columns. ``right``: numbers of the columns that are aligned to the right."""
    listed, at_right = [list(row) for row in rows], set(right)
    widths = [max(map(width, column)) for column in zip(*listed, strict=True)]

    def cell(number: int, text: str) -> str:
        padding = " " * (widths[number] - width(text))
        return padding + text if number in at_right else text + padding

    return ["  ".join(cell(number, text) for number, text in enumerate(row)).rstrip() for row in listed]


def width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return len(_ESCAPES.sub("", text))


def terminal_width() -> int:
    """Return the columns to use: those of the terminal, within limits at which text is readable."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size().columns))


def wrapped(text: str, columns: int, begin: str, *, indent: int = 2) -> list[str]:
    """Return a text as lines. ``begin``: start of the first line. ``indent``: spaces before the others."""
    return wrap(text, columns, initial_indent=begin, subsequent_indent=" " * indent, break_on_hyphens=False)


def bar(share: float, columns: int) -> str:
    """Return a bar for a share between 0 and 1."""
    return _BAR * round(columns * min(1.0, max(0.0, share)))


def duration(seconds: float) -> str:
    """Return a time for people, as kubectl does: "45s", "12m", "3h", "5d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
