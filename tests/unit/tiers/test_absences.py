"""Why a row was not in memory when a request needed it."""

import pytest

from lmcache_store.tiers.memory.contracts import Geometry, LookupResult
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import chunk_names
from lmcache_store.tiers.tiered.store import TieredStore
from tests.harness.loops import in_a_loop
from tests.harness.tiers.chains import one_chain
from tests.harness.tiers.tiered_world import (
    LEASE,
    NUM_COLUMNS,
    OWNER,
    SIZE,
    FakeTier,
    World,
    chain,
    run,
    until,
)

(KEY,) = chain(1)


async def put(world: World, keys: list[bytes]) -> None:
    for key in keys:
        await world.write([key], request=key.hex())


async def fill_memory(world: World) -> None:
    """Evict all rows that are not in use."""
    world.store.memory.release_adopted()
    await put(world, chain(16, start=1))


async def heal(world: World) -> None:
    """End the probes of the tier."""
    world.remote.is_unhealthy = False
    await until(lambda: world.lower.is_healthy)


def absence(world: World) -> Absence:
    return world.store.absence(KEY)


@run
async def test_not_stored_is_a_row_that_no_engine_committed(world):
    assert absence(world) is Absence.NOT_STORED


@run
async def test_a_request_that_stores_a_row_itself_did_not_find_it_being_stored(world):
    await put(world, [KEY])
    world.remote.objects.clear()
    await fill_memory(world)
    world.fill([KEY], 0, request="later")
    assert world.store.absence(KEY, "later") is Absence.EVICTED
    assert world.store.absence(KEY, "another") is Absence.BEING_STORED


@run
async def test_a_preempted_request_that_stored_a_row_finds_it_evicted(world):
    world.put([KEY], request="preempted")
    world.remote.objects.clear()
    await fill_memory(world)
    world.remote.objects.clear()
    assert world.store.absence(KEY, "preempted") is Absence.EVICTED


@run
async def test_a_request_whose_store_is_refused_has_the_reason_of_before(world):
    await put(world, [KEY])
    await fill_memory(world)
    world.remote.objects.clear()
    world.fill(chain(16, start=30), 0)
    world.store.reserve([KEY], 0, OWNER, length=SIZE, request="refused")
    assert world.store.absence(KEY, "refused") is Absence.EVICTED
    assert world.store.absence(KEY, "another") is Absence.STORE_REFUSED


@run
async def test_too_late_is_a_row_on_its_way(world):
    world.remote.fill([KEY])
    world.remote.open.clear()
    world.lookup([KEY])
    await until(lambda: world.remote.num_waiting)
    assert absence(world) is Absence.TOO_LATE  # the tier is asked
    world.remote.held.remove("probe")
    world.remote.open.set()
    await world.until_resident([KEY])
    assert absence(world) is Absence.TOO_LATE  # it arrived after the engine went on


@pytest.mark.parametrize("is_found", [False, True], ids=["evicted", "too late"])
@run
async def test_an_answer_after_the_engine_went_on_decides(world, is_found):
    """Some chunks are on their way already, and the tier is asked only for the others."""
    keys = chain(3)
    world.remote.fill(keys[: 3 if is_found else 1])
    world.store.history.note_stored(chunk_names(keys))
    find, chains = (lambda: world.store.absence(keys[1])), one_chain(keys)
    assert world.store.when_answered(chains, 0, find) is None
    world.remote.hold("probe")
    world.lookup(keys[:1])
    world.lookup(keys[1:], "other")
    assert world.store.when_answered(chains, 3, find) is None
    answer = world.store.when_answered(chains, 1, find)
    assert (find(), answer.done()) == (Absence.TOO_LATE, False)
    world.remote.open.set()
    assert await answer is (Absence.TOO_LATE if is_found else Absence.EVICTED)


@run
async def test_a_row_that_finds_memory_full_of_rows_in_use_is_refused(world):
    world.remote.fill([KEY])
    world.remote.hold("probe")
    world.lookup([KEY])
    await until(lambda: world.remote.num_waiting)
    world.fill(chain(16, start=1), 0)
    world.remote.open.set()
    await until(lambda: world.is_idle)
    assert absence(world) is Absence.STORE_REFUSED


