"""Runs ``top`` for sidecars, wherever their reports come from: live on a terminal, or once as a table."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from lmcache.common import terminal
from lmcache.explain import live
from lmcache.explain.text import Style
from lmcache.explain.traffic import Answer, Traffic, document

_FIRST_SECONDS = 1.0
"""Longest interval before the second reading of a live view, which shows the first rates."""
EXIT_NO_ANSWER = 1
KEYS = "keys: q quit, p pause, s sort by the next column, arrows, PgUp and PgDn scroll"


class Reading(NamedTuple):
    """The answers of all sidecars at one time."""

    answers: Sequence[Answer]
    problems: Sequence[str] = ()
    """Sentences that say what could not be read, and what to do."""


Read = Callable[[], Awaitable[Reading]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all kinds of ``top`` have."""
    about = f"column that orders the pods: {', '.join(live.SORTS)} (default: %(default)s)"
    parser.add_argument(
        "-s", "--sort", choices=live.SORTS, default=live.SORTS[0], metavar="COLUMN", help=about
    )
    about = "seconds between two readings, from 1 to 3600 (default: %(default)g)"
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help=about)
    about = "read twice, print one table, and exit; this is the default without a terminal"
    parser.add_argument("--once", action="store_true", help=about)


def seconds(text: str) -> float:
    """Parse an interval in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return number


async def run(
    title: str, read: Read, arguments: argparse.Namespace, dump: Callable[[dict[str, Any]], str]
) -> int:
    """Show the work of sidecars until the user quits, or once. Returns the exit status.

    Args:
        title: what is shown, such as "namespace/name".
        read: asks all sidecars. It must end in seconds, whatever does not answer.
        arguments: those of `add_arguments`, and ``output``.
        dump: formats the figures as ``arguments.output`` says, unless that is "table".
    """
    if arguments.once or arguments.output != "table" or not terminal.is_interactive():
        return await _once(read, arguments, dump)
    style = Style(terminal.is_colorful(sys.stdout))
    view = live.Live(title, style, arguments.sort, arguments.interval)
    await terminal.show(view, _Refresh(view, read, arguments.interval).refresh)
    return 0


class _Refresh:
    """Reads new figures for a live view."""

    def __init__(self, view: live.Live, read: Read, seconds: float) -> None:
        self._view, self._read, self._seconds = view, read, seconds
        self._traffic = Traffic()
        self._read_at = time.monotonic()
        view.age = lambda: time.monotonic() - self._read_at

    async def refresh(self) -> float:
        """Read once, unless the view is paused. Returns the seconds until the next call."""
        if self._view.is_paused:
            return _FIRST_SECONDS
        began, is_first = time.monotonic(), self._view.figures is None
        reading = await self._read()
        pods = self._traffic.observe(reading.answers)
        if not self._view.is_paused:
            self._view.figures = _figures(pods, self._seconds, reading)
            self._read_at = time.monotonic()
        interval = min(_FIRST_SECONDS, self._seconds) if is_first else self._seconds
        return max(0.1, began + interval - time.monotonic())


async def _once(read: Read, arguments: argparse.Namespace, dump: Callable[[dict[str, Any]], str]) -> int:
    began, traffic = time.monotonic(), Traffic()
    traffic.observe((await read()).answers)
    await asyncio.sleep(max(0.0, began + arguments.interval - time.monotonic()))
    reading = await read()
    figures = _figures(traffic.observe(reading.answers), arguments.interval, reading)
    if arguments.output != "table":
        print(dump(figures), end="")
    else:
        style = Style(terminal.is_colorful(sys.stdout))
        print(*live.page(figures, style, sort=arguments.sort), sep="\n")
    return 0 if any(answer.report for answer in reading.answers) else EXIT_NO_ANSWER


def _figures(pods: Sequence[dict[str, Any]], seconds: float, reading: Reading) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return document(pods, time=now, seconds=seconds, problems=reading.problems)
