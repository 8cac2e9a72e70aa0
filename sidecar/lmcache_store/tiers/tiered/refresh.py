"""Refresh of copies in lower tiers, shortly after a lookup hit their rows in memory.

- A copy is touched. Rows that are hit in memory are not read from lower tiers. An LRU tier would therefore
  evict the hottest rows first.
- A missing copy is written. The tier was restarted or refused the row, or this process adopted the row.
- If rows are admitted to lower tiers on reuse only, the first hit writes the row.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.tiered.write_queue import Write

REFRESH_SECONDS = 600.0
_MIN_REFRESH_SECONDS = 10.0
_REFRESHES = 4
"""Number of times a copy is touched within the time for which its tier keeps unused copies."""

_OFFER_SECONDS = 10.0  # between two writes of a row that was dropped
_PAUSE_SECONDS = 0.1  # repeated lookups of one request within this time count as one hit


class RefreshQueue:
    """Belongs to the event loop. ``run`` is its background work. Takes 8 bytes per row of the arena."""

    def __init__(
        self,
        num_rows: int,
        write: Callable[[Write], None],
        touch: Callable[[Mapping[RowKey, Slot]], None],
        residence_seconds: Callable[[], float],
        num_outages: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """``write`` writes a row to all lower tiers. ``touch`` touches their copies. ``residence_seconds``
        returns how long all of them keep an unused copy, and ``num_outages`` counts their outages that
        ended."""
        self._write = write
        self._touch = touch
        self._residence_seconds = residence_seconds
        self._count_outages = num_outages
        self._num_outages = 0
        self._seconds = REFRESH_SECONDS
        self._clock = clock
        # By lease and first key: a request has one chain per KV group, and looks up a long chain in parts.
        self._latest: dict[Hashable, tuple[Sequence[RowKey], Sequence[Slot]]] = {}
        self.has_hits = asyncio.Event()  # set until all hits are processed
        self._fresh_since = array("d", [-math.inf]) * num_rows  # by row: time of the last write or touch
        self._doubted_at = -math.inf  # an outage had ended: copies that were fresh then may be lost
        self._unused: dict[int, Write] = {}  # by row: stored rows without a hit

    def add(self, lease_id: Hashable, keys: Sequence[RowKey], slots: Sequence[Slot]) -> None:
        """Note that a lookup found the leading keys in these slots. O(1): this is the hot path."""
        self._latest[lease_id, keys[0]] = keys, slots
        self.has_hits.set()

    def mark_fresh(self, slot: Slot) -> None:
        """Note that a row and its copies were just written or promoted."""
        self._fresh_since[slot.row] = self._clock()

    def retry_soon(self, slot: Slot) -> None:
        """Note that a tier lacks a copy of a row: check again at a hit after ``_OFFER_SECONDS``."""
        self._fresh_since[slot.row] = self._clock() - self._seconds + _OFFER_SECONDS

    def write_on_reuse(self, write: Write) -> None:
        """Write the row at its first hit."""
        self._unused[write.slot.row] = write

    async def run(self) -> None:
        """Process hits, in slices of one lookup each."""
        while True:
            await self.has_hits.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            seconds = self._residence_seconds() / _REFRESHES
            self._seconds = min(max(seconds, _MIN_REFRESH_SECONDS), REFRESH_SECONDS)
            if (num_outages := self._count_outages()) != self._num_outages:
                self._num_outages, self._doubted_at = num_outages, self._clock()
            due: dict[RowKey, Slot] = {}
            while self._latest:
                _, (keys, slots) = self._latest.popitem()
                due.update(pair for pair in zip(keys, slots, strict=False) if self._process_hit(pair[1]))
                await asyncio.sleep(0)
            self.has_hits.clear()
            self._touch(due)

    def _process_hit(self, slot: Slot) -> bool:
        """Process a hit of a row. Returns True if its copies are due to be touched."""
        unused = self._unused.get(slot.row)
        if unused is not None and unused.slot == slot:
            del self._unused[slot.row]
            self._write(unused)
        now, fresh_since = self._clock(), self._fresh_since[slot.row]
        is_due = now - fresh_since >= self._seconds or fresh_since <= self._doubted_at
        if is_due:
            self._fresh_since[slot.row] = now
        return is_due
