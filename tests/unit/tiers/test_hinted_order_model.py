"""Model-based test of the eviction order with hints, against an LRU that has no hints.

Each request is one row of a chain by itself, so that the LRU's order is the order of the last uses.
"""

import hashlib
import random
from collections import OrderedDict

import pytest

from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.holds import Hold
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.tiers.chains import one_chain

OWNER, ENGINE = b"o" * 16, b"e" * 16
NUM_ROWS = 24
SECONDS = 40


class World:
    """A tier whose requests look a key up, and store it if it is absent. ``lru`` has the keys of an LRU."""

    def __init__(self, seed: int, percent: int = 50) -> None:
        self.now, self.random = 0.0, random.Random(seed)
        budgets = Budgets(no_salt=Budget(retain_percent=percent))
        arena = PrivateArena(Geometry(4096, 1, 1), NUM_ROWS)
        self.tier = MemoryTier(arena, lambda: self.now, budgets=budgets)
        list(self.tier.adopt())
        self.tier.release_adopted()
        self.lru: OrderedDict[bytes, None] = OrderedDict()
        self.num_hits = self.num_lru_hits = self.number = 0

    @property
    def order(self):
        return self.tier._rows.policy

    @property
    def resident(self) -> set[bytes]:
        return set(self.tier._rows.row_by_key)

    def use(self, key: bytes) -> None:
        self.now += 1
        self.number += 1
        request = f"request {self.number}"
        self.num_lru_hits += key in self.lru
        self.lru[key] = None
        self.lru.move_to_end(key)
        if len(self.lru) > NUM_ROWS:
            self.lru.popitem(last=False)
        result = self.tier.lookup((ENGINE, request), one_chain([key]))
        self.num_hits += result.num_resident
        self.tier.release((ENGINE, request))
        if not result.num_resident:
            reservation = self.tier.reserve(key, 0, OWNER, length=4096, request=request)
            assert reservation.result is Reserved.SLOT  # hints never block a store
            self.tier.commit([reservation.slot], 0, OWNER)

    def retain(self, key: bytes, seconds: float = SECONDS, priority: int = 0) -> None:
        hold = Hold(b"", "request", "message", "action", self.now + seconds, priority)
        self.tier.retain(hold, [(key, 1)], is_open=False)

    def check(self) -> None:
        spared, ghosts = self.resident - set(self.lru), set(self.lru) - self.resident
        assert set(map(self.tier._rows.key, self.order.spared)) == spared
        assert set(self.order._ghosts._rows) == {key[-8:] for key in ghosts}
        held = [row for row in self.order._aside if self.tier.hints.hold(row) is not None]
        assert len(held) <= self.tier.hints.max_retained(b"")


def name(number: int) -> bytes:
    return hashlib.sha512(str(number).encode()).digest()


@pytest.mark.parametrize("seed", range(20))
def test_spared_rows_and_ghosts_are_the_difference_to_an_lru(seed):
    world = World(seed)
    for _ in range(600):
        key = name(world.random.randrange(3 * NUM_ROWS))
        match world.random.randrange(6):
            case 0:
                world.retain(key, world.random.randrange(1, 2 * SECONDS), world.random.randrange(-1, 2))
            case 1:
                world.tier.evict_first([key])
            case _:
                world.use(key)
        world.check()


@pytest.mark.parametrize("seed", range(5))
def test_without_belief_the_order_is_that_of_an_lru(seed):
    world = World(seed, percent=0)
    for _ in range(400):
        key = name(world.random.randrange(3 * NUM_ROWS))
        world.retain(key)
        world.use(key)
    assert list(map(world.tier._rows.key, world.order.victims())) == list(world.lru)
    assert world.num_hits == world.num_lru_hits


def test_ghosts_of_a_group_leave_in_the_order_of_their_eviction():
    world = World(0)
    ghosts = world.order._ghosts
    names = [name(number)[-8:] for number in range(10)]
    for evicted in names:
        ghosts.add(evicted, 1, 1)
    leaving = []
    while ghosts:
        leaving.append(ghosts.oldest[1])
        ghosts.take(leaving[-1])
    assert leaving == names


def test_all_rows_retained_is_an_lru():
    world = World(0)
    for _ in range(600):
        key = name(world.random.randrange(3 * NUM_ROWS))
        world.use(key)
        world.retain(key, 1e6)
    assert world.num_hits >= world.num_lru_hits


def test_retained_row_stays_until_its_end():
    world = World(0)
    world.use(name(0))
    world.retain(name(0))
    for number in range(1, SECONDS):
        world.use(name(number))
    assert name(0) in world.resident
    for number in range(100, 103):
        world.use(name(number))
    assert name(0) not in world.resident


def test_retained_rows_are_handed_over_first():
    world = World(0)
    for number in range(NUM_ROWS):
        world.use(name(number))
    for number in (0, 5):
        world.retain(name(number))
    hottest = [key for key, _, _ in world.tier.hottest_half()]
    assert set(hottest[:2]) == {name(0), name(5)}
    assert hottest[2] == name(NUM_ROWS - 1)


def test_old_entries_of_rows_are_forgotten():
    world = World(0)
    for turn in range(300):
        for number in range(4):
            world.retain(name(number), 1e9)
            world.use(name(number))
        for number in range(NUM_ROWS):
            world.use(name(1000 + NUM_ROWS * turn + number))
    assert world.num_hits > 1000
    lengths = len(world.order._queue), len(world.order._expiries), len(world.order._ghosts._queue)
    assert max(lengths) < 200


