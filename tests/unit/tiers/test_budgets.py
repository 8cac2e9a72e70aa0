"""Budgets of tenants; ``test_budget_model`` covers random sequences of stores, loads and evictions."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_store import keys
from lmcache_store.tiers.budgets import NO_SALT, Budget, Budgets, SaltedBudgets, short_tenant
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import Removal, TenantUses
from tests.harness.tiers.arenas import tier_over
from tests.harness.tiers.chains import one_chain

OWNER, ENGINE = b"o" * 16, b"E" * 16
LIMITED = Budgets(Budget(memory_percent=90), {b"a": Budget("a", min_memory_percent=10), b"b": Budget("b")})


def new_tier(
    num_rows: int, budgets: Budgets | None = None, slots_per_frame: int = 1, num_columns: int = 1
) -> MemoryTier:
    return tier_over(PrivateArena(Geometry(4096, num_columns, slots_per_frame), num_rows), budgets)


def key(name: str) -> bytes:
    return name.encode().ljust(64)


def store(tier: MemoryTier, name: str, *, num_slots: int = 1) -> Reserved:
    """Store a row. The first letter of the name is the tenant, the last one the position in the request."""
    tenant = name[0].strip(".").encode()
    for column in range(tier.arena.geometry.num_columns):
        result, slot = tier.reserve(
            key(name), column, OWNER, length=4096 * num_slots, request=name[:-1], tenant=tenant
        )
        if slot is not None:
            tier.commit([slot], column, OWNER)
    return result


def order(tier: MemoryTier) -> list[str]:
    return [tier._rows.key(row).decode().strip() for row in tier._rows.policy.victims()]


def test_neighbors_below_their_share_are_not_evicted_for_a_long_row():
    tier = new_tier(8, slots_per_frame=4)
    for name in ("b0", "a0", "b1", "b2", "b.0", "b.1", "b.2", "a1"):
        assert store(tier, name) is Reserved.SLOT
    tier.set_budgets(Budgets(by_tenant={b"a": Budget("a", min_memory_percent=25)}))
    # A row of four slots needs a whole frame, and each of both frames has a row of a.
    assert store(tier, "b,0", num_slots=4) is Reserved.BUSY
    assert {"a0", "a1"} < set(order(tier))
    assert store(tier, "b,0", num_slots=2) is Reserved.SLOT
    assert {"a0", "a1"} < set(order(tier))


@pytest.mark.parametrize(("budgets", "is_first"), [(Budgets(), True), (LIMITED, False)])
@given(
    uses=st.lists(st.tuples(st.sampled_from("ab.c"), st.sampled_from("xyz"), st.integers(0, 3)), max_size=30)
)
def test_change_of_budgets_keeps_the_order_of_eviction(budgets, is_first, uses):
    tier = new_tier(64, budgets)
    for tenant, request, number in uses:
        names = [f"{tenant}{request}{n}" for n in range(number)]
        for name in names:
            store(tier, name)
        tier.lookup((ENGINE, tenant + request), one_chain([*map(key, names), key("absent")]), is_hint=True)
    before = order(tier)
    tier.set_budgets(LIMITED if is_first else Budgets())
    assert order(tier) == before
    accounts = tier.stats.tenants.accounts
    assert sum(account.num_rows for account in accounts) == tier.num_used == len(before)
    for name in before:
        tier._rows.remove(key(name))
    assert not any(account.num_bytes for account in tier.stats.tenants.accounts)


def test_smaller_bound_counts_from_the_next_store():
    tier = new_tier(8)
    for n in range(6):
        store(tier, f"a{n}")
    tier.set_budgets(Budgets(by_tenant={b"a": Budget("a", memory_percent=50)}))
    assert tier.num_used == 6
    assert store(tier, "a.0") is Reserved.SLOT
    assert order(tier) == ["a2", "a1", "a0", "a.0"]


def test_evictions_count_for_the_budget_of_the_row():
    tier = new_tier(2, Budgets(by_tenant={b"a": Budget("search")}))
    for name in ("a0", "b0", ".0", ".1", "a.0"):
        store(tier, name)
    assert tier.stats.tenant_counts.evicted == {"search": 1, "default": 2}


def test_refused_stores_count_for_the_budget_of_the_store():
    tier = new_tier(2, Budgets(by_tenant={b"a": Budget("search", min_memory_percent=100)}))
    for name in ("a0", "a1"):
        assert store(tier, name) is Reserved.SLOT
    assert [store(tier, name) for name in ("b0", ".0", "c0")] == [Reserved.BUSY] * 3
    assert tier.stats.tenant_counts.refused == {"default": 3}
    for name in ("a0", "a1"):
        tier.lookup((ENGINE, name), one_chain([key(name)]))
    store(tier, "a2")
    assert tier.stats.tenant_counts.refused["search"] == tier.stats.refused - 3


def flood(tier: MemoryTier, num_rows: int) -> None:
    """Store rows of the tenant b. They are pinned, as they are until their checksums are recorded."""
    for number in range(num_rows):
        slot = tier.reserve(key(f"b.{number}"), 0, OWNER, length=4096, request=f"b{number}", tenant=b"b").slot
        assert slot is not None
        tier.commit([slot], 0, OWNER)
        tier.pin(slot)


@pytest.mark.parametrize(
    "budgets",
    [
        pytest.param(Budgets(by_tenant={b"b": Budget("batch", priority=-10)}), id="lower priority"),
        pytest.param(Budgets(by_tenant={b"a": Budget("search", min_memory_percent=60)}), id="a guarantee"),
        pytest.param(Budgets(Budget(memory_percent=99), {b"b": Budget("batch")}), id="equal priority"),
    ],
)
@pytest.mark.parametrize("tenants", ["a", "ac", "ac."])
def test_pinned_rows_of_a_flood_refuse_no_stores(budgets, tenants):
    tier = new_tier(200, budgets)
    flood(tier, 100)
    for number in range(100):
        assert store(tier, f"{tenants[number % len(tenants)]}.{number}") is Reserved.SLOT
    assert store(tier, "a0") is Reserved.SLOT
    assert tier.num_used == 200
    assert sum(name.startswith("b") for name in order(tier)) == 100


def test_salts_are_resolved_for_each_namespace():
    search = Budget("search")
    salted = SaltedBudgets(Budget(priority=3), {keys.salt_hash("s3cret"): search})
    budgets = salted.resolve([b"n" * 32, b"m" * 32])
    assert budgets.of(short_tenant(keys.tenant("s3cret", b"n" * 32))) is search
    assert budgets.of(short_tenant(keys.tenant("s3cret", b"m" * 32))) is search
    assert budgets.of(short_tenant(keys.tenant("s3cret", b"other"))).priority == 3
    assert budgets.of(b"") is NO_SALT
    assert salted.listed == [Budget(priority=3), search]


@pytest.mark.parametrize(
    ("budget", "has_limits"),
    [(Budget(), False), (Budget(retain_percent=0), False), (Budget(priority=1, retain_percent=0), True)],
)
def test_share_of_hints_alone_is_no_limit(budget, has_limits):
    assert Budgets(budget, no_salt=Budget(retain_percent=1)).has_limits is has_limits
    assert Budgets(by_tenant={b"a": budget}).has_limits is has_limits


def test_rows_without_a_salt_get_the_share_of_hints_of_new_budgets():
    uses = TenantUses()
    budgets = Budgets(no_salt=Budget(retain_percent=5))
    assert not uses.extend(budgets), "the account needs the new share"
    uses.set_budgets(budgets)
    assert uses.account(b"").budget.retain_percent == 5
    assert uses.extend(Budgets(no_salt=Budget(retain_percent=5)))


@pytest.mark.parametrize("is_full", [False, True])
def test_short_rows_of_a_guarantee_stop_no_long_rows(is_full):
    tier = new_tier(512, Budgets(by_tenant={b"a": Budget("a", min_memory_percent=30)}), slots_per_frame=8)
    for number in range(512 if is_full else 0):
        assert store(tier, f"bf{number}.") is Reserved.SLOT
    for number in range(150):
        for name in (f"a{number}.", f"b{number}.", f"bx{number}.", f"by{number}."):
            assert store(tier, name) is Reserved.SLOT
    protected = {name for name in order(tier) if name.startswith("a")}
    assert len(protected) == 150
    for number in range(100):
        assert store(tier, f"bl{number}.", num_slots=8) is Reserved.SLOT
    assert protected <= set(order(tier))
    assert sum(name.startswith("bl") for name in order(tier)) >= 40, "of 64 frames, 19 have rows of a"


def test_guarantee_gives_no_more_than_its_share():
    """A tenant beyond its share evicts by priority and age as all others do."""
    limits = Budget("a", min_memory_percent=10, priority=-10), Budget("b", priority=10)
    tier = new_tier(512, Budgets(by_tenant=dict(zip((b"a", b"b"), limits, strict=True))), slots_per_frame=8)
    for number in range(64):
        store(tier, f"b{number}.", num_slots=8)
    for number in range(600):
        assert store(tier, f"a{number}.") is Reserved.SLOT
    assert sum(name.startswith("b") for name in order(tier)) == 57, "a has seven frames, 11 % of the memory"


def test_holes_that_a_guaranteed_tenant_left_are_filled():
    budgets = Budgets(by_tenant={b"a": Budget("a", min_memory_percent=90)})
    tier = new_tier(512, budgets, slots_per_frame=8)
    for number in range(448):
        store(tier, f"a{number}.")
    for number in range(448):
        if number % 8:
            tier._rows.remove(key(f"a{number}."))
    for number in range(400):
        store(tier, f"b{number}.")
    assert sum(name.startswith("b") for name in order(tier)) == 400
    assert not tier.stats.removed[Removal.EVICTED]


@pytest.mark.parametrize("share", [20, 60])
def test_idle_tenant_stops_no_stores_of_several_columns_and_lengths(share):
    """Chunks of a hybrid model with two ranks have a long row, and short rows of other KV groups."""
    tier = new_tier(256, Budgets(by_tenant={b"i": Budget("idle", min_memory_percent=share)}), 8, 2)

    def store_chunk(tenant: str, number: int) -> set[Reserved]:
        sizes = enumerate((8, 2, 1))
        return {store(tier, f"{tenant}{number}.{group}", num_slots=num_slots) for group, num_slots in sizes}

    share_bytes = share * 256 * 2 * 4096 // 100
    number = 0
    while tier.stats.tenants.num_bytes(b"i") < share_bytes - 11 * 2 * 4096:
        for tenant in "ib":
            store_chunk(tenant, number)
        number += 1
    idle_rows = [name for name in order(tier) if name.startswith("i")]
    for number in range(1000, 1200):
        assert store_chunk("b", number) == {Reserved.SLOT}
    assert set(idle_rows) <= set(order(tier)), "the rows of the guarantee stay"
    num_bytes = tier.stats.tenants.num_bytes(b"b")
    assert num_bytes >= (0.95 - share / 100) * 256 * 2 * 4096, "the rest of the memory is used"
