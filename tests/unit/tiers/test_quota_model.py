"""Model-based test of the memory tier with tenant quotas, against the oracle of ``test_memory_model``."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import invariant

from lmcache.tiers.budgets import Budget, Budgets
from tests.harness.memory_oracle import abandoned
from tests.unit.tiers.test_memory_model import NUM_EXAMPLES, NUM_ROWS, MemoryMachine

MAX_ROWS = 2
"""Maximum number of rows of each tenant."""


class QuotaMachine(MemoryMachine):
    budgets = Budgets(Budget(memory_percent=34))

    def quota_victims(self, tenant: bytes, request: str | None) -> list[int] | None:
        tenant_rows = [row for row in self.rows.values() if row.tenant == tenant]
        excess = len(tenant_rows) + 1 - MAX_ROWS
        if not tenant or excess <= 0:
            return []
        if self.is_adopting:
            return None
        victims = [row.slot.row for row in abandoned(tenant_rows, self.now)]
        victims += [n for n in self.order.of(tenant).victims(request) if not self.rows[n].pins]
        return victims[:excess] if len(victims) >= excess else None

    @invariant()
    def tenants_stay_within_their_quota(self) -> None:
        counts = Counter(row.tenant for row in self.rows.values() if row.tenant)
        assert max(counts.values(), default=0) <= MAX_ROWS <= NUM_ROWS * 34 // 100


TestQuotaModel = QuotaMachine.TestCase
TestQuotaModel.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50)
