"""Effects of a hit in memory on lower tiers: refreshed copies, and the first write under ``OnReuse``."""

from lmcache.tiers.tiered.refresh import REFRESH_SECONDS
from lmcache.tiers.tiered.store import Admit
from tests.harness.tiered_world import LEASE, NUM_COLUMNS, chain, run, until


@run
async def test_hits_refresh_lower_copies_once_per_period(world):
    world.put(chain(3))
    assert await world.store.drain(60)
    for _ in range(2):
        assert world.lookup(chain(4)).num_resident == 3
        await until(lambda: not world.store._refresh._latest)
    assert not world.remote.touched
    world.now += REFRESH_SECONDS
    for request in range(5):
        assert world.lookup(chain(2), str(request)).num_resident == 2
    await until(lambda: world.remote.calls["touch"])
    assert world.remote.touched == dict.fromkeys(chain(2), 1)


@run
async def test_copies_are_refreshed_four_times_per_residence(world):
    async def hit(seconds: float) -> None:
        world.now += seconds
        assert world.lookup(chain(1)).num_resident == 1
        await until(lambda: not world.store._refresh._latest)

    world.put(chain(1))
    assert await world.store.drain(60)
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
async def test_unhealthy_tier_is_not_touched_while_hits_continue(world):
    world.put(chain(2))
    assert await world.store.drain(60)
    world.now += REFRESH_SECONDS
    world.remote.is_unhealthy = True
    world.lookup(chain(2))
    await until(lambda: not world.lower.is_healthy)
    assert world.lookup(chain(2)).num_resident == 2
    world.remote.is_unhealthy = False
    await until(lambda: world.lower.is_healthy)
    world.now += REFRESH_SECONDS
    world.lookup(chain(2))
    await until(lambda: len(world.remote.touched) == 2)


@run
async def test_row_on_its_previous_shard_is_written_to_the_current_shard(world):
    world.remote.fill(chain(3))
    world.remote.misplaced = {(chain(3)[1], 1)}
    await world.until_resident(chain(3))
    assert await world.store.drain(60)
    assert not world.remote.misplaced
    assert world.remote.calls["store"] == NUM_COLUMNS  # the columns of one row
    assert world.lower.stats.written == 1


@run(admit=Admit.ON_REUSE)
async def test_on_reuse_writes_rows_at_their_first_hit(world):
    world.put(chain(4))
    assert await world.store.drain(60)
    assert not world.remote.objects
    for _ in range(2):
        assert world.lookup(chain(2)).num_resident == 2
        await until(lambda: world.lower.stats.written == 2)
    assert {key for key, _ in world.remote.objects} == set(chain(2))


@run
async def test_private_row_is_not_written_with_a_shared_row_of_the_same_hit(world):
    private = b"p" * 64
    world.put([*chain(1), private])
    assert await world.store.drain(60)
    world.now += REFRESH_SECONDS
    assert world.lookup([*chain(1), private]).num_resident == 2
    await until(lambda: not world.store._refresh._latest)
    await until(lambda: world.remote.calls["touch"])
    assert await world.store.drain(60)
    assert {key for key, _ in world.remote.objects} == set(chain(1))
    assert set(world.remote.touched) == set(chain(1))


@run(num_rows=8, admit=Admit.ON_REUSE)
async def test_on_reuse_does_not_write_unused_rows_in_reused_slots(world):
    world.put(chain(8))
    world.lookup(chain(1))
    assert await world.store.drain(60)
    world.store.memory.release(LEASE)
    world.put(chain(8, start=10))
    await until(lambda: not world.store._refresh._latest)
    assert world.lookup(chain(2, start=10)).num_resident == 2
    await until(lambda: world.lower.stats.written == 2)
    assert {key for key, _ in world.remote.objects} == set(chain(2, start=10))
