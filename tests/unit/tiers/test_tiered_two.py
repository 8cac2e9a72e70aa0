"""The tiered store over two lower tiers: the nearer one is asked first, and neither holds the other."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.stats import WriteSkipped
from tests.harness.tiered_world import LEASE, FakeTier, World, chain, content, run, until

CAPACITY_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def world_with_disk(folder: str | Path) -> AsyncIterator[World]:
    """A memory tier that is empty, over a disk that may not be."""
    disk = DiskTier(folder, CAPACITY_BYTES)
    async with World(disk=disk) as world:
        yield world
    disk.close()


def with_disk(test):
    """Run an async test with a world over a new disk, and the disk's folder."""

    def runner() -> None:
        async def main(folder: str) -> None:
            async with world_with_disk(folder) as world:
                await test(world, Path(folder))

        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(folder))

    runner.__name__, runner.__doc__ = test.__name__, test.__doc__
    return runner


@with_disk
async def test_what_is_committed_is_in_both(world, folder):
    world.put(chain(4))
    assert await world.store.drain(60)
    assert set(world.remote.objects) == {(key, column) for key in chain(4) for column in range(2)}
    assert len(list(folder.rglob("*.[01]"))) == 8
    assert world.store.lower["disk"].stats.written == 4


@with_disk
async def test_what_is_on_disk_is_read_from_there_and_the_rest_from_afar(world, folder):
    world.put(chain(3))
    assert await world.store.drain(60)
    world.remote.fill(chain(5))
    async with world_with_disk(Path(tempfile.mkdtemp(dir=folder))) as other:
        other.remote.objects = world.remote.objects
        await other.until_resident(chain(3))
        assert await other.store.drain(60)  # what came from afar is on the disk now
        assert other.store.lower["disk"].stats.written == 3
        other.store.memory.release(LEASE)
        other.put(chain(16, start=50))
        await other.store.drain(60)
        await other.until_resident(chain(5))
        assert other.store.lower["disk"].stats.promoted == 3
        assert other.lower.stats.promoted == 5


async def stored_and_evicted(world, keys) -> None:
    """Rows that only the lower tiers have."""
    world.put(keys)
    assert await world.store.drain(60)
    world.store.memory.release(LEASE)
    world.put(chain(16, start=50))
    assert await world.store.drain(60)


@with_disk
async def test_one_round_trip_per_tier(world, folder):
    await stored_and_evicted(world, chain(2))
    world.remote.objects.clear()
    world.remote.fill(chain(4))
    world.remote.held = {"probe"}
    world.remote.open.clear()
    while world.lookup(chain(6)).num_resident < 2:  # what the disk had is here before the remote tier answers
        assert world.lookup(chain(6)).is_probing
        await asyncio.sleep(0.001)
    world.remote.open.set()
    await until(lambda: world.lower.stats.promoted == 2)
    assert world.remote.calls["probe"] == 1


@with_disk
async def test_what_is_damaged_on_disk_comes_from_afar(world, folder):
    await stored_and_evicted(world, chain(3))
    for path in folder.rglob(f"{chain(2)[1][32:].hex()}.*"):
        damaged = bytearray(path.read_bytes())
        damaged[5000] ^= 1
        path.write_bytes(damaged)
    await world.until_resident(chain(3))
    assert world.store.lower["disk"].stats.promoted == 2
    assert world.lower.stats.promoted == 1


@with_disk
async def test_a_hundred_readers_of_a_missing_chunk_cause_one_read(world, folder):
    world.remote.fill(chain(1))
    world.remote.held = {"load"}
    world.remote.open.clear()
    for request in range(50):
        world.lookup(chain(1), str(request))
    await until(lambda: world.remote.num_waiting)
    for request in range(50, 100):
        assert world.lookup(chain(1), str(request)).num_pending == 1
    world.remote.open.set()
    await world.until_resident(chain(1))
    assert world.remote.calls["probe"] == 1
    assert world.remote.calls["load"] == 2  # its two columns


