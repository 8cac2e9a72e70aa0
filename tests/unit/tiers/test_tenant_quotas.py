"""Tenant quotas of the memory tier; ``test_budget_model`` covers random sequences."""

import pytest

from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import Removal
from tests.harness.tiers.chains import one_chain

OWNER, ENGINE = b"o" * 16, b"E" * 16


class Bench:
    """A memory tier of eight rows with a quota of three rows per tenant."""

    def __init__(self) -> None:
        self.tier = MemoryTier(PrivateArena(Geometry(4096, 1), 8), budgets=Budgets(Budget(memory_percent=40)))
        for _ in self.tier.adopt():
            pass

    def store(self, *names: str) -> None:
        for name in names:
            slot = self.tier.reserve(
                key(name), 0, OWNER, length=4096, request=name[:-1], tenant=name[0].encode()
            ).slot
            assert slot is not None
            self.tier.commit([slot], 0, OWNER)

    def present(self) -> list[str]:
        names = [f"{request}{number}" for request in ("a.", "a,", "b.") for number in range(9)]
        return [name for name in names if self.tier.is_resident(key(name))]


def key(name: str) -> bytes:
    return name.encode().ljust(64)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_tenant_at_its_quota_evicts_its_own_rows_first(bench: Bench) -> None:
    bench.store("b.0", "b.1", "a.0", "a.1", "a.2")
    bench.store("a,0")
    assert bench.present() == ["a.0", "a.1", "a,0", "b.0", "b.1"]  # the tail of the older request was evicted
    bench.tier.lookup((ENGINE, "a.0"), one_chain([key("a.0")]))
    bench.tier.release((ENGINE, "a.0"))
    bench.store("a,1", "a,2")
    assert bench.present() == ["a,0", "a,1", "a,2", "b.0", "b.1"]
    assert bench.tier.stats.removed == {Removal.QUOTA: 3}


def test_tenant_shrinks_to_a_smaller_quota_in_steps() -> None:
    tier = MemoryTier(PrivateArena(Geometry(4096, 1), 400), budgets=Budgets(Budget(memory_percent=50)))
    for _ in tier.adopt():
        pass

    def reserve(number: int) -> Reserved:
        result, slot = tier.reserve(key(f"a{number}"), 0, OWNER, length=4096, tenant=b"a")
        if slot is not None:
            tier.commit([slot], 0, OWNER)
        return result

    assert {reserve(number) for number in range(200)} == {Reserved.SLOT}
    tier.usable_slots = 100
    outcomes = [reserve(number) for number in range(200, 204)]
    assert outcomes == [Reserved.BUSY, Reserved.BUSY, Reserved.SLOT, Reserved.SLOT]
    assert tier.num_used == 50
