from __future__ import annotations

import os
import threading
import time

import pytest

from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.capacity import check_capacity, check_room, memory_limit, memory_room
from lmcache.tiers.memory.contracts import Geometry, Slot
from lmcache.tiers.memory.layout import HEAD_BYTES, ArenaLayout
from lmcache.tiers.memory.mapping import MappedColumn
from lmcache.tiers.memory.slots import ENTRY_BYTES, State
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.pages import PAGE_BYTES

MIB = 1 << 20
GEOMETRY = Geometry(64 << 10, 2)
OWNER = b"o" * 16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arena"


@pytest.fixture
def opened(path):
    """Open arenas that are closed at the end."""
    arenas = []

    def open_arena(capacity: int = 8 * MIB) -> ArenaFile:
        arenas.append(ArenaFile(path, capacity))
        return arenas[-1]

    yield open_arena
    for arena in arenas:
        if not arena._closing:
            arena.close()


def fill(arena: ArenaFile) -> list[int]:
    """Populate all of it; return the numbers of ready rows on the way."""
    seen = []
    grown = threading.Condition()

    def on_growth() -> None:
        with grown:
            seen.append(arena.ready_rows)
            grown.notify()

    arena.start(on_growth)
    with grown:
        assert grown.wait_for(lambda: (seen and seen[-1] == arena.num_rows > 0) or arena.growth_error, 60)
    return seen


class TestLayout:
    @pytest.mark.parametrize("capacity", [8 * MIB, 1 << 30, (1 << 30) + 12345 * 4096])
    @pytest.mark.parametrize("geometry", [Geometry(4096, 1), GEOMETRY, Geometry(1 << 20, 7)])
    def test_nothing_overlaps_and_little_is_wasted(self, capacity, geometry):
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

    def test_too_small_says_how_much_one_row_needs(self):
        with pytest.raises(ArenaError, match=r"one needs \d+ bytes"):
            ArenaLayout.plan(64 << 10, GEOMETRY)

    def test_slots_are_whole_pages(self):
        with pytest.raises(ArenaError, match="whole pages"):
            ArenaLayout.plan(MIB, Geometry(5000, 1))


