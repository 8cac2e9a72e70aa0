"""The HTTP face: read-only, and a bug in a page is that page's only."""

from __future__ import annotations

import asyncio
import http.client
from http import HTTPStatus

import pytest
from lmcache_sidecar.http import HttpServer
from lmcache_sidecar.pages import Page


async def _well() -> Page:
    return Page(HTTPStatus.OK, b"well\n")


async def _broken() -> Page:
    raise RuntimeError("a bug")


def ask(method: str, path: str) -> tuple[int, str | None, bytes]:
    """Status, content type and body of one answer."""

    async def run() -> tuple[int, str | None, bytes]:
        server = HttpServer({"/healthz": _well, "/broken": _broken})
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(request, port)
        finally:
            await server.stop()

    def request(port: int) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read()

    return asyncio.run(run())


def test_a_page_is_served_as_it_is():
    assert ask("GET", "/healthz?x=1") == (200, "text/plain; charset=utf-8", b"well\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/healthz", 405),
        ("DELETE", "/healthz", 405),
        ("GET", "/broken", 500),
    ],
)
def test_everything_else_is_refused(method, path, status):
    assert ask(method, path)[0] == status


def test_a_port_that_is_taken_is_an_error():
    async def run() -> None:
        first, second = HttpServer({}), HttpServer({})
        port = await first.start("127.0.0.1", 0)
        try:
            with pytest.raises(OSError, match="address already in use"):
                await second.start("127.0.0.1", port)
        finally:
            await first.stop()
            await second.stop()

    asyncio.run(run())
