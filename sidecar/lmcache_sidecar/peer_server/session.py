"""One connection of a peer to the server of this pod's rows."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from lmcache_sidecar.peer_server.limits import Turn
from lmcache_sidecar.peer_server.requests import BadRequestError, Command, Requests
from lmcache_sidecar.peer_server.rows import PinnedMemoryRow
from lmcache_sidecar.peer_server.service import PeerService
from lmcache_store.common.sockets import Stream
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.base import ObjectId, RowKey
from lmcache_store.tiers.budgets import short_tenant
from lmcache_store.tiers.header import NO_CHECKSUM, Buffer, Header
from lmcache_store.tiers.peers.peer import OFFER
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.stream import TlsStream
from lmcache_store.tiers.remote.value_formats import seal_of

_PIN_SECONDS = 2.0
"""Time after which a row is pinned again, if it may still be read. A store that closes waits for its pins."""
_STEP_SECONDS = 0.5
"""A waiting connection looks for expired pins at these intervals."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""A client whose node is gone loses its connection within a minute."""
_MAX_LENGTH_DIGITS = 12
_TENANT = re.compile(rb"([0-9a-f]{2}){1,8}")


class PeerSession:
    """Answers the commands of one client. Only its thread uses it, except for ``idle_since``."""

    def __init__(self, service: PeerService, connection: socket.socket) -> None:
        self._service = service
        self._connection = connection
        is_secure = isinstance(connection, ssl.SSLSocket)
        self._stream = (TlsStream if is_secure else Stream)(connection, TIMING.peer_send_seconds)
        _set_options(connection)
        self.is_admitted = not service.needs_password
        """Has the client sent a valid password?"""
        self._began = time.monotonic()
        self._key: RowKey = b""
        self._row: PinnedMemoryRow | None = None
        self._turn: Turn | None = None
        self._turn_of = (b"", 0, 0)  # the turn's row and column, and the first piece that it still covers
        self._pinned_at = self._read_at = 0.0
        self.idle_since = self._began
        """Time since which the client has asked nothing; infinite while a command is being answered."""

    def run(self) -> None:
        """Answer commands until the client leaves. Raises OSError and BadRequestError."""
        self._shake_hands()
        requests = Requests(self._receive)
        while True:
            asked: list[ObjectId | None] = []
            for command in requests.read():
                self._release_expired()
                if self.is_admitted and command[0].upper() == b"HEXISTS" and len(command) == 3:
                    asked.append(self._object_of(command))
                    continue
                self._answer_asked(asked)
                asked = []
                self._answer(command)
            self._answer_asked(asked)

    def release(self) -> None:
        """End the pin, if there is one."""
        row, self._row, self._key = self._row, None, b""
        if row is not None:
            row.release()

    def _shake_hands(self) -> None:
        if isinstance(self._connection, ssl.SSLSocket):
            self._limit_tls(TIMING.peer_password_seconds)
            try:
                self._connection.do_handshake()
            except OSError as error:
                raise BadRequestError(f"the TLS handshake failed: {error}") from None

    def _release_expired(self) -> None:
        if self._row is not None and time.monotonic() > self._read_at + TIMING.peer_pin_seconds:
            self.release()

    def _receive(self, limit: int) -> bytes:
        """Wait for bytes. Meanwhile, ends an expired pin, and a connection without a password."""
        self.idle_since = time.monotonic()
        received: bytes | None = None
        while received is None:
            with contextlib.suppress(BlockingIOError, TimeoutError):  # after _STEP_SECONDS
                self._limit_tls(_STEP_SECONDS)
                received = self._connection.recv(limit)
            self._release_expired()
            if not self.is_admitted and time.monotonic() > self._began + TIMING.peer_password_seconds:
                raise BadRequestError("no password in time")
        self.idle_since = math.inf
        if not received:
            raise ConnectionResetError("the client left")
        return received

    def _answer(self, command: Command) -> None:
        name, arguments = command[0].upper(), command[1:]
        if name == b"AUTH" and arguments:
            if not self._service.admits(arguments[-1]):
                self._send([b"-WRONGPASS invalid username-password pair\r\n"])
                raise BadRequestError("a wrong password")
            self.is_admitted = True
            self._send([b"+OK\r\n"])
        elif not self.is_admitted:
            self._send([b"-NOAUTH Authentication required.\r\n"])
            raise BadRequestError("no password")
        elif name == b"PING":
            self._send([b"+PONG\r\n"])
        elif name == b"HMGET" and len(arguments) == 3:
            self._send_first(*arguments)
        elif name == b"HGET" and len(arguments) == 2:
            self._send_piece(b"", *arguments)
        elif name == OFFER.encode() and len(arguments) in (3, 4):
            self._take_over(*arguments)
        else:
            self._send([b"-ERR unknown command: rows of a peer can only be read\r\n"])

    def _object_of(self, command: Command) -> ObjectId | None:
        key = objects.parse_name(self._service.prefix, command[1])
        field = objects.parse_field(command[2])
        return None if key is None or field is None or field[1] is not None else ObjectId(key, field[0])

    def _answer_asked(self, asked: Sequence[ObjectId | None]) -> None:
        if asked:
            found = iter(self._service.find_each([each for each in asked if each is not None]))
            self._send([b"".join(b":%d\r\n" % (each is not None and next(found)) for each in asked)])

    def _send_first(self, name: bytes, marker: bytes, field: bytes) -> None:
        """Answer an HMGET: the marker of a column, and its first piece."""
        column = objects.parse_field(marker)
        payload = self._payload(name, column[0]) if column is not None and column[1] is None else None
        if column is None or payload is None or not self._has_turn(column[0], 0, payload):
            self.release()
            self._send([b"*2\r\n$-1\r\n$-1\r\n"])
            return
        header = Header(self._key, column[0], len(payload), NO_CHECKSUM).pack()
        self._send_piece(b"*2\r\n$%d\r\n%s\r\n" % (len(header), header), name, field)

    def _send_piece(self, head: bytes, name: bytes, field: bytes) -> None:
        """Send ``head`` and a piece with its seal, or nil. The pin ends with the column's last piece."""
        column, number = objects.parse_field(field) or (0, None)
        payload = self._payload(name, column) if number is not None else None
        sizes = objects.piece_sizes(len(payload)) if payload is not None else []
        if (
            payload is None
            or number is None
            or number >= len(sizes)
            or not self._has_turn(column, number, payload)
        ):
            self.release()
            self._send([head, b"$-1\r\n"])
            return
        start = sum(sizes[:number])
        if self._turn is None or not self._turn.wait_for(start):
            raise ConnectionAbortedError("this server closes")
        self._turn_of = (self._key, column, number + 1)
        piece = payload[start : start + sizes[number]]
        seal = seal_of(ObjectId(self._key, column), len(payload), start, piece)
        if self._row is None or self._row.is_lost:
            raise ConnectionAbortedError(
                "another process changed the arena: the seal may be that of other bytes"
            )
        if number == 0:
            self._service.note_read()  # before the client has the piece: a reader of the counters may know it
        self._send([head, b"$%d\r\n" % (len(piece) + len(seal)), piece, seal, b"\r\n"])
        if number == len(sizes) - 1:
            self.release()

    def _has_turn(self, column: int, number: int, payload: memoryview) -> bool:
        """Reserve time to send a column, unless the time for this piece is reserved already.

        Returns False if the server has no time to send it.
        """
        key, turn_column, first = self._turn_of
        if self._turn is None or (key, turn_column) != (self._key, column) or number < first:
            self._turn = self._service.pace.reserve(len(payload))
            self._turn_of = (self._key, column, number)
        return self._turn is not None

    def _take_over(self, name: bytes, length: bytes, peer: bytes, tenant: bytes = b"") -> None:
        """Answer an offer: 1 if the row is in memory now, else 0. A damaged tenant counts as none."""
        key = objects.parse_name(self._service.prefix, name)
        is_valid = length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS and peer.isascii()
        owner = short_tenant(bytes.fromhex(tenant.decode())) if _TENANT.fullmatch(tenant) else b""
        is_taken = (
            key is not None and is_valid and self._service.take_over(key, int(length), owner, peer.decode())
        )
        self._send([b":%d\r\n" % is_taken])

    def _payload(self, name: bytes, column: int) -> memoryview | None:
        """Return the payload of a column, and pin its row if it is not pinned yet."""
        key = objects.parse_name(self._service.prefix, name)
        if key is None:
            return None
        self._read_at = time.monotonic()
        if key != self._key or self._read_at > self._pinned_at + _PIN_SECONDS:
            self.release()
            self._row = self._service.rows.pin(key)
            self._key, self._pinned_at = key if self._row else b"", self._read_at
        if self._row is None or column >= len(self._row.columns):
            return None
        return self._row.columns[column]

    def _limit_tls(self, seconds: float) -> None:
        """Set the time-out of the next calls. Without TLS, the kernel has one for each direction."""
        if isinstance(self._connection, ssl.SSLSocket):
            self._connection.settimeout(seconds)

    def _send(self, buffers: Sequence[Buffer]) -> None:
        self._limit_tls(TIMING.peer_send_seconds)
        self._stream.start()
        self._stream.send_all(buffers)


def _set_options(connection: socket.socket) -> None:
    step = struct.pack("ll", int(_STEP_SECONDS), int(_STEP_SECONDS % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, step)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
