"""Lookups, promotions and verification of the tiered store, and an unhealthy remote tier."""

import asyncio
import gc
import weakref

from lmcache_store.tiers.memory.contracts import LookupResult
from lmcache_store.tiers.tiered.store import TieredStore
from tests.harness.loops import in_a_loop
from tests.harness.tiers.chains import one_chain
from tests.harness.tiers.tiered_world import (
    LEASE,
    NAMESPACE,
    OWNER,
    SIZE,
    FakeTier,
    World,
    chain,
    run,
    until,
)


@run
async def test_rows_of_unregistered_namespaces_are_not_written_to_lower_tiers(world):
    world.store._labels.clear()
    world.remote.fill(chain(1, start=9))
    await world.write(chain(2))
    assert world.lookup(chain(2)).num_resident == 2
    assert not world.lookup(chain(1, start=9), "other").is_probing
    assert not world.remote.calls


@run
async def test_lookup_returns_probing_then_pending_then_resident(world):
    world.remote.fill(chain(3))
    world.remote.open.clear()
    assert world.lookup(chain(3)) == LookupResult(is_probing=True)
    await until(lambda: world.remote.num_waiting)
    assert world.lookup(chain(3)) == LookupResult(is_probing=True)
    world.remote.open.set()
    await until(lambda: world.lookup(chain(3)).num_resident + world.lookup(chain(3)).num_pending == 3)
    await world.until_resident(chain(3))
    assert not world.lookup(chain(3)).is_probing
    assert world.lower.stats.promoted == 3


@run
async def test_is_memory_only_without_lower_tiers_or_unverified_rows(world):
    assert not world.store.is_memory_only(NAMESPACE), "a remote tier is configured"
    assert world.store.is_memory_only(b"p" * 32), "private rows are never written to lower tiers"
    await world.write(chain(1))
    restarted = TieredStore(world.arena)
    assert restarted.is_memory_only(NAMESPACE)
    await restarted.adopt()
    assert not restarted.is_memory_only(NAMESPACE), "a lookup verifies adopted rows"
    await restarted.close()


@run
async def test_hint_returns_the_lookup_result_without_lease(world):
    world.put(chain(2))
    answer = world.store.lookup(LEASE, one_chain(chain(3), SIZE), is_hint=True)
    assert answer == LookupResult(2, 0, 0, is_probing=True)
    assert world.store.memory.num_leased == 0


@run
async def test_scheduled_requests_promote_nothing(world):
    world.put(chain(1))
    world.remote.fill(chain(3))
    chains = one_chain(chain(3), SIZE)
    answer = world.store.lookup(LEASE, chains, is_hint=True, num_scheduled_hits=1)
    assert answer == LookupResult(1)
    assert await world.store.drain(60)
    assert not world.remote.calls["probe"]
    assert world.store.memory.stats.misses == 2


@run
async def test_counts_hits_as_of_scheduling(world):
    world.put(chain(3))
    chains, stats = one_chain(chain(3), SIZE), world.store.memory.stats
    world.store.lookup(LEASE, chains, is_hint=True, num_scheduled_hits=1)
    assert (stats.hits, stats.misses) == (1, 2)
    world.store.lookup((b"engine", "too many"), chains, is_hint=True, num_scheduled_hits=9)
    assert (stats.hits, stats.misses) == (4, 2)


@run
async def test_origin_of_promoted_rows_is_readable_once(world):
    world.put(chain(1))
    world.remote.fill(chain(3))
    world.lookup(chain(3))
    await world.until_resident(chain(3))
    origins = world.store.origins
    assert [origins.pop(key, "memory") for key in chain(3)] == ["memory", "remote", "remote"]
    assert not origins


@run
async def test_rows_being_written_by_another_engine_are_pending(world):
    world.put(chain(1))
    slots = world.fill(chain(2, start=1), 0)
    answer = world.lookup(chain(4))
    assert (answer.num_resident, answer.num_pending) == (1, 2)
    world.store.memory.abort(slots, 0, OWNER)
    assert world.lookup(chain(4)).num_pending == 0


