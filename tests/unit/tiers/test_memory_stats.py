"""Hits and misses of the memory tier: the first answer counts, once for each key of a request."""

import pytest

from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.stats import TenantUse
from tests.harness.chains import one_chain

OWNER = b"o" * 16
LEASE = (b"e" * 16, "request")
CHAIN = [bytes(32) + bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def tier():
    tier = MemoryTier(PrivateArena(Geometry(4096, 1), 8))
    list(tier.adopt())
    return tier


def store(tier: MemoryTier, keys: list[bytes]) -> None:
    tier.commit([tier.reserve(key, 0, OWNER, length=1).slot for key in keys], 0, OWNER)


def counts(tier: MemoryTier) -> tuple[int, int]:
    return tier.stats.hits, tier.stats.misses


def test_repeated_lookup_without_lease_counts_once(tier):
    for _ in range(3):
        tier.lookup(LEASE, one_chain(CHAIN[:4]))
    assert counts(tier) == (0, 4)


def test_repeated_lookup_under_lease_counts_once(tier):
    store(tier, CHAIN[:3])
    for _ in range(3):
        tier.lookup(LEASE, one_chain(CHAIN[:4]))
    assert counts(tier) == (3, 1)


def test_rows_stored_after_the_first_lookup_count_as_misses(tier):
    tier.lookup(LEASE, one_chain(CHAIN[:4]))
    store(tier, CHAIN[:4])
    tier.lookup(LEASE, one_chain(CHAIN[:4]))
    assert counts(tier) == (0, 4)


def test_growing_request_counts_only_new_keys(tier):
    store(tier, CHAIN[:3])
    tier.lookup(LEASE, one_chain(CHAIN[:2]))
    tier.lookup(LEASE, one_chain(CHAIN[:6]))
    tier.lookup(LEASE, one_chain(CHAIN[:5]))
    assert counts(tier) == (3, 3)


def test_rows_beyond_the_lease_limit_count_as_hits_once(tier):
    store(tier, CHAIN)
    for _ in range(2):
        num_resident, _, _, slots, _ = tier.lookup(LEASE, one_chain(CHAIN))
        assert (num_resident, len(slots)) == (8, 4)
    assert counts(tier) == (8, 0)


def test_each_request_counts_separately(tier):
    for request in ("first", "second"):
        for _ in range(2):
            tier.lookup((LEASE[0], request), one_chain(CHAIN[:2]))
    assert counts(tier) == (0, 4)


def test_number_of_remembered_requests_is_bounded(tier):
    for number in range(10_000):
        tier.lookup((LEASE[0], str(number)), one_chain(CHAIN[:1]))
    assert len(tier.stats._counted) < 5_000


def test_counts_rows_and_bytes_of_tenants(tier):
    for number, tenant in enumerate([b"a", b"b", b"b", b"", b"b"]):
        slot = tier.reserve(CHAIN[number], 0, OWNER, length=1, tenant=tenant).slot
        tier.commit([slot], 0, OWNER)
    uses, rest = tier.stats.tenants.largest(2)
    assert [(use.name, use.num_rows, use.num_bytes) for use in uses] == [
        (b"b", 3, 3 * 4096),
        (b"", 1, 4096),
    ]
    assert (rest.name, rest.num_rows, rest.num_bytes) == (b"other", 1, 4096)
    tier.vacate(0)
    assert tier.stats.tenants.largest() == ([], TenantUse(b"other"))


def test_forgets_tenants_without_rows(tier):
    for number in range(1000):
        key, tenant = number.to_bytes(64, "big"), number.to_bytes(16, "big")
        tier.commit([tier.reserve(key, 0, OWNER, length=1, tenant=tenant).slot], 0, OWNER)
    uses, _ = tier.stats.tenants.largest()
    assert {use.name for use in uses} == {number.to_bytes(16, "big") for number in range(992, 1000)}
    assert len(tier.stats.tenants._uses) <= 9
