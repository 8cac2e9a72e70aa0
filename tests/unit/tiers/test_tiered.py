"""The tiered store over a remote tier that is held, failed and healed at will."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from lmcache.tiers.arena import HeapArena
from lmcache.tiers.base import Geometry, Removal, Reserved, StaleSlot, TierUnavailable
from lmcache.tiers.resilience import CircuitBreaker
from lmcache.tiers.tiered import Lookup, TieredStore

NUM_COLUMNS = 2
SIZE = 4096
NAMESPACE = b"n" * 32
OWNER = b"o" * 16
LEASE = (b"e" * 16, "request")


def chain(length: int, start: int = 0) -> list[bytes]:
    return [NAMESPACE + number.to_bytes(32, "big") for number in range(start, start + length)]


def content(key: bytes, column: int) -> bytes:
    return (key + bytes([column]) * 64) * (SIZE // 128)


class FakeRemote:
    """What ``TieredStore`` needs of ``RemoteTier``; operations in ``held`` wait at the gate."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker(0.001, 0.01)
        self.objects: dict[tuple[bytes, int], bytes] = {}
        self.calls: Counter[str] = Counter()
        self.labels: set[bytes] = set()
        self.held = {"probe", "load", "store"}
        self.open = threading.Event()
        self.open.set()
        self.is_sick = False
        self.is_full = False
        self.num_waiting = 0

    def _enter(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.held:
            self.num_waiting += 1
            assert self.open.wait(20)
            self.num_waiting -= 1
        if self.is_sick:
            self.breaker.failure()
            raise TierUnavailable("sick")

    def probe(self, keys, num_columns):
        self._enter("probe")
        present = [all((key, column) in self.objects for column in range(num_columns)) for key in keys]
        return present.index(False) if False in present else len(keys)

    def load(self, key, column, into):
        self._enter("load")
        payload = self.objects.get((key, column))
        if payload is None or payload == b"invalid":
            into[:3] = b"???"
            return None
        into[: len(payload)] = payload
        return len(payload)

    def store(self, key, column, payload, label):
        self._enter("store")
        if not self.is_full:
            self.objects[key, column] = bytes(payload)
            self.labels.add(label)
        return not self.is_full

    def try_again(self):
        self.calls["trial"] += 1
        if self.is_sick:
            self.breaker.failure()
            return False
        self.breaker.trial_succeeded()
        return True

    def close(self):
        self.calls["close"] += 1

    def fill(self, keys: list[bytes]) -> None:
        self.objects.update({(key, column): content(key, column) for key in keys for column in range(2)})


class World:
    """A store on a running loop, with what tests do to it again and again."""

    def __init__(self, num_rows: int = 16, arena: HeapArena | None = None) -> None:
        self.now = 0.0
        self.remote = FakeRemote()
        self.arena = arena or HeapArena(Geometry(SIZE, NUM_COLUMNS), num_rows)
        self.store = TieredStore(self.arena, self.remote, clock=lambda: self.now)
        self.store.register(NAMESPACE, label=b"model")

    async def __aenter__(self) -> World:
        await self.store.adopt()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.remote.open.set()
        await self.store.close()

    def put(self, keys: list[bytes]) -> None:
        for column in range(NUM_COLUMNS):
            answers = self.store.reserve(keys, column, OWNER, length=SIZE)
            assert all(answer.result is Reserved.SLOT for answer in answers)
            for key, answer in zip(keys, answers, strict=True):
                self.arena.view(answer.slot.row, column)[:] = content(key, column)
            self.store.commit([answer.slot for answer in answers], column, OWNER)

    def lookup(self, keys: list[bytes], request: str = "request") -> Lookup:
        return self.store.lookup((LEASE[0], request), [keys])

    async def until_resident(self, keys: list[bytes]) -> Lookup:
        found = self.lookup(keys)
        while found.num_resident < len(keys):
            await asyncio.sleep(0.001)
            found = self.lookup(keys)
        for key, slot in zip(keys, found.slots[0], strict=False):
            for column in range(NUM_COLUMNS):
                assert bytes(self.arena.view(slot.row, column)) == content(key, column)
        return found


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


def run(test):
    """Run an async test with a World of its own."""

    def runner() -> None:
        async def main() -> None:
            async with World() as world:
                await test(world)

        asyncio.run(main())

    runner.__name__ = test.__name__
    runner.__doc__ = test.__doc__
    return runner


@run
async def test_what_is_committed_is_written_through(world):
    world.put(chain(4))
    assert await world.store.drain(20)
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(4) for c in range(2)}
    assert world.remote.labels == {b"model"}
    assert world.store.stats.written == 4


