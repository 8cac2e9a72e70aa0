"""The HTTP server. It runs on the loop of the engine's calls, so an answer proves that the loop is alive.

No request changes the sidecar's state.
Each connection serves one request, in limited time, and the number of connections is limited. Slow or broken
clients therefore cannot block the kubelet's probe. The server answers even when the process has no file
descriptor left. The head of a request follows RFC 9112, with targets in origin form only.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from lmcache_store.common.sockets import listen
from lmcache_store.common.timing import TIMING

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 32  # with one more, the oldest is closed
_MAX_HEAD_BYTES = 16 << 10
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rf"({_TOKEN}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rf"({_TOKEN}):([\t -~\x80-\xff]*)")
_HOST = re.compile(r"([^:]+|\[[^]]+\])(:[0-9]*)?")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_PAUSE_SECONDS = 0.05  # while no descriptor is left, and none can be closed


class Page(NamedTuple):
    """An answer's status, body and content type."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    query: str
    """Text after the first "?" of the target."""
    headers: Mapping[str, str]
    """Values by name in lower case. Repeated headers are joined by a comma, as RFC 9110 says."""


PageGuard = Callable[[str, str], Page | None]
"""Decides from a path and a token whether another machine may read the page. Returns a refusal, or None."""


class HttpServer:
    """Serves ``pages`` by path, for GET and HEAD, between ``start`` and ``stop``.

    Each page gets the query of the URL, the text after "?". ``guard`` is asked for each page that another
    machine reads, with the request's bearer token, or an empty text.
    """

    def __init__(
        self, pages: Mapping[str, Callable[[str], Awaitable[Page]]], guard: PageGuard | None = None
    ) -> None:
        self._pages = pages
        self._guard = guard
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._spare = -1  # a descriptor to free when no other is left

    def start(self, host: str, port: int) -> int:
        """Listen and return the port. An empty host means every address of IPv4 and IPv6. Raises OSError."""
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):  # then the first connection that ends leaves its descriptor
            self._spare = os.dup(self._listener.fileno())
        self._watch(self._listener)
        chosen: int = self._listener.getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._free_spare()

    # ---- connections ----

    def _watch(self, listener: socket.socket) -> None:
        if listener is self._listener:  # not stopped meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; the loop calls this again while more are waiting."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client closed it already
            return
        except OSError:  # no descriptor is left
            self._free_descriptor(listener)
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._connections[task] = None
        task.add_done_callback(lambda task: self._end(task, connection))
        # A cancelled connection counts until it ends. Close all that exceed the limit, not only one.
        self._close_oldest(len(self._connections) - _MAX_CONNECTIONS)

    def _free_descriptor(self, listener: socket.socket) -> None:
        """Free a descriptor for the waiting connection. Logs nothing, because this may happen often."""
        if self._connections:
            self._close_oldest(1)
        elif self._spare >= 0:
            self._free_spare()
            self._accept(listener)  # before another thread takes the descriptor
        else:
            asyncio.get_running_loop().remove_reader(listener)
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._watch, listener)

    def _close_oldest(self, number: int) -> None:
        for connection in itertools.islice(self._connections, max(0, number)):
            connection.cancel()

    def _end(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        """Close a connection. Its descriptor becomes the spare if there is none.

        If it were free in between, gRPC would take it, and no other would become free for the next probe.
        """
        del self._connections[task]
        if self._spare < 0 and self._listener is not None:
            self._spare = os.dup2(self._listener.fileno(), connection.detach(), inheritable=False)
        else:
            connection.close()

    def _free_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the one request of a connection, within a time limit."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._respond(connection), TIMING.page_seconds)

    async def _respond(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        head = b""
        while b"\r\n\r\n" not in head and len(head) <= _MAX_HEAD_BYTES:
            piece = await loop.sock_recv(connection, _MAX_HEAD_BYTES)
            if not piece:
                return
            head += piece
        await loop.sock_sendall(connection, await self._answer(head, connection))
        connection.shutdown(socket.SHUT_WR)
        # Unread input would reset the connection, and the client would lose the answer.
        while await loop.sock_recv(connection, _MAX_HEAD_BYTES):
            pass

    # ---- requests ----

    async def _answer(self, received: bytes, connection: socket.socket) -> bytes:
        """Return the whole answer to a request. ``received``: its head, and what follows."""
        head, end, _ = received.partition(b"\r\n\r\n")
        request = parse_head(head)
        is_head = request is not None and request.method == "HEAD"
        if end:
            status, body, content_type = await self._page(request, connection)
        else:
            status, body, content_type = _error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            *(["Allow: GET, HEAD"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
            *(["WWW-Authenticate: Bearer"] if status is HTTPStatus.UNAUTHORIZED else []),
            "Connection: close\r\n\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if is_head else body)

    async def _page(self, request: HttpRequest | None, connection: socket.socket) -> Page:
        if request is None:
            return _error(HTTPStatus.BAD_REQUEST)
        page = self._pages.get(request.path)
        if page is None:
            return _error(HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        # Outside of the try block: a client that resets its connection is no bug.
        is_local = _is_local(connection)
        if is_local and not _is_local_name(request.headers.get("host", "")):
            return _error(HTTPStatus.MISDIRECTED_REQUEST)
        try:
            if self._guard and not is_local:
                bearer = _BEARER.fullmatch(request.headers.get("authorization", ""))
                if refusal := self._guard(request.path, bearer[1] if bearer else ""):
                    return refusal
            return await page(request.query)
        except Exception:
            logger.exception("%s %s failed: this is a bug", request.method, request.path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)


def parse_head(head: bytes) -> HttpRequest | None:
    """Return the request with this head, which ends before the empty line. None: it is malformed."""
    first, *lines = head.decode("latin-1").split("\r\n")
    line, fields = _REQUEST_LINE.fullmatch(first), [_FIELD.fullmatch(each) for each in lines]
    headers: dict[str, str] = {}
    for field in fields:
        if field is None:
            return None
        name, value = field[1].lower(), field[2].strip(" \t")
        if name == "host" and name in headers:
            return None
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if line is None or (line[3] == "1" and "host" not in headers):
        return None
    path, _, query = line[2].partition("?")
    return HttpRequest(line[1], path, query, headers)


def _is_local(connection: socket.socket) -> bool:
    """Return True if the client is on this machine, or in this pod. Raises OSError if it has disconnected."""
    address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _is_local_name(host: str) -> bool:
    """Return True if a Host header names no server, or this machine by "localhost" or an IP address.

    Local clients need no token. A web page could otherwise read pages through the port-forward of its
    visitor, under a name of its own that it resolves to 127.0.0.1. The name is the page's, so the check finds
    it. Other clients may send any name: the API server's proxy sends its own.
    """
    match = _HOST.fullmatch(host)
    name = match[1].lower() if match else host
    try:
        return name in ("", "localhost") or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _error(status: HTTPStatus) -> Page:
    return Page(status, f"{status.value} {status.phrase}\n".encode())
