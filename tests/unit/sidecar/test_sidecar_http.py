"""The HTTP server: it is read-only, and a bug in a page affects only that page."""

import asyncio
import contextlib
import http.client
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from http import HTTPStatus
from secrets import token_hex
from typing import Any, TypeVar

import pytest

from lmcache_sidecar.pages.http import HttpServer, Page, parse_head
from lmcache_store.common.timing import TIMING
from tests.harness.loops import in_a_loop

T = TypeVar("T")


async def _healthy_page(_: str) -> Page:
    return Page(HTTPStatus.OK, b"well\n")


async def _broken_page(_: str) -> Page:
    raise RuntimeError("a bug")


def _token_guard(path: str, token: str) -> Page | None:
    if path == "/healthz" or token == "abc":
        return None
    return Page(HTTPStatus.UNAUTHORIZED, f"{token!r}\n".encode())


def call_server(client: Callable[[int], T], **options: Any) -> T:
    """Call ``client`` in a thread with the port of a running server, and return its result."""

    async def run() -> T:
        pages = {"/healthz": _healthy_page, "/data": _healthy_page, "/broken": _broken_page}
        server = HttpServer(pages, **options)
        port = server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(client, port)
        finally:
            await server.stop()

    return asyncio.run(run())


def send_raw(*pieces: bytes, **options: Any) -> bytes:
    """The whole response to these pieces of a request."""

    def exchange(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    return call_server(exchange, **options)


def test_page_is_served_unchanged():
    answer = send_raw(b"GET /healthz?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; charset=utf-8\r\n" in answer
    assert answer.endswith(b"\r\n\r\nwell\n")


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
def test_other_paths_and_methods_are_refused(method, path, status):
    body = bytes(100_000) if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    assert send_raw(head + body).startswith(b"HTTP/1.1 %d " % status)


def test_head_returns_headers_without_body():
    answer = send_raw(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 5\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_request_may_arrive_in_pieces():
    assert send_raw(b"GET /hea", b"lthz HTT", b"P/1.0\r\n", b"\r", b"\n").endswith(b"well\n")


@pytest.mark.parametrize(
    ("raw_request", "status"),
    [
        (b"GET /healthz\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 a TLS hello\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.0\r\n\r\n", 400),
        (b"GET http://localhost/healthz HTTP/1.0\r\n\r\n", 400),
        (b"GET  /healthz HTTP/1.0\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n ", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHOST: localhost\r\n\r\n", 400),
        *(
            (b"GET /healthz HTTP/1.0\r\n" + field + b"\r\n\r\n", 400)
            for field in (b"X", b": x", b"X : x", b" X: x", b"X: 1\r\n 2", b"X: 1\n2", b"X: \0", b"X\xff: x")
        ),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000, 431),
    ],
)
def test_malformed_request_is_refused(raw_request, status):
    assert send_raw(raw_request).startswith(b"HTTP/1.1 %d " % status)


def test_slow_connection_is_closed(monkeypatch):
    monkeypatch.setattr(TIMING, "page_seconds", 0.05)
    assert send_raw() == send_raw(b"GET /healthz HTTP/1.1\r\n") == b""


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "::", "0.0.0.0", "localhost"])
@in_a_loop
async def test_server_listens_on_the_given_host_or_on_all(host):
    # Another process may have this port for the other IP version. It may answer something else, or nothing.
    token = token_hex().encode()

    async def page(_: str) -> Page:
        return Page(HTTPStatus.OK, token)

    server, answering = HttpServer({"/": page}), []
    port = server.start(host, 0)
    for address in ("127.0.0.1", "::1"):
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection(address, port)
                with contextlib.closing(writer):
                    writer.write(b"GET / HTTP/1.0\r\n\r\n")
                    if (await reader.read()).endswith(token):
                        answering.append(address)
    await server.stop()
    expected = {"": ["127.0.0.1", "::1"], "::1": ["::1"], "::": ["::1"]}
    assert answering == expected.get(host, ["127.0.0.1"])


def was_closed(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    return False


@in_a_loop
async def test_flood_of_connections_uses_a_bounded_number_of_descriptors():
    server, max_connections = HttpServer({}), 0
    port = server.start("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        # All connections exist before the loop accepts the first.
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(120)]
        async with asyncio.timeout(60):
            while sum(map(was_closed, clients)) < 120 - 32:
                await asyncio.sleep(0)
                max_connections = max(max_connections, len(server._connections))
        await server.stop()
    assert 32 < max_connections < 40


@in_a_loop
async def test_probes_are_answered_while_another_part_takes_each_free_descriptor():
    """gRPC does so when more clients wait than the process can have descriptors."""
    server, loop = HttpServer({"/healthz": _healthy_page}), asyncio.get_running_loop()
    port, is_over = server.start("127.0.0.1", 0), False
    clients = [socket.socket() for _ in range(3)]
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 10 + max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, former[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, former)

        def take() -> None:
            if not is_over:
                with contextlib.suppress(OSError):  # no descriptor is left
                    while True:
                        stack.callback(os.close, os.dup(0))
                loop.call_soon(take)

        take()
        async with asyncio.timeout(60):
            for client in map(stack.enter_context, clients):
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, b"GET /healthz HTTP/1.0\r\n\r\n")
                while not (received := await loop.sock_recv(client, 4096)).endswith(b"well\n"):
                    assert received
                client.close()
        is_over = True
    await server.stop()


@in_a_loop
async def test_port_in_use_raises_error():
    first, second = HttpServer({}), HttpServer({})
    port = first.start("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match=r"(?i)address already in use"):
            second.start("127.0.0.1", port)
    finally:
        await first.stop()
        await second.stop()


def test_head_is_parsed_as_rfc_9112_says():
    lines = b"GET /a?b?c HTTP/1.1", b"Host:x", b"X-Empty:", b"aCCept: \t a \t", b"Accept:b,c", b"X: \xe9:"
    request = parse_head(b"\r\n".join(lines))
    assert request is not None
    assert request[:3] == ("GET", "/a", "b?c")
    assert request.headers == {"host": "x", "x-empty": "", "accept": "a, b,c", "x": "\xe9:"}


@pytest.mark.parametrize("space", [b" ", b"\t", b"\xff", b"a"])
def test_long_field_takes_linear_time(space):
    began = time.process_time()
    assert parse_head(b"GET / HTTP/1.0\r\nX: " + space * 30_000 + b"\0") is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9464", "[::1]:9464", "10.0.0.7")),
        *(
            (host, False)
            for host in ("evil.example", "evil.example:9464", "localhost.evil.example", "[", "a:b:c")
        ),
    ],
)
def test_local_client_must_not_use_the_name_of_a_web_page(host, is_served, monkeypatch):
    """A web page can reach the port-forward of its visitor, under any name that it gives 127.0.0.1."""
    request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    assert send_raw(request).startswith(b"HTTP/1.1 200" if is_served else b"HTTP/1.1 421")
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("10.0.0.7", 1))
    assert send_raw(request).startswith(b"HTTP/1.1 200"), "the API server's proxy sends its own name"