@pytest.mark.parametrize("private", [True, None])
def test_private_and_unknown_namespaces_stay_in_memory(private):
    async def main() -> None:
        async with World() as world:
            if private:
                world.store.register(NAMESPACE, private=True)
            else:
                world.store._labels.clear()
            world.remote.fill(chain(1, start=9))
            world.put(chain(2))
            assert await world.store.drain(20)
            assert world.lookup(chain(2)).num_resident == 2
            assert not world.lookup(chain(1, start=9), "other").probing
            assert not world.remote.calls

    asyncio.run(main())


@run
async def test_lookup_says_probing_then_pending_then_resident(world):
    world.remote.fill(chain(3))
    world.remote.open.clear()
    assert world.lookup(chain(3)) == Lookup(0, 0, True, [[]])
    await until(lambda: world.remote.num_waiting)
    assert world.lookup(chain(3)) == Lookup(0, 0, True, [[]])
    world.remote.open.set()
    await until(lambda: world.lookup(chain(3)).num_resident + world.lookup(chain(3)).num_pending == 3)
    await world.until_resident(chain(3))
    assert not world.lookup(chain(3)).probing
    assert world.store.stats.promoted == 3


@run
async def test_promotion_is_single_flight(world):
    world.remote.fill(chain(3))
    world.remote.open.clear()
    for request in range(5):
        assert world.lookup(chain(3), str(request)).probing
    world.remote.open.set()
    await until(lambda: world.remote.calls["load"])
    for request in range(5, 10):
        world.lookup(chain(3), str(request))
    await world.until_resident(chain(3))
    assert world.remote.calls == {"probe": 1, "load": 6}


@run
async def test_a_held_remote_holds_no_lookup(world):
    world.put(chain(2))
    assert await world.store.drain(20)
    world.remote.open.clear()
    for request in range(3):
        found = world.lookup(chain(4), str(request))
        assert (found.num_resident, len(found.slots[0])) == (2, 2)
    world.put(chain(2, start=8))
    assert world.lookup(chain(2, start=8), "fresh").num_resident == 2


@run
async def test_a_sick_remote_is_left_alone_until_it_is_well(world):
    world.remote.fill(chain(2))
    world.remote.is_sick = True
    assert world.lookup(chain(2)).probing
    await until(lambda: not world.store.is_remote_well)
    num_probes = world.remote.calls["probe"]
    for _ in range(20):
        assert world.lookup(chain(2)) == Lookup(0, 0, False, [[]])
    world.put(chain(2, start=8))
    await until(lambda: world.remote.calls["trial"] > 3)
    assert world.remote.calls["probe"] == num_probes
    assert not await world.store.drain(0.01)
    world.remote.is_sick = False
    assert await world.store.drain(20)
    assert world.store.stats.written == 2
    world.now += 2
    await world.until_resident(chain(2))


@run
async def test_sickness_in_the_middle_of_a_promotion_leaves_nothing(world):
    world.remote.fill(chain(4))
    world.remote.held = {"load"}
    world.remote.open.clear()
    assert world.lookup(chain(4)).probing
    await until(lambda: world.remote.num_waiting)
    world.remote.is_sick = True
    world.remote.open.set()
    await until(lambda: world.store.stats.promotions_failed >= 2 and not world.store._pending)
    world.remote.is_sick = False
    await until(lambda: world.store.is_remote_well)
    assert world.store.memory.num_used == world.store.stats.promoted


@run
async def test_an_invalid_object_is_a_miss(world):
    world.remote.fill(chain(3))
    world.remote.objects[chain(3)[1], 1] = b"invalid"
    assert world.lookup(chain(3)).probing
    await until(lambda: world.store.stats.promoted + world.store.stats.promotions_failed == 3)
    assert world.lookup(chain(3)).num_resident == 1
    assert world.store.memory.num_used == 2
    assert not world.lookup(chain(3)).probing


@run
async def test_absent_keys_are_asked_for_once_in_a_while(world):
    for _ in range(3):
        world.lookup(chain(2))
        await until(lambda: not world.store._probing)
    assert world.remote.calls["probe"] == 1
    world.now += 1.5
    assert world.lookup(chain(2)).probing


@run
async def test_write_queue_is_bounded_and_drops_the_deepest(world):
    world.remote.open.clear()
    world.put(chain(2))  # two writers take these
    await until(lambda: world.remote.num_waiting == 2)
    world.put(chain(10, start=2))
    await until(lambda: world.store.num_queued_writes + world.store.stats.write_dropped == 10)
    assert world.store.num_queued_writes == 4
    assert world.store.stats.write_dropped == 6
    world.remote.open.set()
    assert await world.store.drain(20)
    assert {key for key, _ in world.remote.objects} == set(chain(6))


