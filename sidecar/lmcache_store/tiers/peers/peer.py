"""One other pod whose memory tier this pod reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from lmcache_store.tiers.base import Loaded, ObjectId, RowKey
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.load_or_recompute import Rate
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.address import Address, AddressKind, Endpoint, Tls
from lmcache_store.tiers.remote.resp import RespConnection
from lmcache_store.tiers.remote.server import RedisServer

OFFER = "OFFER"
"""Command with which a stopping pod offers a row: name, bytes per column, the pod's own name, and the tenant
in hexadecimal if the row has one."""
_MAX_IDLE = 3
"""Connections that stay open: two loads and a question."""


class Peer:
    """Connections, circuit and speed of another pod. Thread-safe.

    ``password`` returns the password for the peers, and may raise OSError; it is called for each connection.
    ``timeout_seconds`` is the deadline of a connection, and of each step of an operation. ``tls``: the
    authority of the peers' certificates; None: no TLS.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        password: Callable[[], str],
        timeout_seconds: float,
        tls: Tls | None = None,
    ) -> None:
        def connect() -> RespConnection:
            address = Address(AddressKind.SHARDS, (endpoint,), password=password(), prefix=prefix, tls=tls)
            return RespConnection(endpoint, address, timeout_seconds)

        self.endpoint = endpoint
        self.questions: set[object] = set()
        """Questions without an answer yet. Only the tier changes it."""
        self._prefix = prefix
        self._server = RedisServer(str(endpoint), connect, lambda failed: None, "peer", _MAX_IDLE)
        self._lock = threading.Lock()  # protects the rate
        self._rate = Rate()

    @property
    def is_available(self) -> bool:
        """Is the circuit closed?"""
        return not self._server.circuit.is_open

    @property
    def problem(self) -> str:
        """Why the circuit is open; empty if it is closed."""
        return self._server.circuit.problem

    def connect(self) -> None:
        """Open a connection, so that the first question finds one. If that fails, the circuit tries again."""
        try:
            self._server.run(lambda connection: connection.call("PING"))
        except (TierUnavailableError, ServerError):
            return

    def ask(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Ask which of these objects the peer has; it has none if it does not answer."""
        commands = [
            ("HEXISTS", objects.redis_name(self._prefix, each.row_key), objects.marker_field(each))
            for each in ids
        ]
        try:
            return [number == 1 for number in self._numbers(commands)]
        except (TierUnavailableError, ServerError):
            return [False] * len(ids)

    def load(self, object_id: ObjectId, into: memoryview, length: int | None) -> Loaded | None:
        """Read one object; see LowerTier. Raises InvalidObjectError, TierUnavailableError and ServerError."""
        with self._lock:
            self._rate.begin(monotonic())
        loaded = None
        try:
            loaded = self._server.run(lambda connection: objects.load(connection, object_id, into, length))
        finally:
            with self._lock:
                self._rate.end(monotonic(), loaded.length if loaded is not None else 0)
        return loaded

    def offer(self, key: RowKey, length: int, tenant: bytes, name: str) -> bool:
        """Offer a row. Returns whether the peer has read it. Raises TierUnavailableError and ServerError.

        ``length``: payload bytes per column. ``name``: the name of this pod in the peers' lists.
        """
        command = (OFFER, objects.redis_name(self._prefix, key), str(length), name, tenant.hex())
        return self._numbers([command if tenant else command[:-1]]) == [1]

    def bytes_per_second(self) -> float:
        """Return the rate of recent loads; 0.0 if it was not measured long enough."""
        with self._lock:
            return self._rate.bytes_per_second(monotonic()) if self._rate.is_certain else 0.0

    def close(self) -> None:
        """Close all connections; those in use when their operation ends."""
        self._server.close()

    def _numbers(self, commands: Sequence[Sequence[str]]) -> list[int]:
        return self._server.run(partial(RespConnection.call_for_numbers, commands=commands))
