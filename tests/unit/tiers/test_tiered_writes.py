"""Commits, write-through and eviction of the tiered store."""

import pytest

from lmcache.tiers.errors import StaleSlotError
from lmcache.tiers.stats import WriteSkipped
from tests.harness.tiered_world import LEASE, OWNER, SIZE, chain, content, run, until


@run
async def test_committed_rows_are_written_through(world):
    world.put(chain(4))
    assert await world.store.drain(60)
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(4) for c in range(2)}
    assert world.remote.labels == {b"model"}
    assert world.lower.stats.written == 4


@run
async def test_write_queue_is_bounded_and_drops_the_deepest(world):
    world.remote.open.clear()
    world.put(chain(2))  # two writers take these
    await until(lambda: world.remote.num_waiting == 2)
    world.put(chain(10, start=2))
    await until(lambda: world.lower.num_queued + world.lower.stats.writes_skipped[WriteSkipped.DROPPED] == 10)
    assert world.lower.num_queued == 4
    assert world.lower.stats.writes_skipped[WriteSkipped.DROPPED] == 6
    world.remote.open.set()
    assert await world.store.drain(60)
    assert {key for key, _ in world.remote.objects} == set(chain(6))


@run
async def test_commit_is_all_or_nothing(world):
    first, second = (answer.slot for answer in world.store.reserve(chain(2), 0, OWNER, length=SIZE))
    for slots in ([first, second._replace(generation=99)], [first, first], [first, second]):
        with pytest.raises(StaleSlotError):
            world.store.commit(slots, 1, OWNER)
    with pytest.raises(StaleSlotError):
        world.store.commit([first, first], 0, OWNER)
    world.store.commit([first, second], 0, OWNER)


@run
async def test_promoted_tail_is_evicted_before_the_head_of_its_request(world):
    world.put(chain(4), request="request")
    assert await world.store.drain(60)
    world.remote.fill(chain(4, start=4))
    world.remote.open.clear()
    assert world.lookup(chain(8)).is_probing
    world.store.memory.release(LEASE)  # the request does not wait for the promotion
    world.remote.open.set()
    await until(lambda: world.lower.stats.promoted == 4)
    world.put(chain(8, start=50), request="fills")
    world.put(chain(4, start=100), request="evicts")
    assert [key for key in chain(8) if world.store.memory.is_resident(key)] == chain(4)


@run
async def test_rows_without_a_request_are_evicted_tail_first_per_call(world):
    world.put(chain(8))
    world.put(chain(8, start=50))
    assert await world.store.drain(60)
    for num_left in reversed(range(8)):
        world.put(chain(1, start=1000 + num_left))
        assert await world.store.drain(60)
        assert [key for key in chain(8) if world.store.memory.is_resident(key)] == chain(num_left)
        assert all(map(world.store.memory.is_resident, chain(8, start=50)))
