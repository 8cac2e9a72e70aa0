"""Reads /stats and /samples of sidecars over HTTP."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

import aiohttp
from yarl import URL

from lmcache_operator.specs.names import SIDECAR_PORT

MAX_STATS_BYTES = 256 << 10
"""Maximum size of /stats. A larger answer counts as none."""
_MAX_SAMPLES_BYTES = 3 << 20
_MAX_PARTS = 16
"""Maximum number of lists and objects in an answer of /samples, which bounds memory. A valid one has four."""


class StatsClient:
    """An HTTP client for the sidecars' /stats and /samples; an async context manager.

    Servers are not trusted, because they run in users' pods. The client follows no redirect, decompresses
    nothing and stores no cookies.
    """

    def __init__(self, port: int = SIDECAR_PORT, *, seconds: float = 1.0, key: bytes = b"") -> None:
        """``seconds``: timeout of one request. ``key``: the operator's secret key for tokens; empty: none."""
        self._port = port
        self._key = key
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

    def token(self, uid: str) -> str:
        """Token for the sidecars of the cluster with this uid, which no other cluster's accept; empty: none.

        Pods that users control receive this token, so it must not open the pages of other users.
        """
        return hmac.new(self._key, uid.encode(), "sha256").hexdigest() if self._key else ""

    async def read(self, address: str, uid: str) -> Any:
        """Read /stats of the sidecar at an IP address, as JSON; None if no valid answer arrives in time.

        ``uid`` is that of the sidecar's cluster.
        """
        return await self._get(address, uid, "/stats", {}, MAX_STATS_BYTES)

    async def samples(self, address: str, uid: str, question: Mapping[str, int]) -> Any:
        """Read /samples, as JSON; None if no valid answer arrives in time."""
        return await self._get(address, uid, "/samples", question, _MAX_SAMPLES_BYTES)

    async def _get(self, address: str, uid: str, path: str, query: Mapping[str, int], max_bytes: int) -> Any:
        headers = {"Authorization": f"Bearer {token}"} if (token := self.token(uid)) else {}
        try:
            url = URL.build(scheme="http", host=address, port=self._port, path=path, query=query)
            request = self._session.get(url, allow_redirects=False, timeout=self._timeout, headers=headers)
            async with request as answer:
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
