"""Serves the rows of this pod's memory tier to the sidecars of other pods. Read-only.

It answers the commands with which the remote tier reads a row (``lmcache_store.tiers.remote.objects``
describes the format), so its clients need no second protocol. A payload goes from the arena into the socket
without a copy in this process. The row is pinned meanwhile: it can't be evicted, and its bytes do not change.

A pod that stops also offers rows to its peers, with a command of its own. The peers then read them as usual.

**Limits.** At most ``max_connections`` clients, each in a thread with low priority; a new one takes the place
of the one that has been idle longest. A connection pins at most one row at a time, and for a second without
progress at most. ``bytes_per_second`` limits all connections together, and so does a budget for questions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence

from lmcache_sidecar.peer_server.requests import BadRequestError
from lmcache_sidecar.peer_server.rows import PeerRows
from lmcache_sidecar.peer_server.service import PeerService
from lmcache_sidecar.peer_server.session import PeerSession
from lmcache_store.common.sockets import listen
from lmcache_store.common.threads import lower_priority
from lmcache_store.tiers.remote.address import Tls
from lmcache_store.tiers.remote.stream import accept_tls

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""32 peers, of which each has up to 8 connections."""
_QUIET_SECONDS = 60.0
"""Time after a log line about a client that is no peer in which there is no other one."""


class PeerServer:
    """Call ``start``, and ``close`` at the end. Thread-safe.

    ``passwords`` returns the passwords that are valid now, and may raise OSError. An empty list admits no
    client. If ``passwords`` is None, the server needs no password.

    ``tls`` is the certificate and its key. If it is None, connections are not encrypted.
    """

    def __init__(
        self,
        rows: PeerRows,
        prefix: str,
        *,
        passwords: Callable[[], Sequence[str]] | None = None,
        tls: Tls | None = None,
        bytes_per_second: float = 0.0,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.service = PeerService(rows, prefix, passwords, bytes_per_second)
        self._tls = tls
        self._max_connections = max_connections
        self._listening: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._lock = threading.Lock()  # protects the following
        self._logged_at = -math.inf
        self._open: dict[socket.socket, threading.Thread] = {}
        self._sessions: dict[socket.socket, PeerSession] = {}

    def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError. An empty host means all addresses."""
        self._listening = listen(host, port)
        self._accepting = threading.Thread(target=self._accept, name="peers-accept", daemon=True)
        self._accepting.start()
        return int(self._listening.getsockname()[1])

    def refuse_offers(self) -> None:
        """Take no more rows over, because this pod stops. Reads go on."""
        self.service.takes_offers = False

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        self.refuse_offers()
        self.service.pace.close()
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
        if self._accepting is not None:
            self._accepting.join()
        with self._lock:
            connections = dict(self._open)
        for connection in connections:
            _shut_down(connection)
        for thread in connections.values():
            thread.join()

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError:  # closed, or the process has no descriptor left
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)
                continue
            try:
                is_taken = self._has_room() and self._start_thread(self._secured(connection))
            except OSError as error:  # the certificate can't be read
                self._note_bad(error)
                connection.close()
                continue
            if not is_taken:
                self.service.note_refused()
                logger.debug("Peer %s was refused: too many connections", address)
                connection.close()

    def _secured(self, connection: socket.socket) -> socket.socket:
        return connection if self._tls is None else accept_tls(connection, self._tls)

    def _has_room(self) -> bool:
        """Is there room for another connection? Ends the one that has been idle longest if necessary.

        Connections without a password end first, so that strangers do not take the places of peers.
        """
        with self._lock:
            num_open, idle = len(self._open), min(self._sessions.items(), key=_worth, default=None)
        if num_open < self._max_connections:
            return True
        if idle is None or idle[1].idle_since == math.inf or num_open > self._max_connections:
            return False  # all are busy, or the last one that was ended has not left yet
        _shut_down(idle[0])
        return True

    def _start_thread(self, connection: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name="peers-serve", daemon=True)
        with self._lock:
            self._open[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # too many threads
            with self._lock:
                del self._open[connection]
            connection.close()
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        lower_priority()
        session: PeerSession | None = None
        try:
            session = PeerSession(self.service, connection)
            with self._lock:
                self._sessions[connection] = session
            session.run()
        except BadRequestError as error:
            self._note_bad(error)
        except OSError as error:
            logger.debug("A peer's connection ended: %s", error)
        except Exception:
            logger.exception("A peer's connection was closed")
        finally:
            if session is not None:
                session.release()
            with self._lock:
                self._sessions.pop(connection, None)
                self._open.pop(connection, None)
            connection.close()

    def _note_bad(self, error: Exception) -> None:
        """Count a client that is no peer, and log it, but not more than once a minute."""
        self.service.note_refused()
        with self._lock:
            is_due = time.monotonic() > self._logged_at + _QUIET_SECONDS
            if is_due:
                self._logged_at = time.monotonic()
        level = logging.WARNING if is_due else logging.DEBUG
        logger.log(level, "A connection to the port for peers was closed: %s", error)


def _worth(item: tuple[socket.socket, PeerSession]) -> tuple[bool, bool, float]:
    """Order connections: busy ones end last, and those without a password first."""
    session = item[1]
    return session.idle_since == math.inf, session.is_admitted, session.idle_since


def _shut_down(connection: socket.socket) -> None:
    """End a connection, so that its thread notices.

    ``SSLSocket.shutdown`` would also end TLS, and the thread would send its next bytes in clear text.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
