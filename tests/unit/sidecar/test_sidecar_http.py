"""The HTTP server: strict about what it reads, bounded in what it takes."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

import pytest
from lmcache_sidecar import http
from lmcache_sidecar.http import BadRequest, HttpServer, Response, parse_head


@pytest.mark.parametrize(
    ("head", "path"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "/"),
        (b"GET /stats?since=1 HTTP/1.0\r\n\r\n", "/stats"),
    ],
)
def test_a_get_has_a_path(head, path):
    assert parse_head(head) == path


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /stats HTTP/1.1\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"HEAD /stats HTTP/1.1\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"GET /stats\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET  /stats HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET stats HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET http://h/stats HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /\xff HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / SMTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"\x16\x03\x01\x02\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"\r\n\r\n", HTTPStatus.BAD_REQUEST),
    ],
)
def test_everything_else_is_refused(head, status):
    with pytest.raises(BadRequest) as caught:
        parse_head(head)
    assert caught.value.status is status


async def _ok() -> Response:
    return Response(HTTPStatus.OK, b"well\n")


async def _broken() -> Response:
    raise RuntimeError("a bug")


def exchange(*requests: bytes, half_close: bool = False) -> list[bytes]:
    """Send each request on a connection of its own; the whole answers."""

    async def run() -> list[bytes]:
        server = HttpServer({"/healthz": _ok, "/broken": _broken})
        port = await server.start("127.0.0.1", 0)

        async def one(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            if half_close:
                writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer

        answers = await asyncio.gather(*map(one, requests))
        await server.stop()
        return answers

    return asyncio.run(run())


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def test_a_page_is_served_whole():
    (answer,) = exchange(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 5" in head
    assert body == b"well\n"


def test_statuses():
    answers = exchange(
        b"GET /nowhere HTTP/1.1\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\n\r\n",
        b"rubbish\r\n\r\n",
        b"GET /broken HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 10000 + b"\r\n\r\n",
    )
    assert list(map(status_of, answers)) == [404, 405, 400, 500, 431]
    assert b"Allow: GET" in answers[1]


def test_a_request_cut_short_is_bad():
    (answer,) = exchange(b"GET /healthz HTTP/1.1\r\n", half_close=True)
    assert status_of(answer) == 400


def test_a_slow_client_is_timed_out(monkeypatch):
    monkeypatch.setattr(http, "_READ_SECONDS", 0.05)
    (answer,) = exchange(b"GET /healthz HTTP/1.1\r\n")
    assert status_of(answer) == 408


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 0)
    with contextlib.suppress(ConnectionResetError):
        assert exchange(b"GET /healthz HTTP/1.1\r\n\r\n") == [b""]
