"""Eviction order when a hit needs rows of several KV groups: the remaining rows are usable."""

import pytest

from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import Chains, Geometry
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier

OWNER, ENGINE = b"o" * 16, b"e" * 16
SLOT_BYTES, NUM_CHUNKS = 4096, 12
GROUPS = (
    KVGroup(0, 16, 3 * SLOT_BYTES),
    KVGroup(1, 16, 2 * SLOT_BYTES, 300, GroupKind.SLIDING_WINDOW),
    KVGroup(2, 256, SLOT_BYTES, 0, GroupKind.STATE),
)
NUM_FRAMES = 2 * NUM_CHUNKS  # the rows of a chunk use two frames


@pytest.fixture
def tier():
    tier = MemoryTier(PrivateArena(Geometry(SLOT_BYTES, 1, 3), 3 * NUM_FRAMES))
    list(tier.adopt())
    return tier


def key(group: KVGroup, chunk: int, name: bytes = b"k") -> bytes:
    return name * 32 + bytes([group.group, chunk]) * 16


def chains(name: bytes = b"k") -> Chains:
    keys = tuple([key(group, chunk, name) for chunk in range(NUM_CHUNKS)] for group in GROUPS)
    return Chains(256, GROUPS, keys)


def store(tier: MemoryTier, first: int, end: int, request: str, name: bytes = b"k") -> None:
    """Reserve rows group by group and commit them together, as an engine does in a step."""
    slots = []
    for group in GROUPS:
        for chunk in range(first, end):
            reserved = tier.reserve(
                key(group, chunk, name), 0, OWNER, length=group.chunk_bytes, depth=chunk, request=request
            )
            slots.append(reserved.slot)
    tier.commit(slots, 0, OWNER)


def evict(tier: MemoryTier, number: int) -> None:
    """Store a row as large as a frame."""
    slot = tier.reserve(bytes([number]) * 64, 0, OWNER, length=3 * SLOT_BYTES, request="other").slot
    tier.commit([slot], 0, OWNER)


def hit(tier: MemoryTier, name: bytes = b"k") -> int:
    return tier.lookup((ENGINE, "looks"), chains(name), is_hint=True).num_resident


def present(tier: MemoryTier, group: KVGroup, name: bytes = b"k") -> int:
    return sum(tier.is_resident(key(group, chunk, name)) for chunk in range(NUM_CHUNKS))


def test_evicts_stored_chain_by_chunk_from_its_tail(tier):
    """After each eviction at most two chunks have a row in a group without being part of the hit."""
    for step in range(0, NUM_CHUNKS, 4):
        store(tier, step, step + 4, "stores")
    hits = []
    for number in range(NUM_FRAMES):
        evict(tier, number)
        is_whole = [
            all(tier.is_resident(key(group, chunk)) for group in GROUPS) for chunk in range(NUM_CHUNKS)
        ]
        hits.append((*is_whole, False).index(False))
        assert max(present(tier, group) for group in GROUPS) - hits[-1] <= 2
    assert hits == sorted(hits, reverse=True)
    assert hits[0] >= NUM_CHUNKS - 2
    assert hits[-1] == 0


def test_evicts_rows_unneeded_by_hits_first(tier):
    store(tier, 0, NUM_CHUNKS, "stores")
    assert hit(tier) == NUM_CHUNKS
    for number in range(NUM_CHUNKS - 2):
        evict(tier, number)
        assert hit(tier) == NUM_CHUNKS
    assert [present(tier, group) for group in GROUPS] == [NUM_CHUNKS, 2, 2]


def test_recently_hit_chains_survive_new_rows(tier):
    """Two chains fill half of the arena each; rows of a third chain do not evict what recent hits need."""
    for name in (b"a", b"b"):
        store(tier, 0, NUM_CHUNKS // 2, name.decode(), name)
    for name in (b"b", b"a"):
        tier.lookup((ENGINE, name.decode()), Chains(256, GROUPS, tuple(k[:6] for k in chains(name).keys)))
        tier.release((ENGINE, name.decode()))
    num_needed = 6 + 1 + 1  # frames for rows of full attention, of windows and of a state
    for number in range(NUM_FRAMES - 2 * num_needed):
        evict(tier, number)
        assert hit(tier, b"a") == hit(tier, b"b") == 6
