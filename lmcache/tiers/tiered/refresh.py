"""What a hit in memory means below, found out a moment after the lookup that made it.

The copies below are touched: rows that are hit in memory are not read below, so a tier that evicts what it
used least recently would evict the hottest rows first. A copy that is not there is written: the tier was
restarted, or refused it, or this process found the row in its arena. And where rows are admitted to lower
tiers on reuse only, its first hit has a row written.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.tiered.write_queue import Write

REFRESH_SECONDS = 600.0
_MIN_REFRESH_SECONDS = 10.0
_REFRESHES = 4
"""Of a copy, in the time in which its tier would forget it."""

_OFFER_SECONDS = 10.0  # between two offers of a row that was dropped
_PAUSE_SECONDS = 0.1  # engines ask for one request again and again: that is one hit


class RefreshQueue:
    """Belongs to the event loop; ``run`` is its background work. Costs 8 bytes per row of the arena."""

    def __init__(
        self,
        num_rows: int,
        write: Callable[[Write], None],
        touch: Callable[[Mapping[RowKey, Slot]], None],
        residence_seconds: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """``write`` a row to all lower tiers; ``touch`` the copies that they have; ``residence_seconds``: how
        long a copy that nobody touches is sure to stay in all of them."""
        self._write = write
        self._touch = touch
        self._residence_seconds = residence_seconds
        self._seconds = REFRESH_SECONDS
        self._clock = clock
        # By lease and first key: a request has a chain per KV group, and asks for a long one by pieces.
        self._latest: dict[Hashable, tuple[Sequence[RowKey], Sequence[Slot]]] = {}
        self._has_some = asyncio.Event()
        self._fresh_since = array("d", [-math.inf]) * num_rows  # by row: its copies were written or touched
        self._doubted_at = -math.inf  # what was fresh then may be lost since
        self._unused: dict[int, Write] = {}  # by row: stored and not hit yet

    def add(self, lease_id: Hashable, keys: Sequence[RowKey], slots: Sequence[Slot]) -> None:
        """A lookup found the leading keys in these slots. O(1): this is the hot path."""
        self._latest[lease_id, keys[0]] = keys, slots
        self._has_some.set()

    def mark_fresh(self, slot: Slot) -> None:
        """The row was stored, or brought, just now, and so were its copies."""
        self._fresh_since[slot.row] = self._clock()

    def retry_soon(self, slot: Slot) -> None:
        """The row has no copy in a tier that should have one: look when it is hit again, after a while."""
        self._fresh_since[slot.row] = self._clock() - self._seconds + _OFFER_SECONDS

    def doubt_all(self) -> None:
        """Any copy may be gone: look for those of rows that are hit."""
        self._doubted_at = self._clock()

    def write_on_reuse(self, write: Write) -> None:
        """Write the row when it is hit for the first time."""
        self._unused[write.slot.row] = write

    async def run(self) -> None:
        """Follow hits up, in slices of one lookup each."""
        while True:
            await self._has_some.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            seconds = self._residence_seconds() / _REFRESHES
            self._seconds = min(max(seconds, _MIN_REFRESH_SECONDS), REFRESH_SECONDS)
            due: dict[RowKey, Slot] = {}
            while self._latest:
                _, (keys, slots) = self._latest.popitem()
                due.update(pair for pair in zip(keys, slots, strict=False) if self._follow_up(pair[1]))
                await asyncio.sleep(0)
            self._has_some.clear()
            self._touch(due)

    def _follow_up(self, slot: Slot) -> bool:
        """Return whether the row's copies are to be touched."""
        unused = self._unused.get(slot.row)
        if unused is not None and unused.slot == slot:
            del self._unused[slot.row]
            self._write(unused)
        now, fresh_since = self._clock(), self._fresh_since[slot.row]
        is_due = now - fresh_since >= self._seconds or fresh_since <= self._doubted_at
        if is_due:
            self._fresh_since[slot.row] = now
        return is_due
