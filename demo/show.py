"""How the demo speaks: numbered steps with their time, the commands that it runs, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_COLOURED = sys.stdout.isatty()

_beside: list[Callable[[], str]] = []
"""Work in the background, each tells its progress in a line; an empty one when it is done."""


def show_beside(progress: Callable[[], str]) -> None:
    """From now on every step ends with the progress of what goes on beside it."""
    _beside.append(progress)


def _paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if _COLOURED else text


def title(text: str) -> None:
    print(f"\n{_paint(text, '1;36')}\n{'─' * len(text)}", flush=True)


def note(text: str) -> None:
    for line in text.splitlines():
        print(f"    {line}", flush=True)


def command(text: str) -> None:
    """A command as a user would type it."""
    print(f"    {_paint('$ ' + text, '2')}", flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """A step that may take a while: announced before, its time given after."""
    print(f"  {_paint('▸', '36')} {text} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"    {_paint('✓', '32')} {time.monotonic() - start:.1f} s", flush=True)
    for progress in _beside:
        if line := progress():
            print(f"    {_paint('beside: ' + line, '2')}", flush=True)
