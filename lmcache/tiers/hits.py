"""What a hit in memory means below, found out a moment after the lookup that made it.

The copies below are made younger, and, if rows are admitted to lower tiers on reuse only, a row's first hit
has it written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from lmcache.tiers.ages import Ages
from lmcache.tiers.base import RowKey, Slot
from lmcache.tiers.lower import Lower

_PAUSE_SECONDS = 0.1  # engines ask for one request again and again: that is one hit


class Hits:
    """Belongs to the event loop; ``run`` is its background work."""

    def __init__(self, ages: Ages, lower: Sequence[Lower]) -> None:
        self._ages = ages
        self._lower = lower
        self._latest: dict[Hashable, tuple[Sequence[RowKey], Sequence[Slot]]] = {}
        self._has_some = asyncio.Event()
        self._unused: dict[int, tuple[Slot, int]] = {}  # by row: stored rows not hit yet, and their depths

    def note(self, lease_id: Hashable, keys: Sequence[RowKey], slots: Sequence[Slot]) -> None:
        """A lookup found the leading keys in these slots. O(1): this is the hot path."""
        self._latest[lease_id] = keys, slots
        self._has_some.set()

    def write_on_reuse(self, slot: Slot, depth: int) -> None:
        """Write the row when it is hit for the first time."""
        self._unused[slot.row] = slot, depth

    async def run(self) -> None:
        """Follow hits up, in slices of one lookup each."""
        while True:
            await self._has_some.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            keys = []
            while self._latest:
                keys += self.follow_up()
                await asyncio.sleep(0)
            self._has_some.clear()
            await asyncio.gather(*(lower.touch(keys) for lower in self._lower))

    def follow_up(self) -> list[RowKey]:
        """Queue what one lookup's hits are the first of. Return what is to be touched."""
        _, (keys, slots) = self._latest.popitem()
        for slot in slots if self._unused else ():
            unused, depth = self._unused.get(slot.row, (None, 0))
            if unused == slot:
                del self._unused[slot.row]
                for lower in self._lower:
                    lower.write(slot, depth)
        return self._ages.due(zip(keys, slots))  # noqa: B905 (leading keys)
