"""Random sequences of operations on a memory tier with hints: no row is lost, and no store is blocked."""

import hashlib
import random

import pytest

from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.hinted_lru import HintedLRU
from lmcache_store.tiers.memory.holds import LOWEST, Hold
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.quotas import TenantOrders
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.tiers.chains import one_chain

OWNER, ENGINE = b"o" * 16, b"e" * 16
NUM_SLOTS = 64
ALL_BUDGETS = (
    Budgets(),
    Budgets(by_tenant={b"a": Budget("a", min_memory_percent=40), b"b": Budget("b", priority=-1)}),
    Budgets(Budget(memory_percent=40), by_tenant={b"a": Budget("a", memory_percent=50, retain_percent=80)}),
)


class RandomUse:
    """Random operations of clients, and of the sidecar."""

    def __init__(self, seed: int, slots_per_frame: int) -> None:
        self.now, self.random, self.slots_per_frame = 0.0, random.Random(seed), slots_per_frame
        arena = PrivateArena(Geometry(4096, 1, slots_per_frame), NUM_SLOTS)
        self.tier = MemoryTier(arena, lambda: self.now, budgets=ALL_BUDGETS[seed % 3])
        list(self.tier.adopt())
        self.tier.release_adopted()
        self.leases: list[tuple[bytes, str]] = []
        self.number = 0

    def keys(self) -> list[bytes]:
        first = self.random.randrange(60)
        return [hashlib.sha512(b"%d" % (first + n)).digest() for n in range(self.random.randrange(1, 6))]

    def run(self) -> None:
        self.now += self.random.random()
        self.number += 1
        operations = self.store, self.store, self.look_up, self.end_lease, self.retain, self.release
        rare = self.change_budgets, self.resize, self.wait
        self.random.choice(rare if self.random.random() < 0.05 else operations)()

    def store(self) -> None:
        length = 4096 * self.random.randrange(1, self.slots_per_frame + 1)
        tenant, column, request = self.random.choice((b"", b"a", b"b", b"c")), 0, str(self.number)
        for key in self.keys():
            result, slot = self.tier.reserve(
                key, column, OWNER, length=length, request=request, tenant=tenant
            )
            if slot is not None and self.random.random() < 0.9:
                self.tier.commit([slot], column, OWNER)
            elif slot is not None:
                self.tier.abort([slot], column, OWNER)
            elif not self.leases and not tenant and self.tier.usable_slots == NUM_SLOTS:
                has_limits = self.tier.stats.tenants.budgets.has_limits
                assert result is Reserved.EXISTS or has_limits, "hints never block a store"

    def look_up(self) -> None:
        lease_id = ENGINE, str(self.number)
        is_hint = self.random.random() < 0.5
        self.tier.lookup(lease_id, one_chain(self.keys()), is_hint=is_hint)
        if not is_hint:
            self.leases.append(lease_id)

    def end_lease(self) -> None:
        if self.leases:
            self.tier.release(self.leases.pop(self.random.randrange(len(self.leases))))

    def retain(self) -> None:
        tenant, end = self.random.choice((b"", b"a", b"b", b"c")), self.now + self.random.randrange(1, 60)
        hold = Hold(tenant, str(self.number), "message", "action", end, self.random.randrange(-2, 3))
        self.tier.retain(hold, [(key, 1) for key in self.keys()], is_open=self.random.random() < 0.5)

    def release(self) -> None:
        self.tier.evict_first(self.keys())

    def change_budgets(self) -> None:
        self.tier.set_budgets(self.random.choice(ALL_BUDGETS))

    def resize(self) -> None:
        if self.random.random() < 0.5:
            self.tier.vacate(self.random.randrange(NUM_SLOTS // 2, NUM_SLOTS), 5)
        else:
            self.tier.usable_slots = None

    def wait(self) -> None:
        self.now += 50

    def check(self) -> None:
        rows, policy = self.tier._rows, self.tier._rows.policy
        victims = list(policy.victims())
        visible = set(rows.row_by_key.values()) - rows.open_rows.keys()
        assert len(victims) == len(set(victims)), "a row has two places"
        assert set(victims) == visible - rows.lease_counts.keys(), "a row is lost, or leased"
        for order in policy._orders.values() if isinstance(policy, TenantOrders) else (policy,):
            self.check_order(order)

    def check_order(self, order: HintedLRU) -> None:
        size = self.tier._rows.allocator.size
        assert order._spared_slots == sum(map(size, order.spared))
        by_rank = {True: 0, False: 0}
        for row, (rank, _) in order._aside.items():
            by_rank[rank == LOWEST] += size(row)
        assert (order._other_slots, order._retained_slots) == (by_rank[True], by_rank[False])
        assert order._ghosts.num_slots == sum(slots for _, slots in order._ghosts._rows.values())
        assert order._ghosts.num_slots <= order._spared_slots
        assert 0 <= order.belief <= 1


@pytest.mark.parametrize("slots_per_frame", [1, 4])
@pytest.mark.parametrize("seed", range(9))
def test_hints_lose_no_row(seed, slots_per_frame):
    use = RandomUse(seed, slots_per_frame)
    for _ in range(600):
        use.run()
        use.check()
