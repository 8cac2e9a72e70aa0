"""What one GPU is to copy, and what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.stats import counter, counters


@dataclass
class CopyStats:
    """What the sidecar copied from GPUs."""

    copied_slots: int = counter("Slots filled from GPU memory")
    copied_bytes: int = counter("Bytes of these slots")
    copy_batches: int = counter("Batches of such copies, each of one GPU")
    failed_slots: int = counter("Slots that were not filled because a reader ended: the engine copied them")
    started_readers: int = counter("Processes started to read a GPU")
    failed_readers: int = counter("Of these, how many ended by a fault")
    left_to_engines: Counter[str] = counters(
        "reason", "Times that a worker was left to copy its stores itself"
    )


@dataclass(eq=False)
class Job:
    """Slots of one client that are to be filled together."""

    num_left: int
    """Queued, or under way."""

    copied: list[bool]
    """By slot."""

    ended: asyncio.Future[None]
    """Done when none is left."""

    refusal: str = ""
    """Why they were not all filled."""

    def note_end(self, position: int, *, is_copied: bool) -> None:
        """One slot less."""
        self.copied[position] = is_copied
        self.num_left -= 1
        if not self.num_left:
            self.ended.set_result(None)


class SlotCopy(NamedTuple):
    """One slot to be filled; ``offset``: of the slot in the arena's file."""

    group: int
    offset: int
    blocks: NDArray[np.uint32]
