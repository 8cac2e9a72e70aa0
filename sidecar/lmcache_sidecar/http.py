"""A small, strict HTTP/1.1 server: GET only, one request per connection, everything bounded.

It answers on the same loop as the engine's calls, so it reads little, waits briefly and knows its paths by
heart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 8192
_READ_SECONDS = 5.0
_WRITE_SECONDS = 10.0
_MAX_CONNECTIONS = 64


_FAILURES: dict[type[Exception], HTTPStatus] = {
    TimeoutError: HTTPStatus.REQUEST_TIMEOUT,
    asyncio.LimitOverrunError: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    asyncio.IncompleteReadError: HTTPStatus.BAD_REQUEST,
}
"""What reading a request may end in."""


class Response(NamedTuple):
    """What a page answers."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Awaitable[Response]]


class BadRequest(Exception):
    """The request can't be served; ``status`` says why."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def parse_head(head: bytes) -> str:
    """Path of a GET request, without its query. Raises BadRequest."""
    first, *rest = head.split(b"\r\n")
    match = re.fullmatch(rb"([^ ]+) (/[!->@-~]*)(\?[!-~]*)? HTTP/1\.[^ ]*", first)
    if match is None or not all(b":" in line for line in rest if line):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    if match[1] != b"GET":
        raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED)
    return match[2].decode()


class HttpServer:
    """Serves ``pages`` (path to coroutine function) from ``start`` to ``stop``."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, host: str, port: int) -> int:
        """Listen, and say on which port. Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=_MAX_HEAD_BYTES)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Take no more requests."""
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections > _MAX_CONNECTIONS:
                return
            writer.write(_encode(await self._respond(reader)))
            async with asyncio.timeout(_WRITE_SECONDS):
                await writer.drain()
        except (OSError, TimeoutError):
            writer.transport.abort()  # it went away, or does not read
        finally:
            self._num_connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _respond(self, reader: asyncio.StreamReader) -> Response:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            page = self._pages.get(parse_head(head))
            return await page() if page else _of_status(HTTPStatus.NOT_FOUND)
        except BadRequest as error:
            return _of_status(error.status)
        except tuple(_FAILURES) as error:
            return _of_status(_FAILURES[type(error)])
        except ConnectionError:
            raise
        except Exception:
            logger.exception("A page failed")
            return _of_status(HTTPStatus.INTERNAL_SERVER_ERROR)


def _of_status(status: HTTPStatus) -> Response:
    return Response(status, f"{status.value} {status.phrase}\n".encode())


def _encode(response: Response) -> bytes:
    allow = "Allow: GET\r\n" if response.status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"Connection: close\r\n{allow}\r\n"
    )
    return head.encode() + response.body
