"""Write-through has a second chance: what a lower tier refused, lost or was never given is offered again."""

from __future__ import annotations

import asyncio

import pytest

from lmcache.tiers.stats import Removal, TieredStats, WriteSkipped
from lmcache.tiers.tiered import tier_worker as lower
from lmcache.tiers.tiered.refresh import REFRESH_SECONDS
from lmcache.tiers.tiered.store import Admit
from tests.harness.tiered_world import FakeTier, World, chain, content, run, until


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(lower, "_OFFER_SECONDS", 0.005)
    monkeypatch.setattr(lower, "_MAX_OFFER_SECONDS", 0.02)


def written(world: World) -> set[bytes]:
    return {key for key, _ in world.remote.objects}


async def hit(world: World, keys: list[bytes]) -> None:
    """Ask as an engine does, and wait until the hit was followed up."""
    assert world.lookup(keys).num_resident == len(keys)
    await until(lambda: not world.store._refresh._latest)


async def hit_until_written(world: World, keys: list[bytes]) -> None:
    async with asyncio.timeout(60):
        while not written(world) >= set(keys):
            await hit(world, keys)


@run
async def test_what_a_restarted_tier_lost_is_written_when_it_is_hit(world):
    world.put(chain(3))
    assert await world.store.drain(60)
    world.remote.is_unhealthy = True
    world.now += REFRESH_SECONDS
    await hit(world, chain(1))
    await until(lambda: not world.lower.is_healthy)
    world.remote.objects.clear()
    world.remote.is_unhealthy = False
    await until(lambda: world.lower.is_healthy)
    await hit_until_written(world, chain(3))
    assert world.remote.objects == {(key, c): content(key, c) for key in chain(3) for c in range(2)}


@run
async def test_what_was_lost_in_silence_is_written_within_the_refresh_period(world):
    world.put(chain(3))
    assert await world.store.drain(60)
    world.remote.objects.pop((chain(3)[1], 1))
    world.now += REFRESH_SECONDS
    await hit(world, chain(3))
    await until(lambda: len(world.remote.objects) == 6)
    assert await world.store.drain(60)
    assert world.lower.stats.written == 4  # what is there is only touched


@run
async def test_a_hit_of_every_group_of_a_request_is_followed_up(world):
    """They are looked up one after the other, under one lease."""
    one, other = chain(2), chain(2, start=50)
    world.put([*one, *other])
    assert await world.store.drain(60)
    world.now += REFRESH_SECONDS
    assert world.lookup(one).num_resident == world.lookup(other).num_resident == 2
    await until(lambda: set(world.remote.touched) == {*one, *other})


@run
async def test_what_was_refused_is_written_when_there_is_room_and_nobody_hits_it(world):
    world.remote.is_full = True
    world.put(chain(4))
    assert await world.store.drain(60)
    stores = world.remote.calls["store"]
    await until(lambda: world.remote.calls["store"] >= stores + 3)  # one row at a time is offered
    world.remote.is_full = False
    await until(lambda: written(world) == set(chain(4)))
    assert await world.store.drain(60)
    assert not world.lower._refused
    assert not world.lower._is_offering


@run
async def test_a_row_that_is_always_refused_keeps_nobody_back(world):
    bad = chain(1)[0]
    store = world.remote.store
    world.remote.store = lambda object_id, *rest: object_id.row_key != bad and store(object_id, *rest)
    world.put(chain(4))
    await until(lambda: written(world) == set(chain(4)[1:]))
    world.put(chain(4, start=10))
    await until(lambda: written(world) >= set(chain(4, start=10)))
    assert world.lower._refused or world.lower._is_offering


@run
async def test_a_row_that_makes_the_tier_unhealthy_keeps_nobody_back(world):
    """The server closes the connection over it, and answers probes: it is not tried at the head for ever."""
    bad = chain(1)[0]
    store = world.remote.store

    def poisoned(object_id, *rest):
        world.remote.is_unhealthy = object_id.row_key == bad
        try:
            return store(object_id, *rest)
        finally:
            world.remote.is_unhealthy = False

    world.remote.store = poisoned
    world.put(chain(4))
    await until(lambda: written(world) == set(chain(4)[1:]))
    await until(
        lambda: world.lower.stats.writes_skipped[WriteSkipped.REFUSED]
    )  # the other writer may be ahead


