"""The HTTP server: read-only, and a bug in a page is that page's only."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import Callable
from http import HTTPStatus
from secrets import token_hex
from typing import TypeVar

import pytest
from lmcache_sidecar.http import HttpServer, Page

T = TypeVar("T")


async def _well(_: str) -> Page:
    return Page(HTTPStatus.OK, b"well\n")


async def _broken(_: str) -> Page:
    raise RuntimeError("a bug")


def served(client: Callable[[int], T]) -> T:
    """What ``client`` returns, which is called in a thread with the port of a server."""

    async def run() -> T:
        server = HttpServer({"/healthz": _well, "/broken": _broken})
        port = server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(client, port)
        finally:
            await server.stop()

    return asyncio.run(run())


def ask(method: str, path: str) -> tuple[int, str | None, bytes]:
    """Status, content type and body of one answer."""

    def request(port: int) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body=b"x" * 100_000 if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read()

    return served(request)


def say(*pieces: bytes) -> bytes:
    """Everything that is answered to these bytes, sent one after the other."""

    def talk(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    return served(talk)


def test_a_page_is_served_as_it_is():
    assert ask("GET", "/healthz?x=1") == (200, "text/plain; charset=utf-8", b"well\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/healthz", 405),
        ("DELETE", "/healthz", 405),
        ("PUT", "/nowhere", 404),
        ("GET", "/../healthz", 404),
        ("GET", "/broken", 500),
    ],
)
def test_everything_else_is_refused(method, path, status):
    assert ask(method, path)[0] == status


def test_head_is_get_without_its_body():
    answer = say(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 5\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_a_request_may_come_in_pieces():
    assert say(b"GET /hea", b"lthz HTT", b"P/1.0\r\n", b"\r", b"\n").endswith(b"well\n")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET /healthz\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 a TLS hello\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000, 431),
    ],
)
def test_rubbish_is_refused(said, status):
    assert say(said).startswith(b"HTTP/1.1 %d " % status)


def test_a_connection_has_its_time(monkeypatch):
    monkeypatch.setattr("lmcache_sidecar.http._CONNECTION_SECONDS", 0.05)
    assert say() == say(b"GET /healthz HTTP/1.1\r\n") == b""


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "::", "0.0.0.0", "localhost"])
def test_it_listens_where_it_is_told_and_else_everywhere(host):
    word = token_hex().encode()  # somebody else may have the other protocol's port of that number

    async def page(_: str) -> Page:
        return Page(HTTPStatus.OK, word)

    async def run() -> list[str]:
        server, answering = HttpServer({"/": page}), []
        port = server.start(host, 0)
        for address in ("127.0.0.1", "::1"):
            with contextlib.suppress(ConnectionRefusedError):
                reader, writer = await asyncio.open_connection(address, port)
                writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                if (await reader.read()).endswith(word):
                    answering.append(address)
                writer.close()
        await server.stop()
        return answering

    expected = {"": ["127.0.0.1", "::1"], "::1": ["::1"], "::": ["::1"]}
    assert asyncio.run(run()) == expected.get(host, ["127.0.0.1"])


def was_closed(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    return False


def test_a_flood_of_connections_takes_a_bounded_number_of_descriptors():
    async def run() -> int:
        server, most = HttpServer({}), 0
        port = server.start("127.0.0.1", 0)
        with contextlib.ExitStack() as stack:
            # All of them are there before the loop takes the first.
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(120)]
            async with asyncio.timeout(60):
                while sum(map(was_closed, clients)) < 120 - 32:
                    await asyncio.sleep(0)
                    most = max(most, len(server._connections))
            await server.stop()
        return most

    assert 32 < asyncio.run(run()) < 40


def test_a_port_that_is_taken_is_an_error():
    async def run() -> None:
        first, second = HttpServer({}), HttpServer({})
        port = first.start("127.0.0.1", 0)
        try:
            with pytest.raises(OSError, match=r"(?i)address already in use"):
                second.start("127.0.0.1", port)
        finally:
            await first.stop()
            await second.stop()

    asyncio.run(run())