@with_disk
async def test_requests_that_share_a_tail_bring_it_once(world, folder):
    world.remote.fill(chain(4))
    world.remote.held = {"probe"}
    world.remote.open.clear()
    for head in range(4):
        assert world.lookup(chain(4)[head:], str(head)).is_probing
    world.remote.open.set()
    await world.until_resident(chain(4))
    await until(lambda: not world.store._promotions._probing)
    assert world.remote.calls["load"] == 8
    assert world.lower.stats.promotions_failed == 0


def world_of_two() -> World:
    world = World(disk=FakeTier())
    world.disk = world.store.lower["disk"]._tier
    return world


@pytest.mark.parametrize("first", ["disk", "remote"])
def test_a_held_tier_holds_no_write_to_the_other(first):
    async def main() -> None:
        async with world_of_two() as world:
            held, free = getattr(world, first), world.remote if first == "disk" else world.disk
            held.open.clear()
            world.put(chain(4))
            await until(lambda: len(free.objects) == 8)
            assert not held.objects
            held.open.set()
            assert await world.store.drain(60)
            assert held.objects == free.objects

    asyncio.run(main())


def test_an_unhealthy_disk_is_passed_by():
    async def main() -> None:
        async with world_of_two() as world:
            world.remote.fill(chain(3))
            world.disk.is_unhealthy = True
            await world.until_resident(chain(3))
            assert not world.store.lower["disk"].is_healthy
            assert not await world.store.drain(0.01)
            world.disk.is_unhealthy = False
            assert await world.store.drain(60)
            assert len(world.disk.objects) == 6  # what came from afar waited for it

    asyncio.run(main())


def test_a_tier_that_hangs_is_passed_by_until_it_answers():
    async def main() -> None:
        async with world_of_two() as world:
            world.disk.held = {"probe"}
            world.disk.open.clear()
            world.remote.fill(chain(1, start=7))
            assert world.lookup(chain(1)).is_probing
            await until(lambda: world.disk.num_waiting)
            world.now += 11
            assert not world.store.lower["disk"].is_healthy
            await world.until_resident(chain(1, start=7))
            assert world.disk.calls["probe"] == 1
            world.disk.open.set()
            await until(lambda: world.store.lower["disk"].is_healthy)

    asyncio.run(main())


# ---- waiting for writes ----


@with_disk
async def test_rows_are_drained_when_all_tiers_have_them(world, folder):
    world.remote.held = {"store"}
    world.remote.open.clear()
    world.put(chain(2))
    draining = asyncio.create_task(world.store.drain(60))
    await until(lambda: world.store.lower["disk"].stats.written == 2)
    assert not draining.done()
    world.remote.open.set()
    assert await draining
    assert len(world.remote.objects) == 4


@run
async def test_what_is_not_written_is_counted_by_its_reason(world):
    world.fill(chain(1), 0)
    world.remote.is_full = True
    world.put(chain(1, start=1))
    assert await world.store.drain(60)
    assert world.lower.stats.writes_skipped == {WriteSkipped.REFUSED: 1}
    world.remote.is_full = False
    world.store._labels.clear()
    world.put(chain(1, start=2))
    assert await world.store.drain(60)
    assert world.remote.objects == {}, "rows of a namespace that is not shared never leave memory"


@run
async def test_an_unavailable_tier_gets_later_what_was_stored_meanwhile(world):
    world.remote.is_unhealthy = True
    world.put(chain(1))
    await until(lambda: not world.lower.is_healthy)  # found out by this very write
    world.put(chain(1, start=1))
    assert not await world.store.drain(0.01)
    world.remote.is_unhealthy = False
    assert await world.store.drain(60)
    assert len(world.remote.objects) == 4


@run
async def test_who_stops_waiting_for_a_write_does_not_stop_it(world):
    world.remote.held = {"store"}
    world.remote.open.clear()
    world.put(chain(2))
    draining = asyncio.create_task(world.store.drain(60))
    await until(lambda: world.remote.num_waiting)
    draining.cancel()
    world.remote.open.set()
    assert await world.store.drain(60)
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(2) for c in range(2)}
