"""``kubectl lmcache logs``: lines of a cluster's engines, sidecars and operator, by time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from lmcache.explain.text import Style, plain
from lmcache_operator.commands import connection, printing
from lmcache_operator.commands.gather import pods_of
from lmcache_operator.commands.log_lines import (
    COMPONENTS,
    EARLIEST,
    OPERATOR,
    Line,
    Reordering,
    Source,
    merged,
    operator_sources,
    sources_of,
)
from lmcache_operator.commands.log_streams import FORBIDDEN, History, Reader
from lmcache_operator.commands.times import parse_seconds
from lmcache_operator.errors import ApiError, FileError, NotFoundError, OperatorError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import POD
from lmcache_operator.specs.names import OPERATOR_LABELS

MAX_FOLLOWED = 500
"""Containers whose logs can be followed at once: each takes a connection."""
_WINDOW_SECONDS, _WINDOW_BYTES = 1.0, 16 << 20
_PRINT_SECONDS, _LIST_SECONDS = 0.1, 5.0
_COLORS = {"engine": "green", "sidecar": "cyan", "operator": "yellow"}
_TOO_MANY = "The cluster has {} containers, and only {} of them are followed: use --pod or --component."
_NO_PODS = "The pods of the cluster cannot be listed"
_NO_OPERATOR = (
    "The operator's lines are missing: give its namespace with --operator-namespace, or choose others with "
    "--component. Its pods cannot be listed in {}"
)
_FORBIDDEN = (
    'Your user may not read logs in namespace {0}. It needs the right "get pods/log". '
    "Example: kubectl -n {0} create role lmcache-logs --verb=get --resource=pods/log"
)
_ABOUT = """\
Show the lines of a cluster's engines and sidecars, and the operator's lines about the cluster, by time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 2 if no log can be read"
    printing.describe(parser, _ABOUT, status)
    connection.add_connection(parser)
    about = "only lines newer than this, such as 30s, 10m or 2h (default: 10m)"
    parser.add_argument("--since", type=_duration, default=600, metavar="TIME", help=about)
    about = "only the last N lines of each container (default: all)"
    parser.add_argument("--tail", type=_number, metavar="N", help=about)
    about = "go on with new lines, until you press Ctrl-C"
    parser.add_argument("-f", "--follow", action="store_true", help=about)
    about = "logs of the containers before their last restart"
    parser.add_argument("-p", "--previous", action="store_true", help=about)
    about = "engine, sidecar or operator; may be repeated (default: all)"
    parser.add_argument("--component", choices=COMPONENTS, action="append", metavar="NAME", help=about)
    about = "only this engine pod; may be repeated (default: all)"
    parser.add_argument("--pod", action="append", metavar="NAME", help=about)
    about = "namespace of the operator (default: all namespaces are searched)"
    parser.add_argument(
        "--operator-namespace", type=connection.namespace_name, metavar="NAME", default="", help=about
    )
    about = "json prints one object per line, for programs (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help=about)
    parser.set_defaults(command=_run)


