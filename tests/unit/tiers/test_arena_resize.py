"""Resizing of an arena that clients have mapped."""

import threading

import pytest

from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.tiers.arenas import Growing, shm_path, tier_over
from tests.harness.tiers.chains import one_chain

__all__ = ["shm_path"]

MIB = 1 << 20
GEOMETRY = Geometry(64 << 10, 2)
CAPACITY = 16 * MIB
OWNER = b"o" * 16


@pytest.fixture
def growing(shm_path):
    growing = Growing(shm_path / "arena", CAPACITY)
    growing.arena.format(GEOMETRY)
    growing.arena.start(growing.note_change)
    growing.grow_to(growing.arena.num_rows)
    yield growing
    if not growing.arena._closing:
        growing.arena.close()


@pytest.fixture
def tier(growing):
    return tier_over(growing.arena)


def fill(tier: MemoryTier) -> None:
    for number in range(tier.usable_slots):
        for column in range(2):
            slot = tier.reserve(number.to_bytes(64, "big"), column, OWNER, length=4).slot
            tier.arena.view(slot.row, column)[:4] = number.to_bytes(4, "big")
            tier.commit([slot], column, OWNER)


def test_shrinking_frees_memory_and_growth_populates_new_memory(growing, tier):
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
    arena.release_surplus()
    freed_bytes = (arena.num_rows - num_rows) * 2 * GEOMETRY.slot_bytes
    growing.wait_for(lambda: growing.taken_bytes() == before - freed_bytes)
    growing.wait_for(lambda: arena.size_bytes == arena.target_bytes == CAPACITY // 2)
    for row in range(num_rows):
        assert bytes(arena.view(row, 1, 4)) == row.to_bytes(4, "big")
    arena.resize(CAPACITY)
    growing.grow_to(arena.num_rows)
    assert not arena.has_surplus
    assert growing.taken_bytes() == before


def test_memory_is_freed_only_by_release_surplus(growing, tier):
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


def test_size_is_limited_to_an_extent_and_the_capacity(growing):
    arena = growing.arena
    min_rows = arena.rows_within(0)
    assert min_rows == 1
    assert arena.rows_within(1 << 60) == arena.num_rows
    arena.resize(0)
    arena.release_surplus()
    growing.wait_for(lambda: arena.ready_rows == min_rows)
    # The tables have entries for all rows of the full capacity.
    growing.wait_for(lambda: 0 < arena.size_bytes == arena.column_offset(0) + 2 * GEOMETRY.slot_bytes)


def test_resizes_during_population(shm_path):
    growing = Growing(shm_path / "arena", CAPACITY, huge_pages=True)
    arena = growing.arena
    arena.format(GEOMETRY)
    small = arena.rows_within(CAPACITY // 4)

    def shrink_once() -> None:
        if arena.ready_rows > small and not has_shrunk.is_set():
            arena.resize(CAPACITY // 4)
            arena.release_surplus()
            has_shrunk.set()
        growing.note_change()

    has_shrunk = threading.Event()
    arena.start(shrink_once)
    growing.wait_for(lambda: has_shrunk.is_set() and growing.taken_bytes() < CAPACITY // 3)
    assert arena.ready_rows == small
    arena.format(Geometry(128 << 10, 1))
    growing.wait_for(lambda: 0 < arena.ready_rows == arena.rows_within(CAPACITY // 4))
    arena.close()


class TestSmallerThanItsFile:
    """The file has the length of the full capacity, but uses memory for its target only."""

    @pytest.fixture
    def growing(self, shm_path):
        growing = Growing(shm_path / "arena", CAPACITY, target_bytes=CAPACITY // 4)
        yield growing
        growing.arena.close()

    def has_settled_at(self, growing: Growing, num_bytes: int) -> bool:
        arena = growing.arena
        assert growing.taken_bytes() <= CAPACITY // 2 + MIB
        return arena.size_bytes == num_bytes and num_bytes - MIB < growing.taken_bytes() <= num_bytes

    def test_resizes_before_and_after_the_first_format(self, growing):
        arena = growing.arena
        arena.start(growing.note_change)
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 4))
        arena.resize(CAPACITY // 2)
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 2))
        arena.resize(CAPACITY // 4)
        arena.release_surplus()
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 4))
        arena.format(GEOMETRY)  # two columns use other pages of the file
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 4))
        assert 0 < arena.ready_rows == arena.rows_within(CAPACITY // 4) < arena.num_rows // 3
        assert not arena.has_surplus
        arena.resize(CAPACITY // 2)
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 2))

    def test_rows_become_ready_before_all_surplus_is_freed(self, growing, monkeypatch):
        """Rows overlap only a part of the pages that were populated before the first format."""
        arena, filled = growing.arena, []
        growing.start_at(CAPACITY // 4)
        taken, punch = [], ArenaFile._punch

        def record_punch(self, *extent) -> bool:
            filled.append((self.ready_rows, self._num_filled))
            assert self.taken_bytes <= CAPACITY // 4 < self.size_bytes
            return punch(self, *extent)

        def record_check(num_bytes: int) -> None:
            taken.append(growing.taken_bytes() + num_bytes)

        monkeypatch.setattr(ArenaFile, "_punch", record_punch)
        monkeypatch.setattr("lmcache_store.tiers.memory.growth.check_available", record_check)
        arena.format(Geometry(16 << 10, 4))
        growing.wait_for(lambda: self.has_settled_at(growing, CAPACITY // 4))
        assert any(ready and num_filled > arena.target_rows for ready, num_filled in filled), filled
        assert max(taken) <= CAPACITY // 4

    def test_frees_surplus_even_without_available_memory(self, growing, monkeypatch):
        arena, available = growing.arena, [1 << 40]
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.available_memory", lambda: available[0])
        monkeypatch.setattr("lmcache_store.tiers.memory.growth._RETRY_SECONDS", 0.01)
        growing.start_at(CAPACITY // 4)
        available[0] = 0
        arena.format(Geometry(16 << 10, 4))
        growing.wait_for(lambda: growing.taken_bytes() < CAPACITY // 8 and arena.growth_error is not None)
        available[0] = 1 << 40
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)

    def test_restart_without_surplus_marks_only_populated_rows_as_filled(self, growing):
        arena = growing.arena
        arena.format(GEOMETRY)
        growing.start_at(CAPACITY // 4)
        arena.close()
        growing.arena = arena = ArenaFile(arena.path, CAPACITY, target_bytes=arena.target_bytes)
        assert arena._num_filled < arena.num_rows // 2

    def test_waits_for_available_memory_and_reports_the_shortage(self, growing, monkeypatch, caplog):
        arena, available = growing.arena, [128 * MIB]
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.available_memory", lambda: available[0])
        monkeypatch.setattr("lmcache_store.tiers.memory.growth._STEP_BYTES", MIB)
        monkeypatch.setattr("lmcache_store.tiers.memory.growth._RETRY_SECONDS", 0.01)
        arena.format(GEOMETRY)
        growing.start_at(CAPACITY // 4)
        available[0] = 64 * MIB
        arena.resize(CAPACITY)
        growing.wait_for(lambda: arena.growth_error is not None)
        assert "the memory limit of this container leaves 64Mi, of which 64Mi" in arena.growth_error
        assert arena.ready_rows == arena.rows_within(CAPACITY // 4)
        assert growing.taken_bytes() <= CAPACITY // 4
        available[0] = 1 << 40
        growing.wait_for(lambda: arena.ready_rows == arena.num_rows)
        growing.wait_for(lambda: arena.growth_error is None)
        assert caplog.text.count("the arena can't grow by") == 1

    def test_reports_unexpected_error_and_retries_growth(self, growing, monkeypatch, caplog):
        arena, bugs = growing.arena, [ValueError("a bug")]

        def fail_with_bug(num_bytes: int) -> None:
            if bugs:
                raise bugs[0]

        monkeypatch.setattr("lmcache_store.tiers.memory.growth.check_available", fail_with_bug)
        monkeypatch.setattr("lmcache_store.tiers.memory.growth._RETRY_SECONDS", 0.01)
        arena.start(growing.note_change)
        growing.wait_for(lambda: arena.growth_error is not None)
        assert "ValueError('a bug'); the arena" in arena.growth_error
        bugs.clear()
        growing.wait_for(lambda: arena.size_bytes == CAPACITY // 4)
        assert caplog.text.count("Traceback") == 1

    def test_populated_pages_need_no_available_memory(self, growing, monkeypatch):
        arena = growing.arena
        arena.format(GEOMETRY)
        growing.start_at(CAPACITY // 4)
        arena.close()
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.available_memory", lambda: 0)
        growing.arena = arena = ArenaFile(arena.path, CAPACITY, target_bytes=CAPACITY // 4)
        growing.start_at(CAPACITY // 4)
