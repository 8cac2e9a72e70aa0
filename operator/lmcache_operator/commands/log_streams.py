"""Reads logs of containers through the API server: once, or as long as they grow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

import aiohttp

from lmcache_operator.commands.log_lines import EARLIEST, Line, Parser, Recent, Source, Splitter
from lmcache_operator.errors import ApiError, RefusedError

if TYPE_CHECKING:  # the client takes half a second to import
    from lmcache_operator.kube.client import KubeApi

_ALL_SECONDS = 4.5
"""Time for the logs of all containers. A command answers within five seconds."""
_MAX_AT_ONCE = 32
_MAX_BYTES = 64 << 20
"""Memory for the lines of all containers together."""
_MIN_BYTES = 32 << 10
_CONNECT_SECONDS = 10.0
_RETRY_SECONDS = 2.0
_MARGIN_SECONDS = 2
FORBIDDEN = "forbidden: get pods/log"


class History(NamedTuple):
    """Lines of one log, as far as it was read."""

    source: Source
    recent: Recent
    last: datetime
    """Time of the last line, also of lines that were not chosen; `EARLIEST`: there is none."""
    problem: str = ""
    """Why the log is not complete; empty: it is."""


class Reader:
    """Reads the logs of the containers of one cluster."""

    def __init__(self, api: KubeApi, namespace: str, cluster: str) -> None:
        self._api, self._namespace, self._cluster = api, namespace, cluster

    def _parser(self, source: Source) -> Parser:
        return Parser(source, self._namespace, self._cluster)

    async def history(self, sources: Sequence[Source], options: Mapping[str, str]) -> list[History]:
        """Read the logs as they are now, in seconds. ``options`` are those of the API server."""
        slots = asyncio.Semaphore(_MAX_AT_ONCE)
        max_bytes = max(_MIN_BYTES, _MAX_BYTES // max(1, len(sources)))
        parts = {source: (Recent(max_bytes), self._parser(source)) for source in sources}
        problems: dict[Source, str] = {}

        async def read(source: Source) -> None:
            recent, parser = parts[source]
            async with slots:
                try:
                    await self._read(source, options, lambda raw: _add(recent, parser.parse(raw)))
                    problems[source] = ""
                except (ApiError, aiohttp.ClientError, OSError) as error:
                    problems[source] = _reason(error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ALL_SECONDS):
                await asyncio.gather(*map(read, sources), return_exceptions=True)
        late_answer = f"not complete after {_ALL_SECONDS:g} s: use --since, --tail or --pod"
        return [
            History(source, recent, parser.last, problems.get(source, late_answer))
            for source, (recent, parser) in parts.items()
        ]

    async def follow(
        self, source: Source, after: datetime, since: float, add: Callable[[Line], None]
    ) -> None:
        """Pass on new lines until the container's pod is deleted, also after restarts of the container.

        Args:
            source: the container.
            after: time of the last line that is known; `EARLIEST`: none is.
            since: time.monotonic() of the last look at the log, which counts if no line is known.
            add: called with each line.
        """
        parser = self._parser(source)
        while True:
            options = {"follow": "true", "timestamps": "true"}
            if after > EARLIEST:
                options["sinceTime"] = after.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            else:
                options["sinceSeconds"] = str(int(time.monotonic() - since) + _MARGIN_SECONDS)

            def take(raw: bytes, known: datetime = after) -> None:
                if line := parser.parse(raw, after=known):
                    add(line)

            try:
                await self._read(source, options, take)
            except RefusedError as error:
                if "not found" in error.message:
                    return
            except (ApiError, aiohttp.ClientError, OSError):
                pass  # the connection broke: the next one continues after the last line
            after = max(after, parser.last)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _read(self, source: Source, options: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        query = urlencode({"container": source.container, **options})
        path = f"/api/v1/namespaces/{source.namespace}/pods/{source.pod}/log?{query}"
        splitter = Splitter()
        async with self._api.stream(path, seconds=_CONNECT_SECONDS) as content:
            async for data in content.iter_any():
                for raw in splitter.feed(data):
                    take(raw)
            if last := splitter.end():
                take(last)


def _add(recent: Recent, line: Line | None) -> None:
    if line:
        recent.add(line)


def _reason(error: Exception) -> str:
    if isinstance(error, ApiError):
        return FORBIDDEN if "forbidden" in error.message else error.message
    return str(error) or type(error).__name__
