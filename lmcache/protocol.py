"""The lm:// protocol: messages, and the stream they go over.

A request is a ``ClientMetaMessage``, and for PUT the payload after it. A reply is a ``ServerMetaMessage`` and
``length`` bytes after it; PUT has none. One request after the other, in native byte order, as legacy peers
speak it. There is neither a version nor a checksum: values bring their own (serde containers).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

from lmcache import stream
from lmcache.tiers.header import Buffer

MAX_KEY_LENGTH = 150  # bytes of UTF-8
MAX_LENGTH = (1 << 31) - 1  # of a payload, in bytes

_CLIENT = struct.Struct(f"ii{MAX_KEY_LENGTH}s")
_SERVER = struct.Struct("ii")
_MIN_BYTES_PER_SECOND = 1 << 20  # a peer that is slower than this over a whole payload counts as gone


class Constants:
    """Numbers of the protocol."""

    CLIENT_PUT = 1
    CLIENT_GET = 2
    CLIENT_EXIST = 3
    CLIENT_LIST = 4

    SERVER_SUCCESS = 200
    SERVER_FAIL = 400


@dataclass
class ClientMetaMessage:
    """Head of a request; ``length`` is that of PUT's payload, else 0."""

    command: int
    key: str
    length: int

    def serialize(self) -> bytes:
        """Return ``packlength()`` bytes, the key padded with spaces.

        Raises ValueError for a key that is too long, would not come back (a space at its end, not UTF-8) or
        would look like two in a LIST (a newline), and for a length that is none.
        """
        key = self.key.encode()
        if len(key) > MAX_KEY_LENGTH or key.endswith(b" ") or b"\n" in key:
            raise ValueError(
                f"a key has at most {MAX_KEY_LENGTH} bytes, no newline, and no space at its end: {self.key!r}"
            )
        if not 0 <= self.length <= MAX_LENGTH:
            raise ValueError(f"a payload of {self.length} bytes can't be sent")
        return _CLIENT.pack(self.command, self.length, key.ljust(MAX_KEY_LENGTH))

    @staticmethod
    def deserialize(raw: bytes) -> ClientMetaMessage:
        """Read what ``serialize`` wrote; raises ValueError for anything else but an unknown command."""
        command, length, key = _unpack(_CLIENT, raw)
        if b"\n" in key:
            raise ValueError("a newline in a key")
        return ClientMetaMessage(command, key.rstrip(b" ").decode(), length)

    @staticmethod
    def packlength() -> int:
        """Bytes of a serialised message."""
        return _CLIENT.size


@dataclass
class ServerMetaMessage:
    """Head of a reply; ``length`` bytes follow."""

    code: int
    length: int

    def serialize(self) -> bytes:
        """Return ``packlength()`` bytes."""
        return _SERVER.pack(self.code, self.length)

    @staticmethod
    def deserialize(raw: bytes) -> ServerMetaMessage:
        """Read what ``serialize`` wrote; raises ValueError for a negative length or another size."""
        return ServerMetaMessage(*_unpack(_SERVER, raw))

    @staticmethod
    def packlength() -> int:
        """Bytes of a serialised message."""
        return _SERVER.size


def _unpack(layout: struct.Struct, raw: bytes) -> tuple[Any, ...]:
    if len(raw) != layout.size:
        raise ValueError(f"a message has {layout.size} bytes, not {len(raw)}")
    fields = layout.unpack(raw)
    if fields[1] < 0:
        raise ValueError(f"a length of {fields[1]} bytes")
    return fields


class Stream(stream.Stream):
    """One end of a connection.

    Each ``send`` and ``receive`` has ``timeout_seconds``, and a second more for each MiB.
    """

    def send(self, *buffers: Buffer) -> None:
        """Send all of the buffers, without joining them."""
        self.start(sum(map(len, buffers)) / _MIN_BYTES_PER_SECOND)
        self.send_all(buffers)

    def receive(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        self.start(num_bytes / _MIN_BYTES_PER_SECOND)
        return self.receive_all(num_bytes)

    def wait(self, seconds: float) -> bool:
        """Wait until something can be received. False: nothing came in time, or the peer closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3)) and bool(self._socket.recv(1, socket.MSG_PEEK))

    def is_quiet(self) -> bool:
        """Is the stream open, with nothing to be received? Between requests, anything else is the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def end_reading(self) -> None:
        """Let this end's ``wait`` and ``receive`` take what has come, and then see the end. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
