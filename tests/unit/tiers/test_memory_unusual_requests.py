"""Requests of clients that are valid but make no sense."""

import pytest

from lmcache.tiers.memory import leases
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


def num_leased_by(memory: MemoryTier, request: str, *numbers: int) -> int:
    return memory.lookup((b"engine", request), one_chain([key(number) for number in numbers])).num_leased


def test_requests_that_lease_one_row_are_limited(memory, monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASES", 3)
    store(memory, 1)
    store(memory, 2)
    assert [num_leased_by(memory, f"r{number}", 1) for number in range(5)] == [1, 1, 1, 0, 0]
    assert num_leased_by(memory, "r0", 1, 2) == 2  # present leases may grow
    memory.release((b"engine", "r1"))
    assert [num_leased_by(memory, request, 1) for request in ("r3", "r4")] == [1, 0]


def test_rows_of_all_leases_are_limited(memory, monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASED_ROWS", 5)
    for number in (1, 2):
        store(memory, number)
    assert [num_leased_by(memory, f"r{number}", 1, 2) for number in range(3)] == [2, 2, 0]
    assert num_leased_by(memory, "r3", 1) == 1
    assert num_leased_by(memory, "r3", 1, 2) == 1
    memory.quarantine_leases(b"engine")
    assert num_leased_by(memory, "r4", 1) == 0
    memory.end_lease_quarantine(b"engine")
    assert num_leased_by(memory, "r4", 1, 2) == 2