class TestFile:
    def test_entries_have_the_size_of_the_contract(self):
        assert ENTRY_BYTES == 128

    def test_rows_become_ready_in_extents(self, opened):
        arena = opened()
        arena.format(GEOMETRY)
        seen = fill(arena)
        assert seen == sorted(seen)
        assert len(set(seen)) > 4
        assert os.stat(arena.path).st_blocks * 512 >= arena.column_offset(1) + arena.num_rows * 65536

    def test_is_filled_before_it_is_formatted_too(self, opened):
        arena = opened()
        filled = threading.Event()
        arena.start(lambda: filled.set() if os.stat(arena.path).st_blocks * 512 >= 8 * MIB else None)
        assert filled.wait(60)
        assert arena.ready_rows == 0
        arena.close()

    def test_format_while_it_is_being_filled(self, opened):
        arena = opened(32 * MIB)
        ready = threading.Event()

        def on_growth() -> None:
            if arena.num_rows and arena.ready_rows == arena.num_rows:
                ready.set()

        arena.start(on_growth)
        arena.format(GEOMETRY)
        arena.format(Geometry(128 << 10, 1))
        assert ready.wait(60)

    def test_growth_that_is_done_before_the_format_is_counts(self, opened, monkeypatch):
        arena = opened(PAGE_BYTES * 64)
        grown, seen = threading.Event(), []

        def on_growth() -> None:
            seen.append(arena.ready_rows)
            grown.set()

        real = arena._write_head

        def late(geometry: Geometry | None, first_generation: int) -> None:
            if geometry is not None:
                arena.start(on_growth)
                assert grown.wait(60)
            real(geometry, first_generation)

        monkeypatch.setattr(arena, "_write_head", late)
        arena.format(Geometry(PAGE_BYTES * 32, 1))
        assert seen[0] == arena.num_rows == 1

    @pytest.mark.parametrize("slot_bytes", [None, PAGE_BYTES, 64 << 10, 1 << 20])
    def test_its_file_takes_what_was_asked_for_and_no_more(self, opened, path, slot_bytes):
        """So that a volume of that size is large enough."""
        arena, full = opened(8 * MIB), threading.Event()

        def on_growth() -> None:
            if arena._grown == arena._layout.num_rows:
                full.set()

        if slot_bytes is not None:
            arena.format(Geometry(slot_bytes, 2))
        arena.start(on_growth)
        assert full.wait(60)
        assert path.stat().st_size == 8 * MIB
        own_blocks = 16 << 10  # of a file system that is no tmpfs, for its list of extents
        assert 6 * MIB <= path.stat().st_blocks * 512 <= 8 * MIB + own_blocks

    def test_slots_are_apart_and_reach_clients(self, opened, path):
        arena = opened()
        arena.format(GEOMETRY)
        for row in range(arena.num_rows):
            for column in range(2):
                arena.view(row, column)[:] = bytes([row + 1, column]) * (32 << 10)
        for column in range(2):
            mapped = MappedColumn(
                path, arena.table_offset(column), arena.column_offset(column), 64 << 10, arena.num_rows
            )
            mapped.populate(0, arena.num_rows)
            for row in range(arena.num_rows):
                assert mapped.slots[row].tobytes() == bytes([row + 1, column]) * (32 << 10)
            mapped.close()
        with pytest.raises(IndexError):
            arena.view(arena.num_rows, 0)

    def test_client_sees_whether_it_still_holds_a_slot(self, opened, path):
        arena = opened()
        arena.format(GEOMETRY)
        tier = MemoryTier(arena)
        tier.usable_slots = 1
        list(tier.adopt())
        mapped = MappedColumn(path, arena.table_offset(1), arena.column_offset(1), 64 << 10, arena.num_rows)
        slots = [tier.reserve(b"k" * 64, column, OWNER, length=1).slot for column in range(2)]
        assert not mapped.holds(slots[1])
        for column in range(2):
            tier.commit([slots[column]], column, OWNER)
        assert mapped.holds(slots[1])
        assert not mapped.holds(Slot(slots[1].row, slots[1].generation + 1))
        tier.reserve(b"l" * 64, 1, OWNER, length=1)
        assert not mapped.holds(slots[1])
        mapped.close()

    def test_a_file_smaller_than_the_sidecar_says_is_refused(self, opened, path):
        opened(8 * MIB)
        with pytest.raises(ArenaError, match="not the same file"):
            MappedColumn(path, 4096, 8 * MIB, 65536, 1)

    def test_one_sidecar_per_file(self, opened, path):
        opened()
        with pytest.raises(ArenaError, match="in use by another sidecar"):
            ArenaFile(path, 8 * MIB)

    def test_somebody_elses_file_is_left_alone(self, path):
        path.write_bytes(b"precious" * 1024)
        with pytest.raises(ArenaError, match="not an arena"):
            ArenaFile(path, 8 * MIB)
        assert path.read_bytes() == b"precious" * 1024

    def test_another_capacity_makes_another_file(self, opened, path):
        opened().close()
        inode = path.stat().st_ino
        with path.open("rb"):  # a client has it open: its bytes must stay
            arena = opened(16 * MIB)
            assert path.stat().st_ino != inode
        assert arena.geometry is None

    @pytest.mark.parametrize("limit", [None, 20 * MIB])
    def test_a_capacity_that_does_not_fit_loses_nothing(self, opened, path, monkeypatch, limit):
        arena = opened()
        arena.format(GEOMETRY)
        arena.table.reserve(3, 1, key=b"k" * 64, owner=OWNER, length=5, generation=7)
        arena.close()
        before = path.read_bytes()
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_limit", lambda: limit)
        with pytest.raises(ArenaError, match="no room"):
            ArenaFile(path, 1 << 50 if limit is None else 16 * MIB)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert opened().table.snapshot(3, 4)[1]["state"] == State.RESERVED

    def test_a_fill_cut_short_by_closing_promises_no_rows(self, opened, monkeypatch):
        arena = opened()
        arena.format(GEOMETRY)
        taking = threading.Event()

        def slow(memory: object) -> None:
            taking.set()
            while not arena._closing:
                time.sleep(0.001)

        monkeypatch.setattr("lmcache.tiers.memory.arena.populate", slow)
        monkeypatch.setattr("lmcache.tiers.memory.arena._STEP_BYTES", 4096)
        arena.start(lambda: None)
        assert taking.wait(60)
        arena.close()
        assert arena.ready_rows == 0

    def test_unreachable_path_says_so(self, tmp_path):
        with pytest.raises(ArenaError, match="missing/arena"):
            ArenaFile(tmp_path / "missing" / "arena", MIB)

    def test_epochs_and_generations_rise_over_restart_and_format(self, opened):
        epochs, generations = [], []
        for geometry in (GEOMETRY, None, Geometry(128 << 10, 1), None):
            arena = opened()
            if geometry:
                arena.format(geometry)
            epochs.append(arena.epoch)
            tier = MemoryTier(arena)
            tier.usable_slots = arena.num_rows
            list(tier.adopt())
            tier.release_adopted()
            slot = tier.reserve(bytes([len(epochs)]) * 64, 0, OWNER, length=1).slot
            generations.append(slot.generation)
            del tier
            arena.close()
        assert epochs == sorted(set(epochs))
        assert generations == sorted(set(generations))

    def test_no_room_while_growing_keeps_what_there_is(self, opened, monkeypatch):
        arena = opened()
        arena.format(GEOMETRY)
        real, half = os.posix_fallocate, 4 * MIB

        def full_volume(fd: int, offset: int, length: int) -> None:
            if offset > half:
                raise OSError(28, "No space left on device")
            real(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", full_volume)
        arena.format(Geometry(64 << 10, 1))
        fill(arena)
        assert 0 < arena.ready_rows < arena.num_rows
        assert "No space left" in arena.growth_error


def lay_out(folder, membership, files):
    """What the kernel tells of a process's control groups."""
    (folder / "cgroup").write_text(membership)
    for name, text in files.items():
        file = folder / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


class TestRoom:
    def test_volume_too_small_says_how_much_and_where(self, path):
        with pytest.raises(ArenaError, match=rf"{path} needs 1024Ti more, its volume has"):
            ArenaFile(path, 1 << 50)
        assert not path.exists()

    def test_what_the_file_holds_already_counts(self, path, monkeypatch):
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_limit", lambda: None)
        volume = os.statvfs(path.parent)
        too_much = volume.f_bavail * volume.f_frsize + (1 << 34)
        with pytest.raises(ArenaError, match="volume"):
            check_capacity(path, too_much)
        check_capacity(path, too_much, 1 << 35)

    def test_memory_limit_says_so(self, path, monkeypatch):
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_limit", lambda: 100 * MIB)
        with pytest.raises(ArenaError, match=r"memory limit of this container is 100Mi"):
            check_capacity(path, 90 * MIB)
        check_capacity(path, 30 * MIB)

    @pytest.mark.parametrize(
        ("membership", "files", "limit"),
        [
            ("0::/\n", {"memory.max": "1000\n"}, 1000),
            ("0::/\n", {"memory.max": "max\n"}, None),
            ("0::/a/b\n", {"a/memory.max": "500\n", "a/b/memory.max": "max\n", "memory.max": "800"}, 500),
            ("0::/host/pod\n", {"memory.max": "800"}, 800),
            ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "700"}, 700),
            ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
            ("", {}, None),
        ],
    )
    def test_limits_of_cgroups(self, tmp_path, membership, files, limit):
        lay_out(tmp_path, membership, files)
        assert memory_limit(tmp_path / "fs", tmp_path / "cgroup") == limit

    @pytest.mark.parametrize(
        ("membership", "files", "room"),
        [
            ("0::/\n", {"memory.max": "1000\n", "memory.current": "400\n"}, 600),
            ("0::/\n", {"memory.max": "max\n", "memory.current": "400\n"}, None),
            (
                "0::/a/b\n",
                {
                    "a/memory.max": "500\n",
                    "a/memory.current": "450\n",
                    "a/b/memory.max": "400\n",
                    "a/b/memory.current": "50\n",
                },
                50,
            ),
            (
                "0::/\n",
                {
                    "memory.max": "1000\n",
                    "memory.current": "900\n",
                    "memory.stat": "anon 5\ninactive_file 30\nactive_file 7\nshmem 800\nfile 837\n",
                },
                137,
            ),
            (
                "4:memory:/x\n",
                {
                    "memory/x/memory.limit_in_bytes": "700",
                    "memory/x/memory.usage_in_bytes": "800",
                    "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
                },
                -80,
            ),
            ("", {}, None),
        ],
    )
    def test_room_in_cgroups(self, tmp_path, membership, files, room):
        lay_out(tmp_path, membership, files)
        assert memory_room(tmp_path / "fs", tmp_path / "cgroup") == room

    def test_some_is_kept_free(self, monkeypatch):
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_room", lambda: 100 * MIB)
        check_room(36 * MIB)
        with pytest.raises(ArenaError, match="leaves 100Mi, of which 64Mi stay free"):
            check_room(37 * MIB)


def test_engines_of_the_same_group_can_map_it(opened, path):
    umask = os.umask(0o077)
    try:
        opened()
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o660


def test_another_file_gives_no_slot_that_the_last_one_gave(opened, path):
    slots = []
    for _ in ("first", "second"):
        arena = opened()
        arena.format(GEOMETRY)
        memory = MemoryTier(arena)
        for _ in memory.adopt():
            pass
        memory.usable_slots = arena.num_rows
        slots.append(memory.reserve(b"k" * 64, 0, OWNER, length=1).slot)
        arena.close()
        path.unlink()
    assert None not in slots
    assert slots[0] != slots[1]
