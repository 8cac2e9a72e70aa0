"""The arena grows and shrinks while clients have it mapped."""

from __future__ import annotations

import threading
from collections.abc import Callable

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

    def __init__(self, path, **options: bool) -> None:
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
def growing(tmp_path):
    growing = Growing(tmp_path / "arena")
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
    gone = (arena.num_rows - num_rows) * 2 * GEOMETRY.slot_bytes
    growing.wait_for(lambda: growing.taken_bytes() == before - gone)
    assert arena.ready_rows == num_rows
    for row in range(num_rows):
        assert bytes(arena.view(row, 1, 4)) == row.to_bytes(4, "big")
    arena.resize(CAPACITY)
    growing.grow_to(arena.num_rows)
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
    growing.wait_for(lambda: growing.taken_bytes() < before - CAPACITY // 3)
    assert not mapped.slots[last].any()
    assert not mapped.holds(slot)
    mapped.close()


def test_rows_in_use_are_a_reason_to_refuse(growing, tier):
    fill(tier)
    arena = growing.arena
    num_rows = arena.rows_within(CAPACITY // 2)
    last = [(arena.num_rows - number).to_bytes(64, "big") for number in (1, 2)]
    tier.lookup((b"e" * 16, "r"), one_chain(last[:1]))
    tier.pin(tier.lookup((b"e" * 16, "s"), one_chain(last[1:])).slots[0])
    tier.release((b"e" * 16, "s"))
    assert tier.vacate(num_rows).blocked == {"leased": 1, "pinned": 1}
    before = growing.taken_bytes()
    with pytest.raises(ArenaError, match="2 rows beyond 8388608 bytes of the arena are in use"):
        arena.resize(CAPACITY // 2)
    assert arena.ready_rows == arena.num_rows
    assert growing.taken_bytes() == before
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
    assert 0 < least < arena.num_rows // 8
    assert arena.rows_within(1 << 60) == arena.num_rows
    arena.resize(0)
    growing.wait_for(lambda: arena.ready_rows == least)


def test_it_may_be_resized_while_it_is_populated(tmp_path):
    growing = Growing(tmp_path / "arena", huge_pages=True)
    arena = growing.arena
    arena.format(GEOMETRY)
    small = arena.rows_within(CAPACITY // 4)

    def shrink_once() -> None:
        if arena.ready_rows > small and not shrunk:
            shrunk.append(arena.ready_rows)
            arena.resize(CAPACITY // 4)
        growing.note_change()

    shrunk: list[int] = []
    arena.start(shrink_once)
    growing.wait_for(lambda: bool(shrunk) and growing.taken_bytes() < CAPACITY // 3)
    assert arena.ready_rows == small
    arena.format(Geometry(128 << 10, 1))
    growing.wait_for(lambda: 0 < arena.ready_rows == arena.rows_within(CAPACITY // 4))
    arena.close()


def test_a_numa_node_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lmcache.tiers.memory.kernel_pages.numa_nodes", lambda: [0, 1])
    with pytest.raises(ArenaError, match="no NUMA node 7; there are 0, 1"):
        ArenaFile(tmp_path / "arena", CAPACITY, numa_node=7)
    assert not (tmp_path / "arena").exists()


def test_before_the_first_format_there_is_nothing_to_resize(tmp_path):
    arena = ArenaFile(tmp_path / "arena", CAPACITY)
    with pytest.raises(ArenaError, match="not formatted"):
        arena.resize(CAPACITY // 2)
    arena.close()
