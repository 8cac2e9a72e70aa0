"""HTTP servers in the event loop of a test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(application: web.Application, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Serve an application. Yields its port."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(handle: Handler) -> AsyncIterator[str]:
    """Let one handler answer all requests to a server. Yields the server's URL."""
    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", handle)
    async with served(application) as port:
        yield f"http://127.0.0.1:{port}"
