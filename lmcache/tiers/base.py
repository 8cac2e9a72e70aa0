"""Words and contracts that all tiers share.

A **chunk** is ``chunk_tokens`` tokens of one request. A **row** is one chunk of all ranks of an engine; a
**column** is one rank's part of it. A row is visible when all its columns are committed, is evicted whole,
and has one index entry: all ranks agree on hit lengths by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from lmcache.tiers.stats import ObjectStats

KEY_BYTES = 32
"""Length of a chunk key and of a namespace (both SHA-256)."""

ROW_KEY_BYTES = 2 * KEY_BYTES

RowKey = bytes
"""64 bytes, namespace + chunk key: what goes over the wire, and what the memory tier indexes."""


class ObjectId(bytes):
    """One column of a row, as all lower tiers know it; each derives from it what its medium calls the object.

    Packed (68 bytes, row key + column), since an index of a disk holds millions, and the garbage collector
    should pass them by.
    """

    __slots__ = ()

    def __new__(cls, row_key: RowKey, column: int) -> ObjectId:
        """Pack it."""
        return super().__new__(cls, row_key + column.to_bytes(4, "big"))

    @property
    def row_key(self) -> RowKey:
        """The row."""
        return self[:-4]

    @property
    def column(self) -> int:
        """Which part of the row."""
        return int.from_bytes(self[-4:], "big")


def split_row_key(key: RowKey) -> tuple[bytes, bytes]:
    """Take a row key apart into (namespace, chunk key)."""
    return key[:KEY_BYTES], key[KEY_BYTES:]


class Loaded(NamedTuple):
    """A payload that was read and compared with its checksum."""

    length: int
    """In bytes."""

    digests: bytes
    """``header.digests`` of it."""

    is_misplaced: bool = False
    """Whether it was found where it will be looked for only for a while, and so should be stored again."""


Listener: TypeAlias = Callable[[bool], None]
"""Called by any thread, and must not block. True: an operation failed; False: a circuit closed, or the
servers are others now."""


class Health(ABC):
    """Whether a medium may be asked, as those see it who use it."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Is it unavailable, as far as is known?"""

    @property
    @abstractmethod
    def num_outages(self) -> int:
        """Changes whenever what it held may be lost: it was unavailable, or was restarted."""

    @property
    def problem(self) -> str:
        """Why it is unavailable, where an operation has found that; holds no secret."""
        return ""

    def subscribe(self, listener: Listener) -> None:
        """Have changes told from now on."""
        self._listeners += (listener,)

    def unsubscribe(self, listener: Listener) -> None:
        """Have nothing told any more; a tier outlives those who use it."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def notify(self, failed: bool) -> None:
        """Tell those who subscribed."""
        for listener in self._listeners:
            listener(failed)


class LowerTier(Protocol):
    """A tier below memory: objects (one column of one row) by id. Thread-safe; every method may block.

    Whatever is wrong with the medium itself raises TierUnavailableError and opens its circuit; from then on
    methods raise at once until a probe finds it healthy. A wrong or short object is a miss and is counted.
    """

    @property
    def health(self) -> Health:
        """Its circuit, or those of its servers."""

    @property
    def address(self) -> object:
        """Where it is; as text it is for people, and holds no secret."""

    @property
    def stats(self) -> ObjectStats:
        """What became of objects here."""

    @property
    def used_bytes(self) -> int | None:
        """What objects take of the medium; None: the tier can't know."""

    @property
    def residence_seconds(self) -> float:
        """How long an object stays here that nobody uses, as things go at present; infinite: not known."""

    def check(self) -> None:
        """Ask the medium how it is, now and then and before anybody needs the tier: the log says what is
        wrong."""

    def probe(self, keys: Sequence[RowKey], num_columns: int) -> int:
        """Return how many leading rows have all their columns here."""

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether it is here: for those who need others than a chain's head."""

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read one object into ``into``; one whose payload has not ``length`` bytes is not valid. None: a
        miss (contents of ``into`` undefined)."""

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Write one object, or mark as used what is there. ``digests``: of the payload, where they are
        known. False: refused (full, say).

        Two writers may store different payloads for one object at once. Any mix of their byte ranges must
        be valid: the remote tier may serve pieces of both."""

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        """Mark rows as used that were hit in a tier above. Return those that are not (whole) here any
        more."""

    def close(self) -> None:
        """Let go of everything; the threads that used the tier must have ended."""
