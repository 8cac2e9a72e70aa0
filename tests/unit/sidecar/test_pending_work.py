"""The count of background work: when it is 0, the effects of all earlier calls can be seen."""

from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.tiered.refresh import REFRESH_SECONDS
from testing.child_process import wait_until
from tests.harness.tiers.tiered_world import NUM_COLUMNS, World, chain, content, run, until


def num_pending(world: World) -> int:
    return sum(world.store.pending_work.values())


async def settle(world: World, kind: str) -> None:
    """Check that work of only this kind is pending until the tier answers."""
    await until(lambda: world.remote.num_waiting)
    pending = world.store.pending_work
    assert pending.pop(kind) > 0
    assert not any(pending.values())
    world.remote.open.set()
    await until(lambda: not num_pending(world))
    world.remote.open.clear()


@run
async def test_rows_are_pending_until_they_are_written(world):
    world.remote.open.clear()
    world.put(chain(4))
    await settle(world, "write")
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(4) for c in range(NUM_COLUMNS)}


@run
async def test_rows_are_pending_until_they_are_promoted(world):
    world.remote.fill(chain(2))
    world.remote.held = {"load"}
    world.remote.open.clear()
    world.lookup(chain(2))
    assert world.store.pending_work["promote"] > 0, "the tiers are asked first"
    await settle(world, "promote")
    assert world.lookup(chain(2)).num_resident == 2


@run
async def test_hits_are_pending_until_their_copies_are_touched(world):
    world.put(chain(2))
    await until(lambda: not num_pending(world))
    world.remote.held = {"touch"}
    world.remote.open.clear()
    world.now += REFRESH_SECONDS
    world.lookup(chain(2))
    assert world.store.pending_work["refresh"] == 1
    await settle(world, "refresh")
    assert set(world.remote.touched) == set(chain(2))


def test_slots_are_pending_until_the_arena_has_its_target_size(tmp_path):
    arena = ArenaFile(tmp_path / "arena", 4 << 20, target_bytes=2 << 20)
    try:
        arena.format(Geometry(64 << 10, 1))
        assert arena.num_pending_rows == arena.target_rows
        arena.start(lambda: None)
        for num_bytes in (2 << 20, 4 << 20, 1 << 20):
            arena.resize(num_bytes)
            if arena.has_surplus:
                assert arena.num_pending_rows > 0
                arena.release_surplus()
            wait_until(lambda: arena.num_pending_rows == 0)
            assert (arena.ready_rows, arena.size_bytes) == (arena.target_rows, num_bytes)
    finally:
        arena.close()
