"""Memory tiers over arenas of files, and what clients map of them."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_store.tiers.budgets import Budgets
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Arena
from lmcache_store.tiers.memory.mapping import MappedColumn, MappedIndex
from lmcache_store.tiers.memory.tier import MemoryTier


def tier_over(arena: Arena, budgets: Budgets | None = None) -> MemoryTier:
    """Return a memory tier that may use all rows, and adopts those of the last tier."""
    tier = MemoryTier(arena, budgets=budgets)
    tier.usable_slots = arena.num_rows
    for _ in tier.adopt():
        pass
    tier.release_adopted()
    return tier


def mapped_column(arena: ArenaFile, column: int) -> MappedColumn:
    geometry = arena.geometry
    return MappedColumn(
        arena.path,
        arena.table_offset(column),
        arena.column_offset(column),
        geometry.slot_bytes,
        arena.num_rows,
        geometry.slots_per_frame,
    )


def mapped_index(arena: ArenaFile) -> MappedIndex:
    return MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)


class Growing:
    """An arena that is populated in the background, and a way to wait for it."""

    def __init__(self, path: Path, capacity: int, **options: int) -> None:
        self.arena = ArenaFile(path, capacity, **options)
        self._changed = threading.Condition()

    def note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60)

    def taken_bytes(self) -> int:
        return self.arena.path.stat().st_blocks * 512

    def start_at(self, num_bytes: int) -> None:
        self.arena.start(self.note_change)
        self.wait_for(lambda: self.arena.size_bytes == num_bytes)

    def grow_to(self, num_rows: int) -> None:
        self.wait_for(lambda: self.arena.ready_rows == num_rows)


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """Return a folder in shared memory, where a file uses its data pages only."""
    with tempfile.TemporaryDirectory(prefix="arena-", dir="/dev/shm") as folder:
        yield Path(folder)