@run
async def test_refused_rows_that_left_memory_take_nobody_s_turn(world):
    offer = lower._OFFER_SECONDS
    world.remote.is_full = True
    world.put(chain(4))
    assert await world.store.drain(60)
    pauses = []

    async def pause(seconds, sleep=asyncio.sleep):
        if seconds >= offer:
            pauses.append(seconds)
        await sleep(seconds)

    await until(lambda: not world.store.num_unwritten)  # none is being offered right now
    for key in chain(3):
        world.store.memory._rows.remove(key)
    world.remote.is_full = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower.asyncio, "sleep", pause)
        await until(lambda: not world.lower._is_offering)
    assert written(world) == {chain(4)[3]}
    assert world.lower.stats.writes_skipped[WriteSkipped.EVICTED] == 3
    assert len(pauses) <= 1  # of the one that waited already, none is seen


@run
async def test_what_was_refused_is_bounded(world):
    world.remote.is_full = True
    world.put(chain(4))
    world.put(chain(12, start=4))
    assert await world.store.drain(60)
    assert len(world.lower._refused) <= 4
    world.remote.is_full = False
    world.now += REFRESH_SECONDS
    await hit_until_written(world, chain(2))


@run
async def test_what_was_dropped_is_written_when_it_is_hit(world):
    world.remote.open.clear()
    world.put(chain(2))
    await until(lambda: world.remote.num_waiting == 2)
    world.put(chain(10, start=2))
    await until(lambda: world.lower.stats.writes_skipped[WriteSkipped.DROPPED] == 6)
    world.remote.open.set()
    assert await world.store.drain(60)
    world.now += 10
    await hit_until_written(world, chain(8))


@pytest.mark.parametrize("admit", Admit)
def test_what_an_earlier_process_did_not_write_is_written_when_it_is_hit(admit):
    async def main() -> None:
        remote = FakeTier()
        remote.is_full = True
        async with World(remote=remote) as world:
            world.put(chain(4))
            assert await world.store.drain(60)
        remote.is_full = False
        async with World(arena=world.arena, remote=remote, admit=admit) as world:
            await world.until_resident(chain(4))
            await hit_until_written(world, chain(4))
            assert remote.objects[chain(4)[3], 1] == content(chain(4)[3], 1)

    asyncio.run(main())


@run
async def test_a_row_that_somebody_wrote_over_is_not_spread(world):
    world.put(chain(2))
    assert await world.store.drain(60)
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


def test_what_was_queued_at_the_end_is_counted_and_the_counts_go_on():
    async def main() -> None:
        stats, remote = {"remote": TieredStats()}, FakeTier()
        for _ in range(2):
            async with World(remote=remote, stats=stats) as world:
                remote.open.clear()
                world.put(chain(6))
                await until(lambda: remote.num_waiting == 2 and world.lower.num_queued == 4)
                world.remote.objects.clear()
        assert stats["remote"].written + stats["remote"].writes_skipped.total() == 12

    asyncio.run(main())


@run
async def test_a_short_object_is_a_miss(world):
    world.remote.fill(chain(2))
    world.remote.objects[chain(2)[1], 1] = b"short"
    assert world.lookup(chain(2)).is_probing
    await until(lambda: world.lower.stats.promoted + world.lower.stats.promotions_failed == 2)
    assert world.lookup(chain(2)).num_resident == 1


@run
async def test_pending_rows_are_counted_exactly(world):
    """One row of eight is on its way; those behind it are here."""
    world.put(chain(7, start=1))
    world.remote.fill(chain(1))
    world.remote.held = {"load"}
    world.remote.open.clear()
    world.lookup(chain(8))
    await until(lambda: world.remote.num_waiting == 1)
    found = world.lookup(chain(8))
    assert (found.num_resident, found.num_pending) == (0, 8)
