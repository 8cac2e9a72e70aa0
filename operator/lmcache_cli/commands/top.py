"""``kubectl lmcache top``: what all pods of a cluster, or of a namespace, do now."""

from __future__ import annotations

import argparse

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import PodFigures, missing_rights, pods_of, read_stats
from lmcache_operator.errors import ApiError
from lmcache_operator.kube.pod_http import PodHttp
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import CLUSTER_LABEL, INJECT_LABEL
from lmcache_store import top
from lmcache_store.explain.traffic import SidecarAnswer

_MIN_SECONDS, _MAX_SECONDS = 1.5, 3.0
"""Time for all sidecars. Between these, it is the interval: a hung sidecar does not delay the others."""
_ABOUT = """\
Show what the pods of a cluster do at present: requests, prompt tokens by where they came from, traffic by
tier, and queues. Without NAME: all clusters of the namespace.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 1 if no sidecar answers; 2 if the cluster cannot be read"
    printing.describe(parser, _ABOUT, status, "-n team", "qwen3-8b --once --sort tokens")
    connection.add_connection(parser, default="all")
    top.add_arguments(parser)
    printing.add_output(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def show(connected: connection.ApiConnection) -> int:
        await connected.named_or_all(arguments.name)
        seconds = max(_MIN_SECONDS, min(_MAX_SECONDS, arguments.interval - 0.1))
        get = PodHttp(connected.api, seconds=seconds).get
        pods, problems = list[Object](), list[str]()
        try:
            pods = await pods_of(connected, arguments.name)
        except ApiError as error:
            problems = [f"the pods cannot be listed: {error.message}"]

        async def read() -> top.TopReading:
            figures = await read_stats(get, pods, seconds=seconds + 0.1)
            missing = missing_rights(figures, connected.namespace)
            return top.TopReading([_answer(each) for each in figures], [*problems, *missing])

        return await top.run(read, arguments, lambda figures: printing.document(figures, arguments.output))

    return connection.run(arguments, show)


def _answer(figures: PodFigures) -> SidecarAnswer:
    metadata = figures.pod["metadata"]
    labels = metadata.get("labels") or {}
    cluster = labels.get(INJECT_LABEL) or labels.get(CLUSTER_LABEL) or ""
    return SidecarAnswer(metadata["uid"], figures.name, cluster, figures.stats, figures.problem)