@run
async def test_slower_is_a_row_whose_load_takes_longer_than_computing(world):
    (measured,) = chain(1, start=1)
    world.remote.fill([KEY, measured])
    world.remote.hold("load")
    world.lookup([measured])
    await until(lambda: world.remote.num_waiting)
    world.now += 1.0  # so that the rate of loads is known: one row a second
    world.remote.open.set()
    await world.until_resident([measured])
    world.lookup([KEY], row_seconds=0.5)
    await until(lambda: world.lower.stats.skipped_slower_than_recompute)
    assert absence(world) is Absence.SLOWER
    world.now += 60  # the decision was about an earlier lookup
    assert absence(world) is Absence.EVICTED


@run
async def test_rows_that_another_sidecar_stored_are_not_new(world):
    keys = chain(3)
    world.remote.fill(keys)
    world.remote.hold("load")
    world.lookup(keys)
    await until(lambda: world.remote.num_waiting)
    past = world.store.history.observe(chunk_names([*keys, *chain(1, start=3)]))
    assert past.num_known == 3
    assert absence(world) is Absence.TOO_LATE


@pytest.mark.parametrize("has_disk", [False, True], ids=["remote", "a disk without the row"])
@in_a_loop
async def test_unavailable_is_a_row_that_a_tier_that_is_down_may_have(has_disk):
    async with World(disk=FakeTier() if has_disk else None) as world:
        await put(world, [KEY])
        await fill_memory(world)
        if has_disk:
            disk = world.store.lower["disk"]._tier
            assert isinstance(disk, FakeTier)
            disk.objects.clear()
        world.remote.is_unhealthy = True
        world.put(chain(1, start=17))
        await until(lambda: not world.lower.is_healthy)
        assert absence(world) is Absence.UNAVAILABLE
        await heal(world)


async def check_failed_load(world, request="request"):
    world.remote.hold("load")
    world.lookup([KEY], request)
    await until(lambda: world.remote.num_waiting)
    world.remote.is_unhealthy = True
    world.remote.open.set()
    await until(lambda: world.is_idle)
    assert absence(world) is Absence.UNAVAILABLE
    await heal(world)


@run
async def test_a_damaged_copy_that_another_tier_replaced_is_forgotten(world):
    world.remote.fill([KEY])
    world.remote.stats.note_invalid(KEY, "checksum")
    await world.until_resident([KEY])
    world.store.memory.release(LEASE)
    await fill_memory(world)
    await check_failed_load(world, "later")


@pytest.mark.parametrize("is_in_memory", [False, True], ids=["remote", "memory"])
@in_a_loop
async def test_invalid_is_a_row_that_was_damaged(is_in_memory):
    async with World() as world:
        if is_in_memory:
            await put(world, [KEY])
            world.arena.view(world.slots([KEY])[0].row, 1)[77] ^= 1
    async with World(arena=world.arena) as world:
        if not is_in_memory:
            world.remote.fill([KEY])
            world.remote.stats.note_invalid(KEY, "checksum")
            world.remote.objects[KEY, 1] = FakeTier.INVALID
        world.lookup([KEY])
        await until(lambda: world.is_idle)
        assert absence(world) is Absence.INVALID
        world.remote.objects.clear()
        await put(world, [KEY])
        await fill_memory(world)
        assert absence(world) is not Absence.INVALID  # the new row was intact


@run
async def test_private_is_an_evicted_row_that_lower_tiers_never_get(world):
    world.store._labels.clear()
    await put(world, [KEY])
    await fill_memory(world)
    assert absence(world) is Absence.PRIVATE


@in_a_loop
async def test_without_lower_tiers_an_evicted_row_is_evicted():
    store = TieredStore(PrivateArena(Geometry(SIZE, NUM_COLUMNS), 1))
    for key in chain(2):
        store.memory.release_adopted()
        answers = [store.reserve([key], column, OWNER, length=SIZE)[0] for column in range(NUM_COLUMNS)]
        for column, answer in enumerate(answers):
            store.commit([answer.slot], column, OWNER)
        assert await store.drain(60)
    assert store.lookup(LEASE, one_chain(chain(1, start=1), SIZE)) == LookupResult(1)
    assert store.absence(KEY) is Absence.EVICTED
    await store.close()
