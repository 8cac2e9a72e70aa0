"""A connection that speaks as much of the Redis protocol (RESP2) as the remote tier needs.

Values go straight between the socket and the caller's memory, by calls that release the GIL. Every wait has a
deadline, kept by the kernel (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): Python's own socket time-outs would make each
read return after one packet.

Connecting is ours as well, though redis-py could do it on the same socket: its time-outs bound each read and
not the handshake, so that a server that trickles holds it for ever; it connects more slowly, and imports a
third of a second of modules.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
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
    """One connection, used by one thread at a time. After any exception it may hold answers to what was asked
    before: close it, unless ServerError was the only answer due.

    Raises TimeoutError and ConnectionError (both OSError), and ServerError for error replies.
    """

    def __init__(self, address: Address, timeout_seconds: float) -> None:
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

    def send(self, *buffers: Buffer) -> None:
        """Send commands; the deadline of all that follows until the next ``send`` starts here."""
        self._deadline = time.monotonic() + self._timeout
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            sent = self._wait_for(self._socket.sendmsg, views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def read_reply(self) -> int | bytes:
        """Read a simple string or an integer."""
        line = self._read_line(b"+", b":")
        return _number(line) if line[:1] == b":" else line[1:]

    def read_bulk_length(self) -> int | None:
        """Read the head of a bulk string: ``read_bulk`` must follow. None: there is no such value."""
        length = _number(self._read_line(b"$"))
        return length if length >= 0 else None

    def read_bulk(self, *targets: memoryview) -> None:
        """Read the bytes of a bulk string into these targets, which must be as long as it is."""
        end = memoryview(bytearray(2))
        for target in (*targets, end):
            self._read_into(target)
        if bytes(end) != b"\r\n":
            raise ConnectionError("a bulk string does not end where it said")

    def _read_line(self, *kinds: bytes) -> bytes:
        """Return a line that starts like one of these. Reads little ahead: payloads are not copied."""
        while (end := self._line.find(b"\r\n")) < 0:
            if len(self._line) > _MAX_LINE_BYTES:
                raise ConnectionError("the server does not speak RESP")
            self._line += self._received(self._wait_for(self._socket.recv, 64))
        line = bytes(self._line[:end])
        del self._line[: end + 2]
        if line[:1] == b"-":
            raise ServerError(line[1:].decode(errors="replace"))
        if line[:1] not in kinds:
            raise ConnectionError(f"unexpected reply {line[:32]!r}")
        return line

    def _read_into(self, target: memoryview) -> None:
        ahead = min(len(self._line), len(target))
        target[:ahead] = self._line[:ahead]
        del self._line[:ahead]
        while ahead < len(target):
            call = self._socket.recv_into
            ahead += self._received(self._wait_for(call, target[ahead:], 0, socket.MSG_WAITALL))

    def _received(self, what: T) -> T:
        if not what:
            raise ConnectionResetError("the server closed the connection")
        return what

    def _wait_for(self, call: Callable[..., T], *arguments: object) -> T:
        # The kernel bounds one call, this bounds them all: a server may trickle.
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"no complete answer within {self._timeout} s")
        try:
            return call(*arguments)
        except BlockingIOError:
            raise TimeoutError(f"no answer within {self._timeout} s") from None


def command(*words: str) -> bytes:
    """Encode a command of small words."""
    encoded = [word.encode() for word in words]
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


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise ConnectionError(f"unexpected reply {line[:32]!r}") from None


def _database(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"remote URL: database {text!r} is not a number")
    return int(text)
