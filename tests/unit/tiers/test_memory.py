"""The memory tier: usable rows, requests that make no sense, hits and misses, and rows of tenants.

``test_memory_model`` covers random sequences of stores, loads and evictions, and the order of eviction.
"""

import pytest

from lmcache_store.tiers.errors import StaleSlotError
from lmcache_store.tiers.memory import leases
from lmcache_store.tiers.memory.contracts import Geometry, Reserved, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import TenantUse
from tests.harness.tiers.chains import one_chain

OWNER, ENGINE = b"o" * 16, b"e" * 16
KEYS = [bytes(32) + bytes([number]) * 32 for number in range(20)]


@pytest.fixture
def tier():
    tier = MemoryTier(PrivateArena(Geometry(4096, 1), 8))
    list(tier.adopt())
    return tier


def store(tier: MemoryTier, *numbers: int, **options) -> list[Reserved]:
    """Store rows one after the other."""
    results = []
    for number in numbers:
        result, slot = tier.reserve(KEYS[number], 0, OWNER, length=1, **options)
        if slot:
            tier.commit([slot], 0, OWNER)
        results.append(result)
    return results


def lookup(tier: MemoryTier, *numbers: int, request: str = "request"):
    return tier.lookup((ENGINE, request), one_chain([KEYS[number] for number in numbers]))


def resident(tier: MemoryTier) -> list[int]:
    return [number for number, key in enumerate(KEYS) if tier.is_resident(key)]


# ---- rows that are not populated or vacated ----


def test_unusable_rows_are_neither_reserved_nor_leased(tier):
    tier.usable_slots = 2
    assert store(tier, 1, 2) == [Reserved.SLOT] * 2
    tier.usable_slots = 1
    assert [lookup(tier, number).num_resident for number in (1, 2)] == [1, 0]
    assert store(tier, 3) == [Reserved.SLOT]
    assert lookup(tier, 3).num_resident == 1


def test_evicts_only_reusable_rows_and_only_when_needed(tier):
    store(tier, *range(8))
    tier.usable_slots = 0
    assert store(tier, 8) == [Reserved.BUSY]
    tier.usable_slots = 2
    assert store(tier, 8) == [Reserved.SLOT]
    lookup(tier, 8)
    assert store(tier, 9, 10) == [Reserved.SLOT] * 2
    tier.usable_slots = 8
    assert resident(tier) == [2, 3, 4, 5, 6, 7, 8, 10]


# ---- requests that are valid but make no sense ----


def test_lease_on_repeated_key_ends_with_its_release(tier):
    store(tier, 1)
    answer = lookup(tier, 1, 1)
    assert answer.num_resident == 2
    assert answer.slots[0] == answer.slots[1]
    tier.release((ENGINE, "request"))
    assert tier.num_leased == 0


def test_repeated_keys_in_a_lookup_keep_the_order(tier):
    store(tier, *range(8), request="long")
    for _ in range(2):
        lookup(tier, *range(5), *range(5))
        tier.release((ENGINE, "request"))
    for num_left in reversed(range(8)):
        store(tier, 10 + num_left, request="evicts")
        assert [number for number in resident(tier) if number < 8] == list(range(num_left))


def test_stores_chunk_deeper_than_the_depth_field(tier):
    store(tier, 1, depth=1 << 32)
    assert lookup(tier, 1).num_resident == 1
    assert tier.num_used == 1


