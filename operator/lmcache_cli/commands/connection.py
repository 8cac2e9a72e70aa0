"""Connects a command to the API server that kubectl uses, and reports what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import yaml

from lmcache_operator.errors import (
    ApiError,
    FileError,
    NoAnswerError,
    NotFoundError,
    OperatorError,
    RefusedError,
)
from lmcache_operator.kube.refusals import with_field
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER, NAMESPACE
from lmcache_store.common.text import plain

if TYPE_CHECKING:  # the client takes half a second to import, which completion and --help need not spend
    from lmcache_operator.kube.client import KubeApi

_FIRST_SECONDS = 4.0
"""Time for the first answer of the API server, which is small."""
_CLOSE_SECONDS = 1.0
"""Time for pending requests to end after they were cancelled. A port-forward waits for the other side."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
EXIT_FOUND, EXIT_ERROR = 1, 2
_EXIT_INTERRUPTED = 130
"""Exit statuses: a command found a problem, or could not do its work. 0: all is well."""


_T = TypeVar("_T")


class ApiConnection(NamedTuple):
    """The API server, and the namespace that the user means."""

    api: KubeApi
    namespace: str
    context: str = ""
    """Context of the kubeconfig; empty in a pod."""
    options: Mapping[str, str] = {}
    """Options of kubectl with which the user chose the API server, for commands that the user can paste."""

    @property
    def flags(self) -> str:
        """The options as words of a shell, each after a space."""
        return _flags(self.options)

    async def cluster(self, name: str | None) -> Object:
        """Read an LMCacheCluster; None: the only one of the namespace. Raises NotFoundError, ApiError."""
        if name is not None:
            resource = await _soon(self.api.get(CLUSTER, self.namespace, name))
            if resource is None:
                raise await self._lacks(no_cluster(name, self.namespace))
            return with_field("metadata", resource)
        clusters = await self.clusters()
        if len(clusters) == 1:
            return clusters[0]
        names = ", ".join(sorted(cluster["metadata"]["name"] for cluster in clusters))
        raise NotFoundError(f"name one of the LMCacheClusters of namespace {self.namespace}: {names}")

    async def named_or_all(self, name: str | None) -> list[Object]:
        """Read an LMCacheCluster; None: all of the namespace. Raises NotFoundError, ApiError."""
        return await self.clusters() if name is None else [await self.cluster(name)]

    async def clusters(self) -> list[Object]:
        """Read all LMCacheClusters of the namespace. Raises NotFoundError if it has none, or ApiError."""
        try:
            clusters = await _soon(self.api.find(CLUSTER, self.namespace))
        except RefusedError as error:
            raise await self._lacks(error) from error
        if not clusters:
            text = f"namespace {self.namespace} has no LMCacheCluster"
            raise await self._lacks(NotFoundError(f"{text}: `kubectl get lmcacheclusters -A` lists all"))
        return clusters

    async def _lacks(self, error: OperatorError) -> OperatorError:
        """Return the error, or another one if not even the namespace or the kind of object exists."""
        with contextlib.suppress(ApiError):  # the user may have no right to read namespaces
            if not await _soon(self.api.serves(CLUSTER)):
                text = "LMCache Cluster is not installed in this Kubernetes cluster"
                return NotFoundError(f"{text}: `kubectl lmcache doctor{self.flags}` says what to do")
            if await _soon(self.api.get(NAMESPACE, "", self.namespace)) is None:
                text = f"there is no namespace {self.namespace}: `kubectl get namespaces` lists all"
                return NotFoundError(text)
        return error

    def located(self, error: OperatorError) -> OperatorError:
        """Return an error of a call with the context and the API server, which may be the wrong ones."""
        server = f"context {self.context} ({self.api.server})" if self.context else self.api.server
        if isinstance(error, NoAnswerError):
            chosen = {**self.options, "context": self.context} if self.context else self.options
            about = f"Check that this machine reaches it: kubectl{_flags(chosen)} cluster-info"
            return OperatorError(f"{server}: {error.message}. {about}")
        return OperatorError(f"{server}: {error}")


def _flags(options: Mapping[str, str]) -> str:
    return "".join(f" --{name}={shlex.quote(value)}" for name, value in options.items())


async def api_offset(api: KubeApi, seconds: float = _FIRST_SECONDS) -> float | None:
    """Return the clock of the API server minus the clock of the user, in seconds; None: unknown."""
    began = time.time()
    text = await api.date(seconds=seconds)
    middle = (began + time.time()) / 2
    try:
        # The header has whole seconds: on average the clock is half a second further.
        return parsedate_to_datetime(text).timestamp() + 0.5 - middle
    except (ValueError, TypeError):
        return None


def no_cluster(name: str, namespace: str) -> NotFoundError:
    """Return the error for the name of a cluster that does not exist."""
    text = f"there is no LMCacheCluster {name} in namespace {namespace}"
    return NotFoundError(f"{text}: `kubectl get lmcacheclusters -A` lists all")


async def _soon(answer: Awaitable[_T]) -> _T:
    """Return an answer of the API server. Raises NoAnswerError if it takes long."""
    try:
        return await asyncio.wait_for(answer, _FIRST_SECONDS)
    except TimeoutError as error:
        raise NoAnswerError("the API server", f"no answer within {_FIRST_SECONDS:g} s") from error


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
            try:
                return await command(connection)
            except (ApiError, NotFoundError) as error:
                raise connection.located(error) from error

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
    from lmcache_operator.kube.watch import context_of

    if arguments.kubeconfig:
        os.environ["KUBECONFIG"] = arguments.kubeconfig
    async with AsyncExitStack() as stack:
        try:
            context, namespace = context_of(arguments.context)
            api = await stack.enter_async_context(connect(context=arguments.context))
        except (ConfigException, OSError, yaml.YAMLError) as error:
            raise _kubeconfig_error(str(error)) from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # a value of a wrong type
            raise _kubeconfig_error("it is not a valid kubeconfig") from error
        chosen = {"kubeconfig": arguments.kubeconfig, "context": arguments.context}
        options = {name: value for name, value in chosen.items() if value}
        try:
            yield ApiConnection(api, arguments.namespace or namespace, context, options)
        finally:  # a request that outlives the connection would print a traceback
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.wait([asyncio.gather(*pending, return_exceptions=True)], timeout=_CLOSE_SECONDS)


def _kubeconfig_error(reason: str) -> FileError:
    files = os.environ.get("KUBECONFIG", "~/.kube/config")
    return FileError(f"{files}: {plain(reason)}. `kubectl config view` shows what kubectl reads of it")
