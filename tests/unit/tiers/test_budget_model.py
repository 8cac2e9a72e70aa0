"""Model-based test of the memory tier with budgets of tenants, against the oracle of ``test_memory_model``.

Each machine has other budgets. The oracle checks which row each store evicts, and which stores are refused.
"""

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import invariant

from lmcache_store.tiers.budgets import Budget, Budgets
from tests.harness.tiers.memory_machine import NUM_ROWS
from tests.harness.tiers.memory_oracle import abandoned
from tests.unit.tiers.test_memory_model import NUM_EXAMPLES, MemoryMachine

SETTINGS = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50)


class ShareMachine(MemoryMachine):
    """Tenant A is guaranteed a third of the rows. The rows of tenant B are evicted first."""

    budgets = Budgets(by_tenant={b"A": Budget("a", min_memory_percent=34), b"B": Budget("b", priority=-1)})

    def check_new_row(self, key: bytes, column: int, owner: bytes, request: str | None) -> None:
        before = {row.slot for row in self.rows.values() if row.tenant == b"A" and row.visible}
        num_before = sum(row.tenant == b"A" for row in self.rows.values())
        super().check_new_row(key, column, owner, request)
        after = {row.slot for row in self.rows.values() if row.tenant == b"A" and row.visible}
        stored = self.find(key)
        if num_before <= NUM_ROWS // 3 and (stored is None or stored.tenant != b"A"):
            assert before <= after  # independent of how the oracle chooses rows


class FullShareMachine(MemoryMachine):
    """All rows are guaranteed to tenants, so that stores without a tenant may be refused."""

    budgets = Budgets(
        by_tenant={
            b"A": Budget("a", min_memory_percent=67, priority=-5),
            b"B": Budget("b", min_memory_percent=33, priority=5),
        }
    )


class BoundMachine(MemoryMachine):
    """Tenant A has an upper bound and a guaranteed share; B has only an upper bound, and stays longest."""

    budgets = Budgets(
        by_tenant={
            b"A": Budget("a", memory_percent=50, min_memory_percent=34),
            b"B": Budget("b", memory_percent=34, priority=1),
        }
    )

    def bound(self, tenant: bytes) -> int:
        return {b"A": 3, b"B": 2}.get(tenant, NUM_ROWS)

    def quota_victims(self, tenant: bytes, request: str | None) -> list[int] | None:
        tenant_rows = [row for row in self.rows.values() if row.tenant == tenant]
        excess = len(tenant_rows) + 1 - self.bound(tenant)
        if excess <= 0 or self.bound(tenant) == NUM_ROWS:
            return []
        if self.is_adopting:
            return None
        victims = [row.slot.row for row in abandoned(tenant_rows, self.now)]
        victims += [n for n in self.order.of(tenant).victims(request) if not self.rows[n].pins]
        return victims[:excess] if len(victims) >= excess else None

    @invariant()
    def tenants_stay_within_their_bounds(self) -> None:
        counts = Counter(row.tenant for row in self.rows.values())
        assert all(count <= self.bound(tenant) for tenant, count in counts.items())


class QuotaMachine(BoundMachine):
    """Each tenant has the same upper bound, and rows without a tenant have none."""

    budgets = Budgets(Budget(memory_percent=34))

    def bound(self, tenant: bytes) -> int:
        return 2 if tenant else NUM_ROWS


class PlainMachine(MemoryMachine):
    """All budgets have one priority: rows are evicted by their last use, whoever stored them."""

    budgets = Budgets(by_tenant={b"A": Budget("a", memory_percent=99), b"B": Budget("b")})


TestShareModel = ShareMachine.TestCase
TestShareModel.settings = SETTINGS
TestFullShareModel = FullShareMachine.TestCase
TestFullShareModel.settings = SETTINGS
TestBoundModel = BoundMachine.TestCase
TestBoundModel.settings = SETTINGS
TestQuotaModel = QuotaMachine.TestCase
TestQuotaModel.settings = SETTINGS
TestPlainModel = PlainMachine.TestCase
TestPlainModel.settings = SETTINGS
