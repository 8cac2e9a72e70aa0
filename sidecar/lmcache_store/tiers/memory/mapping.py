"""Clients' views of the arena file: a worker maps its column, a scheduler the index. Needs no torch.

**A file that another process shortens.** Every engine container may change the length of the file. An access
behind the end ends a process with SIGBUS. The sidecar never changes the length while clients use the file.
Each method therefore compares the length before it touches the memory. If the length differs, no row is found
and no copy is valid. This does not protect an access that is under way when the file becomes shorter.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.allocator import first_slot
from lmcache_store.tiers.memory.contracts import Found, Located, Slot
from lmcache_store.tiers.memory.kernel_pages import populate
from lmcache_store.tiers.memory.shared_index import BUCKET_BYTES, BUCKET_ENTRIES, U64, hash_of, hashes
from lmcache_store.tiers.memory.slots import ENTRY, SlotState


class _MappedFile:
    """The first ``end`` bytes of an arena file. Raises ArenaError when the file is shorter."""

    def __init__(self, path: str | Path, end: int, access: int) -> None:
        with Path(path).open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
            self._file_bytes = os.fstat(file.fileno()).st_size
            if end > self._file_bytes:
                raise ArenaError(
                    f"{path} has {self._file_bytes} bytes, but the arena at least {end}: not the same file"
                )
            self._map = mmap.mmap(file.fileno(), end, access=access)

    @property
    def is_whole(self) -> bool:
        """Has the file the length that it had when it was mapped?"""
        return self._map.size() == self._file_bytes

    def _check_whole(self) -> None:
        if not self.is_whole:
            raise ArenaError("another process changed the length of the arena: the sidecar replaces it")


class MappedColumn(_MappedFile):
    """A worker's view of its column of an arena file. The offsets are those of ``Attached``.

    Raises ArenaError when the file is too small, OSError when it can't be opened.
    """

    slots: NDArray[np.uint8]
    """Slots in memory order, ``[num_rows, slot_bytes]``. Never touch slots that are not populated."""

    def __init__(
        self,
        path: str | Path,
        table_offset: int,
        column_offset: int,
        slot_bytes: int,
        num_rows: int,
        slots_per_frame: int = 1,
    ) -> None:
        self._slots_per_frame = slots_per_frame
        end = max(table_offset + num_rows * ENTRY.itemsize, column_offset + num_rows * slot_bytes)
        super().__init__(path, end, mmap.ACCESS_WRITE)
        data = np.frombuffer(self._map, np.uint8)
        self.slots = data[column_offset : column_offset + num_rows * slot_bytes].reshape(num_rows, slot_bytes)
        table = data[table_offset : table_offset + num_rows * ENTRY.itemsize].view(ENTRY)
        self._generations = table["generation"]
        self._states = table["state"]

    def view(self, row: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the first ``num_bytes`` of a row, flat.

        Raises IndexError if the row can't be that long, ArenaError if the file has another length now.
        """
        self._check_whole()
        num_slots, slot_bytes = self.slots.shape
        first = first_slot(row, num_slots // self._slots_per_frame, self._slots_per_frame)
        max_bytes = (self._slots_per_frame - first % self._slots_per_frame) * slot_bytes
        if not (0 <= row < num_slots and 0 <= num_bytes <= max_bytes):
            raise IndexError(f"there is no row {row} of {num_bytes} bytes in the arena")
        return self.slots.reshape(-1)[first * slot_bytes :][:num_bytes]

    def populate(self, first: int, end: int) -> None:
        """Fault slots ``first`` .. ``end - 1`` into this process's page tables. Releases the GIL."""
        self._check_whole()
        if first < end:
            populate(self.slots[first:end].reshape(-1))

    def holds(self, slot: Slot) -> bool:
        """Is the slot committed under this generation? If so after a copy, the copy is valid."""
        # The state is read first and last: between two writes of the sidecar an entry is FREE.
        return bool(
            self.is_whole
            and self._states[slot.row] == SlotState.COMMITTED
            and self._generations[slot.row] == slot.generation
            and self._states[slot.row] == SlotState.COMMITTED
        )


class MappedIndex(_MappedFile):
    """A scheduler's read-only view of the shared index and the slot table's column 0; see ``shared_index``.

    Raises ArenaError when the file is too small, OSError when it can't be opened.
    """

    def __init__(
        self, path: str | Path, table_offset: int, num_rows: int, index_offset: int, num_buckets: int
    ) -> None:
        end = index_offset + num_buckets * BUCKET_BYTES
        super().__init__(path, end, mmap.ACCESS_READ)
        words = np.frombuffer(self._map, U64)
        first = table_offset // U64.itemsize
        self._table = words[first : first + num_rows * _QUADS].reshape(num_rows, _QUADS)
        self._buckets = words[index_offset // U64.itemsize :].reshape(num_buckets, BUCKET_ENTRIES)
        self._words = words.data
        self._first_entry, self._first_bucket = first, index_offset // U64.itemsize

    def find(self, keys: NDArray[np.uint64]) -> Found:
        """Find the leading visible rows of row keys ``[n, 8]`` (words). 128 keys take about 50 us."""
        rows, is_indexed = self._candidates(keys if self.is_whole else keys[:0])
        rows = rows[: _prefix(is_indexed)]
        is_there, generations = self._check(rows, keys[: len(rows)])
        num_found = _prefix(is_there)
        return Found(rows[:num_found], generations[:num_found])

    def find_each(self, keys: NDArray[np.uint64]) -> Located:
        """Find every visible row of row keys ``[n, 8]`` (words)."""
        if not self.is_whole:
            return Located(np.zeros(len(keys), bool), np.zeros(len(keys), np.int64), keys[:, 0])
        rows, is_indexed = self._candidates(keys)
        rows[~is_indexed] = 0
        is_there, generations = self._check(rows, keys)
        return Located(is_indexed & is_there, rows, generations)

    def find_few(self, keys: Iterable[RowKey]) -> list[Slot]:
        """Find the leading visible rows of row keys, as ``find`` does. 8 keys take about 12 us, or 70 us.

        The longer time applies if the code of this method is not in the CPU's caches. ``find`` has more code,
        so it then takes 300 us.
        """
        slots: list[Slot] = []
        for key in keys if self.is_whole else ():
            if (slot := self._slot(key)) is None:
                break
            slots.append(slot)
        return slots

    def _slot(self, key: RowKey) -> Slot | None:
        words, mixed = self._words, hash_of(key)
        for bucket in (mixed, mixed + 1):
            first = self._first_bucket + bucket % len(self._buckets) * BUCKET_ENTRIES
            for entry in words[first : first + BUCKET_ENTRIES]:
                row = entry - (mixed >> 32 << 32) - 1  # not a row if the upper halves differ
                if 0 <= row < len(self._table):
                    place = self._first_entry + row * _QUADS
                    before = words[place + _GENERATION], words[place + _STATE]
                    has_key = words[place : place + _KEY].tobytes() == key
                    since = words[place + _GENERATION], words[place + _STATE]
                    if has_key and before == since and since[1] == SlotState.COMMITTED:
                        return Slot(row, since[0])
        return None

    def _candidates(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows that the index names, and for which keys it names a row."""
        mixed = hashes(keys)
        home = (mixed & np.uint64(len(self._buckets) - 1)).astype(np.int64)
        after = (home + 1) & (len(self._buckets) - 1)
        entries = np.concatenate(
            (self._buckets.take(home, axis=0), self._buckets.take(after, axis=0)), axis=1
        )
        upper = mixed >> _HALF
        is_match = entries >> _HALF == upper[:, None]
        entry = entries[np.arange(len(keys)), is_match.argmax(axis=1)]
        rows = (entry & _LOWER).astype(np.int64) - 1
        return rows, (entry >> _HALF == upper) & (rows >= 0) & (rows < len(self._table))

    def _check(
        self, rows: NDArray[np.int64], keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """Return which rows have these keys in the slot table, and their generations."""
        before = self._table[rows, _GENERATION_AND_STATE]
        names = self._table[rows, :_KEY]
        since = self._table[rows, _GENERATION_AND_STATE]
        is_whole = (before == since).all(axis=1) & (since[:, 1] == SlotState.COMMITTED)
        return is_whole & (names == keys).all(axis=1), since[:, 0]


_HALF, _LOWER = np.uint64(32), np.uint64((1 << 32) - 1)
# In 8-byte words of an entry of column 0. The upper half of the state's word is the column number, 0.
_KEY = ENTRY["key"].itemsize // U64.itemsize
_GENERATION, _STATE = 13, 14
_GENERATION_AND_STATE = slice(_GENERATION, _STATE + 1)
_QUADS = ENTRY.itemsize // U64.itemsize


def _prefix(flags: NDArray[np.bool_]) -> int:
    """Return the number of leading True values."""
    return len(flags) if flags.all() else int(flags.argmin())
