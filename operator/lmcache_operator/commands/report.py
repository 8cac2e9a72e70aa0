"""``kubectl lmcache report``: one page about a cluster's cache, to read in a browser or to send."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_operator import __version__
from lmcache_operator.commands import connection, printing
from lmcache_operator.commands.files import file_errors
from lmcache_operator.commands.gather import gather
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.history import History
from lmcache_operator.commands.reports.page import page
from lmcache_operator.commands.reports.prometheus import read_history
from lmcache_operator.commands.times import parse_seconds
from lmcache_operator.errors import ApiError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER, EVENT

_MIN_SECONDS, _MAX_SECONDS = 60, 366 * 86400
_ABOUT = """\
Write one HTML page about the cache of a cluster.

The page says what the cache saves, why prompts were computed, and what other sizes of the tiers are worth.
It lists decisions, conditions and pods.

The page needs no network. It contains no text and no tokens of prompts. Figures count from the start of each
sidecar. With --prometheus, the page also shows the past.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    printing.describe(
        parser, _ABOUT, "exit status: 0; 2 if the cluster cannot be read, or the file cannot be written"
    )
    connection.add_connection(parser)
    about = "file to write; - for standard output (default: %(default)s)"
    parser.add_argument("-o", "--output", type=_page_file, metavar="FILE", default="report.html", help=about)
    about = "address of the Prometheus that scrapes the sidecars, such as http://localhost:9090"
    parser.add_argument("--prometheus", type=_url, metavar="URL", help=about)
    about = "length of the past to show, such as 90m, 24h or 7d (default: 24h)"
    parser.add_argument("--since", type=_length, metavar="TIME", default="24h", help=about)
    parser.set_defaults(command=_run)


def _page_file(text: str) -> Path:
    """Return the file to write. In other commands this option names a format, such as json."""
    if text != "-" and Path(text).suffix not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"{text!r}: the report is HTML: name a file that ends in .html")
    return Path(text)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://localhost:9090")
    return text


def _length(text: str) -> tuple[str, float]:
    """Parse a time such as "24h". Returns it with its seconds."""
    seconds = parse_seconds(text)
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time from 1m to 366d, such as 90m, 24h or 7d")
    return text, seconds


def _run(arguments: argparse.Namespace) -> int:
    async def write(connected: connection.Connection) -> int:
        _write(arguments.output, page(await _facts(connected, arguments)))
        return 0

    return connection.run(arguments, write)


async def _facts(connected: connection.Connection, arguments: argparse.Namespace) -> Facts:
    """Read everything at the same time: the sidecars, Prometheus and Events."""
    cluster = await connected.cluster(arguments.name)
    name = cluster["metadata"]["name"]
    since, seconds = arguments.since

    async def history() -> History | None:
        if not arguments.prometheus:
            return None
        return await read_history(arguments.prometheus, connected.namespace, name, time.time(), seconds)

    gathered, past, (events, problems) = await asyncio.gather(
        gather(connected, name), history(), _events(connected, cluster)
    )
    return Facts(gathered, events, past, since, __version__, problems)


async def _events(connected: connection.Connection, cluster: Object) -> tuple[list[Object], list[str]]:
    """Return the Events about a cluster, and what kept them from being read."""
    uid = cluster["metadata"]["uid"]
    selector = f"involvedObject.kind={CLUSTER.kind},involvedObject.uid={uid}"
    try:
        return await connected.api.find(EVENT, connected.namespace, fieldSelector=selector), []
    except ApiError as error:
        return [], [f"The Events cannot be listed: {error.message}"]


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        return
    with file_errors(path):
        path.write_text(text, encoding="utf-8")
    print(f"Wrote {path}. Open it in a browser: {path.resolve().as_uri()}")
