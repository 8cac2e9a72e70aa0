"""Text on a terminal: tables, colors, bars, and numbers for people. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_RESET = "\x1b[0m"
_BAR = "█"


class Style:
    """Colors of a terminal; without color, all texts stay as they are."""

    def __init__(self, has_colors: bool) -> None:
        self._has_colors = has_colors

    def paint(self, text: str, color: str) -> str:
        """Return the text in a color, or bold or dim."""
        return f"\x1b[{_CODES[color]}m{text}{_RESET}" if self._has_colors and text else text

    def title(self, text: str) -> str:
        """Return the title of a part."""
        return self.paint(text, "bold")

    def titled(self, lines: Sequence[str]) -> list[str]:
        """Return the lines of a table, the first one as its title."""
        return [self.title(lines[0]), *lines[1:]]


def plain(text: Any, max_characters: int = 512) -> str:
    """Return the beginning of a text as one printable line; empty for anything but a string."""
    cut_text = text[:max_characters] if isinstance(text, str) else ""
    return " ".join("".join(c if c.isprintable() else " " for c in cut_text).split())


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
    return sum(map(_columns, _ESCAPES.sub("", text)))


def _columns(character: str) -> int:
    if character.isascii():
        return 1
    return 0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "FW")


def bar(share: float, columns: int) -> str:
    """Return a bar for a share between 0 and 1."""
    return _BAR * round(columns * min(1.0, max(0.0, share)))


def rate(number: float) -> str:
    """Return a number per second with three digits: "0", "0.42", "12.3", "1,234"."""
    if not number:
        return "0"
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def gigabytes(num_bytes: float) -> str:
    """Return bytes as GB (10^9 bytes) with two decimals; a smaller number than 0.005 GB in MB."""
    return f"{num_bytes / 1e9:.2f}G" if num_bytes >= 5e6 else f"{num_bytes / 1e6:.2f}M" if num_bytes else "0"
