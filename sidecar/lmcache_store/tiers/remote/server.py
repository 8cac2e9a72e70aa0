"""One server of the remote tier: its pool of connections and its circuit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache_store.tiers.base import Listener
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.errors import ServerError
from lmcache_store.tiers.remote.resp import RespConnection

T = TypeVar("T")


class RedisServer:
    """Thread-safe. ``connect`` opens a new connection to the server's current address."""

    non_fatal_errors = frozenset({"MISCONF", "NOPERM", "NOREPLICAS", "OOM", "READONLY", "WRONGTYPE"})
    """Codes of error replies that concern the command, not the server's health."""

    fatal_errors = frozenset({"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOAUTH", "WRONGPASS"})
    """Codes of error replies that any command would get. For other codes, a PING checks the server."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], RespConnection],
        listener: Listener,
        kind: str = "remote tier",
        max_idle: int | None = None,
    ) -> None:
        """Create a server without a connection. ``max_idle``: connections that stay open; None: all."""
        self.name = name
        self.circuit = Circuit(f"{kind} {name}", self._probe)
        self.circuit.subscribe(listener)
        self._connect = connect
        self._max_idle = max_idle
        self._lock = threading.Lock()  # protects the following
        self._idle: list[RespConnection] = []
        self._is_closed = False

    def run(self, operation: Callable[[RespConnection], T], *, asking: bool = False) -> T:
        """Run an operation on a connection.

        Raises TierUnavailableError if the server is unhealthy or its circuit is open, and ServerError if a
        healthy server replies with an error."""
        self.circuit.check()
        try:
            result = self._attempt(operation, asking=asking)
        except (OSError, ServerError) as error:
            if self._is_about_the_call(error) or self._answers_ping(error):
                if getattr(error, "code", "") == "READONLY":  # another server is the master now: find it
                    self._drop_idle()
                raise
            self._drop_idle()  # new connections find a new master, or a new address
            raise self.circuit.failure(error) from error
        self.circuit.success()
        return result

    def close(self) -> None:
        """Stop probing, and close all connections; connections in use when their operation ends."""
        self.circuit.end(0)
        with self._lock:
            self._is_closed = True
        self._drop_idle()

    def _is_about_the_call(self, error: Exception) -> bool:
        return isinstance(error, ServerError) and error.code in self.non_fatal_errors

    def _answers_ping(self, error: Exception) -> bool:
        """Does the server answer a PING? It may reply ERR, and close the connection, for a huge row only."""
        if not isinstance(error, ServerError) or error.code in self.fatal_errors:
            return False
        try:
            self._attempt(lambda connection: connection.call("PING"))
        except (OSError, ServerError):
            return False
        return True

    def _probe(self) -> None:
        try:
            self._attempt(lambda connection: connection.call("PING"))
        except (OSError, ServerError) as error:
            if not self._is_about_the_call(error):
                self._drop_idle()
                raise

    def _attempt(self, operation: Callable[[RespConnection], T], *, asking: bool = False) -> T:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        try:
            return self._use(idle or self._open(), operation, asking=asking)
        except ConnectionError:
            # A restart may have closed an idle connection long ago, which says nothing about the server now.
            # An error of a new connection shows the server's health. A time-out is never retried.
            if idle is None:
                raise
        self.circuit.restarted()
        return self._use(self._open(), operation, asking=asking)

    def _open(self) -> RespConnection:
        try:
            return self._connect()
        except ServerError as error:  # any error: the connection is unusable
            raise ConnectionError(str(error)) from error

    def _use(
        self, connection: RespConnection, operation: Callable[[RespConnection], T], *, asking: bool
    ) -> T:
        connection.asking = asking
        try:
            return operation(connection)
        finally:
            self._give_back(connection)

    def _give_back(self, connection: RespConnection) -> None:
        with self._lock:
            is_full = self._max_idle is not None and len(self._idle) >= self._max_idle
            if connection.is_reusable and not self._is_closed and not is_full:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
