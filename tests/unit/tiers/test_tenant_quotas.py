"""Tenant quotas of the memory tier; ``test_budget_model`` covers random sequences."""

from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Reserved
from lmcache_store.tiers.stats import Removal
from tests.harness.tiers.chains import one_chain
from tests.unit.tiers.test_budgets import ENGINE, key, new_tier, order, store


def test_tenant_at_its_quota_evicts_its_own_rows_first() -> None:
    tier = new_tier(8, Budgets(Budget(memory_percent=40)))  # three rows for each tenant
    for name in ("b.0", "b.1", "a.0", "a.1", "a.2", "a,0"):
        assert store(tier, name) is Reserved.SLOT
    assert {*order(tier)} == {"a.0", "a.1", "a,0", "b.0", "b.1"}  # the tail of the older request was evicted
    tier.lookup((ENGINE, "a.0"), one_chain([key("a.0")]))
    tier.release((ENGINE, "a.0"))
    for name in ("a,1", "a,2"):
        assert store(tier, name) is Reserved.SLOT
    assert {*order(tier)} == {"a,0", "a,1", "a,2", "b.0", "b.1"}
    assert tier.stats.removed == {Removal.QUOTA: 3}


def test_tenant_shrinks_to_a_smaller_quota_in_steps() -> None:
    tier = new_tier(400, Budgets(Budget(memory_percent=50)))
    assert {store(tier, f"a{number}.") for number in range(200)} == {Reserved.SLOT}
    tier.usable_slots = 100
    outcomes = [store(tier, f"a{number}.") for number in range(200, 204)]
    assert outcomes == [Reserved.BUSY, Reserved.BUSY, Reserved.SLOT, Reserved.SLOT]
    assert tier.num_used == 50
