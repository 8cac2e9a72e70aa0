"""Output of the demo: titles, steps with their time, notes and commands."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_COLOURED = sys.stdout.isatty()

_numbers = itertools.count(1)
"""Numbers of the parts that run."""

_background: list[Callable[[], str]] = []
"""Functions that return a line with the progress of background work; empty: the work is done."""


def show_background(progress: Callable[[], str]) -> None:
    """Print this progress of background work at the end of each further step."""
    _background.append(progress)


def _paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if _COLOURED else text


def title(text: str) -> None:
    print(f"\n{_paint(text, '1;36')}\n{'─' * len(text)}", flush=True)


def part(text: str) -> None:
    """Print the title of the next part."""
    title(f"{next(_numbers)}. {text}")


def note(text: str) -> None:
    for line in text.splitlines():
        print(f"    {line}", flush=True)


def command(text: str) -> None:
    """Print a command as a user would type it."""
    print(f"    {_paint('$ ' + text, '2')}", flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Print a step before it runs, and its time afterwards."""
    print(f"  {_paint('▸', '36')} {text} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"    {_paint('✓', '32')} {time.monotonic() - start:.1f} s", flush=True)
    for progress in _background:
        if line := progress():
            print(f"    {_paint('background: ' + line, '2')}", flush=True)
