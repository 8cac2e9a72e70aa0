"""Engines map slot table and shared index for as long as they live: what one of them writes there must
not become what the sidecar believes."""

from __future__ import annotations

import pytest

from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.contracts import Geometry, Reserved
from lmcache.tiers.memory.mapping import MappedIndex
from lmcache.tiers.memory.slots import State
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.chains import one_chain
from tests.unit.tiers.test_shared_index import CAPACITY, OWNER, SLOT_BYTES, row_key, words

KEY, OTHER = row_key(1), row_key(2)
LEASE = (b"e" * 16, "r")


@pytest.fixture
def arena(tmp_path):
    arena = ArenaFile(tmp_path / "arena", CAPACITY)
    arena.format(Geometry(SLOT_BYTES, 1))
    yield arena
    arena.close()


@pytest.fixture
def tier(arena):
    tier = MemoryTier(arena)
    for _ in tier.adopt():
        pass
    tier.usable_slots = arena.num_rows
    return tier


def store(tier, key):
    reserved = tier.reserve(key, 0, OWNER, length=SLOT_BYTES)
    if reserved.result is Reserved.SLOT:
        tier.commit([reserved.slot], 0, OWNER)
    return reserved


def fill(tier, arena):
    """Store so much that every row is another key's."""
    for number in range(100, 100 + arena.num_rows):
        assert store(tier, row_key(number)).result is Reserved.SLOT


@pytest.fixture(params=["key", "generation", "state", "all"])
def scribble(request, arena):
    """Writes over what the slot table says of a row."""

    def write(row):
        entry = arena.table._entries[0]
        for name, value in (("key", OTHER), ("generation", 1 << 63), ("state", State.FREE)):
            if request.param in (name, "all"):
                entry[name][row] = value

    return write


def test_what_is_evicted_is_forgotten_under_its_own_key(tier, arena, scribble):
    scribble(store(tier, KEY).slot.row)
    fill(tier, arena)
    assert tier.lookup(LEASE, one_chain([KEY])).num_resident == 0
    assert not tier.is_resident(KEY)
    assert store(tier, KEY).result is Reserved.SLOT


def test_a_row_is_known_by_what_was_stored(tier, scribble):
    slot = store(tier, KEY).slot
    scribble(slot.row)
    assert tier.lookup(LEASE, one_chain([KEY])).slots == [slot]
    assert tier.pin(slot) == KEY
    assert tier.describe(slot)[0] == KEY
    tier.unpin(slot)


def test_a_row_that_no_reader_finds_any_more_is_stored_anew(tier, arena, scribble):
    reader = MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)
    scribbled = store(tier, KEY).slot
    scribble(scribbled.row)
    anew = store(tier, KEY)
    assert anew.result is Reserved.SLOT
    assert anew.slot != scribbled
    assert reader.find(words(KEY)).slots() == [anew.slot]
    reader.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_row_that_one_rank_can_not_read_is_stored_anew_by_all(tmp_path, order):
    arena = ArenaFile(tmp_path / "arena", CAPACITY)
    arena.format(Geometry(SLOT_BYTES, 2))
    tier = MemoryTier(arena)
    tier.usable_slots = arena.num_rows
    tier.release_adopted()
    for _ in range(2):
        slots = [tier.reserve(KEY, column, OWNER, length=SLOT_BYTES).slot for column in order]
        assert slots[0] == slots[1]
        assert slots[0] is not None
        for column in range(2):
            tier.commit(slots[:1], column, OWNER)
        arena.table._entries["state"][1, slots[0].row] = State.FREE
    arena.close()


@pytest.mark.parametrize("scribble", [0, 0xFF, 0x11])
def test_an_index_that_was_written_over_shows_again_what_is_stored(tier, arena, scribble):
    reader = MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)
    before = store(tier, KEY).slot
    arena.shared_index._buckets[:] = scribble
    assert not len(reader.find(words(KEY)).rows)
    after = store(tier, OTHER).slot
    assert store(tier, KEY).result is Reserved.EXISTS
    assert [reader.find(words(key)).slots() for key in (KEY, OTHER)] == [[before], [after]]
    reader.close()
