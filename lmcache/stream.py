"""A connected socket, with a deadline for each message.

Bytes go straight between the kernel and the caller's memory, and the GIL is free meanwhile. Sockets are
blocking ones whose time-out the kernel keeps (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): with Python's own time-outs
each read would return after one packet, with ``MSG_WAITALL`` one call takes a whole message. The kernel
bounds one wait and the deadline bounds them all, since a peer may send byte by byte.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S", int, bytes)


class Stream:
    """A TCP or UNIX socket, used by one thread at a time.

    Raises OSError (TimeoutError, ConnectionError), and is of no use then. Time runs from ``start``.
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
        """Give all that follows the time-out, and so many seconds more."""
        self._seconds = self._timeout + more_seconds
        self._deadline = time.monotonic() + self._seconds

    def send_all(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send all of the buffers, without joining them."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            views = _rest(views, self._in_time(self._send, views))

    def receive_some(self, limit: int) -> bytes:
        """Return what has come, at most ``limit`` bytes."""
        return self._in_time(self._socket.recv, limit)

    def receive_all(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes; memory beyond what came is only reserved, not taken."""
        parts: list[bytes] = []
        while num_bytes:
            parts.append(self._in_time(self._socket.recv, num_bytes, socket.MSG_WAITALL))
            num_bytes -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, views: Sequence[memoryview]) -> None:
        """Receive into all of these, in order."""
        left = [view for view in views if len(view)]
        while left:
            left = _rest(left, self._in_time(self._receive_into, left))

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
            done = call(*arguments)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError(f"no complete message within {round(self._seconds, 1)} s") from None
        if not done:
            raise ConnectionResetError("the peer closed the connection")
        return done


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of these when so many bytes of them are done."""
    views = list(views)
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    return [views[0][done:], *views[1:]] if done else views
