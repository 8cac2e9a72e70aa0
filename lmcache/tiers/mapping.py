"""A client's view of its column of the arena file. Without torch."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.base import ArenaError, Slot
from lmcache.tiers.pages import populate
from lmcache.tiers.slots import ENTRY, State


class MappedColumn:
    """A client's view of its column of an arena file; the offsets are those of the column, as ``Attached``
    carries them.

    Raises ArenaError when the file is too small, OSError when it can't be opened.
    """

    slots: NDArray[np.uint8]
    """[num_rows, slot_bytes]; rows that were not populated yet must not be touched."""

    def __init__(
        self, path: str | Path, table_offset: int, column_offset: int, slot_bytes: int, num_rows: int
    ) -> None:
        end = max(table_offset + num_rows * ENTRY.itemsize, column_offset + num_rows * slot_bytes)
        with Path(path).open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if end > size:
                raise ArenaError(f"{path} has {size} bytes, the sidecar speaks of {end}: not the same file")
            self._map = mmap.mmap(file.fileno(), end)
        data = np.frombuffer(self._map, np.uint8)
        self.slots = data[column_offset : column_offset + num_rows * slot_bytes].reshape(num_rows, slot_bytes)
        table = data[table_offset : table_offset + num_rows * ENTRY.itemsize].view(ENTRY)
        self._generations = table["generation"]
        self._states = table["state"]

    def populate(self, first_row: int, last_row: int) -> None:
        """Fault rows ``first_row`` .. ``last_row - 1`` into this process's page tables, without the GIL."""
        if first_row < last_row:
            populate(self.slots[first_row:last_row].reshape(-1))

    def holds(self, slot: Slot) -> bool:
        """Is the slot committed under this generation now? Ask after the copy: then the copy was good."""
        # The state is read first and last: between two writes of the sidecar an entry is FREE.
        return bool(
            self._states[slot.row] == State.COMMITTED
            and self._generations[slot.row] == slot.generation
            and self._states[slot.row] == State.COMMITTED
        )

    def close(self) -> None:
        """Let go of the mapping; it ends with the last array made from ``slots``."""
        del self.slots, self._generations, self._states
        with contextlib.suppress(BufferError):
            self._map.close()
