"""``kubectl lmcache top``: the present work of all pods of one cluster or of a namespace, live."""

from __future__ import annotations

import argparse
import time

from lmcache.common import top
from lmcache.explain.traffic import Answer
from lmcache_operator.commands import connection, printing
from lmcache_operator.commands.gather import PodFigures, missing_rights, pods_of, read_stats
from lmcache_operator.errors import ApiError
from lmcache_operator.kube.pod_http import PodHttp
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import CLUSTER_LABEL, INJECT_LABEL

_MIN_SECONDS, _MAX_SECONDS = 1.5, 3.0
"""Time for all sidecars. Between these, it is the interval: a hung sidecar does not delay the others."""
_LIST_SECONDS = 10.0
"""Interval between two lists of the pods: a list of 1,000 pods is large."""
_ABOUT = """\
Show what the pods of a cluster do at present: requests, prompt tokens by where they came from, traffic by
tier, and queues. Without NAME: all clusters of the namespace.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = f"{top.KEYS}\n\nexit status: 0; 1 if no sidecar answers; 2 if the cluster cannot be read"
    printing.describe(parser, _ABOUT, status)
    about = "name of the LMCacheCluster (default: all of the namespace)"
    parser.add_argument("name", nargs="?", type=connection.object_name, metavar="NAME", help=about)
    connection.add_namespace(parser)
    top.add_arguments(parser)
    printing.add_output(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def show(connected: connection.Connection) -> int:
        await _check_name(connected, arguments.name)
        title = f"{connected.namespace}/{arguments.name}" if arguments.name else connected.namespace
        source = _Source(connected, arguments.name, arguments.interval)
        return await top.run(
            title, source.read, arguments, lambda figures: printing.document(figures, arguments.output)
        )

    return connection.run(arguments, show)


async def _check_name(connected: connection.Connection, name: str | None) -> None:
    """Raise NotFoundError unless the cluster exists, or the namespace has one."""
    if name is not None:
        await connected.cluster(name)
    else:
        await connected.clusters()


class _Source:
    """Asks the sidecars of pods, and lists the pods now and then."""

    def __init__(self, connected: connection.Connection, name: str | None, interval: float) -> None:
        self._connected, self._name = connected, name
        self._seconds = max(_MIN_SECONDS, min(_MAX_SECONDS, interval - 0.1))
        self._get = PodHttp(connected.api, seconds=self._seconds).get
        self._pods: list[Object] = []
        self._listed_at = float("-inf")

    async def read(self) -> top.Reading:
        """Ask all sidecars once."""
        try:
            await self._list()
        except ApiError as error:
            return top.Reading((), (f"the pods cannot be listed: {error.message}",))
        figures = await read_stats(self._get, self._pods, seconds=self._seconds + 0.1)
        problems = missing_rights(figures, self._connected.namespace)
        return top.Reading([_answer(each) for each in figures], problems)

    async def _list(self) -> None:
        if time.monotonic() - self._listed_at >= _LIST_SECONDS:
            self._pods = await pods_of(self._connected, self._name)
            self._listed_at = time.monotonic()


def _answer(figures: PodFigures) -> Answer:
    metadata = figures.pod["metadata"]
    labels = metadata.get("labels") or {}
    cluster = labels.get(INJECT_LABEL) or labels.get(CLUSTER_LABEL) or ""
    return Answer(metadata["uid"], figures.name, cluster, figures.stats, figures.problem)
