"""Reads /stats and /samples of sidecars over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import aiohttp
from yarl import URL

from lmcache_operator.specs.names import SIDECAR_PORT

MAX_STATS_BYTES = 256 << 10
"""Maximum size of /stats. A larger answer counts as none."""
_MAX_SAMPLES_BYTES = 3 << 20
_MAX_PARTS = 16
"""Maximum number of lists and objects in an answer of /samples, which bounds memory. A valid one has four."""


_TOKEN = Path("/var/run/secrets/lmcache.io/token")
"""The operator's token for sidecars, as the chart mounts it. The API server refuses its audience."""


class StatsClient:
    """An HTTP client for the sidecars' /stats and /samples; an async context manager.

    Servers are not trusted, because they run in users' pods. The client follows no redirect, decompresses
    nothing and stores no cookies.
    """

    def __init__(self, port: int = SIDECAR_PORT, *, seconds: float = 1.0, token: Path = _TOKEN) -> None:
        """``seconds``: timeout of one request. ``token``: file with the token to send, if it exists."""
        self._port = port
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # callers limit concurrency
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def read(self, address: str) -> Any:
        """Read /stats of the sidecar at an IP address, as JSON; None if no valid answer arrives in time."""
        return await self._get(address, "/stats", {}, MAX_STATS_BYTES, None)

    async def samples(self, address: str, question: Mapping[str, int]) -> Any:
        """Read /samples; {} if the sidecar does not serve it, None if no valid answer arrives in time."""
        return await self._get(address, "/samples", question, _MAX_SAMPLES_BYTES, {})

    def _headers(self) -> dict[str, str]:
        """Read the token at each request, because the kubelet renews it."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return {"Authorization": f"Bearer {self._token.read_text(encoding='ascii').strip()}"}
        return {}

    async def _get(
        self, address: str, path: str, query: Mapping[str, int], max_bytes: int, unknown: Any
    ) -> Any:
        try:
            url = URL.build(scheme="http", host=address, port=self._port, path=path, query=query)
            request = self._session.get(
                url, allow_redirects=False, timeout=self._timeout, headers=self._headers()
            )
            async with request as answer:
                if answer.status == HTTPStatus.NOT_FOUND:
                    return unknown
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        return None
                if max_bytes > MAX_STATS_BYTES and body.count(b"[") + body.count(b"{") > _MAX_PARTS:
                    return None
                return json.loads(bytes(body)) if answer.status == HTTPStatus.OK else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError):
            return None
