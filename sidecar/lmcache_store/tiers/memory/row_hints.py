"""Hints about the rows of the memory tier, for the eviction order and for lookups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.budgets import Budget
from lmcache_store.tiers.memory.contracts import OpenRow
from lmcache_store.tiers.memory.hinted_lru import HintedLRU
from lmcache_store.tiers.memory.holds import Hold, Holds
from lmcache_store.tiers.memory.quotas import TenantOrders
from lmcache_store.tiers.memory.row_index import RowIndex
from lmcache_store.tiers.stats import Account, MemoryStats


class RowHints:
    """Belongs to the rows of one arena."""

    def __init__(self, rows: RowIndex, stats: MemoryStats, clock: Callable[[], float]) -> None:
        self.now = clock
        self.holds = Holds(clock, self.account_of)
        """Rows that hints retain."""
        self._rows: RowIndex = weakref.proxy(
            rows
        )  # so that the arena's memory is unmapped with the last reference
        self._stats = stats

    def hold(self, row: int) -> Hold | None:
        """Return the hint that retains a row, or None."""
        return self.holds.of(self._rows.key(row)) if self.holds else None

    def is_retained(self, row: int) -> bool:
        """Does a hint retain this row?"""
        return self.hold(row) is not None

    def key(self, row: int) -> RowKey:
        """Return the key of a row."""
        return self._rows.key(row)

    def size(self, row: int) -> int:
        """Return the slots of a row."""
        return self._rows.allocator.size(row)

    def account_of(self, tenant: bytes) -> Account | None:
        """Return the account whose rows are in one order; None: all rows are."""
        tenants = self._stats.tenants
        return tenants.account(tenant) if tenants.budgets.has_limits else None

    def limits(self, account: Account | None) -> tuple[int, int]:
        """Return how many slots of an account's rows hints may retain, and release early; None: of all."""
        budget, share = self._share(account)
        return share * budget.retain_percent // 100, share // 2

    def max_retained(self, tenant: bytes) -> int:
        """Return how many slots hints of a tenant may retain that an LRU would evict."""
        return self.limits(self.account_of(tenant))[0]

    def max_named(self, tenant: bytes) -> int:
        """Return how many slots the holds of a tenant may name. An LRU would have most of these rows, too."""
        return self._share(self.account_of(tenant))[1]

    def retain(self, hold: Hold, keys: Sequence[tuple[RowKey, int]], *, is_open: bool) -> None:
        """Retain the rows of these keys, with their slots. ``is_open``: and rows that its request stores."""
        self.holds.add(hold, keys, self.max_named(hold.tenant))
        if is_open:
            self.holds.open(hold.request_id, hold)

    def note_order(self, policy: HintedLRU | TenantOrders) -> None:
        """Note that the rows have another eviction order, and perhaps other accounts."""
        self.holds.regroup()
        if self.holds:
            policy.begin_hints()

    def note_published(self, number: int, row: OpenRow) -> None:
        """Note a row that became visible: it joins the hold of its request."""
        if self.holds:
            self.holds.join(row.request, row.key, self.size(number), self.max_named)

    def _share(self, account: Account | None) -> tuple[Budget, int]:
        """Return the budget of an account, and the slots of its upper bound."""
        budget = self._stats.tenants.budgets.no_salt if account is None else account.budget
        return budget, self._rows.usable_slots * budget.memory_percent // 100
