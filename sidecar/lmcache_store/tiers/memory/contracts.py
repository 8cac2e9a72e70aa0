"""Types and contracts of the memory tier: slots, results of its methods, and the interface of an arena.

The arena has one equal partition per column. Partitions are divided into equal **slots**, and consecutive
slots form frames. In every column, a row takes consecutive slots of one frame, as many as its bytes need
(see ``allocator``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmcache_store.kv_groups import KVGroup, first_needed_chunk, longest_hit
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.shared_index import SharedIndex
from lmcache_store.tiers.memory.slots import SlotTable

Place: TypeAlias = tuple[int, int]
"""A row of a request: (index of the chunk, index of the chain)."""


class Slot(NamedTuple):
    """A row of the arena, by its first slot. The generation changes whenever the row is given out again."""

    row: int
    generation: int


class Reserved(enum.Enum):
    """Result of ``reserve`` for one key. The values equal those of Reservation in ``kvcache.proto``."""

    SLOT = 1  # copy into the slot, then commit or abort
    EXISTS = 2  # this column of the row is committed already
    BUSY = 3  # another client is writing this column, or no slots can be freed now


class Reservation(NamedTuple):
    """Answer of ``reserve`` for one key; ``slot`` is set if and only if ``result`` is SLOT."""

    result: Reserved
    slot: Slot | None = None


@dataclass(frozen=True)
class Chains:
    """Row keys of a request's leading chunks: one chain per KV group that stores KV."""

    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    keys: tuple[Sequence[RowKey], ...]
    """Row keys per group, head first. All chains have the same chunks."""
    tenant: bytes = b""
    """Tenant that owns the rows that are promoted for this request."""
    num_handed_over: int = 0
    """Leading chunks that another engine has computed a moment ago. Their rows may be stored only now."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks in each chain."""
        return len(self.keys[0])

    @property
    def is_prefix(self) -> bool:
        """Is a hit simply the leading rows of one chain?"""
        return len(self.groups) == 1 and self.groups[0].is_full

    def longest_hit(self, residency: Sequence[bytes | bytearray], at_most: int | None = None) -> int:
        """Return the chunks of the longest hit, at most ``at_most``; see ``kv_groups``."""
        at_most = self.num_chunks if at_most is None else at_most
        return longest_hit(self.groups, self.chunk_tokens, residency, 0, at_most)

    def places(self, num_chunks: int) -> list[Place]:
        """Return the rows that a hit of ``num_chunks`` chunks needs, chunk by chunk.

        With this order, the rows of a chunk are neighbors in the eviction order."""
        firsts = [first_needed_chunk(group, num_chunks, self.chunk_tokens) for group in self.groups]
        return [
            (chunk, group)
            for chunk in range(min(firsts), num_chunks)
            for group, first in enumerate(firsts)
            if first <= chunk
        ]

    def key(self, place: Place) -> RowKey:
        """Return the key of this row."""
        return self.keys[place[1]][place[0]]


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that is not yet complete, or that left the index for good."""

    key: RowKey
    slot: Slot
    request: Hashable = None
    """Request that stores the row."""

    writers: dict[int, bytes | None] = field(default_factory=dict)
    """Owner of each reserved column; None while the column is in quarantine."""

    committed: set[int] = field(default_factory=set)
    """Columns that are committed."""

    is_invalid: bool = False
    """True once the row left the index for good."""


class Residency(NamedTuple):
    """Rows of a request that are in memory."""

    num_resident: int
    """Number of chunks in the longest hit."""
    num_leased: int
    """Number of chunks in the longest hit of leased rows."""
    keys: Sequence[RowKey]
    """Row keys; the keys of ``slots`` come first."""
    slots: list[Slot]
    """Slots of the leased rows."""
    present: tuple[bytes, ...]
    """One byte per chunk and chain; 0 means absent. For full attention, 0 from the first absent chunk on."""


class LookupResult(NamedTuple):
    """Result of a lookup over all KV groups of a request. All numbers count leading chunks, at whose end the
    request can resume."""

    num_resident: int = 0
    """Chunks in memory."""
    num_leased: int = 0
    """Chunks in memory and under the request's lease. Their rows stay in place until the lease ends."""
    num_pending: int = 0
    """Chunks after ``num_resident`` that will be in memory when all current promotions succeed."""
    is_probing: bool = False
    """Is the answer of a lower tier still outstanding, or will a later lookup ask it again for rows that were
    handed over?"""

    @property
    def num_expected(self) -> int:
        """Chunks in memory or being promoted."""
        return self.num_resident + self.num_pending


class Located(NamedTuple):
    """Places of the keys of a lookup, by position. Rows and generations of absent keys are undefined."""

    is_there: NDArray[np.bool_]
    rows: NDArray[np.int64]
    generations: NDArray[np.uint64]


class Found(NamedTuple):
    """Places of the leading keys of a chain, in order."""

    rows: NDArray[np.int64]
    generations: NDArray[np.uint64]

    def part(self, chunks: slice) -> Found:
        """Return the places of these chunks."""
        return Found(self.rows[chunks], self.generations[chunks])

    def slots(self) -> list[Slot]:
        """Return the places as slots."""
        return list(map(Slot, self.rows.tolist(), self.generations.tolist()))


@dataclass(frozen=True)
class Geometry:
    """Format of the arena's slots. Engines with different geometries can't share an arena."""

    slot_bytes: int
    """Bytes of one slot, in whole pages."""

    num_columns: int
    """Number of columns, one per rank."""

    slots_per_frame: int = 1
    """Number of slots in the longest row, at most 16."""

    def __str__(self) -> str:
        frames = f", {self.slots_per_frame} per row at most" if self.slots_per_frame > 1 else ""
        return f"slots of {self.slot_bytes} bytes in {self.num_columns} columns{frames}"


class VacateResult(NamedTuple):
    """Result of ``vacate``."""

    num_evicted: int
    blocked: dict[str, int]
    """Number of rows that could not be evicted, by use (``leased``, ``pinned``, ...)."""


class Arena(Protocol):
    """Memory for rows: bytes and the slot table. ``MemoryTier`` decides which rows are in it."""

    num_rows: int
    """Slots of a column when all extents are ready: an upper bound of the number of rows."""

    first_generation: int
    """Lower bound of this format's generations. All earlier formats' generations are below it."""

    table: SlotTable
    """State of every slot."""

    @property
    def shared_index(self) -> SharedIndex | None:
        """Index of visible rows for other processes; None if the arena is private."""

    @property
    def geometry(self) -> Geometry | None:
        """Size and number of slots; None until the arena is formatted."""

    @property
    def ready_rows(self) -> int:
        """Number of populated slots, the leading ones. Only these may be used."""

    @property
    def is_lost(self) -> bool:
        """Has another process taken bytes of the rows away? If so after a read, the bytes may be wrong."""

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """Return the first ``length`` bytes of a row's column, writable; by default its first slot."""
