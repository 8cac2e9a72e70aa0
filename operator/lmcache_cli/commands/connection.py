"""Connects a command to the API server that kubectl uses, and reports what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import yaml

from lmcache_operator.errors import FileError, NoAnswerError, NotFoundError, OperatorError
from lmcache_operator.kube.refusals import with_field
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER
from lmcache_store.common.text import plain

if TYPE_CHECKING:  # the client takes half a second to import, which completion and --help need not spend
    from lmcache_operator.kube.client import KubeApi

_FIRST_SECONDS = 4.0
"""Time for the first answer of the API server, which is small."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
EXIT_FOUND, EXIT_ERROR = 1, 2
_EXIT_INTERRUPTED = 130
"""Exit statuses: a command found a problem, or could not do its work. 0: all is well."""


_T = TypeVar("_T")


class ApiConnection(NamedTuple):
    """The API server, and the namespace that the user means."""

    api: KubeApi
    namespace: str

    async def cluster(self, name: str | None) -> Object:
        """Read an LMCacheCluster; None: the only one of the namespace. Raises NotFoundError, ApiError."""
        if name is not None:
            resource = await _soon(self.api.get(CLUSTER, self.namespace, name))
            if resource is None:
                raise no_cluster(name, self.namespace)
            return with_field("metadata", resource)
        clusters = await self.clusters()
        if len(clusters) == 1:
            return clusters[0]
        names = ", ".join(sorted(cluster["metadata"]["name"] for cluster in clusters))
        raise NotFoundError(f"name one of the LMCacheClusters of namespace {self.namespace}: {names}")

    async def clusters(self) -> list[Object]:
        """Read all LMCacheClusters of the namespace. Raises NotFoundError if it has none, or ApiError."""
        clusters = await _soon(self.api.find(CLUSTER, self.namespace))
        if not clusters:
            raise NotFoundError(
                f"namespace {self.namespace} has no LMCacheCluster: "
                "`kubectl get lmcacheclusters -A` lists all"
            )
        return clusters


def no_cluster(name: str, namespace: str) -> NotFoundError:
    """Return the error for the name of a cluster that does not exist."""
    text = f"there is no LMCacheCluster {name} in namespace {namespace}"
    return NotFoundError(f"{text}: `kubectl get lmcacheclusters -A` lists all")


async def _soon(answer: Awaitable[_T]) -> _T:
    """Return an answer of the API server. Raises NoAnswerError if it takes long."""
    try:
        return await asyncio.wait_for(answer, _FIRST_SECONDS)
    except TimeoutError as error:
        message = f"no answer within {_FIRST_SECONDS:g} s: check the connection with `kubectl version`"
        raise NoAnswerError("the API server", message) from error


def object_name(text: str) -> str:
    """Parse the name of an object. The API server would read any other text as a part of a path."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of an object")
    return text


def namespace_name(text: str) -> str:
    """Parse the name of a namespace; empty: the default."""
    return object_name(text) if text else text


def add_connection(parser: argparse.ArgumentParser, default: str = "the only one") -> None:
    """Add the options that find an LMCacheCluster. They are those of kubectl."""
    about = f"name of the LMCacheCluster (default: {default} of the namespace)"
    parser.add_argument("name", nargs="?", type=object_name, metavar="NAME", help=about)
    about = "namespace (default: that of the kubeconfig's present context)"
    parser.add_argument("-n", "--namespace", type=namespace_name, metavar="NAME", help=about)
    parser.add_argument(
        "--context", metavar="NAME", help="context of the kubeconfig (default: the present one)"
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: the same file as kubectl")


def run(arguments: argparse.Namespace, command: Callable[[ApiConnection], Awaitable[int]]) -> int:
    """Run a command with a connection. Prints errors, and returns the exit status."""

    async def connected_command() -> int:
        async with connected(arguments) as connection:
            return await command(connection)

    return reported(lambda: asyncio.run(connected_command()))


def reported(command: Callable[[], int]) -> int:
    """Run a command. Prints errors, and returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not UTF-8 lacks characters of bars
        sys.stdout.reconfigure(errors="replace")
    try:
        status = command()
        sys.stdout.flush()  # at exit, Python would print the error of a closed pipe
        return status
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@asynccontextmanager
async def connected(arguments: argparse.Namespace) -> AsyncIterator[ApiConnection]:
    """Connect as the options say. Raises FileError if the kubeconfig is unusable."""
    from kubernetes.aio.config import ConfigException

    from lmcache_operator.kube.client import connect
    from lmcache_operator.kube.watch import default_namespace

    if arguments.kubeconfig:
        os.environ["KUBECONFIG"] = arguments.kubeconfig
    async with AsyncExitStack() as stack:
        try:
            namespace = arguments.namespace or default_namespace(arguments.context)
            api = await stack.enter_async_context(connect(context=arguments.context))
        except (ConfigException, OSError, yaml.YAMLError) as error:
            raise _kubeconfig_error(str(error)) from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # a value of a wrong type
            raise _kubeconfig_error("it is not a valid kubeconfig") from error
        yield ApiConnection(api, namespace)


def _kubeconfig_error(reason: str) -> FileError:
    files = os.environ.get("KUBECONFIG", "~/.kube/config")
    if not any(Path(file).expanduser().exists() for file in files.split(os.pathsep)):
        return FileError(
            f"{files}: there is no such file. Name your kubeconfig with --kubeconfig or KUBECONFIG"
        )
    return FileError(f"{files}: {plain(reason)}. `kubectl config view` shows what kubectl reads of it")
