"""Words and contracts of the memory tier: what a slot is, who answers what, and what an arena must offer.

The arena has one equal partition per column, so a **slot** is (row, column).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.memory.shared_index import SharedIndex
from lmcache.tiers.memory.slots import SlotTable


class Slot(NamedTuple):
    """A row of the arena as it was given to somebody: the generation changes whenever the row is given
    again."""

    row: int
    generation: int


class Reserved(enum.Enum):
    """What ``reserve`` answers for one key; the values are those of ``kvcache.proto``'s Reservation."""

    SLOT = 1  # copy into the slot, then commit or abort
    EXISTS = 2  # this column of the row is committed already
    BUSY = 3  # somebody is writing this column, or no row can be freed now


class Reservation(NamedTuple):
    """One answer of ``reserve``; ``slot`` is set if and only if ``result`` is SLOT."""

    result: Reserved
    slot: Slot | None = None


class LookupResult(NamedTuple):
    """What a lookup found of one KV group's chain; the counts are chunks from its first one on."""

    num_resident: int = 0
    """In memory."""
    num_leased: int = 0
    """In memory and under the request's lease: they stay where the index says until it ends."""
    num_pending: int = 0
    """After ``num_resident``: here when all that is being brought has come."""
    is_probing: bool = False
    """Lower tiers have not said yet what they hold."""

    @property
    def num_expected(self) -> int:
        """In memory, or on their way there."""
        return self.num_resident + self.num_pending


class Found(NamedTuple):
    """Where the leading keys of a chain are, in order."""

    rows: NDArray[np.int64]
    generations: NDArray[np.uint64]

    def slots(self) -> list[Slot]:
        """As slots."""
        return list(map(Slot, self.rows.tolist(), self.generations.tolist()))


@dataclass(frozen=True)
class Geometry:
    """What fixes the arena's slots. Two engines with another geometry can't share an arena."""

    slot_bytes: int
    """Of one column, whole pages."""

    num_columns: int


class Arena(Protocol):
    """Memory for rows. ``MemoryTier`` decides what is in it; an arena only holds bytes and the slot table."""

    num_rows: int
    """Rows when all extents are ready."""

    first_generation: int
    """Generations of earlier formats of this arena are below this."""

    table: SlotTable
    """What is known about every row."""

    @property
    def shared_index(self) -> SharedIndex | None:
        """Where other processes look for visible rows; None when nobody does."""

    @property
    def geometry(self) -> Geometry | None:
        """Size and number of slots; None until the arena is formatted."""

    @property
    def ready_rows(self) -> int:
        """Rows below this number are populated and may be used."""

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """The first ``length`` writable bytes from a slot on (rows of several slots); not given: all of the
        slot."""
