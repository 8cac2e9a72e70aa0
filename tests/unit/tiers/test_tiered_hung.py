"""A tier whose calls never come back, or a row that no thread can check: nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lmcache.tiers.tiered import tier_worker as lower
from tests.harness.tiered_world import FakeTier, World, chain, run, until


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(lower, "_STUCK_SECONDS", 0.02)


@asynccontextmanager
async def disk_that_hangs(*held: str) -> AsyncIterator[tuple[World, FakeTier]]:
    """In front of a remote tier that is well and has all rows."""
    disk = FakeTier()
    disk.held = set(held)
    disk.fill(chain(30))
    async with World(64, disk=disk) as world:
        world.remote.fill(chain(200))
        disk.open.clear()
        try:
            yield world, disk
        finally:
            disk.open.set()


def test_a_probe_that_hangs_leaves_its_keys_to_the_next_tier():
    async def main() -> None:
        async with disk_that_hangs("probe") as (world, disk):
            world.lookup(chain(3))
            await until(lambda: disk.num_waiting == 1)
            world.now += 1  # the disk counts as stuck
            await asyncio.wait_for(world.until_resident(chain(3)), 60)
            assert disk.num_waiting == 1
            assert not world.store._promotions._probing

    asyncio.run(main())


def test_rows_behind_a_load_that_hangs_are_not_pending():
    async def main() -> None:
        async with disk_that_hangs("load") as (world, disk):
            world.lookup(chain(30))
            await until(lambda: disk.num_waiting == 2)
            assert world.store.lower["disk"].num_loads == 16  # as many as may be pending
            world.now += 1
            await until(lambda: len(world.store._promotions._pending) == 2)
            await asyncio.wait_for(world.until_resident(chain(10, start=100)), 60)
            assert world.store.lower["disk"].num_loads == 2

    asyncio.run(main())


@run
async def test_an_error_while_rows_are_verified_leaves_none_of_them_pending(world):
    world.put(chain(3))
    assert await world.store.drain(60)
    await world.store.close()
    async with World(arena=world.arena) as again:

        async def fail(slot: object) -> bool:
            raise MemoryError

        again.store.memory.release_adopted()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(again.store._checksums, "verify", fail)
            assert again.lookup(chain(3)).num_pending == 3
            await until(lambda: not again.store._promotions._pending)
        await again.until_resident(chain(3))