def _duration(text: str) -> int:
    if not (seconds := parse_seconds(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 10m or 2h")
    return seconds


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    async def show(connected: connection.Connection) -> int:
        if arguments.follow and arguments.previous:
            raise FileError("--previous: a previous log does not grow: leave out --follow")
        cluster = await connected.cluster(arguments.name)
        logs = _Logs(connected, cluster["metadata"]["name"], arguments)
        status = await logs.show()
        if arguments.follow and not status:
            await logs.follow()
        return status

    return connection.run(arguments, show, max_connections=MAX_FOLLOWED + 64)


class _Logs:
    """The logs of one cluster, as the options say."""

    def __init__(self, connected: connection.Connection, name: str, arguments: argparse.Namespace) -> None:
        self._connected, self._name, self._arguments = connected, name, arguments
        self._components: Sequence[str] = arguments.component or COMPONENTS
        self._reader = Reader(connected.api, connected.namespace, name)
        self._style = Style(printing.is_colorful(sys.stdout))
        self._histories: list[History] = []
        self._problems: list[str] = []
        self._listed = set[str]()
        self._read_at = 0.0

    async def show(self) -> int:
        """Print the lines that exist. Returns the exit status."""
        sources = await self._sources()
        options = {"timestamps": "true", "sinceSeconds": str(self._arguments.since)}
        if self._arguments.tail:
            options["tailLines"] = str(self._arguments.tail)
        if self._arguments.previous:
            options["previous"] = "true"
        self._read_at = time.monotonic()
        self._histories = await self._reader.history(sources, options)
        for line in merged(history.recent.lines for history in self._histories):
            self._print(line)
        sys.stdout.flush()
        problems = [*self._problems, *problems_of(self._histories, self._connected.namespace)]
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr, flush=True)
        is_read = any(not history.problem or history.recent.lines for history in self._histories)
        return 0 if is_read or not problems else connection.EXIT_ERROR

    async def follow(self) -> None:
        """Print new lines for ever, also of pods that are new."""
        ordering = Reordering(_WINDOW_SECONDS, _WINDOW_BYTES)
        tasks: dict[Source, asyncio.Task[None]] = {}
        last = {history.source: history.last for history in self._histories}

        def add(line: Line) -> None:
            ordering.add(line, time.monotonic())

        def update(present: Sequence[Source]) -> None:
            for source in tasks.keys() - set(present):  # deleted pods; a new one may have the same name
                tasks.pop(source).cancel()
            for source in present[:MAX_FOLLOWED]:
                if source not in tasks:
                    reading = self._reader.follow(source, last.get(source, EARLIEST), self._read_at, add)
                    tasks[source] = asyncio.create_task(reading)

        if len(last) > MAX_FOLLOWED:
            print(_TOO_MANY.format(len(last), MAX_FOLLOWED), file=sys.stderr)
        update(list(last))
        watching = asyncio.create_task(self._watch(update))
        try:
            while True:
                for task in (watching, *tasks.values()):
                    if task.done():
                        task.result()  # raises the error of a task that failed
                for line in ordering.due(time.monotonic()):
                    self._print(line)
                sys.stdout.flush()
                await asyncio.sleep(_PRINT_SECONDS)
        finally:
            for task in (watching, *tasks.values()):
                task.cancel()

    async def _watch(self, update: Callable[[Sequence[Source]], None]) -> None:
        """Pass on the containers again and again. An error changes nothing until the next time."""
        while True:
            await asyncio.sleep(_LIST_SECONDS)
            with contextlib.suppress(OperatorError):
                update(await self._sources())

    async def _sources(self) -> list[Source]:
        """Find the containers. Raises ApiError or NotFoundError."""
        self._problems = []
        is_previous, sources = self._arguments.previous, list[Source]()
        if set(self._components) != {OPERATOR}:
            listed = await self._list(pods_of(self._connected, self._name), _NO_PODS)
            for pod in _chosen(listed, self._arguments.pod):
                sources += sources_of(pod, self._components, is_previous=is_previous)
        if OPERATOR in self._components and not (self._arguments.pod and not self._arguments.component):
            for pod in await self._operator_pods():
                sources += operator_sources(pod, is_previous=is_previous)
        return sources

    async def _operator_pods(self) -> list[Object]:
        selector = ",".join(f"{key}={value}" for key, value in OPERATOR_LABELS.items())
        namespace = self._arguments.operator_namespace
        where = f"namespace {namespace}" if namespace else "all namespaces"
        listing = self._connected.api.find(POD, namespace, labelSelector=selector)
        pods = await self._list(listing, _NO_OPERATOR.format(where))
        if not pods and not self._problems:
            self._problems.append("There is no pod of the operator, so its lines are missing.")
        return pods

    async def _list(self, listing: Awaitable[list[Object]], about: str) -> list[Object]:
        """Return listed pods. The first error is reported. Later ones are raised: followed logs continue."""
        try:
            pods = await listing
        except ApiError as error:
            if about in self._listed:
                raise
            self._problems.append(f"{about}: {error.message}")
            return []
        self._listed.add(about)
        return pods

    def _print(self, line: Line) -> None:
        if self._arguments.output == "json":
            print(json.dumps(line.document(), ensure_ascii=False))
            return
        stamp = line.document()["time"][:-4] + "Z"  # milliseconds
        source = self._style.paint(str(line.source), _COLORS[line.source.component])
        print(f"{self._style.paint(stamp, 'dim')} {source} {line.message}")


def _chosen(pods: Sequence[Object], chosen: Sequence[str] | None) -> list[Object]:
    """Return the pods that the user names, or all. Raises NotFoundError if one of them does not exist."""
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    if missing := sorted(set(chosen or ()) - by_name.keys()):
        raise NotFoundError(f"the cluster has no engine pod {missing[0]}: `kubectl lmcache status` lists all")
    return [by_name[name] for name in chosen] if chosen else list(pods)


def problems_of(histories: Iterable[History], namespace: str) -> list[str]:
    """Return a sentence for each log that is not complete, and one for a missing right."""
    problems, forbidden = [], set[str]()
    for history in histories:
        if history.problem == FORBIDDEN:
            forbidden.add(history.source.namespace)
        elif history.problem:
            problems.append(f"{history.source}: {plain(history.problem)}")
        if history.recent.num_dropped:
            number = f"{history.recent.num_dropped:,}"
            problems.append(
                f"{history.source}: the oldest {number} lines are left out: use --since, --tail or --pod"
            )
    return [*(_FORBIDDEN.format(each) for each in sorted(forbidden)), *printing.shortened(problems)]
