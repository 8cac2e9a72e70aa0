"""Pictures of a terminal: a command and the lines that it prints, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

_FONT = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)
_FAMILY = "Fira Code, monospace"
_FORMAT = _FONT.sub("", CONSOLE_SVG_FORMAT).replace(_FAMILY, "ui-monospace, Menlo, Consolas, monospace")
"""The format of rich without its fonts, which readers would get from another host."""
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)


def drawn(command: str, lines: Iterable[str]) -> str:
    """Return a picture of a command and of the lines that it prints, with their colours."""
    text = Text.from_ansi("\n".join([f"\x1b[2m$\x1b[0m {command}", *lines]).rstrip())
    width = max(line.cell_len for line in text.split())
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width
    )
    console.print(text, no_wrap=True, overflow="ignore", crop=False)
    name = "-".join(command.split()[:3])
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, code_format=_FORMAT, unique_id=name)
    return _TRAILING.sub("", svg)
