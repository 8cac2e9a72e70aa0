"""Words and contracts of the memory tier: what a slot is, who answers what, and what an arena must offer.

The arena has one equal partition per column, cut into equal **slots**, and these into frames: a row takes as
many consecutive slots of one frame, in every column, as its bytes need (see ``allocator``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmcache.kv_groups import KVGroup, first_needed_chunk, longest_hit
from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.shared_index import SharedIndex
from lmcache.tiers.memory.slots import SlotTable

Place: TypeAlias = tuple[int, int]
"""A row of a request: the chunk's number, and that of the chain."""


class Slot(NamedTuple):
    """A row of the arena as it was given to somebody, by its first slot: the generation changes whenever it
    is given again."""

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


@dataclass(frozen=True)
class Chains:
    """The leading chunks of a request as row keys: a chain per KV group that stores something."""

    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    keys: tuple[Sequence[RowKey], ...]
    """Per group, head first: of the same chunks."""
    tenant: bytes = b""
    """Whose rows those are that are brought into memory for it."""

    @property
    def num_chunks(self) -> int:
        """Chunks of each chain."""
        return len(self.keys[0])

    @property
    def is_prefix(self) -> bool:
        """Is a hit nothing but leading rows of one chain?"""
        return len(self.groups) == 1 and self.groups[0].is_full

    def longest_hit(self, residency: Sequence[bytes | bytearray], at_most: int | None = None) -> int:
        """See ``kv_groups``."""
        at_most = self.num_chunks if at_most is None else at_most
        return longest_hit(self.groups, self.chunk_tokens, residency, 0, at_most)

    def places(self, num_chunks: int) -> list[Place]:
        """Return the rows that a hit of so many chunks needs: chunk by chunk, so that in the order of
        eviction the rows of a chunk are neighbours."""
        firsts = [first_needed_chunk(group, num_chunks, self.chunk_tokens) for group in self.groups]
        return [
            (chunk, group)
            for chunk in range(min(firsts), num_chunks)
            for group, first in enumerate(firsts)
            if first <= chunk
        ]

    def key(self, place: Place) -> RowKey:
        """Return the row's key."""
        return self.keys[place[1]][place[0]]


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that is not complete yet, or out of the index for good."""

    key: RowKey
    slot: Slot
    request: Hashable = None
    """The one that it was stored for."""

    writers: dict[int, bytes | None] = field(default_factory=dict)
    """Owners by column; None: in quarantine."""

    committed: set[int] = field(default_factory=set)
    """Columns whose bytes are complete."""

    is_invalid: bool = False
    """Out of the index for good."""


class Residency(NamedTuple):
    """What of a request's rows is in memory."""

    num_resident: int
    """Chunks of the longest hit."""
    num_leased: int
    """Chunks of the longest hit of leased rows."""
    keys: Sequence[RowKey]
    """Those of ``slots`` come first."""
    slots: list[Slot]
    """Leased rows."""
    present: tuple[bytes, ...]
    """Per chain a byte per chunk, 0: not there; of full attention not beyond the first that is not."""


class LookupResult(NamedTuple):
    """What a lookup found of a request, in all its KV groups together: counts of leading chunks at whose end
    it can resume."""

    num_resident: int = 0
    """In memory."""
    num_leased: int = 0
    """In memory and under the request's lease: what is read of them stays where the index says until it
    ends."""
    num_pending: int = 0
    """After ``num_resident``: here when all that is being brought has come."""
    is_probing: bool = False
    """Lower tiers have not said yet what they hold."""

    @property
    def num_expected(self) -> int:
        """In memory, or on their way there."""
        return self.num_resident + self.num_pending


class Located(NamedTuple):
    """Where each of some keys is; ``rows`` and ``generations`` of those that are not there mean nothing."""

    is_there: NDArray[np.bool_]
    rows: NDArray[np.int64]
    generations: NDArray[np.uint64]


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

    slots_per_frame: int = 1
    """Slots of the longest row, at most 16."""

    def __str__(self) -> str:
        frames = f", {self.slots_per_frame} per row at most" if self.slots_per_frame > 1 else ""
        return f"slots of {self.slot_bytes} bytes in {self.num_columns} columns{frames}"


class VacateResult(NamedTuple):
    """What ``vacate`` did."""

    num_evicted: int
    blocked: dict[str, int]
    """Rows that had to stay, by who uses them."""


class Arena(Protocol):
    """Memory for rows. ``MemoryTier`` decides what is in it; an arena only holds bytes and the slot table."""

    num_rows: int
    """Slots of a column when all extents are ready, and so the most rows there can be."""

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
        """Slots below this number are populated and may be used."""

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """The first ``length`` writable bytes of a row's column; not given: its first slot."""
