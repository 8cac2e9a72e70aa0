import asyncio
import os
import threading
import time

import numpy as np
import pytest

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Slot
from lmcache_store.tiers.memory.layout import HEAD_BYTES, ArenaLayout
from lmcache_store.tiers.memory.mapping import MappedColumn
from lmcache_store.tiers.memory.slots import ENTRY_BYTES, NO_CHECKSUM, SlotState
from lmcache_store.tiers.pages import PAGE_BYTES
from lmcache_store.tiers.tiered.checksums import Checksums
from tests.harness.tiers.arenas import Growing, mapped_column, mapped_index, tier_over

MIB = 1 << 20
GEOMETRY = Geometry(64 << 10, 2)
OWNER = b"o" * 16


@pytest.fixture
def grown(path):
    """Open arenas that are populated in the background, and close them at teardown."""
    opened = []

    def open_arena(capacity: int = 8 * MIB) -> Growing:
        opened.append(Growing(path, capacity))
        return opened[-1]

    yield open_arena
    for growing in opened:
        if not growing.arena._closing:
            growing.arena.close()


@pytest.fixture
def opened(grown):
    return lambda *capacity: grown(*capacity).arena


def first_slot(arena: ArenaFile, key: bytes) -> Slot:
    slot = tier_over(arena).reserve(key, 0, OWNER, length=1).slot
    assert slot is not None
    return slot


class TestLayout:
    @pytest.mark.parametrize("capacity", [8 * MIB, 1 << 30, (1 << 30) + 12345 * 4096])
    @pytest.mark.parametrize("geometry", [Geometry(4096, 1), GEOMETRY, Geometry(1 << 20, 7)])
    def test_columns_do_not_overlap_and_waste_little(self, capacity, geometry):
        layout = ArenaLayout.plan(capacity, geometry)
        last = geometry.num_columns - 1
        assert layout.table_offset(0) == HEAD_BYTES
        assert layout.table_offset(last) + layout.num_rows * ENTRY_BYTES <= layout.data_offset
        for column in range(last):
            assert layout.slot_offset(layout.num_rows, column) <= layout.slot_offset(0, column + 1)
        assert layout.slot_offset(layout.num_rows, last) <= capacity
        assert layout.slot_offset(0, last) % 4096 == 0
        used = layout.num_rows * geometry.num_columns * (geometry.slot_bytes + ENTRY_BYTES)
        assert used > capacity * 0.96 - 2 * geometry.slot_bytes * geometry.num_columns

    def test_refuses_too_small_capacity_with_the_bytes_of_a_row(self):
        with pytest.raises(ArenaError, match=r"one row needs \d+ bytes"):
            ArenaLayout.plan(64 << 10, GEOMETRY)

    def test_refuses_slots_of_partial_pages(self):
        with pytest.raises(ArenaError, match="whole pages"):
            ArenaLayout.plan(MIB, Geometry(5000, 1))


