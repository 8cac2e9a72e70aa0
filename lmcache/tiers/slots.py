"""The slot table: 128 bytes about every slot, in shared memory beside the slots themselves.

It is the index that survives a restart of the sidecar, and what clients check after a copy. Only the sidecar
writes it. It lies column by column, so that a client needs only its own column's part.

**Write order.** A process can die between any two stores. So an entry is FREE while its other fields change,
and the state is stored last: an entry that says RESERVED or COMMITTED is whole. A checksum is stored after
COMMITTED; a torn one does not fit its bytes, so that the row fails its verification and is dropped.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype(
    [
        ("key", "V64"),
        ("owner", "V16"),  # uuid of the client that reserved the slot; zeros: the sidecar itself
        ("checksum", "V16"),  # xxh3-128 of the payload; zeros: not known
        ("length", "<u8"),  # payload bytes
        ("generation", "<u8"),  # rises whenever the row is given anew; never goes back
        ("state", "<u4"),
        ("column", "<u4"),
        ("spare", "V8"),
    ]
)
"""Layout of one entry; part of the arena file's format and of the wire contract."""

ENTRY_BYTES = ENTRY.itemsize
NO_CHECKSUM = bytes(16)


class State(enum.IntEnum):
    """State of one slot."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2


class SlotTable:
    """Entries of all slots, [num_columns, num_rows]."""

    def __init__(self, entries: NDArray[np.void]) -> None:
        self.num_columns, self.num_rows = entries.shape
        self._entries = entries
        self._states = entries["state"]
        self._checksums = entries["checksum"]
        self._lengths = entries["length"]

    def reserve(
        self, row: int, column: int, *, key: bytes, owner: bytes, length: int, generation: int
    ) -> None:
        """Give the slot to ``owner``."""
        self._states[column, row] = State.FREE
        self._entries[column, row] = (key, owner, NO_CHECKSUM, length, generation, State.FREE, column, b"")
        self._states[column, row] = State.RESERVED

    def commit(self, row: int, column: int) -> None:
        """Mark the payload as complete."""
        self._states[column, row] = State.COMMITTED

    def seal(self, row: int, column: int, checksum: bytes) -> None:
        """Note the checksum of a committed payload: from now on it outlives a restart."""
        self._checksums[column, row] = checksum

    def unseal(self, row: int) -> None:
        """Forget the checksums of a row: it does not outlive a restart."""
        self._checksums[:, row] = NO_CHECKSUM

    def free_slot(self, row: int, column: int) -> None:
        """Free one column of a row that is not complete."""
        self._states[column, row] = State.FREE

    def free(self, row: int) -> None:
        """Free all columns of the row; generations stay, so that they go on rising."""
        self._states[:, row] = State.FREE

    def length(self, row: int, column: int) -> int:
        """Payload bytes in the slot."""
        return int(self._lengths[column, row])

    def set_length(self, row: int, column: int, length: int) -> None:
        """Correct the payload's length of a reserved slot (known only once it was loaded)."""
        self._lengths[column, row] = length

    def checksum(self, row: int, column: int) -> bytes:
        """xxh3-128 of the payload, or NO_CHECKSUM."""
        checksum: bytes = self._checksums[column, row].tobytes()
        return checksum

    def snapshot(self, first_row: int, last_row: int) -> NDArray[np.void]:
        """Copy entries of rows ``first_row`` .. ``last_row - 1``, [num_columns, rows]."""
        return self._entries[:, first_row:last_row].copy()

    def max_generation(self) -> int:
        """Highest generation ever given out."""
        return int(self._entries["generation"].max(initial=0))
