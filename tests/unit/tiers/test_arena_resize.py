"""The arena grows and shrinks while clients have it mapped."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.mapping import MappedColumn
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.chains import one_chain

MIB = 1 << 20
GEOMETRY = Geometry(64 << 10, 2)
CAPACITY = 16 * MIB
OWNER = b"o" * 16


class Growing:
    """An arena that is populated in the background, and a way to wait for it."""

    def __init__(self, path, **options: int) -> None:
        self.arena = ArenaFile(path, CAPACITY, **options)
        self._changed = threading.Condition()

    def note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, 60)

    def taken_bytes(self) -> int:
        return self.arena.path.stat().st_blocks * 512

    def grow_to(self, num_rows: int) -> None:
        self.wait_for(lambda: self.arena.ready_rows == num_rows)


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """In memory, where a file takes its pages and nothing else."""
    with tempfile.TemporaryDirectory(prefix="arena-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def growing(shm_path):
    growing = Growing(shm_path / "arena")
    growing.arena.format(GEOMETRY)
    growing.arena.start(growing.note_change)
    growing.grow_to(growing.arena.num_rows)
    yield growing
    if not growing.arena._closing:
        growing.arena.close()


@pytest.fixture
def tier(growing):
    tier = MemoryTier(growing.arena)
    list(tier.adopt())
    tier.usable_slots = growing.arena.num_rows
    return tier


def fill(tier: MemoryTier) -> None:
    for number in range(tier.usable_slots):
        for column in range(2):
            slot = tier.reserve(number.to_bytes(64, "big"), column, OWNER, length=4).slot
            tier.arena.view(slot.row, column)[:4] = number.to_bytes(4, "big")
            tier.commit([slot], column, OWNER)


def test_memory_goes_back_and_comes_again(growing, tier):
    fill(tier)
    arena, before = growing.arena, growing.taken_bytes()
    num_rows = arena.rows_within(CAPACITY // 2)
    assert 0 < num_rows < arena.num_rows
    evicted = tier.vacate(num_rows)
    assert (evicted.num_evicted, evicted.blocked) == (arena.num_rows - num_rows, {})
    arena.resize(CAPACITY // 2)
    assert arena.ready_rows == num_rows
    assert arena.has_surplus
    assert arena.size_bytes > CAPACITY - MIB
    arena.give_back()
    gone = (arena.num_rows - num_rows) * 2 * GEOMETRY.slot_bytes
    growing.wait_for(lambda: growing.taken_bytes() == before - gone)
    growing.wait_for(lambda: arena.size_bytes == arena.target_bytes == CAPACITY // 2)
    for row in range(num_rows):
        assert bytes(arena.view(row, 1, 4)) == row.to_bytes(4, "big")
    arena.resize(CAPACITY)
    growing.grow_to(arena.num_rows)
    assert not arena.has_surplus
    assert growing.taken_bytes() == before


def test_a_client_that_has_it_mapped_reads_zeros_and_goes_on(growing, tier):
    fill(tier)
    arena = growing.arena
    mapped = MappedColumn(
        arena.path, arena.table_offset(1), arena.column_offset(1), GEOMETRY.slot_bytes, arena.num_rows
    )
    last = arena.num_rows - 1
    slot = tier.lookup((b"e" * 16, "r"), one_chain([last.to_bytes(64, "big")])).slots[0]
    assert mapped.slots[last, :4].tobytes() == last.to_bytes(4, "big")
    tier.release((b"e" * 16, "r"))
    tier.vacate(arena.rows_within(CAPACITY // 2))
    before = growing.taken_bytes()
    arena.resize(CAPACITY // 2)
    arena.give_back()
    growing.wait_for(lambda: growing.taken_bytes() < before - CAPACITY // 3)
    assert not mapped.slots[last].any()
    assert not mapped.holds(slot)
    mapped.close()


def test_what_is_there_stays_until_it_is_given_back(growing, tier):
    fill(tier)
    arena, before = growing.arena, growing.taken_bytes()
    last = [(arena.num_rows - number).to_bytes(64, "big") for number in (1, 2)]
    tier.lookup((b"e" * 16, "r"), one_chain(last[:1]))
    tier.pin(tier.lookup((b"e" * 16, "s"), one_chain(last[1:])).slots[0])
    tier.release((b"e" * 16, "s"))
    num_rows = arena.rows_within(CAPACITY // 2)
    assert tier.vacate(num_rows).blocked == {"leased": 1, "pinned": 1}
    arena.resize(CAPACITY // 2)
    arena.resize(CAPACITY // 4)
    arena.resize(CAPACITY // 2)
    assert growing.taken_bytes() == before
    assert arena.has_surplus
    assert bytes(arena.view(arena.num_rows - 1, 0, 4)) == (arena.num_rows - 1).to_bytes(4, "big")
    tier.release((b"e" * 16, "r"))
    assert tier.vacate(num_rows).blocked == {"pinned": 1}


def test_rows_that_are_written_or_in_quarantine_stay(growing, tier):
    arena = growing.arena
    for number in range(arena.num_rows):
        tier.reserve(number.to_bytes(64, "big"), 0, OWNER if number % 2 else b"p" * 16, length=4)
    tier.quarantine(OWNER)
    num_rows = arena.rows_within(CAPACITY // 2)
    num_odd = sum(number % 2 for number in range(num_rows, arena.num_rows))
    num_even = arena.num_rows - num_rows - num_odd
    assert tier.vacate(num_rows).blocked == {"reserved": num_even, "quarantined": num_odd}
    tier.end_quarantine(OWNER)
    assert tier.vacate(num_rows).blocked == {"reserved": num_even}


def test_it_is_never_smaller_than_an_extent_nor_larger_than_its_capacity(growing):
    arena = growing.arena
    least = arena.rows_within(0)
    assert least == 1
    assert arena.rows_within(1 << 60) == arena.num_rows
    arena.resize(0)
    arena.give_back()
    growing.wait_for(lambda: arena.ready_rows == least)
    # Its tables are there for all rows that it can have.
    growing.wait_for(lambda: 0 < arena.size_bytes == arena.column_offset(0) + 2 * GEOMETRY.slot_bytes)


def test_it_may_be_resized_while_it_is_populated(shm_path):
    growing = Growing(shm_path / "arena", huge_pages=True)
    arena = growing.arena
    arena.format(GEOMETRY)
    small = arena.rows_within(CAPACITY // 4)

    def shrink_once() -> None:
        if arena.ready_rows > small and not shrunk:
            shrunk.append(arena.ready_rows)
            arena.resize(CAPACITY // 4)
            arena.give_back()
        growing.note_change()

    shrunk: list[int] = []
    arena.start(shrink_once)
    growing.wait_for(lambda: bool(shrunk) and growing.taken_bytes() < CAPACITY // 3)
    assert arena.ready_rows == small
    arena.format(Geometry(128 << 10, 1))
    growing.wait_for(lambda: 0 < arena.ready_rows == arena.rows_within(CAPACITY // 4))
    arena.close()


def test_a_numa_node_that_does_not_exist_is_named(shm_path, monkeypatch):
    monkeypatch.setattr("lmcache.tiers.memory.kernel_pages.numa_nodes", lambda: [0, 1])
    with pytest.raises(ArenaError, match="no NUMA node 7; there are 0, 1"):
        ArenaFile(shm_path / "arena", CAPACITY, numa_node=7)
    assert not (shm_path / "arena").exists()


class TestSmallerThanItsFile:
    """The file is as long as the arena may become; memory is taken for its target alone."""

    @pytest.fixture
    def growing(self, shm_path):
        growing = Growing(shm_path / "arena", target_bytes=CAPACITY // 4)
        yield growing
        growing.arena.close()

    def is_settled_at(self, growing: Growing, num_bytes: int) -> bool:
        arena = growing.arena
        assert growing.taken_bytes() <= CAPACITY // 2 + MIB
        return arena.size_bytes == num_bytes and num_bytes - MIB < growing.taken_bytes() <= num_bytes

    def test_before_the_first_format_and_after_it(self, growing):
        arena = growing.arena
        arena.start(growing.note_change)
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 4))
        arena.resize(CAPACITY // 2)
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 2))
        arena.resize(CAPACITY // 4)
        arena.give_back()
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 4))
        arena.format(GEOMETRY)  # its two columns are far apart: other pages of the file
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 4))
        assert 0 < arena.ready_rows == arena.rows_within(CAPACITY // 4) < arena.num_rows // 3
        assert not arena.has_surplus
        arena.resize(CAPACITY // 2)
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 2))

    def test_rows_of_several_columns_are_ready_before_all_is_given_back(self, growing, monkeypatch):
        """Only a part of what was filled before the first format lies where rows are now."""
        arena, filled = growing.arena, []
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        taken, give_back = [], ArenaFile._give_back

        def noted(self, *extent) -> bool:
            filled.append((self.ready_rows, self._filled))
            assert self.taken_bytes <= CAPACITY // 4 < self.size_bytes
            return give_back(self, *extent)

        def checked(num_bytes: int) -> None:
            taken.append(growing.taken_bytes() + num_bytes)

        monkeypatch.setattr(ArenaFile, "_give_back", noted)
        monkeypatch.setattr("lmcache.tiers.memory.arena.check_room", checked)
        arena.format(Geometry(16 << 10, 4))
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 4))
        assert any(ready and then > arena.target_rows for ready, then in filled), filled
        assert max(taken) <= CAPACITY // 4

    def test_what_is_not_wanted_goes_back_though_there_is_no_room(self, growing, monkeypatch):
        arena, room = growing.arena, [1 << 40]
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_room", lambda: room[0])
        monkeypatch.setattr("lmcache.tiers.memory.arena._RETRY_SECONDS", 0.01)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        room[0] = 0
        arena.format(Geometry(16 << 10, 4))
        growing.wait_for(lambda: growing.taken_bytes() < CAPACITY // 8 and arena.growth_error is not None)
        room[0] = 1 << 40
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)

    def test_what_an_earlier_process_left_stays_until_it_is_given_back(self, growing):
        arena = growing.arena
        arena.format(GEOMETRY)
        arena.resize(CAPACITY // 2)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 2)
        num_rows, before = arena.ready_rows, growing.taken_bytes()
        arena.view(num_rows - 1, 1, 4)[:] = b"last"
        arena.close()
        growing.arena = arena = ArenaFile(arena.path, CAPACITY, target_bytes=CAPACITY // 4)
        arena.start(growing.note_change)
        growing.wait_for(lambda: 0 < arena.ready_rows == arena.target_rows)
        assert arena.has_surplus
        assert growing.taken_bytes() == before
        assert bytes(arena.view(num_rows - 1, 1, 4)) == b"last"
        arena.give_back()
        growing.wait_for(lambda: self.is_settled_at(growing, CAPACITY // 4))

    def test_an_earlier_process_that_took_no_more_left_nothing_to_give_back(self, growing):
        arena = growing.arena
        arena.format(GEOMETRY)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        arena.close()
        growing.arena = arena = ArenaFile(arena.path, CAPACITY, target_bytes=arena.target_bytes)
        assert arena._filled < arena.num_rows // 2

    def test_it_waits_for_room_and_says_so(self, growing, monkeypatch, caplog):
        arena, room = growing.arena, [128 * MIB]
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_room", lambda: room[0])
        monkeypatch.setattr("lmcache.tiers.memory.arena._STEP_BYTES", MIB)
        monkeypatch.setattr("lmcache.tiers.memory.arena._RETRY_SECONDS", 0.01)
        arena.format(GEOMETRY)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        room[0] = 64 * MIB
        arena.resize(CAPACITY)
        growing.wait_for(lambda: arena.growth_error is not None)
        assert "the memory limit of this container leaves 64Mi, of which 64Mi" in arena.growth_error
        assert arena.ready_rows == arena.rows_within(CAPACITY // 4)
        assert growing.taken_bytes() <= CAPACITY // 4
        room[0] = 1 << 40
        growing.wait_for(lambda: arena.ready_rows == arena.num_rows)
        growing.wait_for(lambda: arena.growth_error is None)
        assert caplog.text.count("no room") == 1

    def test_an_error_that_nobody_expects_is_told_and_not_the_end(self, growing, monkeypatch, caplog):
        arena, bugs = growing.arena, [ValueError("a bug")]

        def room(num_bytes: int) -> None:
            if bugs:
                raise bugs[0]

        monkeypatch.setattr("lmcache.tiers.memory.arena.check_room", room)
        monkeypatch.setattr("lmcache.tiers.memory.arena._RETRY_SECONDS", 0.01)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.growth_error is not None)
        assert "ValueError('a bug'); the arena" in arena.growth_error
        bugs.clear()
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        assert caplog.text.count("Traceback") == 1

    def test_what_is_populated_already_needs_no_room(self, growing, monkeypatch):
        arena = growing.arena
        arena.format(GEOMETRY)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        arena.close()
        monkeypatch.setattr("lmcache.tiers.memory.capacity.memory_room", lambda: 0)
        growing.arena = arena = ArenaFile(arena.path, CAPACITY, target_bytes=CAPACITY // 4)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
