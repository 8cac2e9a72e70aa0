"""Commits, write-through and eviction of the tiered store, and effects of a hit in memory on lower tiers."""

from functools import partial

import pytest

from lmcache_store.tiers.errors import StaleSlotError
from lmcache_store.tiers.stats import WriteSkipped
from lmcache_store.tiers.tiered.refresh import REFRESH_SECONDS
from lmcache_store.tiers.tiered.store import Admit
from tests.harness.tiers.chains import one_chain
from tests.harness.tiers.tiered_world import LEASE, NUM_COLUMNS, OWNER, SIZE, chain, content, run, until


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
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(6) for c in range(2)}
    assert world.remote.labels == {b"model"}


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
    await world.write(chain(4), request="request")
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
    await world.write(chain(8, start=50))
    for num_left in reversed(range(8)):
        await world.write(chain(1, start=1000 + num_left))
        assert [key for key in chain(8) if world.store.memory.is_resident(key)] == chain(num_left)
        assert all(map(world.store.memory.is_resident, chain(8, start=50)))


# ---- hits: refreshed copies, and the first write under ``OnReuse`` ----


@run
async def test_hits_refresh_lower_copies_once_per_period(world):
    await world.write(chain(3))
    for _ in range(2):
        assert world.lookup(chain(4)).num_resident == 3
        await until(lambda: not world.store._refresh._latest)
    assert not world.remote.touched
    world.now += REFRESH_SECONDS
    for request in range(5):
        assert world.lookup(chain(2), str(request)).num_resident == 2
    await until(lambda: world.remote.touched)
    assert world.remote.touched == dict.fromkeys(chain(2), 1)


@run
async def test_copies_are_refreshed_four_times_per_residence(world):
    async def hit(seconds: float) -> None:
        world.now += seconds
        assert world.lookup(chain(1)).num_resident == 1
        await until(lambda: not world.store._refresh._latest)

    await world.write(chain(1))
    world.remote.residence_seconds = 120.0
    await hit(29)
    await hit(1)
    await until(lambda: world.remote.touched == {chain(1)[0]: 1})
    for world.remote.residence_seconds, pause in ((1.0, 10.0), (1e6, REFRESH_SECONDS)):
        touched = world.remote.calls["touch"]
        await hit(pause - 1)
        assert world.remote.calls["touch"] == touched
        await hit(1)
        await until(lambda num_touches=touched + 1: world.remote.calls["touch"] == num_touches)


@run
async def test_row_on_its_previous_shard_is_written_to_the_current_shard(world):
    world.remote.fill(chain(3))
    world.remote.misplaced = {(chain(3)[1], 1)}
    await world.until_resident(chain(3))
    assert await world.store.drain(60)
    assert not world.remote.misplaced
    assert world.remote.calls["store"] == NUM_COLUMNS  # the columns of one row
    assert world.lower.stats.written == 1


@run
async def test_private_row_is_not_written_with_a_shared_row_of_the_same_hit(world):
    private = b"p" * 64
    await world.write([*chain(1), private])
    world.now += REFRESH_SECONDS
    assert world.lookup([*chain(1), private]).num_resident == 2
    await until(lambda: not world.store._refresh._latest)
    await until(lambda: world.remote.calls["touch"])
    assert await world.store.drain(60)
    assert {key for key, _ in world.remote.objects} == set(chain(1))
    assert set(world.remote.touched) == set(chain(1))


@run(num_rows=8, admit=Admit.ON_REUSE)
async def test_on_reuse_does_not_write_unused_rows_in_reused_slots(world):
    await world.write(chain(8))
    world.lookup(chain(1))
    world.store.memory.release(LEASE)
    world.put(chain(8, start=10))
    assert await world.store.drain(60)  # a hit long before the row has a checksum writes nothing
    await until(lambda: not world.store._refresh._latest)
    assert world.lookup(chain(2, start=10)).num_resident == 2
    await until(lambda: world.lower.stats.written == 2)
    assert {key for key, _ in world.remote.objects} == set(chain(2, start=10))


@run(admit=Admit.ON_REUSE)
async def test_relayed_lookups_are_uses_that_are_not_counted(world):
    """The sidecar of another node counts these requests."""
    world.put(chain(3))
    world.remote.fill(chain(4)[3:])
    lookup = partial(world.store.lookup, LEASE, one_chain(chain(4), SIZE), is_counted=False)
    assert lookup(is_hint=True).is_probing
    await until(lambda: lookup().num_leased == 4)
    await until(lambda: {key for key, _ in world.remote.objects} == set(chain(4)))
    stats = world.store.memory.stats
    assert (stats.hits, stats.misses) == (0, 0)
    world.store.lookup((b"engine", "counted"), one_chain(chain(4), SIZE))
    assert (stats.hits, stats.misses) == (4, 0)
