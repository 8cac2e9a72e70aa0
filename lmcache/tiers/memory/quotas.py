"""How much of the memory one tenant may take: who has that much makes room with rows of his own.

A row belongs to the tenant it was made for, whoever uses it later. Rows without a tenant (their requests had
no salt, or they are from before a restart) are not limited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from lmcache.tiers.policy import LRU
from lmcache.tiers.stats import TenantUse


class _Links(dict[int, int]):
    """Numbers that are 0 unless they were set: a list of few rows among many takes the memory of few."""

    def __missing__(self, row: int) -> int:
        return 0

    def __setitem__(self, row: int, other: int) -> None:
        if other:
            super().__setitem__(row, other)
        else:
            self.pop(row, None)


class TenantOrders(LRU):
    """The order of all rows, and beside it, in the same way, that of each tenant's own. O(1) per row."""

    def __init__(self, num_rows: int, tenants: Sequence[TenantUse]) -> None:
        """``tenants``: whose a row is, by row."""
        super().__init__(num_rows)
        self._tenants = tenants
        self._own: dict[bytes, LRU] = {}

    def admit(self, row: int, group: Hashable) -> None:
        """Of the row's tenant, too."""
        super().admit(row, group)
        if name := self._tenants[row].name:
            self._order(name).admit(row, group)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """Of each of the rows' tenants, too."""
        super().touch(rows, group)
        own: dict[bytes, list[int]] = {}
        for row in rows:
            if name := self._tenants[row].name:
                own.setdefault(name, []).append(row)
        for name, some in own.items():
            self._order(name).touch(some, group)

    def remove(self, *rows: int) -> None:
        """Of their tenants, too."""
        super().remove(*rows)
        for row in rows:
            name = self._tenants[row].name
            if order := self._own.get(name):
                order.remove(row)
                if next(order.victims(), None) is None:
                    del self._own[name]

    def victims_of(self, tenant: bytes, sparing: Hashable) -> Iterator[int]:
        """As ``victims``, of one tenant."""
        order = self._own.get(tenant)
        return iter(()) if order is None else order.victims(sparing)

    def _order(self, tenant: bytes) -> LRU:
        return self._own.setdefault(tenant, LRU(0, _Links(), _Links()))


def leading(rows: Iterable[int], num_slots: int, size: Callable[[int], int]) -> list[int]:
    """Return the first rows that have so many slots together; all, if they have fewer."""
    leaving = list[int]()
    for row in rows:
        if num_slots <= 0:
            break
        leaving.append(row)
        num_slots -= size(row)
    return leaving
