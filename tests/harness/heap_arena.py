"""An arena in this process's own memory, ready at once."""

from __future__ import annotations

import numpy as np

from lmcache.tiers.base import Geometry
from lmcache.tiers.slots import ENTRY, SlotTable


class HeapArena:
    """See the module."""

    first_generation = 1

    def __init__(self, geometry: Geometry, num_rows: int) -> None:
        self.geometry = geometry
        self.num_rows = self.ready_rows = num_rows
        self.table = SlotTable(np.zeros((geometry.num_columns, num_rows), ENTRY))
        self._slots = np.zeros((geometry.num_columns, num_rows, geometry.slot_bytes), np.uint8)

    def view(self, row: int, column: int) -> memoryview:
        """The ``slot_bytes`` writable bytes of one slot."""
        return memoryview(self._slots[column, row])
