"""The read-only HTTP server, on the same loop as the engine's calls: an answer proves that the loop is alive.

One request per connection, few connections, little time for each: whoever holds one open, or sends rubbish,
takes nothing from the kubelet's probe. It is answered even when the process has no descriptor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 32  # one more, and the oldest is closed
_CONNECTION_SECONDS = 10.0  # from its first byte to its last
_MAX_HEAD_BYTES = 16 << 10
_BACKLOG = 128
_REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_PAUSE_SECONDS = 0.05  # when there is no descriptor, and nothing of ours to close


class Page(NamedTuple):
    """What is answered."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class HttpServer:
    """Serves ``pages`` by their paths, each given the query (what follows the "?"), GET and HEAD only, from
    ``start`` to ``stop``."""

    def __init__(self, pages: Mapping[str, Callable[[str], Awaitable[Page]]]) -> None:
        self._pages = pages
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._spare = -1  # a descriptor for the connection that comes when no other is left

    def start(self, host: str, port: int) -> int:
        """Listen, and say on which port; no host: on every address of IPv4 and IPv6. Raises OSError."""
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self._keep_spare()
        self._watch(self._listener)
        chosen: int = self._listener.getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Take no more requests."""
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
        """Take one connection; the loop comes back while there are more."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # gone before its turn
            return
        except OSError:  # no descriptor is left
            self._make_room(listener)
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._connections[task] = None
        task.add_done_callback(self._note_end)
        # Not only one: those that end take a moment longer than the next one's coming.
        self._close_oldest(len(self._connections) - _MAX_CONNECTIONS)

    def _make_room(self, listener: socket.socket) -> None:
        """Let go of a descriptor of ours for whoever waits; nothing is logged, it may go on for long."""
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
            with contextlib.suppress(OSError):  # the next connection's end is the next chance
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _free_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    async def _serve(self, connection: socket.socket) -> None:
        """One request, one answer."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECTION_SECONDS):
                head = b""
                while b"\r\n\r\n" not in head and len(head) <= _MAX_HEAD_BYTES:
                    piece = await loop.sock_recv(connection, _MAX_HEAD_BYTES)
                    if not piece:
                        return
                    head += piece
                await loop.sock_sendall(connection, await self._answer(head))
                connection.shutdown(socket.SHUT_WR)
                # What is still on its way here would reset the connection, and the answer with it.
                while await loop.sock_recv(connection, _MAX_HEAD_BYTES):
                    pass

    # ---- requests ----

    async def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's head."""
        is_head = head.startswith(b"HEAD ")
        status, body, content_type = await self._page(head)
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            *(["Allow: GET, HEAD"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
            "Connection: close\r\n\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if is_head else body)

    async def _page(self, head: bytes) -> Page:
        if b"\r\n\r\n" not in head:
            return _error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        request = _REQUEST_LINE.match(head)
        if request is None:
            return _error(HTTPStatus.BAD_REQUEST)
        method, target = request.groups()
        path, _, query = target.decode(errors="replace").partition("?")
        page = self._pages.get(path)
        if page is None:
            return _error(HTTPStatus.NOT_FOUND)
        if method not in (b"GET", b"HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return await page(query)
        except Exception:
            logger.exception("a page has a bug")
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)


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
