"""Repeated write-through: rows that a lower tier refused, lost or never received are offered again."""

import asyncio

import pytest

from lmcache_store.tiers.stats import Removal, TieredStats, WriteSkipped
from lmcache_store.tiers.tiered import tier_worker as lower
from lmcache_store.tiers.tiered.refresh import REFRESH_SECONDS
from tests.harness.loops import in_a_loop
from tests.harness.tiers.tiered_world import FakeTier, World, chain, run, until


@pytest.fixture(autouse=True)
def short_offer_period(monkeypatch):
    monkeypatch.setattr(lower, "_OFFER_SECONDS", 0.005)
    monkeypatch.setattr(lower, "_MAX_OFFER_SECONDS", 0.02)


def written(world: World) -> set[bytes]:
    return {key for key, _ in world.remote.objects}


@in_a_loop
async def test_hit_writes_rows_that_an_earlier_process_has_not_written():
    async with World() as killed:
        await killed.write(chain(3))
    async with World(arena=killed.arena) as world:  # its lower tier is empty
        world.store.memory.release_adopted()
        await world.until_resident(chain(3))
        await until(lambda: written(world) == set(chain(3)))


@pytest.mark.parametrize("outage", ["before the hit", "at the hit", "a hung operation"])
@in_a_loop
async def test_hits_of_an_outage_leave_no_row_unwritten_after_it(outage):
    async with World() as killed:
        await killed.write(chain(3))
    remote = FakeTier()  # it is empty
    async with World(arena=killed.arena, remote=remote) as world:
        world.store.memory.release_adopted()
        remote.is_unhealthy = outage != "a hung operation"
        if outage == "before the hit":
            remote.health.failure("unhealthy")
            await until(lambda: not world.lower.is_healthy)
        elif not remote.is_unhealthy:
            remote.hold("probe")
            assert world.lookup(chain(1, start=50), "another").is_probing
            await until(lambda: remote.num_waiting)
            world.now += 10.0
            assert not world.lower.is_healthy
        await world.until_resident(chain(3))
        await until(lambda: not world.store.pending_work["refresh"])
        assert not written(world)
        remote.is_unhealthy = False
        remote.open.set()
        await until(lambda: world.lower.is_healthy)  # the circuit's own probe closes it
        world.lookup(chain(3))
        await until(lambda: written(world) == set(chain(3)))


@in_a_loop
async def test_outage_of_a_tier_adds_no_touches_in_other_tiers():
    disk, remote = FakeTier(), FakeTier()
    async with World(disk=disk, remote=remote) as world:
        await world.write(chain(3))
        remote.is_unhealthy = True
        remote.health.failure("unhealthy")
        await until(lambda: not world.lower.is_healthy)
        world.now += REFRESH_SECONDS
        for _ in range(3):
            world.lookup(chain(3))
            await until(lambda: not world.store.pending_work["refresh"])
        assert disk.touched == dict.fromkeys(chain(3), 1)
        remote.is_unhealthy = False
        await until(lambda: world.lower.is_healthy)


@run
async def test_hits_of_all_groups_of_a_request_are_processed(world):
    """The groups are looked up separately under the same lease."""
    first, second = chain(2), chain(2, start=50)
    await world.write([*first, *second])
    world.now += REFRESH_SECONDS
    assert world.lookup(first).num_resident == world.lookup(second).num_resident == 2
    await until(lambda: set(world.remote.touched) == {*first, *second})


@run
async def test_refused_rows_are_written_without_hits_when_the_tier_has_capacity(world):
    world.remote.is_full = True
    await world.write(chain(4))
    stores = world.remote.calls["store"]
    await until(lambda: world.remote.calls["store"] >= stores + 3)  # the worker offers one row at a time
    world.remote.is_full = False
    await until(lambda: written(world) == set(chain(4)))
    assert await world.store.drain(60)
    assert not world.lower._refused
    assert not world.lower._is_offering