def send_guarded(request: bytes) -> bytes:
    """The response of a server whose pages need the token "abc"."""
    return send_raw(request, guard=_token_guard)


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        (b"", b""),
        (b"Authorization: Bearer abd\r\n", b"abd"),
        (b"Authorization: Basic abc\r\n", b""),
        (b"Authorization: abc\r\n", b""),
        (b"Authorization: Bearer abc d\r\n", b""),
        (b"Authorization: Bearer abc\r\nauthorization: Bearer abc\r\n", b""),
        (b"X-Authorization: Bearer abc\r\n", b""),
        (b"\r\nAuthorization: Bearer abc\r\n", b""),
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_guarded_page_is_refused_without_its_token(headers, token, method, monkeypatch):
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("10.0.0.7", 1))
    answer = send_guarded(method + b" /data HTTP/1.1\r\nHost: 10.0.0.9\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"WWW-Authenticate: Bearer\r\n" in answer
    assert answer.endswith(b"\r\n\r\n" + (b"'%s'\n" % token if method == b"GET" else b""))


@pytest.mark.parametrize("header", [b"Authorization: Bearer abc", b"AUTHORIZATION:bearer  abc "])
def test_guarded_page_is_served_with_its_token(header, monkeypatch):
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("10.0.0.7", 1))
    assert send_guarded(b"GET /data HTTP/1.0\r\n" + header + b"\r\n\r\n").endswith(b"well\n")


@pytest.mark.parametrize(
    ("address", "status"),
    [
        *((address, b"401") for address in ("10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0")),
        *((address, b"200") for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1")),
    ],
)
def test_guarded_page_is_served_to_this_machine_without_a_token(address, status, monkeypatch):
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: (address, 1))
    answer = send_guarded(b"GET /data HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)


def test_client_that_resets_its_connection_is_no_bug(caplog):
    """Otherwise any pod could fill the log with stack traces."""

    def reset(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        wait_answered(port)

    def wait_answered(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"well\n"

    call_server(reset)
    assert not caplog.records
