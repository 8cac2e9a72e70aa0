"""Tenant quotas: the share of memory that one tenant may use. At its quota, a tenant evicts its own rows.

A row belongs to the tenant of the request that stored it, even if other tenants use it later. Rows without a
tenant are not limited: their requests had no salt, or the rows are from before a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from lmcache.tiers.policy import LRU
from lmcache.tiers.stats import TenantUse


class _Links(dict[int, int]):
    """A mapping of numbers, 0 by default. A list of few rows among many thus takes little memory."""

    def __missing__(self, row: int) -> int:
        return 0

    def __setitem__(self, row: int, other: int) -> None:
        if other:
            super().__setitem__(row, other)
        else:
            self.pop(row, None)


class TenantOrders(LRU):
    """The eviction order of all rows, and the same order of each tenant's rows. O(1) per row."""

    def __init__(self, num_rows: int, tenants: Sequence[TenantUse]) -> None:
        """``tenants``: the tenant of each row."""
        super().__init__(num_rows)
        self._tenants = tenants
        self._order_by_tenant: dict[bytes, LRU] = {}

    def admit(self, row: int, group: Hashable) -> None:
        """See LRU; also in the order of the row's tenant."""
        super().admit(row, group)
        if name := self._tenants[row].name:
            self._order(name).admit(row, group)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """See LRU; also in the orders of the rows' tenants."""
        super().touch(rows, group)
        rows_by_tenant: dict[bytes, list[int]] = {}
        for row in rows:
            if name := self._tenants[row].name:
                rows_by_tenant.setdefault(name, []).append(row)
        for name, tenant_rows in rows_by_tenant.items():
            self._order(name).touch(tenant_rows, group)

    def remove(self, *rows: int) -> None:
        """See LRU; also from the orders of the rows' tenants."""
        super().remove(*rows)
        for row in rows:
            name = self._tenants[row].name
            if order := self._order_by_tenant.get(name):
                order.remove(row)
                if next(order.victims(), None) is None:
                    del self._order_by_tenant[name]

    def victims_of(self, tenant: bytes, sparing: Hashable) -> Iterator[int]:
        """Yield the rows of one tenant in eviction order; see ``victims``."""
        order = self._order_by_tenant.get(tenant)
        return iter(()) if order is None else order.victims(sparing)

    def _order(self, tenant: bytes) -> LRU:
        return self._order_by_tenant.setdefault(tenant, LRU(0, _Links(), _Links()))


def leading(rows: Iterable[int], num_slots: int, size: Callable[[int], int]) -> list[int]:
    """Return the first rows that have ``num_slots`` slots together; all rows if they have fewer."""
    leaving = list[int]()
    for row in rows:
        if num_slots <= 0:
            break
        leaving.append(row)
        num_slots -= size(row)
    return leaving
