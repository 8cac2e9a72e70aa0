"""A connected socket with a deadline for each message.

Bytes move straight between the kernel and the caller's memory, without the GIL. The sockets are blocking, and
the kernel enforces the time-out (``SO_RCVTIMEO``, ``SO_SNDTIMEO``). With Python's own time-outs each read
would return after one packet; with ``MSG_WAITALL`` one call receives a whole message. The kernel's time-out
limits one call. The deadline limits all calls for a message, because a peer may send it byte by byte.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S", int, bytes)


class Stream:
    """A TCP or UNIX socket for one thread at a time.

    Methods raise OSError (TimeoutError, ConnectionError); the stream is unusable afterwards. Call ``start``
    before each message: the deadline counts from there.
    """

    def __init__(self, connection: socket.socket, timeout_seconds: float) -> None:
        self._socket = connection
        self._timeout = self._seconds = timeout_seconds
        self._deadline = 0.0
        self._set_timeout()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, more_seconds: float = 0.0) -> None:
        """Start the deadline of a message: the time-out plus ``more_seconds``."""
        self._seconds = self._timeout + more_seconds
        self._deadline = time.monotonic() + self._seconds

    def send_all(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send all buffers, without joining them."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            views = _rest(views, self._in_time(self._send, views))

    def receive_some(self, limit: int) -> bytes:
        """Receive at least one byte and at most ``limit`` bytes."""
        return self._in_time(self._socket.recv, limit)

    def receive_all(self, num_bytes: int) -> bytes:
        """Receive exactly ``num_bytes`` bytes. Memory for bytes not received yet is reserved but not used."""
        parts: list[bytes] = []
        while num_bytes:
            parts.append(self._in_time(self._socket.recv, num_bytes, socket.MSG_WAITALL))
            num_bytes -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, views: Sequence[memoryview]) -> None:
        """Receive until all ``views`` are full, in order."""
        unfilled = [view for view in views if len(view)]
        while unfilled:
            unfilled = _rest(unfilled, self._in_time(self._receive_into, unfilled))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _set_timeout(self) -> None:
        limit = struct.pack("ll", int(self._timeout), int(self._timeout % 1 * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _send(self, views: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(views)

    def _receive_into(self, views: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def _in_time(self, call: Callable[..., S], *arguments: object) -> S:
        try:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            result = call(*arguments)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError(f"no complete message within {round(self._seconds, 1)} s") from None
        if not result:
            raise ConnectionResetError("the peer closed the connection")
        return result


def _rest(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return ``views`` without their first ``num_bytes`` bytes."""
    views = list(views)
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views.pop(0))
    return [views[0][num_bytes:], *views[1:]] if num_bytes else views


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. An empty host means every address of IPv4 and IPv6. Raises OSError."""
    is_any = not host and socket.has_dualstack_ipv6()  # a pod may have addresses of one family only
    family = socket.AF_INET6 if is_any or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=is_any)
