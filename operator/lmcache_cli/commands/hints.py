"""``kubectl lmcache hints``: the hints that retain KV in the pods of a cluster, or of a namespace."""

from __future__ import annotations

import argparse

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import (
    POD_SECONDS,
    PodFigures,
    late_pods,
    missing_rights,
    pods_of,
    problems_of,
    read_each,
    read_page,
)
from lmcache_operator.errors import NotFoundError
from lmcache_operator.kube.pod_http import PodHttp
from lmcache_store.explain import retained

_ABOUT = """\
Show the hints that retain KV in the memory tiers of pods now: how much, for how long, and what they saved so
far. Without NAME: all clusters of the namespace.
"""
_TOO_OLD = "its sidecar knows no hints: set spec.images.policy to Follow, which replaces the pods"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 2 if the cluster cannot be read, or no sidecar answers"
    printing.describe(parser, _ABOUT, status, "-n team qwen3-8b", "qwen3-8b -o json")
    connection.add_connection(parser, default="all")
    printing.add_output(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    return connection.run(arguments, lambda connected: _show(connected, arguments))


async def _show(connected: connection.ApiConnection, arguments: argparse.Namespace) -> int:
    """Print the hints of all pods. Raises NotFoundError if no sidecar answers, or ApiError."""
    await connected.named_or_all(arguments.name)
    pods = await pods_of(connected, arguments.name)
    get = PodHttp(connected.api, seconds=POD_SECONDS).get
    figures = [*map(_known, await read_each(pods, lambda pod: read_page(get, pod, "/hints")))]
    problems = problems_of(figures, missing_rights(figures, connected.namespace) + late_pods(figures))
    printing.print_problems(problems)
    pages = [(each.name, each.stats) for each in figures if not each.problem]
    if not pages:
        raise NotFoundError("no sidecar answered: check that the pods of the LMCacheCluster run")
    hints = [{"pod": pod, **hint} for pod, page in pages for hint in retained.documents(page)]
    content = {"version": 1, "namespace": connected.namespace, "hints": hints, "problems": problems}
    print(printing.answer(arguments.output, retained.lines(pages), content), end="")
    return 0


def _known(figures: PodFigures) -> PodFigures:
    """Return the answer of a pod. Sidecars of earlier versions have no such page."""
    return figures._replace(problem=_TOO_OLD) if figures.problem.startswith("HTTP 404") else figures
