"""``kubectl lmcache bench``: measures what the cache of a cluster saves."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from lmcache.bench import command
from lmcache.bench.client import BenchError, Target
from lmcache_operator.commands import connection, printing
from lmcache_operator.commands.gather import pods_of, sidecar_port
from lmcache_operator.errors import NotFoundError, OperatorError
from lmcache_operator.kube.forward import forwarded
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs.names import ENGINE_PORT

_MORE = """
Requests reach each ready pod by a port-forward, so measured times include the way through the API server.
"""
_MAX_PODS = 16
"""Limit of pods, each with two port-forwards."""
_EXIT = "exit status: 0; 1 if the results are not complete; 2 if the benchmark did not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    printing.describe(parser, command.ABOUT + _MORE, _EXIT)
    connection.add_connection(parser)
    about = "send requests to this address, such as that of an ingress, instead of to each pod"
    parser.add_argument("--engine-url", metavar="URL", help=about)
    about = "port of the engines (default: %(default)s)"
    parser.add_argument("--engine-port", type=int, metavar="PORT", default=ENGINE_PORT, help=about)
    command.add_options(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    def compare() -> int:
        with _errors():
            return command.compare(arguments.compare)

    async def bench(connected: connection.Connection) -> int:
        with _errors():
            return await _bench(connected, arguments)

    return connection.reported(compare) if arguments.compare else connection.run(arguments, bench)


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of the load generator to those that commands print."""
    try:
        yield
    except BenchError as error:
        raise OperatorError(str(error)) from error


async def _bench(connected: connection.Connection, arguments: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        targets = await _targets(connected, arguments, stack)
        # The load generator uses threads, and this event loop forwards their connections.
        runner = await asyncio.to_thread(command.runner_for, arguments, targets)
        measuring = asyncio.create_task(asyncio.to_thread(runner.measure))
        try:
            await asyncio.shield(measuring)
        except asyncio.CancelledError:  # Ctrl-C: await requests that were sent, and show what was measured
            runner.stop()
            await measuring
        return command.report(arguments, runner)


async def _targets(
    connected: connection.Connection, arguments: argparse.Namespace, stack: AsyncExitStack
) -> list[Target]:
    """Return the ready pods of a cluster, with ports that lead to them until the stack is closed."""
    cluster = await connected.cluster(arguments.name)
    name = cluster["metadata"]["name"]
    pods = [pod for pod in await pods_of(connected, name) if is_ready(pod)]
    if len(pods) > _MAX_PODS:
        print(f"Measuring {_MAX_PODS} of {len(pods)} ready pods.", file=sys.stderr)
        pods = pods[:_MAX_PODS]
    if not pods:
        raise NotFoundError(f"{name} has no ready pod: `kubectl lmcache status {name}` shows why")

    async def url(pod: str, port: int) -> str:
        local = await stack.enter_async_context(forwarded(connected.api, connected.namespace, pod, port))
        return f"http://127.0.0.1:{local}"

    targets = []
    for pod in pods:
        pod_name, port = pod["metadata"]["name"], sidecar_port(pod)
        engine_url = arguments.engine_url or await url(pod_name, arguments.engine_port)
        targets.append(Target(pod_name, engine_url, await url(pod_name, port) if port else ""))
    return targets
