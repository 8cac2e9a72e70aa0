"""``lmcache-sidecar top``: the present work of the sidecar at a URL, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lmcache.common import top
from lmcache.common.options import describe
from lmcache.explain.traffic import Answer
from lmcache_sidecar.explain.asking import ExplainError, add_url, ask

T = TypeVar("T")

_MAX_SECONDS = 2.0
"""Time for one answer."""
_ABOUT = """\
Show what a sidecar does at present: requests, prompt tokens by where they came from, and traffic by tier.
"""
_EXIT = f"""\
{top.KEYS}

exit status: 0; 1 if the sidecar does not answer

example: lmcache-sidecar top --url http://127.0.0.1:9464
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    describe(parser, _ABOUT, _EXIT)
    add_url(parser)
    top.add_arguments(parser)
    about = "json is for programs, and prints once (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    seconds = min(_MAX_SECONDS, arguments.interval)

    async def read() -> top.Reading:
        name = arguments.url.rstrip("/").rpartition("//")[2]
        try:
            asking = _in_thread(lambda: ask(arguments.url, "/stats"))
            report = await asyncio.wait_for(asking, seconds)
        except asyncio.TimeoutError:
            return top.Reading([Answer(name, name, "", problem=f"no answer within {seconds:g} s")])
        except ExplainError as error:
            return top.Reading([Answer(name, name, "", problem=str(error))])
        if not isinstance(report, dict):
            return top.Reading([Answer(name, name, "", problem="the server is no sidecar")])
        return top.Reading([Answer(name, name, "", report)])

    def dump(figures: dict[str, Any]) -> str:
        return json.dumps(figures, indent=2, ensure_ascii=False) + "\n"

    try:
        return asyncio.run(top.run(arguments.url, read, arguments, dump))
    except KeyboardInterrupt:
        return 130


async def _in_thread(work: Callable[[], T]) -> T:
    """Run work in a daemon thread: the process can end while a server does not answer."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_result(value)

    def call() -> None:
        try:
            ending = result.set_result, work()
        except Exception as error:
            ending = result.set_exception, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop is closed: the user has quit
            loop.call_soon_threadsafe(finish, *ending)

    threading.Thread(target=call, daemon=True).start()
    return await result