def test_requests_that_lease_one_row_are_limited(tier, monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASES", 3)
    store(tier, 1, 2)
    assert [lookup(tier, 1, request=f"r{number}").num_leased for number in range(5)] == [1, 1, 1, 0, 0]
    assert lookup(tier, 1, 2, request="r0").num_leased == 2  # present leases may grow
    tier.release((ENGINE, "r1"))
    assert [lookup(tier, 1, request=request).num_leased for request in ("r3", "r4")] == [1, 0]


def test_rows_of_all_leases_are_limited(tier, monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASED_ROWS", 5)
    store(tier, 1, 2)
    assert [lookup(tier, 1, 2, request=f"r{number}").num_leased for number in range(3)] == [2, 2, 0]
    assert lookup(tier, 1, request="r3").num_leased == 1
    assert lookup(tier, 1, 2, request="r3").num_leased == 1
    assert lookup(tier, 1, request="r4").num_leased == 0
    tier.end_leases(ENGINE)
    assert lookup(tier, 1, 2, request="r4").num_leased == 2


def test_release_ends_all_lookups_of_a_lease(tier):
    store(tier, *range(4))
    assert [lookup(tier, *rows).num_leased for rows in ((0, 1), (2, 3))] == [2, 2]
    assert tier.num_leased == 4
    tier.release((ENGINE, "request"))
    assert tier.num_leased == 0


# ---- hits and misses: the first answer counts, once for each key of a request ----


@pytest.mark.parametrize(
    ("num_stored", "lookups", "counts"),
    [
        pytest.param(0, [("r", 4)] * 3, (0, 4), id="repeated without a lease"),
        pytest.param(3, [("r", 4)] * 3, (3, 1), id="repeated under a lease"),
        pytest.param(3, [("r", 2), ("r", 6), ("r", 5)], (3, 3), id="a growing request"),
        pytest.param(8, [("r", 8)] * 2, (8, 0), id="beyond the limit of leases"),
        pytest.param(0, [("r", 2), ("r", 2), ("s", 2), ("s", 2)], (0, 4), id="two requests"),
    ],
)
def test_each_key_of_a_request_counts_once(tier, num_stored, lookups, counts):
    store(tier, *range(num_stored))
    for request, length in lookups:
        lookup(tier, *range(length), request=request)
    assert (tier.stats.hits, tier.stats.misses) == counts


def test_rows_stored_after_the_first_lookup_count_as_misses(tier):
    lookup(tier, 0, 1, 2, 3)
    store(tier, 0, 1, 2, 3)
    lookup(tier, 0, 1, 2, 3)
    assert (tier.stats.hits, tier.stats.misses) == (0, 4)


def test_request_counts_what_its_engine_found_when_it_scheduled_it(tier):
    """The report may arrive after the request's own rows were stored. They still are misses."""
    store(tier, 0, 1, 2, 3)
    tier.lookup((ENGINE, "request"), one_chain(KEYS[:4]), num_found=1)
    assert (tier.stats.hits, tier.stats.misses) == (1, 3)


def test_number_of_remembered_requests_is_bounded(tier):
    for number in range(10_000):
        lookup(tier, 1, request=str(number))
    assert len(tier.stats._counted) < 5_000


def test_counts_rows_and_bytes_of_tenants(tier):
    for number, tenant in enumerate([b"a", b"b", b"b", b"", b"b"]):
        store(tier, number, tenant=tenant)
    uses, rest = tier.stats.tenants.largest(2)
    assert [(use.name, use.num_rows, use.num_bytes) for use in (*uses, rest)] == [
        (b"b", 3, 3 * 4096),
        (b"", 1, 4096),
        (b"other", 1, 4096),
    ]
    tier.vacate(0)
    assert tier.stats.tenants.largest() == ([], TenantUse(b"other"))


def test_forgets_tenants_without_rows(tier):
    for number in range(1000):
        key, tenant = number.to_bytes(64, "big"), number.to_bytes(16, "big")
        tier.commit([tier.reserve(key, 0, OWNER, length=1, tenant=tenant).slot], 0, OWNER)
    uses, _ = tier.stats.tenants.largest()
    assert {use.name for use in uses} == {number.to_bytes(16, "big") for number in range(992, 1000)}
    assert len(tier.stats.tenants._uses) <= 9


# ---- slots into which the sidecar copies for their owner ----


@pytest.mark.parametrize(
    ("slots", "column", "owner", "num_bytes"),
    [
        pytest.param([0], 1, OWNER, 4096, id="another column"),
        pytest.param([0], 0, b"p" * 16, 4096, id="another owner"),
        pytest.param([0, 2], 0, OWNER, 4096, id="a slot that nobody reserved"),
        pytest.param([0, 1], 0, OWNER, 8193, id="more bytes than reserved"),
    ],
)
def test_holds_only_slots_and_bytes_that_the_owner_reserved(slots, column, owner, num_bytes):
    tier = MemoryTier(PrivateArena(Geometry(4096, 2, 4), 8))
    tier.release_adopted()
    reserved = [tier.reserve(KEYS[n], 0, OWNER, length=4096 * n).slot for n in (1, 2)] + [Slot(5, 1)]
    with pytest.raises(StaleSlotError):
        tier.hold([reserved[n] for n in slots], column, owner, [4096, num_bytes][: len(slots)])
    assert not tier._held
    tier.hold(reserved[:2], 0, OWNER, [4096, 8192])
