"""Reasons why a row was not in memory when a request needed it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.base import RowKey

_MAX_ROWS = 1 << 14
_RECENT_SECONDS = 30.0
"""Time for which a decision about a lower tier explains a miss. The next lookup decides again."""


class Absence(enum.Enum):
    """Reason for one row."""

    EVICTED = "evicted"  # from every tier that held it
    BEING_STORED = "being_stored"  # an earlier request is still storing it
    STORE_REFUSED = "store_refused"  # memory was full of rows in use
    NOT_STORED = "not_stored"  # the engine looked it up, but did not store it
    TOO_LATE = "too_late"  # a lower tier was asked or its row was on the way; the engine did not wait
    SLOWER = "slower_than_computing"  # loading it was estimated to take longer than computing it
    UNAVAILABLE = "tier_unavailable"
    INVALID = "invalid"  # damaged, or of another format
    PRIVATE = "private"  # other processes cannot find its key, so lower tiers do not hold it


class Absences:
    """Decisions that keep rows out of memory, by row. Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._noted: Recent[RowKey, tuple[Absence, float]] = Recent(_MAX_ROWS)
        self._opened: Recent[RowKey, tuple[str, Absence]] = Recent(_MAX_ROWS)

    def note(self, key: RowKey, absence: Absence) -> None:
        """Record a decision about a row."""
        lasts = math.inf if absence in (Absence.STORE_REFUSED, Absence.INVALID) else _RECENT_SECONDS
        self._noted[key] = absence, self._clock() + lasts

    def note_opened(self, key: RowKey, request: str, absence: Absence) -> None:
        """Record why a row was absent until this request began to store it."""
        self._opened[key] = request, absence

    def before(self, key: RowKey, request: str) -> Absence | None:
        """Return why a row was absent until this request began to store it; None: another one stored it."""
        opened_by, absence = self._opened.get(key, (None, None))
        return absence if request and opened_by == request else None

    def forget(self, key: RowKey) -> None:
        """Record that the row is in memory."""
        self._noted.pop(key, None)

    def of(self, key: RowKey) -> Absence | None:
        """Return the last decision about a row, if it still explains a miss."""
        noted = self._noted.get(key)
        return noted[0] if noted is not None and self._clock() < noted[1] else None
