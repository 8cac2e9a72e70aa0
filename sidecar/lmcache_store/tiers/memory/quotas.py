"""Budgets of tenants in the memory tier: upper bounds, guaranteed shares, and the order of eviction.

A row belongs to the tenant of the request that stored it, even if other tenants use it later. Rows without a
tenant are neither limited nor protected: their requests had no salt, or an older sidecar stored them.

- **Upper bound.** At its bound, a tenant evicts its own rows.
- **Guaranteed share.** While a tenant uses at most its share, stores of other tenants evict none of its rows.
  Only existing rows are protected: other tenants may use a share that its tenant does not fill. If nothing
  else can be evicted, the store is refused. A tenant below its share evicts rows of other tenants first.
- **Order.** Rows of lower priority are evicted first, and among equal priorities the least recently used.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

from lmcache_store.tenant_names import MAX_NAMED
from lmcache_store.tiers.memory.hinted_lru import HintedLRU, HintedRows
from lmcache_store.tiers.pages import zeros
from lmcache_store.tiers.policy import LRU
from lmcache_store.tiers.stats import Account, TenantUse

_MAX_RETAINED = 64
"""Rows of one tenant among which its upper bound spares those that hints retain."""


class _Links(dict[int, int]):
    """A mapping of numbers, 0 by default. A list of few rows among many thus takes little memory."""

    def __missing__(self, row: int) -> int:
        return 0

    def __setitem__(self, row: int, other: int) -> None:
        if other:
            super().__setitem__(row, other)
        else:
            self.pop(row, None)


class TenantOrders:
    """Eviction order of all rows, as one list for each account. O(1) per row and change.

    The next victim is the oldest of the lists' first rows, so an eviction takes time in proportion to the
    number of accounts. Tenants that are not named also have a list each, if their bound counts for each.
    """

    def __init__(self, num_rows: int, rows: HintedRows, tenants: Sequence[TenantUse]) -> None:
        """``tenants``: the tenant of each row. ``rows``: what hints say about them."""
        self._rows = rows
        self._is_hinted = False
        self._num_rows = num_rows
        num_ends = MAX_NAMED + 2  # lists: named ones, the default's, and rows without a tenant
        self._older, self._newer = zeros(num_rows + 1 + num_ends, "I"), zeros(num_rows + 1 + num_ends, "I")
        self._ages = zeros(num_rows + 1, "Q")
        self._age = 0
        self._tenants = tenants
        self._orders: dict[Account, HintedLRU] = {}
        self._order_by_tenant: dict[bytes, LRU] = {}

    def admit(self, row: int, group: Hashable) -> None:
        """See LRU."""
        use = self._tenants[row]
        self._age += 1
        order = self._order(use.account)
        order.admit(row, group)
        order.note_use((row,), group, self._age)
        if use.account.has_tenant_bounds:
            self._order_of(use.name).admit(row, group)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """See LRU."""
        self._age += 1
        rows_by_account: dict[Account, list[int]] = {}
        rows_by_tenant: dict[bytes, list[int]] = {}
        for row in rows:
            use = self._tenants[row]
            rows_by_account.setdefault(use.account, []).append(row)
            if use.account.has_tenant_bounds:
                rows_by_tenant.setdefault(use.name, []).append(row)
        for account, account_rows in rows_by_account.items():
            order = self._order(account)
            order.touch(account_rows, group)
            order.note_use(account_rows, group, self._age)
        for name, tenant_rows in rows_by_tenant.items():
            self._order_of(name).touch(tenant_rows, group)

    def remove(self, *rows: int) -> None:
        """See LRU."""
        for row in rows:
            use = self._tenants[row]
            if order := self._orders.get(use.account):
                order.remove(row)
            if tenant_order := self._order_by_tenant.get(use.name):
                tenant_order.remove(row)
                if next(tenant_order.victims(), None) is None:
                    del self._order_by_tenant[use.name]

    def begin_hints(self) -> None:
        """See HintedLRU."""
        self._is_hinted = True
        for order in self._orders.values():
            order.is_hinted = True

    def release(self, rows: Iterable[int]) -> None:
        """See HintedLRU."""
        for row in rows:
            if order := self._orders.get(self._tenants[row].account):
                order.release((row,))

    def note_retained(self, rows: Iterable[int]) -> None:
        """See HintedLRU."""
        for row in rows:
            if order := self._orders.get(self._tenants[row].account):
                order.note_retained((row,))

    def note_hits(self, rows: Sequence[int]) -> None:
        """See HintedLRU."""
        for row in rows if self._is_hinted else ():
            if order := self._orders.get(self._tenants[row].account):
                order.note_hits((row,))

    def note_misses(self, chains: Sequence[Sequence[bytes]], num_hit: int) -> None:
        """See HintedLRU. A key has one tenant, because keys depend on the salt."""
        for order in self._orders.values():
            order.note_misses(chains, num_hit)

    def note_evicted(self, row: int) -> None:
        """See HintedLRU."""
        if order := self._orders.get(self._tenants[row].account):
            order.note_evicted(row)

    def victims(self, sparing: Hashable = None) -> Iterator[int]:
        """Yield all rows in eviction order; see LRU."""
        return self._merge(list(self._orders), sparing)

    def victims_for(
        self,
        account: Account,
        sparing: Hashable,
        is_protected: Callable[[Account], bool],
        max_rows: int,
        *,
        is_within_share: bool,
    ) -> Iterator[int]:
        """Yield the rows that a store of this account may evict, in order.

        ``max_rows``: limit for each account, so that pinned rows of one do not hide the rows of another.
        ``is_within_share``: the account uses less than its guaranteed share. Its rows then come last.
        """
        accounts = [other for other in self._orders if other is account or not is_protected(other)]
        if not is_within_share or account not in self._orders:
            return self._merge(accounts, sparing, max_rows)
        accounts.remove(account)
        last = self._merge([account], sparing, max_rows)
        return itertools.chain(self._merge(accounts, sparing, max_rows), last)

    def victims_of(self, tenant: bytes, account: Account, sparing: Hashable) -> Iterator[int]:
        """Yield the rows that count against the upper bound of a tenant, in eviction order."""
        if not account.has_tenant_bounds:
            order = self._orders.get(account)
            return iter(()) if order is None else order.victims(sparing)
        rows = self._order_by_tenant[tenant].victims(sparing) if tenant in self._order_by_tenant else iter(())
        first = list(itertools.islice(rows, _MAX_RETAINED))
        first.sort(key=lambda row: self._rows.hold(row) is not None)
        return itertools.chain(first, rows)

    def sections(self) -> Iterator[tuple[Hashable, list[int]]]:
        """Yield groups in the order of their last use; see LRU."""
        sections = [order.aged_sections() for order in self._orders.values()]
        merged = heapq.merge(*sections, key=lambda section: section[0])
        return ((name, rows) for _, name, rows in merged)

    def _merge(
        self, accounts: Iterable[Account], sparing: Hashable, max_rows: int | None = None
    ) -> Iterator[int]:
        present = [account for account in accounts if not self._orders[account].is_empty]
        present.sort(key=_priority)
        for _, equals in itertools.groupby(present, _priority):
            orders = [self._orders[account] for account in equals]
            if len(orders) == 1:
                yield from itertools.islice(orders[0].victims(sparing), max_rows)
            else:
                oldest = [itertools.islice(order.aged_victims(sparing), max_rows) for order in orders]
                yield from (row for _, row in heapq.merge(*oldest))

    def _order(self, account: Account) -> HintedLRU:
        order = self._orders.get(account)
        if order is None:
            end = self._num_rows + 1 + len(self._orders)
            links = self._older, self._newer, end, self._ages
            order = HintedLRU(self._num_rows, *links, self._rows, partial(self._rows.limits, account))
            order.is_hinted = self._is_hinted
            self._orders[account] = order
        return order

    def _order_of(self, tenant: bytes) -> LRU:
        return self._order_by_tenant.setdefault(tenant, LRU(0, _Links(), _Links()))


def whole_order(num_rows: int, rows: HintedRows) -> HintedLRU:
    """Return the eviction order of all rows as one list."""
    links = zeros(num_rows + 1, "I"), zeros(num_rows + 1, "I")
    ages, limits = zeros(num_rows + 1, "Q"), partial(rows.limits, None)
    return HintedLRU(num_rows, *links, 0, ages, rows, limits, counts_uses=True)


def _priority(account: Account) -> int:
    return account.budget.priority


def leading(rows: Iterable[int], num_slots: int, size: Callable[[int], int]) -> list[int]:
    """Return the first rows that have ``num_slots`` slots together; all rows if they have fewer."""
    leaving = list[int]()
    for row in rows:
        if num_slots <= 0:
            break
        leaving.append(row)
        num_slots -= size(row)
    return leaving
