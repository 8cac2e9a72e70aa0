"""The slot table: 128 bytes about every slot, in the same shared memory as the slots.

The table survives a restart of the sidecar, which finds its rows again in it. Only the sidecar writes the
table, and clients check it after a copy. The table is laid out column by column, so that a client needs only
the part of its own column.

**Write order.** A process can crash between any two stores. An entry is therefore FREE while its other fields
change, and its state is stored last: the fields of a RESERVED or COMMITTED entry are complete. A checksum is
stored after COMMITTED. A torn checksum does not match the bytes, so the row fails its verification.
"""

from __future__ import annotations

import enum
import struct

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype(
    [
        ("key", "V64"),
        ("owner", "V16"),  # uuid of the client that reserved the slot; zeros: the sidecar
        ("checksum", "V16"),  # ``header.slot_checksum``; zeros: unknown
        ("length", "<u8"),  # payload bytes
        ("generation", "<u8"),  # rises whenever the row is given out; never falls
        ("state", "<u4"),
        ("column", "<u4"),
        ("tenant", "S8"),  # ``budgets.short_tenant`` of the row's tenant; zeros: none
    ]
)
"""ArenaLayout of one entry; part of the arena file's format and of the wire contract."""

ENTRY_BYTES = ENTRY.itemsize
NO_CHECKSUM = bytes(16)
_MAX_GENERATIONS = 1 << 48
"""Upper bound of the generations that one format of an arena gives out, in any number of years."""

_FIELDS = struct.Struct("<64s16s16sQQII8s")
_KEY_BYTES = ENTRY["key"].itemsize
# Where fields are, in units of their size.
_WORDS, _STATE = ENTRY_BYTES // 4, 28
_QUADS, _LENGTH, _GENERATION = ENTRY_BYTES // 8, 12, 13


class SlotState(enum.IntEnum):
    """State of one slot."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2


_FREE, _RESERVED, _COMMITTED = map(int, SlotState)


class SlotTable:
    """Entries of all slots, ``[num_columns, num_rows]``, contiguous."""

    def __init__(self, entries: NDArray[np.void]) -> None:
        self.num_columns: int = entries.shape[0]
        self.num_rows: int = entries.shape[1]
        self._entries = entries
        self._checksums = entries["checksum"]
        # Plain stores of single fields are ten times as fast as numpy.
        self._bytes: memoryview[int] = entries.reshape(-1).view(np.uint8).data
        self._words: memoryview[int] = self._bytes.cast("I")
        self._quads: memoryview[int] = self._bytes.cast("Q")

    @classmethod
    def blank(cls, num_columns: int, num_rows: int) -> SlotTable:
        """Create a table in private memory. The kernel takes only pages that are touched."""
        return cls(np.zeros((num_columns, num_rows), ENTRY))

    def reserve(
        self, row: int, column: int, *, key: bytes, owner: bytes, length: int, generation: int, tenant: bytes
    ) -> None:
        """Reserve the slot for ``owner``."""
        number = column * self.num_rows + row
        words, state = self._words, number * _WORDS + _STATE
        words[state] = _FREE
        fields = key, owner, NO_CHECKSUM, length, generation, _FREE, column, tenant
        _FIELDS.pack_into(self._bytes, number * ENTRY_BYTES, *fields)
        words[state] = _RESERVED

    def commit(self, row: int, column: int) -> None:
        """Mark the slot's payload as complete."""
        self._words[(column * self.num_rows + row) * _WORDS + _STATE] = _COMMITTED

    def record_checksum(self, row: int, column: int, checksum: bytes) -> None:
        """Record the checksum of a committed payload, so that it survives a restart."""
        self._checksums[column, row] = checksum

    def forget_checksums(self, row: int) -> None:
        """Delete the checksums of a row, so that it does not survive a restart."""
        self._checksums[:, row] = NO_CHECKSUM

    def free_slot(self, row: int, column: int) -> None:
        """Free one column of an incomplete row."""
        self._words[(column * self.num_rows + row) * _WORDS + _STATE] = _FREE

    def free(self, row: int) -> None:
        """Free all columns of a row. Their generations stay, so that later ones are higher."""
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
        """Return the key of a row that is not free."""
        start = row * ENTRY_BYTES
        return bytes(self._bytes[start : start + _KEY_BYTES])

    def length(self, row: int, column: int) -> int:
        """Return the payload bytes in the slot."""
        return self._quads[(column * self.num_rows + row) * _QUADS + _LENGTH]

    def checksum(self, row: int, column: int) -> bytes:
        """Return the recorded checksum of the payload, or NO_CHECKSUM."""
        checksum: bytes = self._checksums[column, row].tobytes()
        return checksum

    def snapshot(self, first_row: int, last_row: int) -> NDArray[np.void]:
        """Copy entries of rows ``first_row`` .. ``last_row - 1``, [num_columns, rows]."""
        return self._entries[:, first_row:last_row].copy()


def next_generation(entries: NDArray[np.void], first_generation: int) -> int:
    """Return a generation above all generations of this format, which began with ``first_generation``."""
    generations = entries["generation"][were_given(entries, first_generation)]
    return max(first_generation, int(generations.max(initial=0)) + 1)


def were_given(entries: NDArray[np.void], first_generation: int) -> NDArray[np.bool_]:
    """Return which entries have a generation that this format can have given out.

    A faulty engine may write any number into the table. That number must not determine later generations."""
    given: NDArray[np.bool_] = entries["generation"] - np.uint64(first_generation) < _MAX_GENERATIONS
    return given


def whole_rows(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which rows of a snapshot are whole: all columns match, are committed and have checksums."""
    is_whole = (entries["state"] == SlotState.COMMITTED) & (entries["checksum"] != np.void(NO_CHECKSUM))
    is_whole &= entries["generation"] == entries["generation"][0]
    is_whole &= entries["key"] == entries["key"][0]
    whole: NDArray[np.bool_] = is_whole.all(axis=0)
    return whole