@run
async def test_probes_do_not_wait_for_promotions(world):
    world.remote.fill(chain(3))
    world.remote.hold("load")
    assert world.lookup(chain(3)).is_probing
    await until(lambda: world.remote.num_waiting == 2)
    assert world.lookup(chain(1, start=50), "other").is_probing
    await until(lambda: not world.lookup(chain(1, start=50), "other").is_probing)
    assert world.remote.num_waiting == 2


@run
async def test_unhealthy_remote_tier_gets_no_requests_until_recovery(world):
    world.remote.fill(chain(2))
    world.remote.is_unhealthy = True
    assert world.lookup(chain(2)).is_probing
    await until(lambda: not world.lower.is_healthy)
    num_probes = world.remote.calls["probe"]
    for _ in range(20):
        assert world.lookup(chain(2)) == LookupResult()
    world.put(chain(2, start=8))
    await until(lambda: world.remote.calls["health probe"] > 3)
    assert world.remote.calls["probe"] == num_probes
    assert not await world.store.drain(0.01)
    world.remote.is_unhealthy = False
    assert await world.store.drain(60)
    assert world.lower.stats.written == 2
    world.now += 2
    await world.until_resident(chain(2))


@in_a_loop
async def test_store_over_a_tier_that_is_out_already_awaits_its_recovery():
    """An engine attaches during the outage. A reachable tier would be reported until the first request."""
    remote = FakeTier()
    remote.is_unhealthy = True
    assert remote.health.failure("cannot resolve the host") is not None
    async with World(remote=remote) as world:
        assert not world.lower.is_healthy
        assert world.lookup(chain(2)) == LookupResult()
        assert not remote.calls["probe"]
        remote.is_unhealthy = False
        await until(lambda: world.lower.is_healthy)
        await world.write(chain(2))
    assert world.lower.stats.written == 2


@run
async def test_invalid_and_short_objects_are_misses(world):
    world.remote.fill(chain(4))
    world.remote.objects[chain(4)[1], 1] = world.remote.INVALID
    world.remote.objects[chain(4)[2], 1] = b"short"
    assert world.lookup(chain(4)).is_probing
    await until(lambda: world.lower.stats.promoted + world.lower.stats.promotions_failed == 4)
    assert world.lookup(chain(4)).num_resident == 1
    assert world.store.memory.num_used == 2
    assert not world.lookup(chain(4)).is_probing


@run
async def test_absent_keys_are_probed_once_per_interval(world):
    for _ in range(3):
        world.lookup(chain(2))
        await until(lambda: not world.store._promotions._probing)
    assert world.remote.calls["probe"] == 1
    world.now += 1.5
    assert world.lookup(chain(2)).is_probing


def test_closed_store_is_released_by_its_tiers():
    """The tiers outlive a store whose arena is reformatted, and must not keep the old store's index alive."""

    async def main() -> weakref.ref[object]:
        async with World(remote=tier) as world:
            await world.write(chain(2))
            return weakref.ref(world.store.memory)

    tier = FakeTier()
    memory = asyncio.run(main())
    gc.collect()
    assert memory() is None
    assert tier.health.failure("it burns") is not None
    tier.health.end()


@in_a_loop
async def test_close_waits_for_threads_up_to_its_timeout():
    world = World()
    await world.store.adopt()
    world.remote.fill(chain(1))
    world.remote.hold("load")
    world.lookup(chain(1))
    await until(lambda: world.remote.num_waiting)
    assert not await world.store.close(0.01)  # the thread of a hung tier still uses the arena
    world.remote.open.set()
    assert await world.store.close()
    assert world.remote.num_waiting == 0


@in_a_loop
async def test_event_loop_runs_while_the_index_is_rebuilt():
    world = World(num_rows=1000)
    num_steps = 0

    async def count_steps() -> None:
        nonlocal num_steps
        while True:
            num_steps += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count_steps())
    await world.store.adopt()
    task.cancel()
    assert num_steps >= 7
    await world.store.close()


@run
async def test_drain_ignores_later_writes(world):
    world.store._outstanding.add()
    draining = asyncio.create_task(world.store.drain(60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.store._outstanding.done()
    world.store._outstanding.add()
    assert await draining
    world.store._outstanding.done()
