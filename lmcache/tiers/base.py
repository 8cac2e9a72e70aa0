"""Words and contracts that all tiers share.

A **chunk** is ``chunk_tokens`` tokens of one request. A **row** is one chunk of all ranks of an engine; a
**column** is one rank's part of it. The arena has one equal partition per column, so a **slot** is (row,
column). A row is visible when all its columns are committed, is evicted whole, and has one index entry: all
ranks agree on hit lengths by construction.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from lmcache.tiers.circuit import CircuitBreaker
    from lmcache.tiers.memory.shared_index import SharedIndex
    from lmcache.tiers.memory.slots import SlotTable

KEY_BYTES = 32
"""Length of a chunk key and of a namespace (both SHA-256)."""

PAGE_BYTES = 4096
"""Slots of an arena and objects on disk are whole pages."""

RowKey = bytes
"""64 bytes, namespace + chunk key: what the memory tier indexes and lower tiers name objects by."""


def split_row_key(key: RowKey) -> tuple[bytes, bytes]:
    """Take a row key apart into (namespace, chunk key)."""
    return key[:KEY_BYTES], key[KEY_BYTES:]


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple


class Slot(NamedTuple):
    """A row of the arena as it was given to somebody: the generation changes whenever the row is given
    anew."""

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


@dataclass
class Lookup:
    """Answer of a lookup over the tiers; counts are chunks, and a chunk is one row in every group."""

    num_resident: int = 0  # leading chunks in memory
    num_pending: int = 0  # chunks after those that are here when all that is being brought has come
    probing: bool = False  # the remote tier has not said yet what it holds
    slots: list[list[Slot]] = field(default_factory=list)  # per group, of the leading chunks that are leased
    num_coming: int = 0  # of the pending ones, those that are not here yet


class Removal(enum.Enum):
    """Why an object left a tier; a label of the removal counters."""

    EVICTED = "evicted"  # capacity: the policy chose it
    INVALID = "invalid"  # checksum, length, version or key did not fit


class TierError(Exception):
    """Base of all errors of the tiers; a miss is a value, never an exception."""


class ArenaError(TierError):
    """The arena can't be made, grown or adopted: the message says how much is needed, and where."""


class StaleSlot(TierError):
    """A slot was named by a generation that is over, or by somebody who does not hold it. Nothing was
    changed."""


class TierUnavailable(TierError):
    """A lower tier did not answer within its deadline, or its circuit is open."""


@dataclass(frozen=True)
class Geometry:
    """What fixes the arena's slots. Two engines with another geometry can't share an arena."""

    slot_bytes: int  # of one column, whole pages
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


class Loaded(NamedTuple):
    """A payload that was read and compared with its checksum."""

    length: int  # bytes
    digests: bytes  # ``header.digests`` of it


class LowerTier(Protocol):
    """A tier below memory: objects (one column of one row) by name. Thread-safe; every method may block.

    Whatever is wrong with the medium itself raises TierUnavailable and opens ``breaker``; from then on
    methods raise at once until ``try_again`` finds it well. A wrong or short object is a miss and is
    counted.
    """

    breaker: CircuitBreaker
    """Opened by the tier's own operations."""

    def probe(self, keys: Sequence[RowKey], num_columns: int) -> int:
        """Return how many leading rows have all their columns here."""

    def load(self, key: RowKey, column: int, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read one object into ``into``; one whose payload has not ``length`` bytes is not valid. None: a
        miss (contents of ``into`` undefined)."""

    def store(
        self, key: RowKey, column: int, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Write one object, or refresh the age of what is there. ``digests``: of the payload, where they are
        known. False: refused (full, say)."""

    def touch(self, keys: Sequence[RowKey], num_columns: int, lengths: Sequence[int] = ()) -> set[RowKey]:
        """Refresh the age of rows that were hit in a tier above, with payloads of ``lengths`` bytes. Return
        those that are not (whole) here any more."""

    def try_again(self) -> bool:
        """While the circuit is open: try the medium, and close the circuit if it is well."""

    def close(self) -> None:
        """Let go of everything; the threads that used the tier must have ended."""
