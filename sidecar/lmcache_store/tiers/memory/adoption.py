"""Adoption of the rows that an earlier process left in the arena, after a restart.

The slot table records them. Committed rows with checksums become visible when they are verified at their
first use. Reserved slots are quarantined under the owner in the table. All other rows were unfinished and
are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lmcache_store.tiers.memory.contracts import Arena, OpenRow, Slot
from lmcache_store.tiers.memory.rows import MemoryRows
from lmcache_store.tiers.memory.slots import SlotState, next_generation, were_given, whole_rows

SIDECAR = bytes(16)
"""Owner of the rows that the sidecar itself fills (promotions)."""

_SLICE_ROWS = 128

Quarantine = dict[bytes, set[tuple[int, int]]]
"""Slots as (row, column), by owner."""


def adopt_rows(
    arena: Arena, rows: MemoryRows, num_slots: Callable[[int], int], quarantine: Quarantine
) -> Iterator[None]:
    """Build the index in slices of less than 1 ms. Exhaust the iterator before any other call.

    ``num_slots`` returns the slots of a row of a length in bytes. ``quarantine`` receives the slots that a
    client may still be writing.
    """
    table = arena.table
    for first in range(0, arena.num_rows, _SLICE_ROWS):
        entries = table.snapshot(first, min(first + _SLICE_ROWS, arena.num_rows))
        is_given = were_given(entries, arena.first_generation)
        entries["generation"] *= is_given
        rows.next_generation = max(rows.next_generation, next_generation(entries, arena.first_generation))
        rows.first_generation = rows.next_generation
        is_whole = whole_rows(entries) & is_given.all(axis=0)
        lengths = np.where(entries["state"] != SlotState.FREE, entries["length"], 0).max(axis=0)
        for offset in np.flatnonzero((entries["state"] != SlotState.FREE).any(axis=0)).tolist():
            newest = entries[int(entries["generation"][:, offset].argmax()), offset]
            slot = Slot(first + offset, int(newest["generation"]))
            if not rows.allocator.allocate_at(slot.row, num_slots(int(lengths[offset]))):
                table.free(slot.row)  # an engine overwrote this entry, or that of a neighbor
            elif not _index(rows, slot, newest, is_whole=is_whole[offset]):
                _open_invalid(rows, slot, entries[:, offset], quarantine)
        yield
    rows.is_holding_adopted = bool(rows.row_by_key or rows.dropped)


def _index(rows: MemoryRows, slot: Slot, entry: np.void, *, is_whole: bool) -> bool:
    """Index a row if it is whole and the first one with its key. It must be verified before use."""
    key = entry["key"].tobytes()
    rows.name(slot, key, entry["tenant"].item())
    if not is_whole or rows.row_by_key.setdefault(key, slot.row) != slot.row:
        return False
    rows.unverified[slot.row] = 1
    rows.policy.admit(slot.row, None)
    return True


def _open_invalid(rows: MemoryRows, slot: Slot, entries: NDArray[np.void], quarantine: Quarantine) -> None:
    number, row = slot.row, OpenRow(rows.key(slot.row), slot, is_invalid=True)
    for column, entry in enumerate(entries):
        owner = entry["owner"].tobytes()
        if entry["state"] == SlotState.RESERVED and owner != SIDECAR:
            row.writers[column] = None
            quarantine.setdefault(owner, set()).add((number, column))
    rows.open_rows[number] = row
    rows.release_if_unused(number)
