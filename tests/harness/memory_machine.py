"""A memory tier with the bookkeeping of its oracle, for model-based tests."""

from __future__ import annotations

import itertools

from hypothesis.stateful import RuleBasedStateMachine

from lmcache.tiers.memory.contracts import Geometry, Slot
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.memory_oracle import KnownRow, Orders, abandoned

NUM_ROWS, NUM_COLUMNS, SLOT_BYTES = 6, 2, 4096
CHAIN = [bytes([number]) * 64 for number in range(9)]
OWNERS = [name * 16 for name in (b"a", b"b", b"c")]
ENGINES, REQUESTS = [b"E" * 16, b"F" * 16], ["r0", "r1"]


class MemoryOracleMachine(RuleBasedStateMachine):
    """A memory tier and what its users know of it; subclasses add the rules."""

    quota_percent = 100

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = PrivateArena(Geometry(SLOT_BYTES, NUM_COLUMNS), NUM_ROWS)
        self.rows: dict[int, KnownRow] = {}  # the oracle: rows in use
        self.order = Orders(self.rows)
        self.ranks = itertools.count()
        self.dropped: list[int] = []  # useless rows that wait for clients from before the restart
        self.leases: dict[tuple[bytes, str], list[KnownRow]] = {}
        self.old_leases: dict[bytes, list[tuple[str, list[KnownRow]]]] = {}
        self.is_adopting = False
        self.generations = dict.fromkeys(range(NUM_ROWS), 0)
        self.stale: list[tuple[Slot, int, bytes]] = []
        self.start()

    def start(self) -> None:
        self.tier = MemoryTier(self.arena, lambda: self.now, None, self.quota_percent)
        for _ in self.tier.adopt():
            pass

    # ---- bookkeeping of the oracle ----

    def find(self, key: bytes) -> KnownRow | None:
        return next((row for row in self.rows.values() if row.key == key and not row.spoilt), None)

    def settle(self, rows: list[KnownRow]) -> None:
        for row in rows:
            if row.visible:
                self.order.add_tail(row.slot.row, row.request)
            if not row.used and row.spoilt:
                if row.held and self.is_adopting:
                    self.dropped.append(row.slot.row)
                else:
                    del self.rows[row.slot.row]
            elif not row.used and not row.visible:
                row.idle_since, row.idle_rank = self.now, next(self.ranks)

    def quota_victims(self, tenant: bytes, request: str | None) -> list[int] | None:
        return []  # rows to evict for the tenant's quota; None: the tier must refuse

    def allowed_rows(self, request: str | None) -> list[int]:
        """Return the rows of which the tier must reuse one; empty: the tier must refuse."""
        free = sorted(set(range(NUM_ROWS)) - self.rows.keys())
        if free or self.is_adopting or self.dropped:
            return free[:1] or ([] if self.is_adopting else self.dropped)
        if idle := abandoned(self.rows.values(), self.now):
            return [row.slot.row for row in idle if row.idle_since == idle[0].idle_since]
        return [number for number in self.order.victims(request) if not self.rows[number].pins][:1]

    def drop_row(self, number: int) -> None:
        self.rows.pop(number, None)
        self.order.remove(number)
        self.dropped = [other for other in self.dropped if other != number]
