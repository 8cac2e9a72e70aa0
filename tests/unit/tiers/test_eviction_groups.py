"""Which rows go first where a hit needs rows of several KV groups: what is left is of use."""

from __future__ import annotations

import pytest

from lmcache.kv_groups import GroupKind, KVGroup
from lmcache.tiers.memory.contracts import Chains, Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier

OWNER, ENGINE = b"o" * 16, b"e" * 16
SLOT_BYTES, NUM_CHUNKS = 4096, 12
GROUPS = (
    KVGroup(0, 16, 3 * SLOT_BYTES),
    KVGroup(1, 16, 2 * SLOT_BYTES, 300, GroupKind.SLIDING_WINDOW),
    KVGroup(2, 256, SLOT_BYTES, 0, GroupKind.STATE),
)
NUM_FRAMES = 2 * NUM_CHUNKS  # a chunk's rows of all groups take two


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
    """A step of an engine: group after group, committed together."""
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


def test_a_stored_chain_goes_chunk_by_chunk_from_its_tail(tier):
    """One slot is left after each chunk: at most two chunks' rows of any group can't be hit."""
    for step in range(0, NUM_CHUNKS, 4):
        store(tier, step, step + 4, "stores")
    hits = []
    for number in range(NUM_FRAMES):
        evict(tier, number)
        is_whole = [all(tier.is_resident(key(group, at)) for group in GROUPS) for at in range(NUM_CHUNKS)]
        hits.append((*is_whole, False).index(False))
        assert max(present(tier, group) for group in GROUPS) - hits[-1] <= 2
    assert hits == sorted(hits, reverse=True)
    assert hits[0] >= NUM_CHUNKS - 2
    assert hits[-1] == 0


def test_what_a_hit_does_not_need_goes_before_what_it_needs(tier):
    store(tier, 0, NUM_CHUNKS, "stores")
    assert hit(tier) == NUM_CHUNKS
    for number in range(NUM_CHUNKS - 2):
        evict(tier, number)
        assert hit(tier) == NUM_CHUNKS
    assert [present(tier, group) for group in GROUPS] == [NUM_CHUNKS, 2, 2]


def test_the_end_that_is_used_stays_and_others_go_first(tier):
    """Two conversations, half of the arena each: the one that was hit last loses nothing to a third."""
    for name in (b"a", b"b"):
        store(tier, 0, NUM_CHUNKS // 2, name.decode(), name)
    for name in (b"b", b"a"):
        tier.lookup((ENGINE, name.decode()), Chains(256, GROUPS, tuple(k[:6] for k in chains(name).keys)))
        tier.release((ENGINE, name.decode()))
    num_needed = 6 + 1 + 1  # frames: rows of full attention, windows and a state, and what shares frames
    for number in range(NUM_FRAMES - 2 * num_needed):
        evict(tier, number)
        assert hit(tier, b"a") == hit(tier, b"b") == 6
