"""A plain model of the rows of a memory tier, as its users know them."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.memory.rows import INCOMPLETE_SECONDS


def tenant_of(key: bytes) -> bytes:
    """The tenant that stores this key: one of two, or no tenant."""
    return [b"", b"A", b"B"][key[0] % 3]


@dataclass
class KnownRow:
    """A row as its users know it: ``committed`` columns out of ``num_columns``, sizes in bytes."""

    slot: Slot
    key: bytes
    num_columns: int
    slot_bytes: int
    request: Hashable
    tenant: bytes
    writing: dict[int, bytes] = field(default_factory=dict)  # column -> owner
    quarantined: dict[int, bytes] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    readers: int = 0  # leases
    pins: int = 0
    spoilt: bool = False
    sealed: bool = False
    unverified: bool = False
    held: bool = False  # a client from before the restart may still read the row
    idle_since: float = 0.0
    idle_rank: int = 0  # order among rows that are idle since the same time

    @property
    def visible(self) -> bool:
        return len(self.committed) == self.num_columns and not self.spoilt

    @property
    def used(self) -> bool:
        return bool(self.writing or self.quarantined or self.readers or self.pins)

    @property
    def user(self) -> str | None:
        """The kind of use that prevents eviction, if any."""
        users = {
            "leased": self.readers,
            "pinned": self.pins,
            "quarantined": self.quarantined,
            "reserved": self.writing,
        }
        return next((name for name, uses in users.items() if uses), None)

    def content(self, column: int) -> bytes:
        return bytes([self.slot.generation % 251, column + 1]) * (self.slot_bytes // 2)


def abandoned(rows: Iterable[KnownRow], now: float) -> list[KnownRow]:
    """Incomplete rows that no writer will complete, oldest first."""
    idle = [row for row in rows if not (row.used or row.visible or row.spoilt)]
    return sorted(
        (row for row in idle if now - row.idle_since > INCOMPLETE_SECONDS), key=lambda row: row.idle_rank
    )


class Order:
    """Evictable rows by request: oldest request first, and for each request the head first."""

    def __init__(self) -> None:
        self.requests: list[tuple[Hashable, list[int]]] = []

    def victims(self, sparing: Hashable = None) -> list[int]:
        return [row for name, rows in self.requests if not name or name != sparing for row in reversed(rows)]

    def remove(self, row: int) -> None:
        remaining = [(name, [other for other in rows if other != row]) for name, rows in self.requests]
        self.requests = [(name, rows) for name, rows in remaining if rows]

    def add_tail(self, row: int, request: Hashable) -> None:
        self._change([row], request, is_head=False)

    def add_head(self, rows: Sequence[int], request: Hashable) -> None:
        if rows:
            self._change(rows, request, is_head=True)

    def _change(self, changed: Sequence[int], request: Hashable, *, is_head: bool) -> None:
        for row in changed:
            self.remove(row)
        present = dict(self.requests).get(request, [])
        merged = [*changed, *present] if is_head else [*present, *changed]
        self.requests = [(name, rows) for name, rows in self.requests if name != request]
        self.requests.append((request, merged))


class Orders:
    """The order of the rows of each account, and of each tenant. ``rows`` are the existing rows.

    ``account_of`` returns the account of a tenant. Accounts compare their rows by the last use of requests.
    """

    def __init__(self, rows: Mapping[int, KnownRow], account_of: Callable[[bytes], Hashable]) -> None:
        self._rows = rows
        self._account_of = account_of
        self._accounts: dict[Hashable, Order] = {}
        self._tenants: dict[bytes, Order] = {}
        self._uses: dict[tuple[Hashable, Hashable], int] = {}  # (account, request) -> number of the last use
        self._num_uses = 0

    def of(self, tenant: bytes) -> Order:
        return self._tenants.setdefault(tenant, Order())

    def remove(self, row: int) -> None:
        for order in (*self._accounts.values(), *self._tenants.values()):
            order.remove(row)

    def add_tail(self, row: int, request: Hashable) -> None:
        self._change([row], request, is_head=False)

    def add_head(self, rows: Sequence[int], request: Hashable) -> None:
        self._change(rows, request, is_head=True)

    def aged_victims(self, sparing: Hashable = None) -> list[tuple[Hashable, int, int]]:
        """Return (account, number of the last use, row), the rows of each account in eviction order."""
        return [
            (account, self._uses[account, name], row)
            for account, order in self._accounts.items()
            for name, rows in order.requests
            if not name or name != sparing
            for row in reversed(rows)
        ]

    @property
    def is_empty(self) -> bool:
        return not any(order.requests for order in self._accounts.values())

    def _change(self, changed: Sequence[int], request: Hashable, *, is_head: bool) -> None:
        self._num_uses += 1
        for row in changed:
            self.remove(row)
        for orders, name_of in ((self._accounts, self._account_of), (self._tenants, lambda tenant: tenant)):
            rows_by_name: dict[Hashable, list[int]] = {}
            for row in changed:
                rows_by_name.setdefault(name_of(self._rows[row].tenant), []).append(row)
            for name, rows in rows_by_name.items():
                orders.setdefault(name, Order())._change(rows, request, is_head=is_head)
                if orders is self._accounts:
                    self._uses[name, request] = self._num_uses
