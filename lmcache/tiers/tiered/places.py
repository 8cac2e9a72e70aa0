"""Finds the present places of rows. Promotes, leases, counts and refreshes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.tiered.tier_worker import TierWorker

MEMORY, ABSENT, UNKNOWN = "m", "-", "?"
"""Letters of places. The lower tiers have the first letter of their names."""

_SLICE = 128
"""Rows to look up before other tasks run: far less than 1 ms."""
_LOOK_SECONDS = 3.0
"""Deadline of a lower tier: the answer must arrive within 5 s."""


async def find_places(memory: MemoryTier, workers: Sequence[TierWorker], keys: Sequence[RowKey]) -> str:
    """Return one letter per row: the fastest tier that holds it.

    UNKNOWN: no tier that answered holds the row, and one did not answer.
    """
    letters = []
    for start in range(0, len(keys), _SLICE):
        for key in keys[start : start + _SLICE]:
            is_in_memory = memory.is_resident(key) or memory.unverified_slot(key) is not None
            letters.append(MEMORY if is_in_memory else ABSENT)
        await asyncio.sleep(0)
    absent = [number for number, letter in enumerate(letters) if letter == ABSENT]
    looks = [_look(worker, [keys[number] for number in absent]) for worker in workers]
    for worker, found in zip(workers, await asyncio.gather(*looks), strict=True):
        for position, number in enumerate(absent):
            if letters[number] in (ABSENT, UNKNOWN):
                if found is None:
                    letters[number] = UNKNOWN
                elif found[position]:
                    letters[number] = worker.name[0]
    return "".join(letters)


async def _look(worker: TierWorker, keys: Sequence[RowKey]) -> list[bool] | None:
    """Return whether a lower tier holds each row; None: the tier does not answer in time."""

    async def look() -> list[bool] | None:
        found: list[bool] = []
        for start in range(0, len(keys), _SLICE):
            part = await worker.look(keys[start : start + _SLICE])
            if part is None:
                return None
            found += part
        return found

    try:
        return await asyncio.wait_for(look(), _LOOK_SECONDS)
    except asyncio.TimeoutError:
        return None
