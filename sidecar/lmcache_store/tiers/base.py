"""Types and contracts that all tiers share.

A **chunk** is ``chunk_tokens`` tokens of one request. A **row** is one chunk of all ranks of an engine. A
**column** is one rank's part of a row. A row becomes visible when all its columns are committed, is evicted
as a whole, and has one index entry. All ranks therefore agree on the length of a hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NewType, Protocol, TypeAlias, runtime_checkable

from lmcache_store.tiers.stats import ObjectStats

KEY_BYTES = 32
"""Length of a chunk key and of a namespace (both SHA-256)."""

ROW_KEY_BYTES = 2 * KEY_BYTES

RowKey = bytes
"""Namespace and chunk key, 64 bytes: the key in messages and in the index of the memory tier."""


class ObjectId(bytes):
    """Name of one column of a row in all lower tiers. Each tier derives the name in its medium from it.

    It is packed into 68 bytes (row key and column): a disk's index holds millions of ids, and the garbage
    collector does not track bytes.
    """

    __slots__ = ()

    def __new__(cls, row_key: RowKey, column: int) -> ObjectId:
        """Pack a row key and a column."""
        return super().__new__(cls, row_key + column.to_bytes(4, "big"))

    @property
    def row_key(self) -> RowKey:
        """Key of the row."""
        return self[:-4]

    @property
    def column(self) -> int:
        """Number of the column."""
        return int.from_bytes(self[-4:], "big")


StoredId = NewType("StoredId", ObjectId)
"""Name of an object in a medium: its id, with another key if the medium must not show the row key."""


def split_row_key(key: RowKey) -> tuple[bytes, bytes]:
    """Split a row key into (namespace, chunk key)."""
    return key[:KEY_BYTES], key[KEY_BYTES:]


class Loaded(NamedTuple):
    """A payload that was loaded and matches its checksum."""

    length: int
    """Length of the payload in bytes."""

    digests: bytes
    """``header.digests`` of the payload."""

    is_misplaced: bool = False
    """Was it found on a server that is asked only for a limited time? Then it should be stored again."""


Listener: TypeAlias = Callable[[bool], None]
"""Called in any thread; must not block. True: an operation failed. False: a circuit closed, or the list of
servers changed."""


class MediumHealth(ABC):
    """Health of a medium: whether to send it requests."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Is the medium known to be unavailable?"""

    @property
    @abstractmethod
    def num_outages(self) -> int:
        """Number of events after which stored objects may be lost: outages and restarts."""

    @property
    def problem(self) -> str:
        """Reason why the medium is unavailable, if an operation found one. Holds no secret."""
        return ""

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` at each change from now on."""
        self._listeners += (listener,)

    def unsubscribe(self, listener: Listener) -> None:
        """End a subscription. A tier outlives its users, so each user must end its own."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def notify(self, failed: bool) -> None:
        """Call all listeners."""
        for listener in self._listeners:
            listener(failed)


class LowerTier(Protocol):
    """A tier below memory: objects (one column of one row) by id. Thread-safe; every method may block.

    A fault of the medium raises TierUnavailableError and opens the circuit. Methods then raise immediately
    until a probe succeeds. An invalid or short object is a miss and is counted.
    """

    @property
    def health(self) -> MediumHealth:
        """Circuit of the tier, or the circuits of its servers."""

    @property
    def address(self) -> object:
        """Location of the medium. Its text is for people, and holds no secret."""

    @property
    def stats(self) -> ObjectStats:
        """Counters of this tier's objects."""

    @property
    def takes_writes(self) -> bool:
        """Can objects be stored? If not, ``store`` and ``touch`` are never called."""

    @property
    def is_local(self) -> bool:
        """Does a question take no round trip?"""

    @property
    def is_encrypted(self) -> bool:
        """Are payloads encrypted? Each load and store then takes more processor time."""

    @property
    def used_bytes(self) -> int | None:
        """Bytes that objects take of the medium; None if the tier can't know."""

    @property
    def residence_seconds(self) -> float:
        """Seconds for which an unused object stays, at the current rate of eviction; infinite if unknown."""

    def check(self) -> None:
        """Check the medium and log problems. Called at intervals, before a request needs the tier."""

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether this tier holds it. In Redis, this counts as a use of the object."""

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read one object into ``into``. Returns None on a miss; the contents of ``into`` are then undefined.

        An object whose payload does not have ``length`` bytes is invalid."""

    def rate_of(self, keys: Sequence[RowKey]) -> float | None:
        """Return the rate of recent loads from the places of these rows; 0.0 if it is unknown.

        None: all rows have the same place, so the rate of all loads from this tier counts."""

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Write one object, or mark a present one as recently used. Returns False if it was refused, for
        example because the tier is full. ``digests``: digests of the payload, if known.

        Two writers may store different payloads for one object at once. Any mix of their byte ranges must
        be valid, because the remote tier may return pieces of both."""

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        """Mark rows that were hit in a higher tier as recently used. Returns rows that are absent here, or
        incomplete."""

    def close(self) -> None:
        """Release all resources. The threads that used the tier must have ended."""


class OwnerBound(NamedTuple):
    """Upper bound of the bytes that objects of one owner take in a tier."""

    owner: str
    num_bytes: int


@runtime_checkable
class BoundedTier(Protocol):
    """A lower tier that can bound the bytes of owners: this pod's disk. Tiers of several pods can't."""

    def admits(self, lengths: Mapping[ObjectId, int], bound: OwnerBound) -> bool:
        """May the owner store all of these objects, given the bytes of each payload? Counts a refusal.

        Stored objects take no more bytes. Rows that are stored at the same moment may exceed the bound."""

    def assign(self, object_id: ObjectId, owner: str) -> None:
        """Count an object for its owner from now on, if it is stored."""

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes of the objects of each owner that has a bound."""