@run
async def test_rows_being_written_are_not_evicted_and_queued_ones_may_be(world):
    world.remote.open.clear()
    world.put(chain(6))
    await until(lambda: world.remote.num_waiting == 2 and world.store.num_queued_writes == 4)
    world.put(chain(14, start=100))
    world.remote.open.set()
    assert await world.store.drain(20)
    assert all(payload == content(*name) for name, payload in world.remote.objects.items())
    stats = world.store.stats
    assert stats.written + stats.write_dropped + stats.write_evicted == 20
    assert stats.write_evicted > 0


@run
async def test_a_full_remote_refuses_and_is_not_sick(world):
    world.remote.is_full = True
    world.put(chain(2))
    assert await world.store.drain(20)
    assert world.store.stats.write_refused == 2
    assert world.store.is_remote_well


@run
async def test_commit_is_all_or_nothing(world):
    first, second = (answer.slot for answer in world.store.reserve(chain(2), 0, OWNER, length=SIZE))
    for slots in ([first, second._replace(generation=99)], [first, first], [first, second]):
        with pytest.raises(StaleSlot):
            world.store.commit(slots, 1, OWNER)
    with pytest.raises(StaleSlot):
        world.store.commit([first, first], 0, OWNER)
    world.store.commit([first, second], 0, OWNER)


@run
async def test_a_chunk_is_a_row_in_every_group(world):
    full, window = chain(4), chain(4, start=50)
    world.put([*full, *window[:2]])
    assert await world.store.drain(20)
    for column in range(2):
        world.remote.objects[window[2], column] = content(window[2], column)
    found = world.store.lookup(LEASE, [full, window])
    assert (found.num_resident, found.num_pending, found.probing) == (2, 0, True)
    rows = [[world.store.memory.describe(slot)[0] for slot in slots] for slots in found.slots]
    assert rows == [full[:2], window[:2]]
    await until(lambda: world.store.lookup(LEASE, [full, window]).num_resident == 3)


@run
async def test_promotions_take_a_quarter_of_the_arena_at_a_time(world):
    world.remote.fill(chain(8))
    world.remote.open.clear()
    world.lookup(chain(8))
    world.remote.open.set()
    await until(lambda: world.store.stats.promoted == 4)
    assert world.lookup(chain(8)).num_resident == 4
    await world.until_resident(chain(8))


def test_adopted_rows_are_verified_before_they_are_offered():
    async def main() -> None:
        async with World() as world:
            world.put(chain(5))
            assert await world.store.drain(20)
            slots = world.lookup(chain(5)).slots[0]
        world.arena.view(slots[2].row, 1)[77] ^= 1
        async with World(arena=world.arena) as world:
            assert world.lookup(chain(5)) == Lookup(0, 5, False, [[]])
            await world.until_resident(chain(2))
            await until(lambda: not world.store._pending)
            found = world.lookup(chain(5))
            assert (found.num_resident, found.num_pending) == (2, 0)
            assert found.probing  # what is damaged here may be intact below
            assert world.store.stats.verified == 4
            assert world.store.memory.stats.removed[Removal.INVALID] == 1

    asyncio.run(main())


def test_close_waits_for_threads():
    async def main() -> None:
        world = World()
        await world.store.adopt()
        world.remote.fill(chain(1))
        world.remote.held = {"load"}
        world.remote.open.clear()
        world.lookup(chain(1))
        await until(lambda: world.remote.num_waiting)
        closing = asyncio.create_task(world.store.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        world.remote.open.set()
        await closing
        assert world.remote.num_waiting == 0
        assert world.remote.calls["close"] == 1

    asyncio.run(main())


def test_without_a_remote_tier():
    async def main() -> None:
        store = TieredStore(HeapArena(Geometry(SIZE, 1), 4))
        await store.adopt()
        store.register(NAMESPACE)
        (answer,) = store.reserve(chain(1), 0, OWNER, length=SIZE)
        store.commit([answer.slot], 0, OWNER)
        assert store.lookup(LEASE, [chain(2)]) == Lookup(1, 0, False, [[answer.slot]])
        assert await store.drain(20)
        assert not store.is_remote_well
        await store.close()

    asyncio.run(main())


def test_the_loop_runs_while_the_index_is_rebuilt():
    async def main() -> None:
        world = World(num_rows=1000)
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await world.store.adopt()
        task.cancel()
        assert others >= 7
        await world.store.close()

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 60
