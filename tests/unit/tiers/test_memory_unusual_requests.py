"""Requests of clients that are valid but make no sense."""

from __future__ import annotations

import pytest

from lmcache.tiers.memory.contracts import Geometry, Reserved
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.chains import one_chain

OWNER = b"o" * 16
LEASE = (b"engine", "request")


def key(number: int) -> bytes:
    return bytes(32) + number.to_bytes(32, "big")


@pytest.fixture
def memory() -> MemoryTier:
    tier = MemoryTier(PrivateArena(Geometry(4096, 1), 8))
    tier.release_adopted()
    return tier


def store(memory: MemoryTier, number: int, depth: int = 0) -> None:
    reservation = memory.reserve(key(number), 0, OWNER, length=1, depth=depth)
    assert reservation.result is Reserved.SLOT
    memory.commit([reservation.slot], 0, OWNER)


def test_lease_on_repeated_key_ends_with_its_release(memory):
    store(memory, 1)
    num_resident, _, _, slots, _ = memory.lookup(LEASE, one_chain([key(1), key(1)]))
    assert num_resident == 2
    assert slots[0] == slots[1]
    memory.release(LEASE)
    assert memory.num_leased == 0


def test_stores_chunk_deeper_than_the_depth_field(memory):
    store(memory, 1, depth=1 << 32)
    assert memory.lookup(LEASE, one_chain([key(1)])).num_resident == 1
    assert memory.num_used == 1
