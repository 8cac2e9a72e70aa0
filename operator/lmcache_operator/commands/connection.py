"""Connects a command to the API server that kubectl uses, and reports what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import yaml

from lmcache_operator.errors import FileError, NotFoundError, OperatorError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER

if TYPE_CHECKING:  # the client takes half a second to import, which completion and --help need not spend
    from lmcache_operator.kube.client import KubeApi

MAX_CONNECTIONS = 64
"""Connections to the API server, unless a command needs more."""
EXIT_FOUND, EXIT_ERROR = 1, 2
_EXIT_INTERRUPTED = 130
"""Exit statuses: a command found a problem, or could not do its work. 0: all is well."""


class Connection(NamedTuple):
    """The API server, and the namespace that the user means."""

    api: KubeApi
    namespace: str

    async def cluster(self, name: str | None) -> Object:
        """Read an LMCacheCluster; None: the only one of the namespace. Raises NotFoundError, ApiError."""
        if name is not None:
            resource = await self.api.get(CLUSTER, self.namespace, name)
            if resource is None:
                raise NotFoundError(
                    f"there is no LMCacheCluster {name} in namespace {self.namespace}: "
                    "`kubectl get lmcacheclusters -A` lists all"
                )
            return resource
        clusters = await self.api.find(CLUSTER, self.namespace)
        if len(clusters) == 1:
            return clusters[0]
        names = ", ".join(sorted(cluster["metadata"]["name"] for cluster in clusters))
        raise NotFoundError(
            f"name one of the LMCacheClusters of namespace {self.namespace}: {names}"
            if clusters
            else f"namespace {self.namespace} has none: `kubectl get lmcacheclusters -A` lists all"
        )


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options that find an LMCacheCluster. They are those of kubectl."""
    about = "name of the LMCacheCluster (default: the only one of the namespace)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=about)
    add_namespace(parser)


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Add the options that find a namespace. They are those of kubectl."""
    about = "namespace (default: that of the kubeconfig's present context)"
    parser.add_argument("-n", "--namespace", metavar="NAME", help=about)
    parser.add_argument(
        "--context", metavar="NAME", help="context of the kubeconfig (default: the present one)"
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: the same file as kubectl")


def run(
    arguments: argparse.Namespace,
    command: Callable[[Connection], Awaitable[int]],
    *,
    max_connections: int = MAX_CONNECTIONS,
) -> int:
    """Run a command with a connection. Prints errors, and returns the exit status."""

    async def connected_command() -> int:
        async with connected(arguments, max_connections) as connection:
            return await command(connection)

    return reported(lambda: asyncio.run(connected_command()))


def reported(command: Callable[[], int]) -> int:
    """Run a command. Prints errors, and returns the exit status."""
    try:
        return command()
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@asynccontextmanager
async def connected(
    arguments: argparse.Namespace, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[Connection]:
    """Connect as the options say. Raises FileError if the kubeconfig is unusable."""
    from kubernetes.aio.config import ConfigException

    from lmcache_operator.kube.client import connect
    from lmcache_operator.kube.watch import default_namespace

    if arguments.kubeconfig:
        os.environ["KUBECONFIG"] = arguments.kubeconfig
    try:
        namespace = arguments.namespace or default_namespace(arguments.context)
        opened = connect(context=arguments.context, max_connections=max_connections)
        api = await opened.__aenter__()
    except (ConfigException, OSError, TypeError, yaml.YAMLError) as error:
        raise FileError(f"{os.environ.get('KUBECONFIG', '~/.kube/config')}: {error}") from error
    try:
        yield Connection(api, namespace)
    finally:
        await opened.__aexit__(None, None, None)
