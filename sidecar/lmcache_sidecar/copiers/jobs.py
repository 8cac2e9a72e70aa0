"""Copy jobs of one GPU, and the counters of their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_store.tiers.stats import counter, counters


@dataclass
class CopyStats:
    """Counters of copies from GPU memory."""

    copied_slots: int = counter("Slots filled from GPU memory")
    copy_batches: int = counter("Batches of copies that were sent to readers")
    failed_slots: int = counter("Slots not filled because a reader ended; the engines copied their KV")
    started_readers: int = counter("Reader processes that were started")
    failed_readers: int = counter("Reader processes that ended by a fault")
    left_to_engines: Counter[str] = counters("reason", "Decisions that a worker copies its stores itself")


@dataclass(eq=False)
class Job:
    """Slots of one client that one call fills."""

    num_left: int
    """Slots that are queued or under way."""

    copied: list[bool]
    """Whether each slot was filled, in the order of the slots."""

    ended: asyncio.Future[None]
    """Future that is done when no slot is left."""

    refusal: str = ""
    """Reason why some slots were not filled; empty while there is none."""

    def note_end(self, position: int, *, is_copied: bool) -> None:
        """Record the end of one slot's copy."""
        self.copied[position] = is_copied
        self.num_left -= 1
        if not self.num_left:
            self.ended.set_result(None)


class PlacedCopy(NamedTuple):
    """One slot to fill; ``offset`` is the slot's place in the arena's file, in bytes."""

    group: int
    offset: int
    blocks: NDArray[np.uint32]
    tenant: bytes = b""
    """Tenant of the slot's row."""
