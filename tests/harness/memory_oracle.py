"""What the users of a memory tier know about its rows, kept in the plainest way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.memory.rows import INCOMPLETE_SECONDS


def tenant_of(key: bytes) -> bytes:
    """The tenant that stores this key: one of two, or nobody."""
    return [b"", b"A", b"B"][key[0] % 3]


@dataclass
class KnownRow:
    """A row as its users know it. ``committed`` columns out of ``num_columns``; sizes in bytes."""

    slot: Slot
    key: bytes
    num_columns: int
    slot_bytes: int
    request: Hashable
    tenant: bytes
    writing: dict[int, bytes] = field(default_factory=dict)  # column -> owner
    quarantined: dict[int, bytes] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    readers: int = 0  # leases, those in quarantine included
    pins: int = 0
    spoilt: bool = False
    sealed: bool = False
    unverified: bool = False
    held: bool = False  # a client from before the restart may read it
    idle_since: float = 0.0
    idle_rank: int = 0  # which of those idle since the same time was first

    @property
    def visible(self) -> bool:
        return len(self.committed) == self.num_columns and not self.spoilt

    @property
    def used(self) -> bool:
        return bool(self.writing or self.quarantined or self.readers or self.pins)

    @property
    def user(self) -> str | None:
        """Who keeps it from being evicted?"""
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
    """Rows that nobody completes any more, the oldest first."""
    idle = [row for row in rows if not (row.used or row.visible or row.spoilt)]
    return sorted(
        (row for row in idle if now - row.idle_since > INCOMPLETE_SECONDS), key=lambda row: row.idle_rank
    )


class Order:
    """Rows that may be evicted, by request: the oldest request first, its rows head first."""

    def __init__(self) -> None:
        self.requests: list[tuple[Hashable, list[int]]] = []

    def victims(self, sparing: Hashable = None) -> list[int]:
        return [row for name, rows in self.requests if not name or name != sparing for row in reversed(rows)]

    def remove(self, row: int) -> None:
        left = [(name, [other for other in rows if other != row]) for name, rows in self.requests]
        self.requests = [(name, rows) for name, rows in left if rows]

    def add_tail(self, row: int, request: Hashable) -> None:
        self._change([row], request, is_head=False)

    def add_head(self, rows: Sequence[int], request: Hashable) -> None:
        if rows:
            self._change(rows, request, is_head=True)

    def _change(self, changed: Sequence[int], request: Hashable, *, is_head: bool) -> None:
        for row in changed:
            self.remove(row)
        present = dict(self.requests).get(request, [])
        rows = [*changed, *present] if is_head else [*present, *changed]
        self.requests = [(name, others) for name, others in self.requests if name != request]
        self.requests.append((request, rows))


class Orders(Order):
    """The order of all rows, and that of each tenant's own. ``rows``: those there are."""

    def __init__(self, rows: Mapping[int, KnownRow]) -> None:
        super().__init__()
        self._rows = rows
        self._own: dict[bytes, Order] = {}

    def of(self, tenant: bytes) -> Order:
        return self._own.setdefault(tenant, Order())

    def remove(self, row: int) -> None:
        super().remove(row)
        for order in self._own.values():
            order.remove(row)

    def _change(self, changed: Sequence[int], request: Hashable, *, is_head: bool) -> None:
        super()._change(changed, request, is_head=is_head)
        for tenant in {self._rows[row].tenant for row in changed}:
            own = [row for row in changed if self._rows[row].tenant == tenant]
            self.of(tenant)._change(own, request, is_head=is_head)
