"""Rows, passwords, budgets and counters that all connections of peers share."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_sidecar.peer_server.limits import Pace, QuestionBudget
from lmcache_sidecar.peer_server.rows import PeerRows
from lmcache_store.tiers.base import ObjectId, RowKey
from lmcache_store.tiers.stats import counter

logger = logging.getLogger(__name__)


@dataclass
class PeerServerStats:
    """Counters of a peer server. Only its service changes them."""

    read_columns: int = counter("Columns of rows that other pods began to read")
    taken_rows: int = counter("Rows that a stopping pod offered, and that are in this memory tier now")
    refused_connections: int = counter(
        "Connections that were refused: too many, a wrong password, or not the protocol of peers"
    )


class PeerService:
    """The rows that peers may read, with the limits of all connections together. Thread-safe.

    ``passwords``: see ``PeerServer``.
    """

    def __init__(
        self,
        rows: PeerRows,
        prefix: str,
        passwords: Callable[[], Sequence[str]] | None = None,
        bytes_per_second: float = 0.0,
    ) -> None:
        self.rows, self.prefix = rows, prefix
        self.pace = Pace(bytes_per_second)
        self.stats = PeerServerStats()
        self.takes_offers = True
        self._passwords = passwords
        self._questions = QuestionBudget()
        self._lock = threading.Lock()  # protects the counters

    @property
    def needs_password(self) -> bool:
        """Must a client authenticate first?"""
        return self._passwords is not None

    def admits(self, password: bytes) -> bool:
        """Is this password valid? Takes as long for a wrong one."""
        try:
            valid = self._passwords() if self._passwords is not None else ()
        except OSError as error:
            logger.error("Peers are refused: %s", error)
            return False
        matches = [hmac.compare_digest(password, each.encode()) for each in valid if each]
        return self._passwords is None or any(matches)

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether it can be read now; of none if questions have taken too much time."""
        if not self._questions.has_time():
            return [False] * len(ids)
        self._questions.spend(len(ids))
        return self.rows.find_each(ids)

    def note_read(self) -> None:
        """Count a column that a client begins to read."""
        with self._lock:
            self.stats.read_columns += 1

    def take_over(self, key: RowKey, length: int, tenant: bytes, peer: str) -> bool:
        """Read a row from the peer that offers it. False: refused."""
        is_taken = self.takes_offers and self.rows.take_over(key, length, tenant, peer)
        with self._lock:
            self.stats.taken_rows += is_taken
        return is_taken

    def note_refused(self) -> None:
        """Count a connection that was refused."""
        with self._lock:
            self.stats.refused_connections += 1
