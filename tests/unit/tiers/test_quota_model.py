"""The memory tier with tenants' quotas, against the same oracle."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import invariant

from tests.harness.memory_oracle import abandoned
from tests.unit.tiers.test_memory_model import NUM_EXAMPLES, NUM_ROWS, MemoryMachine

SHARE = 2
"""Rows that each tenant may have."""


class QuotaMachine(MemoryMachine):
    quota_percent = 34

    def gives_way(self, tenant: bytes, request: str | None) -> list[int] | None:
        own = [row for row in self.rows.values() if row.tenant == tenant]
        excess = len(own) + 1 - SHARE
        if not tenant or excess <= 0:
            return []
        if self.holding:
            return None
        gone = [row.slot.row for row in abandoned(own, self.now)]
        gone += [n for n in self.order.of(tenant).victims(request) if not self.rows[n].pins]
        return gone[:excess] if len(gone) >= excess else None

    @invariant()
    def nobody_has_more_than_his_share(self) -> None:
        counts = Counter(row.tenant for row in self.rows.values() if row.tenant)
        assert max(counts.values(), default=0) <= SHARE <= NUM_ROWS * self.quota_percent // 100


TestQuotaModel = QuotaMachine.TestCase
TestQuotaModel.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50)
