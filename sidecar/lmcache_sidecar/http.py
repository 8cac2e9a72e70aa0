"""The HTTP server. It runs on the loop of the engine's calls, so an answer proves that the loop is alive.

No request changes the sidecar's state.
Each connection serves one request, in limited time, and the number of connections is limited. Slow or broken
clients therefore cannot block the kubelet's probe. The server answers even when the process has no file
descriptor left.
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

from lmcache.common.timing import TIMING

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 32  # with one more, the oldest is closed
_MAX_HEAD_BYTES = 16 << 10
_BACKLOG = 128
_REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_ACCEPT = re.compile(rb"^accept:([^\r]*)", re.MULTILINE | re.IGNORECASE)
_AUTHORIZATION = re.compile(rb"^authorization:([^\r\n]*)", re.MULTILINE | re.IGNORECASE)
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_PAUSE_SECONDS = 0.05  # while no descriptor is left, and none can be closed


OPEN_METRICS = "application/openmetrics-text"


class Page(NamedTuple):
    """An answer's status, body and content type."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Guard = Callable[[str, str], Awaitable[Page | None]]
"""Decides from a path and a token whether another machine may read the page. Returns a refusal, or None."""


class HttpServer:
    """Serves ``pages`` by path, for GET and HEAD, between ``start`` and ``stop``.

    Each page gets the query of the URL, the text after "?". A page whose name is a path, a space and a media
    type replaces the page of this path for clients that accept the type. ``guard`` is asked for each page
    that another machine reads, with the request's bearer token, or an empty text.
    """

    def __init__(
        self,
        pages: Mapping[str, Callable[[str], Awaitable[Page]]],
        guard: Guard | None = None,
    ) -> None:
        self._pages = pages
        self._guard = guard
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._spare = -1  # a descriptor to free when no other is left

    def start(self, host: str, port: int) -> int:
        """Listen and return the port. An empty host means every address of IPv4 and IPv6. Raises OSError."""
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self._keep_spare()
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
        task.add_done_callback(self._note_end)
        # A cancelled connection counts until it ends. Close all that exceed the limit, not only one.
        self._close_oldest(len(self._connections) - _MAX_CONNECTIONS)

    def _free_descriptor(self, listener: socket.socket) -> None:
        """Free a descriptor for the waiting connection. Logs nothing, because this may happen often."""
        loop = asyncio.get_running_loop()
        if self._connections:
            self._close_oldest(1)
        elif self._spare >= 0:
            self._free_spare()
        else:
            loop.remove_reader(listener)
            loop.call_later(_PAUSE_SECONDS, self._watch, listener)

    def _close_oldest(self, number: int) -> None:
        for connection in itertools.islice(self._connections, max(0, number)):
            connection.cancel()

    def _note_end(self, connection: asyncio.Task[None]) -> None:
        del self._connections[connection]
        if self._listener is not None:
            self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):  # tried again when the next connection ends
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _free_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the one request of a connection, within a time limit."""
        with connection, contextlib.suppress(OSError, asyncio.TimeoutError):
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

    async def _answer(self, head: bytes, connection: socket.socket) -> bytes:
        """Return the whole answer to a request. ``head``: what was received, up to the end of the head."""
        is_head = head.startswith(b"HEAD ")
        status, body, content_type = await self._page(head, connection)
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

    async def _page(self, head: bytes, connection: socket.socket) -> Page:
        if b"\r\n\r\n" not in head:
            return _error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        request = _REQUEST_LINE.match(head)
        if request is None:
            return _error(HTTPStatus.BAD_REQUEST)
        method, target = request.groups()
        path, _, query = target.decode(errors="replace").partition("?")
        page = self._find(path, head)
        if page is None:
            return _error(HTTPStatus.NOT_FOUND)
        if method not in (b"GET", b"HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        # Outside of the try block: a client that resets its connection is no bug.
        guard = None if self._guard is None or _is_local(connection) else self._guard
        try:
            refusal = await guard(path, _token_of(head)) if guard else None
            return refusal or await page(query)
        except Exception:
            logger.exception("%s %s failed: this is a bug", method.decode(), path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _find(self, path: str, head: bytes) -> Callable[[str], Awaitable[Page]] | None:
        accepted = b",".join(_ACCEPT.findall(head)).decode(errors="replace").lower()
        for name in self._pages:
            other_path, _, media_type = name.partition(" ")
            if other_path == path and media_type and media_type in accepted:
                return self._pages[name]
        return self._pages.get(path) if " " not in path else None


def _is_local(connection: socket.socket) -> bool:
    """Return True if the client is on this machine, or in this pod. Raises OSError if it has disconnected."""
    address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _token_of(head: bytes) -> str:
    """Return the bearer token of a request; empty if it has none, or several."""
    values = _AUTHORIZATION.findall(head.partition(b"\r\n\r\n")[0])
    bearer = _BEARER.fullmatch(values[0].decode("ascii", "replace").strip()) if len(values) == 1 else None
    return bearer[1] if bearer else ""


def _listen(host: str, port: int) -> socket.socket:
    is_any = not host and socket.has_dualstack_ipv6()  # a pod may have addresses of one family only
    return socket.create_server(
        ("::" if is_any else host, port),
        family=socket.AF_INET6 if is_any or ":" in host else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=is_any,
    )


def _error(status: HTTPStatus) -> Page:
    return Page(status, f"{status.value} {status.phrase}\n".encode())
