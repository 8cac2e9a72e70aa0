"""A connection that speaks as much of the Redis protocol (RESP2) as the remote tier needs.

Values go straight between the socket and the caller's memory, by calls that release the GIL. Every wait has a
deadline, kept by the kernel (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): Python's own socket time-outs would make each
read return after one packet.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from lmcache.tiers.base import TierError
from lmcache.tiers.header import Buffer

T = TypeVar("T")

_MAX_LINE_BYTES = 4096
_DEFAULT_PORT = 6379


class ServerError(TierError):
    """An error reply; ``code`` is its first word (``LOADING``, ``OOM``, ...)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


@dataclass(frozen=True)
class Address:
    """Where a server is, and who we are there."""

    host: str
    port: int
    path: str  # of a UNIX socket; then host and port mean nothing
    database: int
    username: str = field(repr=False)
    password: str = field(repr=False)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read ``redis://[[user]:password@]host[:port][/db]`` or ``unix://[[user]:password@]/path[?db=0]``.

        Raises ValueError, saying what is wrong; the message never holds the password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORT
        except ValueError:
            raise ValueError("remote URL: the host or port can't be read") from None
        username, password = unquote(parts.username or ""), unquote(parts.password or "")
        if parts.scheme == "unix":
            if not parts.path.strip("/") or parts.hostname:
                raise ValueError("remote URL: unix:// needs an absolute path, as in unix:///run/redis.sock")
            database = parse_qs(parts.query).get("db", ["0"])[0]
            return cls("", 0, unquote(parts.path), _database(database), username, password)
        if parts.scheme == "rediss":
            raise ValueError("remote URL: TLS (rediss://) is not supported yet, use redis:// or unix://")
        if parts.scheme != "redis":
            raise ValueError(f"remote URL: scheme {parts.scheme!r} is not one of redis, unix")
        if not parts.hostname:
            raise ValueError("remote URL: redis:// needs a host, as in redis://cache.example:6379/0")
        return cls(parts.hostname, port, "", _database(parts.path.strip("/") or "0"), username, password)


class Connection:
    """One connection, used by one thread. After any exception but ServerError it must be closed.

    Raises TimeoutError and ConnectionError (both OSError), and ServerError for error replies.
    """

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self.num_unread = 0  # replies that are still to come
        self._timeout = timeout_seconds
        self._deadline = 0.0
        self._line = bytearray()  # received, not consumed yet
        self._socket = _connect(address, timeout_seconds)
        try:
            if address.password:
                account = (address.username, address.password) if address.username else (address.password,)
                self.call("AUTH", *account)
            if address.database:
                self.call("SELECT", str(address.database))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def call(self, *words: str) -> int | bytes:
        """Send one command of small words and read its reply."""
        self.send(command(*words))
        return self.read_reply()

    def send(self, *buffers: Buffer, num_commands: int = 1) -> None:
        """Send commands; the deadline of all that follows until the next ``send`` starts here."""
        self._deadline = time.monotonic() + self._timeout
        self.num_unread += num_commands
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            sent = self._wait_for(self._socket.sendmsg, views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def read_reply(self) -> int | bytes:
        """Read a simple string or an integer."""
        kind, rest = self._read_line()
        if kind not in (b"+", b":"):
            raise ConnectionError(f"unexpected reply {kind + rest[:32]!r}")
        self.num_unread -= 1
        return int(rest) if kind == b":" else rest

    def read_bulk_length(self) -> int | None:
        """Read the head of a bulk string: ``read_bulk`` must follow. None: there is no such value."""
        kind, rest = self._read_line()
        if kind != b"$":
            raise ConnectionError(f"unexpected reply {kind + rest[:32]!r}")
        length = int(rest)
        if length < 0:
            self.num_unread -= 1
            return None
        return length

    def read_bulk(self, targets: Sequence[memoryview]) -> None:
        """Read the bytes of a bulk string into these targets, which must be as long as it is."""
        end = memoryview(bytearray(2))
        for target in (*targets, end):
            self._read_into(target)
        if bytes(end) != b"\r\n":
            raise ConnectionError("a bulk string does not end where it said")
        self.num_unread -= 1

    def _read_line(self) -> tuple[bytes, bytes]:
        """Return the first byte and the rest of a line. Reads little ahead, so that payloads are not
        copied."""
        while (end := self._line.find(b"\r\n")) < 0:
            if len(self._line) > _MAX_LINE_BYTES:
                raise ConnectionError("the server does not speak RESP")
            received = self._wait_for(self._socket.recv, 64)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._line += received
        line = bytes(self._line[:end])
        del self._line[: end + 2]
        if line[:1] == b"-":
            self.num_unread -= 1
            raise ServerError(line[1:].decode(errors="replace"))
        return line[:1], line[1:]

    def _read_into(self, target: memoryview) -> None:
        ahead = min(len(self._line), len(target))
        target[:ahead] = self._line[:ahead]
        del self._line[:ahead]
        while ahead < len(target):
            received = self._wait_for(self._socket.recv_into, target[ahead:], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            ahead += received

    def _wait_for(self, call: Callable[..., T], *arguments: object) -> T:
        # The kernel bounds one call, this bounds them all: a server may trickle.
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"no complete answer within {self._timeout} s")
        try:
            return call(*arguments)
        except BlockingIOError:
            raise TimeoutError(f"no answer within {self._timeout} s") from None


def command(*words: str | bytes) -> bytes:
    """Encode a command of small words."""
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


def set_head(name: str, num_bytes: int) -> bytes:
    """Encode the start of ``SET name <num_bytes>``; the value and CR LF follow."""
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name.encode(), num_bytes)


def _connect(address: Address, timeout_seconds: float) -> socket.socket:
    if address.path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_seconds)
        connection.connect(address.path)
    else:
        connection = socket.create_connection((address.host, address.port), timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return connection


def _database(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"remote URL: database {text!r} is not a number")
    return int(text)