def test_renewed_hold_counts_for_rows_that_an_lru_has_evicted():
    world = World(0)
    world.use(name(0))
    world.retain(name(0))
    for number in range(100, 100 + NUM_ROWS):
        world.use(name(number))
    assert len(world.order.spared) == 1
    world.retain(name(0), 3 * SECONDS)
    for number in range(200, 200 + 2 * SECONDS):
        world.use(name(number))
    assert name(0) in world.resident
    world.now += 2 * SECONDS
    world.use(name(300))
    assert name(0) not in world.resident
    assert world.order._retained_slots == 0


def test_a_row_that_returns_under_one_hold_leaves_no_old_entries():
    world = World(0)
    for number in (0, 1):
        world.use(name(number))
        world.retain(name(number), 1e9, priority=number)
    for turn in range(200):
        world.use(name(1))  # the other row stays aside
        for number in range(NUM_ROWS):
            world.use(name(1000 + NUM_ROWS * turn + number))
    assert len(world.order.spared) == 2
    assert max(len(world.order._queue), len(world.order._expiries)) < 80


def test_lowest_priority_leaves_first_when_the_budget_is_full():
    world = World(0, percent=13)  # three rows
    for number in range(4):
        world.use(name(number))
        world.retain(name(number), 1000, priority=number % 2)
    for number in range(100, 200):
        world.use(name(number))
    assert {name(1), name(3)} < world.resident
    assert len(world.resident & {name(0), name(2)}) == 1


def test_released_rows_leave_first_and_a_use_undoes_it():
    world = World(0)
    for number in range(NUM_ROWS):
        world.use(name(number))
    world.tier.evict_first([name(20), name(21), name(22)])
    world.use(name(21))
    for number in range(100, 103):
        world.use(name(number))
    assert {name(21), *(name(number) for number in range(1, 20))} <= world.resident
    assert not {name(20), name(22)} & world.resident


def test_wrong_hints_lose_their_belief():
    world = World(0)
    for turn in range(60):
        for number in range(20):  # a working set that fits
            world.use(name(number))
        for number in range(3):
            world.retain(name(1000 + 3 * turn + number), 1e6)
            world.use(name(1000 + 3 * turn + number))
    assert world.order.belief < 0.2


def test_belief_returns_when_hints_would_have_paid():
    world = World(0)
    world.tier.retain(
        Hold(b"", "r", "m", "a", 1e9), [(name(number), 1) for number in range(4)], is_open=False
    )
    world.order.belief = 0.0
    for turn in range(40):
        for number in range(4):
            world.use(name(number))
        for number in range(2 * NUM_ROWS):
            world.use(name(1000 + 2 * NUM_ROWS * turn + number))
    assert world.order.belief > 0.5
    assert world.num_hits > 100
    assert world.num_lru_hits == 0


@pytest.mark.parametrize("seed", range(5))
def test_hints_of_a_tenant_cost_another_tenant_no_row(seed):
    """Each store evicts a row of the same tenant as without hints."""
    choices = random.Random(seed)
    limited = Budgets(by_tenant={b"a": Budget("a", min_memory_percent=1), b"b": Budget("b")})
    tiers = [MemoryTier(PrivateArena(Geometry(4096, 1, 1), NUM_ROWS), budgets=limited) for _ in range(2)]
    for tier in tiers:
        list(tier.adopt())
        tier.release_adopted()
    plain, hinted = tiers
    for number in range(800):
        tenant = choices.choice((b"a", b"b", b"b"))
        for tier in tiers:
            slot = tier.reserve(name(number), 0, OWNER, length=4096, request=str(number), tenant=tenant).slot
            tier.commit([slot], 0, OWNER)
        if tenant == b"a" and choices.random() < 0.5:
            action = choices.choice((hinted.evict_first, lambda keys: retain_for(hinted, keys)))
            action([name(number - choices.randrange(4))])
        assert [use.num_rows for use in rows_by_tenant(plain)] == [
            use.num_rows for use in rows_by_tenant(hinted)
        ]
    assert set(plain._rows.row_by_key) != set(hinted._rows.row_by_key)


def retain_for(tier: MemoryTier, keys: list[bytes]) -> None:
    hold = Hold(b"a", "request", "message", "action", tier.hints.now() + 1e6)
    tier.retain(hold, [(key, 1) for key in keys], is_open=False)


def rows_by_tenant(tier: MemoryTier) -> list:
    return sorted(tier.stats.tenants.largest()[0], key=lambda use: use.name)


def test_long_row_takes_the_slots_of_retained_neighbors_last():
    """Frames of four slots have four short rows each, one of them retained in most frames."""
    tier = MemoryTier(PrivateArena(Geometry(4096, 1, 4), 24))
    list(tier.adopt())
    tier.release_adopted()
    for number in range(24):
        slot = tier.reserve(name(number), 0, OWNER, length=4096, request=str(number)).slot
        tier.commit([slot], 0, OWNER)
    frame_of = {number: tier._rows.row_by_key[name(number)] % 6 for number in range(24)}
    retained = [min(number for number, frame in frame_of.items() if frame == f) for f in range(5)]
    tier.retain(
        Hold(b"", "r", "m", "a", tier.hints.now() + 1e6), [(name(n), 1) for n in retained], is_open=False
    )
    slot = tier.reserve(name(100), 0, OWNER, length=4 * 4096, request="long").slot
    assert slot.row % 6 == 5
    tier.commit([slot], 0, OWNER)
    assert all(name(number) in tier._rows.row_by_key for number in retained)
    assert tier.reserve(name(101), 0, OWNER, length=4 * 4096, request="long 2").slot is not None
