"""Rows of chunks that another engine has computed a moment ago, and rows that another pod offers."""

import asyncio

import pytest

from lmcache_store.tiers.load_or_recompute import Rate
from lmcache_store.tiers.memory.contracts import LookupResult
from lmcache_store.tiers.stats import Removal
from tests.harness.loops import in_a_loop
from tests.harness.tiers.tiered_world import NUM_COLUMNS, SIZE, World, chain, content, run, until


async def ask(world, keys, **options):
    """Look up once, and wait until the lower tier has answered."""
    result = world.lookup(keys, **options)
    await until(lambda: not world.store._promotions._probing)
    return result


@run
async def test_lower_tiers_are_asked_again_for_rows_that_are_being_stored(world):
    for num_probes in (1, 2, 3):
        assert (await ask(world, chain(2), num_handed_over=2)).is_probing
        assert world.remote.calls["probe"] == num_probes
        world.now += 0.2
    world.remote.fill(chain(2))
    await until(lambda: world.lookup(chain(2), num_handed_over=2) == LookupResult(2, 2))


@run
async def test_lower_tiers_are_asked_less_and_less_often(world):
    """A request that waits looks up every 10 ms."""
    asked_at = []
    while world.now < 1.5:
        num_probes = world.remote.calls["probe"]
        assert (await ask(world, chain(2), num_handed_over=2)).is_probing, "the rows may still appear"
        asked_at += [world.now] * (world.remote.calls["probe"] - num_probes)
        world.now += 0.01
    assert asked_at == pytest.approx([0.0, 0.05, 0.15, 0.35, 0.75], abs=0.025)


@run
async def test_rows_that_cannot_be_loaded_are_asked_for_less_and_less_often(world):
    world.remote.fill(chain(2))
    world.remote.objects = dict.fromkeys(world.remote.objects, world.remote.INVALID)
    while world.now < 0.3:
        await ask(world, chain(2), num_handed_over=2)
        await until(lambda: world.is_idle)
        world.now += 0.01
    assert world.remote.calls["probe"] <= 5


@run
async def test_lookups_between_two_questions_find_rows_that_were_stored_meanwhile(world):
    assert (await ask(world, chain(2), num_handed_over=2)).is_probing
    world.put(chain(2))
    assert world.lookup(chain(2), num_handed_over=2) == LookupResult(2, 2)
    assert world.remote.calls["probe"] == 1


@run
async def test_another_request_may_have_asked_too_early(world):
    await ask(world, chain(2), request="early")
    world.remote.fill(chain(2))
    assert not world.lookup(chain(2), request="same").is_probing, "the rows count as absent"
    assert (await ask(world, chain(2), num_handed_over=2)).is_probing
    await until(lambda: world.lookup(chain(2), num_handed_over=2) == LookupResult(2, 2))


@run
async def test_rows_after_those_that_were_handed_over_are_asked_for_once(world):
    world.remote.fill(chain(2))
    await until(lambda: world.lookup(chain(4), num_handed_over=2) == LookupResult(2, 2))
    num_probes = world.remote.calls["probe"]
    for _ in range(3):
        assert await ask(world, chain(4), num_handed_over=2) == LookupResult(2, 2)
    assert world.remote.calls["probe"] == num_probes


@run
async def test_rows_that_load_slower_than_they_are_computed_are_asked_for_once(world):
    world.remote.fill(chain(2))
    world.lower._rate = Rate()
    world.lower._rate.begin(world.now - 2)
    world.lower._rate.end(world.now, 2)
    assert (await ask(world, chain(2), row_seconds=1e-9, num_handed_over=2)).is_probing
    assert not world.lookup(chain(2), row_seconds=1e-9, num_handed_over=2).is_probing
    assert world.lower.stats.skipped_slower_than_recompute == 2


# ---- rows that another pod offers ----


@pytest.mark.parametrize("is_looked_up", [False, True])
@in_a_loop
async def test_adopted_rows_are_verified_when_another_pod_reads_them(is_looked_up):
    async with World() as killed:
        await killed.write(chain(3))
        damaged = killed.slots(chain(3))[1]
    killed.arena.view(damaged.row, 1)[5] ^= 1
    async with World(arena=killed.arena) as world:
        store, memory = world.store, world.store.memory
        assert all(map(store.can_be_read, chain(3)))
        if is_looked_up:
            assert world.lookup(chain(3)).num_pending == 3
        reads = [store.begin_read(key) for key in (*chain(3), *chain(3))]
        slots = await asyncio.gather(*reads)
        assert [slot is not None for slot in slots] == [True, False, True] * 2
        assert (memory.stats.verified, memory.stats.removed[Removal.INVALID]) == (2, 1)
        for slot in filter(None, slots):
            store.end_read(slot)


async def _offer(length: int) -> tuple[bool, int]:
    async with World() as world:
        (key,) = chain(1)
        world.remote.objects.update(
            {(key, column): content(key, column)[:length] for column in range(NUM_COLUMNS)}
        )
        is_taken = await world.store.take_over(key, length, b"tenant", "remote")
        num_hits = world.lookup([key]).num_resident
        assert [world.store.memory.tenant(slot) for slot in world.slots([key])] == [b"tenant"] * num_hits
        return is_taken, num_hits


def test_offered_row_is_a_hit():
    assert asyncio.run(_offer(SIZE)) == (True, 1)


@pytest.mark.parametrize("length", [0, 16, SIZE - 1, 2 * SIZE])
def test_row_of_another_length_is_refused(length):
    """An engine reads a whole chunk. After a shorter row, it would read what was in the slot before."""
    assert asyncio.run(_offer(length)) == (False, 0)
