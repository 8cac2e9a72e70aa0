"""The index of the memory tier: which row holds a key, and whether readers may use that row.

**Cost of a row.** A row that is complete and idle costs one index entry and a few numbers. Its length is in
the slot table, its place in the eviction order in the policy. Only two kinds of rows have an ``OpenRow``: a
row that a client is writing, and a row that left the index while a client may still access it.

**The slot table is written and not trusted.** Engines have it mapped, and a faulty engine may overwrite it.
This process therefore reads the key and the generation of a row from its own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.allocator import FrameAllocator
from lmcache_store.tiers.memory.contracts import Arena, OpenRow, Slot
from lmcache_store.tiers.pages import zeros


class RowIndex:
    """Rows of one arena by key. Clears the arena's shared index. ``slots_per_frame``: slots of the longest
    row."""

    def __init__(self, arena: Arena, slots_per_frame: int) -> None:
        if arena.geometry is None:
            raise ArenaError("the arena is not formatted yet")
        self.allocator = FrameAllocator(arena.num_rows, slots_per_frame)
        self.table = arena.table
        self._bytes_per_slot = arena.geometry.slot_bytes * arena.geometry.num_columns
        self._arena = arena
        self._shared = arena.shared_index
        if self._shared is not None:
            self._shared.clear()
        self.row_by_key: dict[RowKey, int] = {}  # visible rows, and rows that are being written under a key
        self.open_rows: dict[int, OpenRow] = {}
        num_numbers = self.allocator.num_numbers
        self._keys: list[RowKey] = []  # by row number, up to the largest number used; references, not copies
        self._generations = zeros(num_numbers, "Q")
        self.unverified = zeros(num_numbers, "B")  # 1: adopted, and not yet compared with its checksums
        self._limit: int | None = None
        self._hidden: set[int] = set()  # rows beyond the limit, which readers do not find

    @property
    def usable_slots(self) -> int:
        """Only rows below this slot are given out or leased. Default: the populated slots."""
        return self._arena.ready_rows if self._limit is None else self._limit

    @usable_slots.setter
    def usable_slots(self, number: int | None) -> None:
        self._limit = number
        while number is None and self._hidden:
            row = self._hidden.pop()
            if self.is_visible(self.slot(row)):
                self.is_readable(row)

    @property
    def _usable_frames(self) -> int:
        return ceil_div(self.usable_slots, self.allocator.slots_per_frame)

    def is_usable(self, row: int) -> bool:
        """Is the row within the usable slots?"""
        return row % self.allocator.num_frames < self._usable_frames

    def find(self, key: RowKey) -> int | None:
        """Return the visible row of this key, if readers may use it."""
        return next(iter(self.prefix((key,))), None)

    def prefix(self, keys: Iterable[RowKey]) -> list[int]:
        """Return the rows of the leading keys that readers may use."""
        rows = []
        index, opened, unverified = self.row_by_key, self.open_rows, self.unverified
        num_frames, usable_frames = self.allocator.num_frames, self._usable_frames
        for key in keys:
            row = index.get(key)
            if row is None or row in opened or unverified[row] or row % num_frames >= usable_frames:
                break
            rows.append(row)
        return rows

    def each(self, keys: Iterable[RowKey]) -> list[int]:
        """Return the row of each key; -1 where readers may use none."""
        index, opened, unverified = self.row_by_key, self.open_rows, self.unverified
        num_frames, usable_frames = self.allocator.num_frames, self._usable_frames
        return [
            row
            if (row := index.get(key, -1)) >= 0
            and row not in opened
            and not unverified[row]
            and row % num_frames < usable_frames
            else -1
            for key in keys
        ]

    def key(self, row: int) -> RowKey:
        """Return the key of a row that is not free."""
        return self._keys[row]

    def slot(self, row: int) -> Slot:
        """Return the slot of a visible row."""
        return Slot(row, self._generations[row])

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the slots of visible rows."""
        generations = self._generations
        return [Slot(row, generations[row]) for row in rows]

    def is_visible(self, slot: Slot) -> bool:
        """Does the index name this slot as a complete row?"""
        row, generation = slot
        return (
            row not in self.open_rows
            and self._generations[row] == generation
            and self.row_by_key.get(self._keys[row]) == row
        )

    def is_readable(self, number: int) -> bool:
        """Does the slot table match a visible row? If it does, publish the row to readers again.

        False: an engine overwrote the row's entries in the slot table, and maybe its bytes.
        """
        key, generation, table = self._keys[number], self._generations[number], self.table
        columns = range(table.num_columns)
        matches = table.key(number) == key and all(table.is_committed(number, generation, c) for c in columns)
        if matches and not self.unverified[number]:
            self._publish_key(key, number)
        return matches

    def mark_verified(self, number: int) -> None:
        """Let readers find an adopted row: its bytes match their checksums."""
        self.unverified[number] = 0
        if self.is_visible(self.slot(number)):
            self._publish_key(self._keys[number], number)

    def _publish_key(self, key: RowKey, number: int) -> None:
        if self._shared is not None:
            self._shared.insert(key, number)

    def _unindex(self, key: RowKey, number: int) -> None:
        if self.row_by_key.get(key) == number:
            del self.row_by_key[key]
        if self._shared is not None:  # before the slot is free
            self._shared.remove(key, number)
