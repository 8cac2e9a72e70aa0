"""A memory tier with the bookkeeping of its oracle, for model-based tests."""

import itertools
from collections.abc import Hashable

from hypothesis.stateful import RuleBasedStateMachine

from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Geometry, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.tiers.memory_oracle import KnownRow, Orders, abandoned

NUM_ROWS, NUM_COLUMNS, SLOT_BYTES = 6, 2, 4096
CHAIN = [bytes([number]) * 64 for number in range(9)]
OWNERS = [name * 16 for name in (b"a", b"b", b"c")]
ENGINES, REQUESTS = [b"E" * 16, b"F" * 16], ["r0", "r1"]


class MemoryOracleMachine(RuleBasedStateMachine):
    """A memory tier and what its users know of it; subclasses add the rules."""

    budgets: Budgets | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = PrivateArena(Geometry(SLOT_BYTES, NUM_COLUMNS), NUM_ROWS)
        self.rows: dict[int, KnownRow] = {}  # the oracle: rows in use
        self.order = self.new_orders()
        self.ranks = itertools.count()
        self.dropped: list[int] = []  # useless rows that wait for clients from before the restart
        self.leases: dict[tuple[bytes, str], list[KnownRow]] = {}
        self.is_adopting = False
        self.generations = dict.fromkeys(range(NUM_ROWS), 0)
        self.stale: list[tuple[Slot, int, bytes]] = []
        self.start()

    def start(self) -> None:
        self.tier = MemoryTier(self.arena, lambda: self.now, None, self.budgets)
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

    def new_orders(self) -> Orders:
        return Orders(self.rows, self.account_of)

    def account_of(self, tenant: bytes) -> Hashable:
        """Return the budget that counts a tenant's rows; without limits, one for all rows."""
        return None if self.budgets is None else self.budgets.of(tenant) if tenant else b""

    def quota_victims(self, tenant: bytes, request: str | None) -> list[int] | None:
        return []  # rows to evict for the tenant's quota; None: the tier must refuse

    def allowed_rows(self, request: str | None, tenant: bytes) -> list[int]:
        """Return the rows of which the tier must reuse one; empty: the tier must refuse."""
        free = sorted(set(range(NUM_ROWS)) - self.rows.keys())
        if free or self.is_adopting or self.dropped:
            return free[:1] or ([] if self.is_adopting else self.dropped)
        if idle := abandoned(self.rows.values(), self.now):
            return [row.slot.row for row in idle if row.idle_since == idle[0].idle_since]
        return self.victims(request, tenant)

    def victims(self, request: str | None, tenant: bytes) -> list[int]:
        """Return the rows of which a store of the tenant must evict one, if no row is free or useless."""
        best: dict[Hashable, tuple[tuple[bool, int, int], int]] = {}  # account -> rank, row
        for account, use, row in self.order.aged_victims(request):
            if not self.rows[row].pins and account not in best and self.can_evict(account, tenant):
                best[account] = (self.is_last(account, tenant), self.priority_of(account), use), row
        first = min((rank for rank, _ in best.values()), default=None)
        return [row for rank, row in best.values() if rank == first]

    def can_evict(self, account: Hashable, tenant: bytes) -> bool:
        return account == self.account_of(tenant) or self.num_rows(account) > self.share_of(account)

    def is_last(self, account: Hashable, tenant: bytes) -> bool:
        is_below = self.num_rows(account) < self.share_of(account)
        return account == self.account_of(tenant) and is_below

    def num_rows(self, account: Hashable) -> int:
        return sum(self.account_of(row.tenant) == account for row in self.rows.values())

    def share_of(self, account: Hashable) -> int:
        return NUM_ROWS * account.min_memory_percent // 100 if isinstance(account, Budget) else 0

    def priority_of(self, account: Hashable) -> int:
        return account.priority if isinstance(account, Budget) else 0

    def drop_row(self, number: int) -> None:
        self.rows.pop(number, None)
        self.order.remove(number)
        self.dropped = [other for other in self.dropped if other != number]
