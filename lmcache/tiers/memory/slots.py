"""The slot table: 128 bytes about every slot, in shared memory beside the slots themselves.

It is the index that survives a restart of the sidecar, and what clients check after a copy. Only the sidecar
writes it. It lies column by column, so that a client needs only its own column's part.

**Write order.** A process can die between any two stores. So an entry is FREE while its other fields change,
and the state is stored last: an entry that says RESERVED or COMMITTED is whole. A checksum is stored after
COMMITTED; a torn one does not fit its bytes, so that the row fails its verification and is dropped.
"""

from __future__ import annotations

import enum
import struct

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype(
    [
        ("key", "V64"),
        ("owner", "V16"),  # uuid of the client that reserved the slot; zeros: the sidecar itself
        ("checksum", "V16"),  # ``header.slot_checksum``; zeros: not known
        ("length", "<u8"),  # payload bytes
        ("generation", "<u8"),  # rises whenever the row is given again; never goes back
        ("state", "<u4"),
        ("column", "<u4"),
        ("spare", "V8"),
    ]
)
"""ArenaLayout of one entry; part of the arena file's format and of the wire contract."""

ENTRY_BYTES = ENTRY.itemsize
NO_CHECKSUM = bytes(16)
_MOST_GENERATIONS = 1 << 48
"""That one format of an arena gives out, in any number of years."""

_GIVEN = struct.Struct("<64s16s16sQQ")  # key .. generation
_KEY_BYTES = ENTRY["key"].itemsize
# Where fields are, in units of their size.
_WORDS, _STATE, _COLUMN = ENTRY_BYTES // 4, 28, 29
_QUADS, _LENGTH, _GENERATION = ENTRY_BYTES // 8, 12, 13


class State(enum.IntEnum):
    """State of one slot."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2


_FREE, _RESERVED, _COMMITTED = map(int, State)


class SlotTable:
    """Entries of all rows, [num_columns, num_rows], contiguous."""

    def __init__(self, entries: NDArray[np.void]) -> None:
        self.num_columns: int = entries.shape[0]
        self.num_rows: int = entries.shape[1]
        self._entries = entries
        self._checksums = entries["checksum"]
        # Single fields are written by plain stores: ten times as fast as by numpy.
        self._bytes: memoryview[int] = entries.reshape(-1).view(np.uint8).data
        self._words: memoryview[int] = self._bytes.cast("I")
        self._quads: memoryview[int] = self._bytes.cast("Q")

    @classmethod
    def blank(cls, num_columns: int, num_rows: int) -> SlotTable:
        """Make a table in this process's own memory, of which only what is touched is taken."""
        return cls(np.zeros((num_columns, num_rows), ENTRY))

    def reserve(
        self, row: int, column: int, *, key: bytes, owner: bytes, length: int, generation: int
    ) -> None:
        """Give the slot to ``owner``."""
        number = column * self.num_rows + row
        words, state = self._words, number * _WORDS + _STATE
        words[state] = _FREE
        _GIVEN.pack_into(self._bytes, number * ENTRY_BYTES, key, owner, NO_CHECKSUM, length, generation)
        words[number * _WORDS + _COLUMN] = column
        words[state] = _RESERVED

    def commit(self, row: int, column: int) -> None:
        """Mark the payload as complete."""
        self._words[(column * self.num_rows + row) * _WORDS + _STATE] = _COMMITTED

    def record_checksum(self, row: int, column: int, checksum: bytes) -> None:
        """Record the checksum of a committed payload: from now on it outlives a restart."""
        self._checksums[column, row] = checksum

    def forget_checksums(self, row: int) -> None:
        """Forget the checksums of a row: it does not outlive a restart."""
        self._checksums[:, row] = NO_CHECKSUM

    def free_slot(self, row: int, column: int) -> None:
        """Free one column of a row that is not complete."""
        self._words[(column * self.num_rows + row) * _WORDS + _STATE] = _FREE

    def free(self, row: int) -> None:
        """Free all columns of the row; generations stay, so that they go on rising."""
        for column in range(self.num_columns):
            self.free_slot(row, column)

    def is_committed(self, row: int, generation: int, column: int = 0) -> bool:
        """Is this column of the row committed under this generation?"""
        number = column * self.num_rows + row
        return (
            self._words[number * _WORDS + _STATE] == _COMMITTED
            and self._quads[number * _QUADS + _GENERATION] == generation
        )

    def key(self, row: int) -> bytes:
        """Row key of a row that is not free."""
        start = row * ENTRY_BYTES
        return bytes(self._bytes[start : start + _KEY_BYTES])

    def length(self, row: int, column: int) -> int:
        """Payload bytes in the slot."""
        return self._quads[(column * self.num_rows + row) * _QUADS + _LENGTH]

    def checksum(self, row: int, column: int) -> bytes:
        """The recorded checksum of the payload, or NO_CHECKSUM."""
        checksum: bytes = self._checksums[column, row].tobytes()
        return checksum

    def snapshot(self, first_row: int, last_row: int) -> NDArray[np.void]:
        """Copy entries of rows ``first_row`` .. ``last_row - 1``, [num_columns, rows]."""
        return self._entries[:, first_row:last_row].copy()

    def num_used(self, first_frame: int, num_frames: int) -> int:
        """Count the rows in frames from this one on, of so many, of which a column is not free."""
        is_used = (self._entries["state"] != State.FREE).any(axis=0)
        return int(is_used.reshape(-1, num_frames)[:, first_frame:].sum())

    def next_generation(self, first_generation: int) -> int:
        """Return a generation above all that were given out since the arena's format, which began with
        ``first_generation``."""
        return next_generation(self._entries, first_generation)


def next_generation(entries: NDArray[np.void], first_generation: int) -> int:
    """See ``SlotTable``; of the entries of a snapshot."""
    generations = entries["generation"][were_given(entries, first_generation)]
    return max(first_generation, int(generations.max(initial=0)) + 1)


def were_given(entries: NDArray[np.void], first_generation: int) -> NDArray[np.bool_]:
    """Which entries have generations that can have been given out? An engine that writes where it must not
    may leave any number there: it must not become the measure of those to come."""
    given: NDArray[np.bool_] = entries["generation"] - np.uint64(first_generation) < _MOST_GENERATIONS
    return given


def whole_rows(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which rows of a snapshot are whole: their columns belong together, are committed and have checksums?"""
    is_whole = (entries["state"] == State.COMMITTED) & (entries["checksum"] != np.void(NO_CHECKSUM))
    is_whole &= entries["generation"] == entries["generation"][0]
    is_whole &= entries["key"] == entries["key"][0]
    whole: NDArray[np.bool_] = is_whole.all(axis=0)
    return whole
