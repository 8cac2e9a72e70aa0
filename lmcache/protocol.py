"""The lm:// protocol: its messages, and the stream that carries them.

A request is a ``ClientMetaMessage``; in a PUT request, the payload follows. A reply is a
``ServerMetaMessage`` and ``length`` bytes after it; PUT has no reply. Peers send requests one after another,
in native byte order, as LMCache 0.1-0.3 does. The protocol has neither a version nor a checksum; the values
have both (serde containers).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

from lmcache_store.common import sockets
from lmcache_store.tiers.header import Buffer

MAX_KEY_LENGTH = 150  # bytes of UTF-8
MAX_LENGTH = (1 << 31) - 1  # bytes of a payload

_CLIENT = struct.Struct(f"ii{MAX_KEY_LENGTH}s")
_SERVER = struct.Struct("ii")
_MIN_BYTES_PER_SECOND = 1 << 20  # a slower peer times out


class Constants:
    """Command and status codes of the protocol."""

    CLIENT_PUT = 1
    CLIENT_GET = 2
    CLIENT_EXIST = 3
    CLIENT_LIST = 4

    SERVER_SUCCESS = 200
    SERVER_FAIL = 400


@dataclass
class ClientMetaMessage:
    """Head of a request. ``length`` is the number of payload bytes of a PUT request, otherwise 0."""

    command: int
    key: str
    length: int

    def serialize(self) -> bytes:
        """Return the message as ``packlength()`` bytes, with the key padded with spaces.

        Raises ValueError if the length is out of range or the key is invalid. A key is invalid if it is too
        long, not UTF-8, ends with a space, or contains a newline (which separates the keys of a LIST reply).
        """
        key = self.key.encode()
        if len(key) > MAX_KEY_LENGTH or key.endswith(b" ") or b"\n" in key:
            raise ValueError(
                f"a key has at most {MAX_KEY_LENGTH} bytes, no newline, and no space at its end: {self.key!r}"
            )
        if not 0 <= self.length <= MAX_LENGTH:
            raise ValueError(f"a payload must have 0 to {MAX_LENGTH} bytes, not {self.length}")
        return _CLIENT.pack(self.command, self.length, key.ljust(MAX_KEY_LENGTH))

    @staticmethod
    def deserialize(raw: bytes) -> ClientMetaMessage:
        """Parse the bytes that ``serialize`` returns; accepts unknown commands.

        Raises ValueError for all other bytes.
        """
        command, length, key = _unpack(_CLIENT, raw)
        if b"\n" in key:
            raise ValueError("the key of the request contains a newline")
        return ClientMetaMessage(command, key.rstrip(b" ").decode(), length)

    @staticmethod
    def packlength() -> int:
        """Bytes of a serialised message."""
        return _CLIENT.size


@dataclass
class ServerMetaMessage:
    """Head of a reply, which ``length`` bytes follow."""

    code: int
    length: int

    def serialize(self) -> bytes:
        """Return the message as ``packlength()`` bytes."""
        return _SERVER.pack(self.code, self.length)

    @staticmethod
    def deserialize(raw: bytes) -> ServerMetaMessage:
        """Parse the bytes that ``serialize`` returns.

        Raises ValueError for a negative length or another size.
        """
        return ServerMetaMessage(*_unpack(_SERVER, raw))

    @staticmethod
    def packlength() -> int:
        """Bytes of a serialised message."""
        return _SERVER.size


def _unpack(layout: struct.Struct, raw: bytes) -> tuple[Any, ...]:
    if len(raw) != layout.size:
        raise ValueError(f"a message must have {layout.size} bytes, not {len(raw)}")
    fields = layout.unpack(raw)
    if fields[1] < 0:
        raise ValueError(f"the length in the message is negative: {fields[1]} bytes")
    return fields


class TimedStream(sockets.Stream):
    """One end of a connection.

    Each ``send`` and ``receive`` times out after ``timeout_seconds``, plus one second per MiB.
    """

    def send(self, *buffers: Buffer) -> None:
        """Send all buffers, without joining them."""
        self.start(sum(map(len, buffers)) / _MIN_BYTES_PER_SECOND)
        self.send_all(buffers)

    def receive(self, num_bytes: int) -> bytes:
        """Receive exactly ``num_bytes`` bytes."""
        self.start(num_bytes / _MIN_BYTES_PER_SECOND)
        return self.receive_all(num_bytes)

    def wait(self, seconds: float) -> bool:
        """Wait until data can be received.

        Returns False on time-out, or if the peer closed the connection.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3)) and bool(self._socket.recv(1, socket.MSG_PEEK))

    def is_quiet(self) -> bool:
        """Return whether the stream is open and has no data to receive.

        Between two requests, a stream that is not quiet is unusable.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def end_reading(self) -> None:
        """End the stream for ``wait`` and ``receive``, after the data received so far. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
