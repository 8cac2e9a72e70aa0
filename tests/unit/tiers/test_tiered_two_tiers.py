"""The tiered store over two lower tiers: the first is looked up first, and neither delays the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmcache_store.tiers.disk.tier import DiskTier
from tests.harness.loops import in_a_loop
from tests.harness.tiers.tiered_world import LEASE, FakeTier, World, chain, content, run, until

CAPACITY_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def world_with_disk(folder: str | Path) -> AsyncIterator[World]:
    """Yield a world with an empty memory tier over a disk that may hold rows."""
    disk = DiskTier(folder, CAPACITY_BYTES)
    async with World(disk=disk) as world:
        yield world
    disk.close()


async def store_and_evict(world, keys) -> None:
    """Store rows and evict them from memory, so that only the lower tiers hold them."""
    await world.write(keys)
    world.store.memory.release(LEASE)
    await world.write(chain(16, start=50))


@in_a_loop
async def test_lookup_sends_a_single_probe_per_tier(tmp_path):
    async with world_with_disk(tmp_path) as world:
        await store_and_evict(world, chain(2))
        world.remote.objects.clear()
        world.remote.fill(chain(4))
        world.remote.hold("probe")
        while (
            world.lookup(chain(6)).num_resident < 2
        ):  # rows on disk are resident before the remote tier answers
            assert world.lookup(chain(6)).is_probing
            await asyncio.sleep(0.001)  # real time: polls
        world.remote.open.set()
        await until(lambda: world.lower.stats.promoted == 2)
        assert world.remote.calls["probe"] == 1


@in_a_loop
async def test_damaged_rows_on_disk_are_promoted_from_remote(tmp_path):
    async with world_with_disk(tmp_path) as world:
        await store_and_evict(world, chain(3))
        for path in tmp_path.rglob(f"{chain(2)[1][32:].hex()}.*"):
            damaged = bytearray(path.read_bytes())
            damaged[5000] ^= 1
            path.write_bytes(damaged)
        await world.until_resident(chain(3))
        assert world.store.lower["disk"].stats.promoted == 2
        assert world.lower.stats.promoted == 1


@run
async def test_concurrent_lookups_of_a_missing_chunk_load_its_columns_once(world):
    world.remote.fill(chain(1))
    world.remote.hold("load")
    for request in range(50):
        world.lookup(chain(1), str(request))
    await until(lambda: world.remote.num_waiting)
    for request in range(50, 100):
        assert world.lookup(chain(1), str(request)).num_pending == 1
    world.remote.open.set()
    await world.until_resident(chain(1))
    assert world.remote.calls["probe"] == 1
    assert world.remote.calls["load"] == 2  # the two columns of the row


@run
async def test_requests_with_a_common_tail_promote_the_tail_once(world):
    world.remote.fill(chain(4))
    world.remote.hold("probe")
    for head in range(4):
        assert world.lookup(chain(4)[head:], str(head)).is_probing
    world.remote.open.set()
    await world.until_resident(chain(4))
    await until(lambda: not world.store._promotions._probing)
    assert world.remote.calls["load"] == 8
    assert world.lower.stats.promotions_failed == 0


class TwoTierWorld(World):
    """A store with a disk tier in front of the remote tier."""

    def __init__(self) -> None:
        self.disk = FakeTier()
        super().__init__(disk=self.disk)


@pytest.mark.parametrize("first", ["disk", "remote"])
@in_a_loop
async def test_hung_tier_does_not_delay_writes_to_the_other_tier(first):
    async with TwoTierWorld() as world:
        hung, working = getattr(world, first), world.remote if first == "disk" else world.disk
        hung.open.clear()
        world.put(chain(4))
        await until(lambda: len(working.objects) == 8)
        assert not hung.objects
        hung.open.set()
        assert await world.store.drain(60)
        assert hung.objects == working.objects


@in_a_loop
async def test_hung_tier_is_skipped_until_its_next_answer():
    async with TwoTierWorld() as world:
        world.disk.hold("probe")
        world.remote.fill(chain(1, start=7))
        assert world.lookup(chain(1)).is_probing
        await until(lambda: world.disk.num_waiting)
        world.now += 11
        assert not world.store.lower["disk"].is_healthy
        await world.until_resident(chain(1, start=7))
        assert world.disk.calls["probe"] == 1
        world.disk.open.set()
        await until(lambda: world.store.lower["disk"].is_healthy)


# ---- waiting for writes ----


@run
async def test_cancelled_drain_does_not_cancel_writes(world):
    world.remote.hold("store")
    world.put(chain(2))
    draining = asyncio.create_task(world.store.drain(60))
    await until(lambda: world.remote.num_waiting)
    draining.cancel()
    world.remote.open.set()
    assert await world.store.drain(60)
    assert world.remote.objects == {(k, c): content(k, c) for k in chain(2) for c in range(2)}