class TestFile:
    def test_rows_become_ready_in_extents(self, grown):
        growing, ready_counts = grown(), []
        arena = growing.arena
        arena.format(GEOMETRY)

        def on_growth() -> None:
            ready_counts.append(arena.ready_rows)
            growing.note_change()

        arena.start(on_growth)
        growing.grow_to(arena.num_rows)
        assert ready_counts == sorted(ready_counts)
        assert len(set(ready_counts)) > 4
        assert growing.taken_bytes() >= arena.column_offset(1) + arena.num_rows * 65536

    def test_format_during_population_makes_all_rows_ready(self, grown):
        growing = grown(32 * MIB)
        growing.arena.start(growing.note_change)
        growing.arena.format(GEOMETRY)
        growing.arena.format(Geometry(128 << 10, 1))
        growing.grow_to(growing.arena.num_rows)

    def test_rows_populated_before_format_ends_are_ready(self, grown, monkeypatch):
        growing = grown(PAGE_BYTES * 64)
        arena, real = growing.arena, growing.arena._write_head

        def write_late(geometry: Geometry | None, first_generation: int) -> None:
            if geometry is not None:
                arena.start(growing.note_change)
                growing.wait_for(lambda: arena.ready_rows == arena.num_rows == 1)
            real(geometry, first_generation)

        monkeypatch.setattr(arena, "_write_head", write_late)
        arena.format(Geometry(PAGE_BYTES * 32, 1))
        assert arena.ready_rows == 1

    @pytest.mark.parametrize("slot_bytes", [None, PAGE_BYTES, 64 << 10, 1 << 20])
    def test_file_uses_no_more_than_its_capacity(self, grown, path, slot_bytes):
        """A volume of the arena's capacity is large enough."""
        growing = grown()
        if slot_bytes is not None:
            growing.arena.format(Geometry(slot_bytes, 2))
        growing.arena.start(growing.note_change)
        growing.wait_for(lambda: growing.arena._num_ready == growing.arena._layout.num_rows)
        assert path.stat().st_size == 8 * MIB
        extent_list_bytes = 16 << 10  # file systems other than tmpfs store a list of extents
        assert 6 * MIB <= growing.taken_bytes() <= 8 * MIB + extent_list_bytes

    def test_client_sees_whether_its_slot_is_valid(self, opened):
        arena = opened()
        arena.format(GEOMETRY)
        tier = tier_over(arena)
        tier.usable_slots = 1
        mapped = mapped_column(arena, 1)
        slots = [tier.reserve(b"k" * 64, column, OWNER, length=1).slot for column in range(2)]
        assert not mapped.holds(slots[1])
        for column in range(2):
            tier.commit([slots[column]], column, OWNER)
        assert mapped.holds(slots[1])
        assert not mapped.holds(Slot(slots[1].row, slots[1].generation + 1))
        tier.reserve(b"l" * 64, 1, OWNER, length=1)
        assert not mapped.holds(slots[1])

    @pytest.mark.parametrize("num_bytes", [0, HEAD_BYTES, 7 * MIB, 9 * MIB])
    def test_no_row_of_a_file_of_another_length_is_read_or_recorded(self, opened, path, num_bytes):
        arena = opened()
        arena.format(Geometry(64 << 10, 1))
        tier = tier_over(arena)
        slot = tier.reserve(b"k" * 64, 0, OWNER, length=1).slot
        tier.commit([slot], 0, OWNER)
        column, index = mapped_column(arena, 0), mapped_index(arena)
        keys = np.frombuffer(b"k" * 64, "<u8").reshape(1, 8)
        assert (column.holds(slot), index.find(keys).slots()) == (True, [slot])
        os.truncate(path, num_bytes)
        assert not column.holds(slot)
        assert not index.find(keys).slots()
        assert not index.find_each(keys).is_there.any()
        for access in (lambda: column.view(slot.row, 1), lambda: column.populate(0, 1)):
            with pytest.raises(ArenaError, match="changed the length"):
                access()
        assert arena.is_lost
        assert path.stat().st_size == max(num_bytes, 8 * MIB + PAGE_BYTES)
        assert not any(arena.view(slot.row, 0)) or num_bytes > 7 * MIB  # without a SIGBUS
        assert tier.pin(slot) is None

        async def record() -> None:
            checksums = Checksums(tier)
            tier._rows.pin(slot.row)  # as a commit does, before the file was changed
            os.truncate(path, num_bytes)  # once more, so that no check has made the file longer
            await checksums.record(slot)
            await checksums.close()

        asyncio.run(record())
        assert arena.table.checksum(slot.row, 0) == NO_CHECKSUM
        assert not column.holds(slot)

    def test_refuses_rows_beyond_the_last_one(self, opened):
        arena = opened()
        arena.format(GEOMETRY)
        with pytest.raises(IndexError):
            arena.view(arena.num_rows, 0)

    def test_client_refuses_file_smaller_than_announced(self, opened, path):
        opened(8 * MIB)
        with pytest.raises(ArenaError, match="not the same file"):
            MappedColumn(path, 4096, 8 * MIB, 65536, 1)

    def test_refuses_foreign_file_without_changing_its_bytes(self, path):
        path.write_bytes(b"precious" * 1024)
        with pytest.raises(ArenaError, match="not an arena"):
            ArenaFile(path, 8 * MIB)
        assert path.read_bytes() == b"precious" * 1024

    def test_new_capacity_creates_a_new_file(self, opened, path):
        opened().close()
        inode = path.stat().st_ino
        with path.open("rb"):  # a client has the old file open, so its bytes must not change
            arena = opened(16 * MIB)
            assert path.stat().st_ino != inode
        assert arena.geometry is None

    @pytest.mark.parametrize("limit", [None, 20 * MIB])
    def test_refused_capacity_keeps_the_old_rows(self, opened, path, monkeypatch, limit):
        arena = opened()
        arena.format(GEOMETRY)
        arena.table.reserve(3, 1, key=b"k" * 64, owner=OWNER, length=5, generation=7, tenant=b"")
        arena.close()
        before = path.read_bytes()
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.memory_limit", lambda: limit)
        with pytest.raises(ArenaError, match="not enough memory"):
            ArenaFile(path, 1 << 50 if limit is None else 16 * MIB)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert opened().table.snapshot(3, 4)[1]["state"] == SlotState.RESERVED

    def test_closing_during_population_leaves_no_ready_rows(self, opened, monkeypatch):
        arena = opened()
        arena.format(GEOMETRY)
        populating = threading.Event()

        def populate_slowly(memory: object) -> None:
            populating.set()
            while not arena._closing:
                time.sleep(0.001)  # real time: polls

        monkeypatch.setattr("lmcache_store.tiers.memory.growth.kernel_pages.populate", populate_slowly)
        monkeypatch.setattr("lmcache_store.tiers.memory.growth._STEP_BYTES", 4096)
        arena.start(lambda: None)
        assert populating.wait(60)
        arena.close()
        assert arena.ready_rows == 0

    def test_error_names_unreachable_path(self, tmp_path):
        with pytest.raises(ArenaError, match="missing/arena"):
            ArenaFile(tmp_path / "missing" / "arena", MIB)

    def test_epochs_and_generations_increase_over_restart_and_format(self, opened):
        epochs, generations = [], []
        for geometry in (GEOMETRY, None, Geometry(128 << 10, 1), None):
            arena = opened()
            if geometry:
                arena.format(geometry)
            epochs.append(arena.epoch)
            generations.append(first_slot(arena, bytes([len(epochs)]) * 64).generation)
            arena.close()
        assert epochs == sorted(set(epochs))
        assert generations == sorted(set(generations))

    def test_new_file_never_repeats_slots_of_the_last_file(self, opened, path):
        slots = []
        for _ in ("first", "second"):
            arena = opened()
            arena.format(GEOMETRY)
            slots.append(first_slot(arena, b"k" * 64))
            arena.close()
            path.unlink()
        assert slots[0] != slots[1]

    def test_full_volume_during_growth_keeps_ready_rows(self, grown, monkeypatch):
        growing = grown()
        arena = growing.arena
        arena.format(GEOMETRY)
        real, half = os.posix_fallocate, 4 * MIB

        def fail_beyond_half(fd: int, offset: int, length: int) -> None:
            if offset > half:
                raise OSError(28, "No space left on device")
            real(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", fail_beyond_half)
        arena.format(Geometry(64 << 10, 1))
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.growth_error is not None)
        assert 0 < arena.ready_rows < arena.num_rows
        assert "No space left" in arena.growth_error


def test_processes_of_the_same_unix_group_can_map_the_file(opened, path):
    umask = os.umask(0o077)
    try:
        opened()
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o660