@run
async def test_permanently_refused_row_does_not_block_other_rows(world):
    bad_key = chain(1)[0]
    store = world.remote.store
    world.remote.store = lambda object_id, *rest: object_id.row_key != bad_key and store(object_id, *rest)
    world.put(chain(4))
    await until(lambda: written(world) == set(chain(4)[1:]))
    world.put(chain(4, start=10))
    await until(lambda: written(world) >= set(chain(4, start=10)))
    assert world.lower._refused or world.lower._is_offering


@run
async def test_row_with_unhealthy_store_does_not_block_other_rows(world):
    """The server closes the connection on the bad row and answers probes; the worker retries it last."""
    bad_key = chain(1)[0]
    store = world.remote.store

    def fail_for_bad_key(object_id, *rest):
        if object_id.row_key == bad_key:
            raise world.remote.health.failure("unhealthy")
        return store(object_id, *rest)

    world.remote.store = fail_for_bad_key
    world.put(chain(4))
    await until(lambda: written(world) == set(chain(4)[1:]))
    await until(lambda: world.lower.stats.writes_skipped[WriteSkipped.REFUSED])  # another writer may be ahead


@run
async def test_evicted_refused_rows_use_no_offer_turns(world):
    offer = lower._OFFER_SECONDS
    world.remote.is_full = True
    await world.write(chain(4))
    pauses = []

    async def pause(seconds, sleep=asyncio.sleep):
        if seconds >= offer:
            pauses.append(seconds)
        await sleep(seconds)  # real time: as long as the product sleeps

    await until(lambda: not world.store.num_unwritten)  # no row is being offered now
    for key in chain(3):
        world.store.memory._rows.remove(key)
    world.remote.is_full = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", pause)
        await until(lambda: not world.lower._is_offering)
    assert written(world) == {chain(4)[3]}
    assert world.lower.stats.writes_skipped[WriteSkipped.EVICTED] == 3
    assert len(pauses) <= 1  # only the pause that had already begun may be recorded


@run
async def test_number_of_remembered_refused_rows_is_bounded(world):
    world.remote.is_full = True
    world.put(chain(4))
    await world.write(chain(12, start=4))
    assert len(world.lower._refused) <= 4
    world.remote.is_full = False
    world.now += REFRESH_SECONDS
    await until(lambda: world.lookup(chain(2)).num_resident == 2 and written(world) >= set(chain(2)))


@run
async def test_corrupted_row_is_not_written_to_lower_tiers(world):
    await world.write(chain(2))
    world.remote.objects.clear()
    slot = world.slots(chain(1))[0]
    world.arena.view(slot.row, 1)[5] ^= 1
    world.store.memory.release((b"e" * 16, "request"))
    world.now += REFRESH_SECONDS
    world.lookup(chain(2))
    await until(lambda: world.lower.stats.writes_skipped[WriteSkipped.INVALIDATED])
    await until(lambda: written(world) == {chain(2)[1]})
    assert world.store.memory.stats.removed[Removal.INVALID] == 1
    assert not world.store.memory.is_resident(chain(1)[0])


@in_a_loop
async def test_queued_rows_at_close_are_counted_across_restarts():
    stats, remote = {"remote": TieredStats()}, FakeTier()
    async with World(remote=remote, stats=stats):
        pass
    assert not stats["remote"].writes_skipped, "no row was dropped"
    for _ in range(2):
        async with World(remote=remote, stats=stats) as world:
            remote.open.clear()
            world.put(chain(6))
            await until(lambda: remote.num_waiting == 2 and world.lower.num_queued == 4)
            world.remote.objects.clear()
    assert stats["remote"].written + stats["remote"].writes_skipped.total() == 12


@run
async def test_rows_behind_a_pending_row_count_as_pending(world):
    """The first of eight rows is being promoted; the other seven are in memory."""
    world.put(chain(7, start=1))
    world.remote.fill(chain(1))
    world.remote.hold("load")
    world.lookup(chain(8))
    await until(lambda: world.remote.num_waiting == 1)
    answer = world.lookup(chain(8))
    assert (answer.num_resident, answer.num_pending) == (0, 8)
