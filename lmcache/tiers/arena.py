"""The arena file: one shared-memory file that holds all rows of a sidecar, and outlives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.base import Geometry, Slot


class ArenaFile:
    """Create or adopt the file at ``path``; populate it in the background; hold its slot table.

    Raises ArenaError when there is no room (saying how much is needed and where), when another process has the
    file open as its arena, or when the file is something else.
    """

    epoch: int
    """Changes at every open and every ``format``; never comes back."""
    growth_error: str | None
    """Why the arena stopped growing below its capacity; None while all is well."""

    def __init__(self, path: Path, capacity_bytes: int) -> None: ...

    def start(self, on_growth: Callable[[], None]) -> None:
        """Populate in a background thread; ``on_growth`` is called from that thread after each extent."""

    @property
    def geometry(self) -> Geometry | None:
        """None until the arena is formatted."""

    @property
    def num_rows(self) -> int:
        """Rows when all extents are ready; 0 until formatted."""

    @property
    def ready_rows(self) -> int:
        """Rows below this number are populated; only grows between two formats."""

    def format(self, geometry: Geometry) -> None:
        """Drop everything and lay the arena out anew: all slots free, another epoch, generations go on rising.

        Raises ArenaError when not even one row fits. The caller made sure that nobody uses the old layout.
        """

    def table_offset(self, column: int) -> int:
        """Byte offset of the slot table of one column: ``num_rows`` entries of 128 bytes."""

    def column_offset(self, column: int) -> int:
        """Byte offset of slot 0 of a column; slots follow each other without gaps."""

    def view(self, row: int, column: int) -> memoryview:
        """The ``slot_bytes`` writable bytes of one slot."""

    def close(self) -> None:
        """Stop populating and let go of the file; it stays for the next process."""


class ColumnMapping:
    """A client's view of its column of the arena; see ``map_column``."""

    slots: NDArray[np.uint8]
    """[num_rows, slot_bytes]"""

    def populate(self, first_row: int, last_row: int) -> None:
        """Fault rows ``first_row`` .. ``last_row - 1`` into this process's page tables, without the GIL."""

    def holds(self, slot: Slot) -> bool:
        """Is the slot still committed under this generation? Read straight from shared memory."""

    def close(self) -> None:
        """Let go of the mapping (it ends with the last array made from ``slots``)."""


def map_column(
    path: Path, table_offset: int, column_offset: int, slot_bytes: int, num_rows: int
) -> ColumnMapping:
    """Map one column of an arena file; the offsets are those of the column (``Attached`` carries them)."""
