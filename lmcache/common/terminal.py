"""A full-screen view on a terminal, with keys, for commands that show live figures.

This module needs only the standard library. curses has its own event loop and its own handler of window
changes, which do not fit asyncio. rich draws, but reads no keys. Both would need as much code as this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO

_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[1~": "home", "\x1bOH": "home", "\x1b[F": "end",
    "\x1b[4~": "end", "\x1bOF": "end",
}  # fmt: skip
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_MAX_KEY_BYTES = 1024
_TICK_SECONDS = 1.0
"""Longest time between two drawings, so that the times on the screen stay true."""


class View(Protocol):
    """The content of the screen, and its answer to keys."""

    def draw(self, columns: int, lines: int) -> Sequence[str]:
        """Return at most ``lines`` lines of at most ``columns`` columns."""

    def press(self, key: str) -> bool:
        """Handle a key, such as "q", "up" or "page down". False: the user wants to quit."""


def is_colorful(stream: TextIO) -> bool:
    """Return whether to use colors: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_interactive() -> bool:
    """Return whether a full-screen view is possible: a person reads the output and has a keyboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def keys(typed: str) -> Iterator[str]:
    """Yield the names of the keys that a terminal sent. Unknown sequences are left out."""
    for match in _KEY.finditer(typed):
        key = match[0]
        if key in _KEYS:
            yield _KEYS[key]
        elif not key.startswith("\x1b"):
            yield key


async def show(view: View, refresh: Callable[[], Awaitable[float]]) -> None:
    """Show a view until the user quits, or a signal ends the process. Restores the terminal.

    Args:
        view: draws the screen. It is drawn again after each key, each refresh and each change of the window.
        refresh: reads new figures, and returns the seconds to wait before the next call. The screen answers
            keys while it runs.
    """
    screen = _Screen(view)
    with screen.active():
        parts = _repeat(refresh, screen.draw), _tick(screen.draw), screen.quit.wait()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
    for task in done:
        task.result()  # raises the error of a refresh, once the terminal is restored


async def _repeat(refresh: Callable[[], Awaitable[float]], draw: Callable[[], None]) -> None:
    while True:
        seconds = await refresh()
        draw()
        await asyncio.sleep(seconds)


async def _tick(draw: Callable[[], None]) -> None:
    while True:
        draw()
        await asyncio.sleep(_TICK_SECONDS)


class _Screen:
    """The terminal of this process while a view is shown."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._modes = termios.tcgetattr(self._input)
        self.quit = asyncio.Event()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use the terminal in the context, and restore it afterwards."""
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), self.quit.set)
        handlers |= {signal.SIGWINCH: self.draw, signal.SIGTSTP: self._suspend}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        loop.add_reader(self._input, self._read)
        self._enter()
        try:
            yield
        finally:
            self._leave()
            loop.remove_reader(self._input)
            for number in handlers:
                loop.remove_signal_handler(number)

    def draw(self) -> None:
        """Draw the whole screen in one write, so that it does not flicker."""
        with contextlib.suppress(OSError):  # the terminal is gone: SIGHUP ends the view
            columns, lines = os.get_terminal_size(self._output)
            drawn = list(self._view.draw(columns, lines))[:lines]
            text = f"{_END_OF_LINE}\r\n".join(drawn)
            self._write(f"{_HOME}{text}{_END_OF_LINE}{_END_OF_SCREEN}")

    def _read(self) -> None:
        try:
            typed = os.read(self._input, _MAX_KEY_BYTES)
        except OSError:
            typed = b""
        if not typed or not all(map(self._view.press, keys(typed.decode(errors="ignore")))):
            self.quit.set()
        self.draw()

    def _suspend(self) -> None:
        """Give the terminal back to the shell until it continues this process."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self.draw()

    def _enter(self) -> None:
        tty.setcbreak(self._input)
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):
            self._write(_LEAVE)
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)

    def _write(self, text: str) -> None:
        rest = text.encode(errors="replace")
        while rest:
            rest = rest[os.write(self._output, rest) :]
