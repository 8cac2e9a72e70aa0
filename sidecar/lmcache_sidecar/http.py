"""The read-only HTTP face, on the same loop as the engine's calls: an answer proves that the loop is alive.

Imported once the socket listens: the library takes as long to import as all the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from lmcache_sidecar.pages import Page

_SHUTDOWN_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 75.0  # longer than Prometheus' usual interval


class HttpServer:
    """Serves ``pages`` by their paths, GET and HEAD only, from ``start`` to ``stop``."""

    def __init__(self, pages: Mapping[str, Callable[[], Awaitable[Page]]]) -> None:
        app = web.Application()
        app.add_routes([web.get(path, _handler(page)) for path, page in pages.items()])
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=_KEEP_ALIVE_SECONDS, shutdown_timeout=_SHUTDOWN_SECONDS
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and say on which port. Raises OSError."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        chosen: int = self._runner.addresses[0][1]
        return chosen

    async def stop(self) -> None:
        """Take no more requests."""
        await self._runner.cleanup()


def _handler(page: Callable[[], Awaitable[Page]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        status, body, content_type = await page()
        return web.Response(status=status, body=body, headers={"Content-Type": content_type})

    return handle
