"""Which hits in memory should make the copies below younger. Pure but for the clock, which is given.

Rows that are hit in memory are not read below: without this, a tier that forgets what is oldest would forget
the hottest rows first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable

from lmcache.tiers.base import RowKey, Slot

REFRESH_SECONDS = 600.0


class Ages:
    """Remembers, in 8 bytes per row of the arena, when the copies below were last written or touched."""

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._young_since = array("d", [-math.inf]) * num_rows

    def note(self, slot: Slot) -> None:
        """The row's copies are young: it was stored, or brought, just now."""
        self._young_since[slot.row] = self._clock()

    def due(self, hits: Iterable[tuple[RowKey, Slot]]) -> list[RowKey]:
        """Return which of the rows that were hit are to be touched below, and take it as done."""
        now = self._clock()
        keys = []
        for key, slot in hits:
            if now - self._young_since[slot.row] >= REFRESH_SECONDS:
                self._young_since[slot.row] = now
                keys.append(key)
        return keys
