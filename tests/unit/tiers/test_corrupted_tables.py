"""Writes of a faulty engine to the slot table or the shared index never mislead the sidecar.

Engines map both as long as they live.
"""

import pytest

from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.slots import SlotState
from tests.harness.tiers.arenas import mapped_index, tier_over
from tests.harness.tiers.chains import one_chain
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
    return tier_over(arena)


def store(tier, key):
    reserved = tier.reserve(key, 0, OWNER, length=SLOT_BYTES)
    if reserved.result is Reserved.SLOT:
        tier.commit([reserved.slot], 0, OWNER)
    return reserved


def fill(tier, arena):
    """Store new keys until each row holds another key."""
    for number in range(100, 100 + arena.num_rows):
        assert store(tier, row_key(number)).result is Reserved.SLOT


@pytest.fixture(params=["key", "generation", "state", "all"])
def corrupt(request, arena):
    """Return a function that overwrites the slot table's entry of a row."""

    def write(row):
        entry = arena.table._entries[0]
        for name, value in (("key", OTHER), ("generation", 1 << 63), ("state", SlotState.FREE)):
            if request.param in (name, "all"):
                entry[name][row] = value

    return write


def test_eviction_forgets_the_stored_key(tier, arena, corrupt):
    corrupt(store(tier, KEY).slot.row)
    fill(tier, arena)
    assert tier.lookup(LEASE, one_chain([KEY])).num_resident == 0
    assert not tier.is_resident(KEY)
    assert store(tier, KEY).result is Reserved.SLOT


def test_rows_keep_the_stored_key_and_slot(tier, corrupt):
    slot = store(tier, KEY).slot
    corrupt(slot.row)
    assert tier.lookup(LEASE, one_chain([KEY])).slots == [slot]
    assert tier.pin(slot) == KEY
    assert tier.describe(slot)[0] == KEY
    tier.unpin(slot)


def test_rows_invisible_to_readers_are_stored_again(tier, arena, corrupt):
    reader = mapped_index(arena)
    corrupted = store(tier, KEY).slot
    corrupt(corrupted.row)
    second = store(tier, KEY)
    assert second.result is Reserved.SLOT
    assert second.slot != corrupted
    assert reader.find(words(KEY)).slots() == [second.slot]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_unreadable_for_a_rank_are_stored_again_by_all_ranks(tmp_path, order):
    arena = ArenaFile(tmp_path / "arena", CAPACITY)
    arena.format(Geometry(SLOT_BYTES, 2))
    tier = tier_over(arena)
    for _ in range(2):
        slots = [tier.reserve(KEY, column, OWNER, length=SLOT_BYTES).slot for column in order]
        assert slots[0] == slots[1]
        assert slots[0] is not None
        for column in range(2):
            tier.commit(slots[:1], column, OWNER)
        arena.table._entries["state"][1, slots[0].row] = SlotState.FREE
    arena.close()


@pytest.mark.parametrize("corrupt", [0, 0xFF, 0x11])
def test_overwritten_index_shows_stored_rows_again(tier, arena, corrupt):
    reader = mapped_index(arena)
    before = store(tier, KEY).slot
    arena.shared_index._buckets[:] = corrupt
    assert not len(reader.find(words(KEY)).rows)
    after = store(tier, OTHER).slot
    assert store(tier, KEY).result is Reserved.EXISTS
    assert [reader.find(words(key)).slots() for key in (KEY, OTHER)] == [[before], [after]]
