"""The command ``top``: what sidecars do now. Its caller says where their reports come from."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from lmcache_store.common.terminal import is_colorful
from lmcache_store.common.text import Style
from lmcache_store.explain import live
from lmcache_store.explain.traffic import SidecarAnswer, document, pod_figures

EXIT_NO_ANSWER = 1


class TopReading(NamedTuple):
    """The answers of all sidecars at one time."""

    answers: Sequence[SidecarAnswer]
    problems: Sequence[str] = ()
    """Sentences that say what could not be read, and what to do."""


Read = Callable[[], Awaitable[TopReading]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all kinds of ``top`` have."""
    about = f"column that orders the pods: {', '.join(live.SORTS)} (default: %(default)s)"
    parser.add_argument(
        "-s", "--sort", choices=live.SORTS, default=live.SORTS[0], metavar="COLUMN", help=about
    )
    about = "seconds between two readings, from 1 to 3600 (default: %(default)g)"
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help=about)
    parser.add_argument("--once", action="store_true", help="print one table and exit, which is the default")


def seconds(text: str) -> float:
    """Parse an interval in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return number


async def run(read: Read, arguments: argparse.Namespace, dump: Callable[[dict[str, Any]], str]) -> int:
    """Ask the sidecars twice, and print their work in between. Returns the exit status.

    Args:
        read: asks all sidecars. It must end in seconds, whatever does not answer.
        arguments: those of `add_arguments`, and ``output``.
        dump: formats the figures as ``arguments.output`` says, unless that is "table".
    """
    began, first = time.monotonic(), await read()
    await asyncio.sleep(max(0.0, began + arguments.interval - time.monotonic()))
    reading = await read()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    pods = pod_figures(first.answers, reading.answers)
    figures = document(pods, time=now, seconds=arguments.interval, problems=reading.problems)
    if arguments.output != "table":
        print(dump(figures), end="")
    else:
        style = Style(is_colorful(sys.stdout))
        print(*live.page(figures, style, sort=arguments.sort), sep="\n")
    return 0 if any(answer.report for answer in reading.answers) else EXIT_NO_ANSWER
