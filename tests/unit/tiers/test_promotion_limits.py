"""Limits of promotions: in small tiers, between tenants, and while calls of a tier never return."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains
from tests.harness.loops import in_a_loop
from tests.harness.tiers.chains import CHUNK_TOKENS
from tests.harness.tiers.tiered_world import LEASE, SIZE, FakeTier, World, chain, run, until


@asynccontextmanager
async def hanging_disk(*held: str) -> AsyncIterator[tuple[World, FakeTier]]:
    """Yield a world whose disk hangs in the calls ``held`` and whose remote tier works and holds all rows.

    The disk soon counts as stuck, but not before it answers a probe, unless the probe hangs. The remote tier
    has more time than a busy machine needs.
    """
    disk = FakeTier()
    disk.held = set(held)
    disk.fill(chain(30))
    find_each = disk.find_each
    async with World(64, disk=disk) as world:

        def use_short_limit() -> None:
            world.store.lower["disk"]._stuck_seconds = 0.02

        def find_and_use_short_limit(*arguments: Any) -> list[bool]:
            """The store waits for this answer with the former limit."""
            is_found: list[bool] = find_each(*arguments)
            use_short_limit()
            return is_found

        if "probe" in held:
            use_short_limit()
        disk.find_each = find_and_use_short_limit
        world.remote.fill(chain(200))
        disk.open.clear()
        try:
            yield world, disk
        finally:
            disk.open.set()


@in_a_loop
async def test_keys_of_a_hung_probe_are_looked_up_in_the_next_tier():
    async with hanging_disk("probe") as (world, disk):
        world.lookup(chain(3))
        await until(lambda: disk.num_waiting == 1)
        world.now += 1  # the disk counts as stuck
        await asyncio.wait_for(world.until_resident(chain(3)), 60)
        assert disk.num_waiting == 1
        assert not world.store._promotions._probing


@pytest.mark.parametrize(("is_encrypted", "expected"), [(False, 2), (True, 4)])
@in_a_loop
async def test_encrypted_tier_moves_twice_as_many_rows_at_once(is_encrypted, expected):
    """While some threads encrypt or decrypt, others use the medium."""
    remote = FakeTier()
    remote.is_encrypted = is_encrypted
    remote.fill(chain(8))
    async with World(64, remote=remote) as world:
        for held in ("load", "store"):
            remote.hold(held)
            if held == "load":
                world.lookup(chain(8))
            else:
                world.put(chain(8, start=100))
            await until(lambda: remote.num_waiting == expected)
            assert remote.calls[held] == expected
            remote.open.set()
            await until(lambda: not remote.num_waiting)
            await until(lambda: world.is_idle)


@in_a_loop
async def test_rows_behind_a_hung_load_are_not_pending():
    async with hanging_disk("load") as (world, disk):
        world.lookup(chain(30))
        await until(lambda: disk.num_waiting == 2)
        assert world.store.lower["disk"].num_loads == 16  # as many as may be pending
        world.now += 1
        await until(lambda: len(world.store._promotions._pending) == 2)
        await asyncio.wait_for(world.until_resident(chain(10, start=100)), 60)
        assert world.store.lower["disk"].num_loads == 2


@run
async def test_failed_verification_leaves_no_pending_rows(world):
    await world.write(chain(3))
    await world.store.close()
    async with World(arena=world.arena) as restarted:

        async def fail(slot: object) -> bool:
            raise MemoryError

        restarted.store.memory.release_adopted()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restarted.store._checksums, "verify", fail)
            assert restarted.lookup(chain(3)).num_pending == 3
            await until(lambda: not restarted.store._promotions._pending)
        await restarted.until_resident(chain(3))


# ---- limits ----

TENANTS = (b"first", b"second")


def lookup(world: World, tenant: bytes, keys: list[bytes]) -> int:
    """Look up a chain of this tenant; returns how many rows are in memory."""
    chains = Chains(CHUNK_TOKENS, (KVGroup(0, 16, SIZE),), (keys,), tenant=tenant)
    return world.store.lookup((LEASE[0], tenant.decode()), chains, chunk_seconds=0.0).num_resident


@pytest.mark.parametrize("num_rows", [2, 3, 7, 15])
@in_a_loop
async def test_each_of_two_tenants_promotes_a_chunk_at_once_in_a_small_tier(num_rows):
    async with World(num_rows) as world:
        world.remote.hold("load")
        pending = world.store._promotions._pending
        for number, tenant in enumerate(TENANTS):
            keys = chain(8, 100 * number)
            world.remote.fill(keys)
            lookup(world, tenant, keys)
            await until(lambda wanted=number + 1: len({owner for _, owner in pending.values()}) == wanted)
        assert len(pending) <= num_rows
        world.remote.open.set()
        for number, tenant in enumerate(TENANTS):
            await until(lambda t=tenant, n=number: lookup(world, t, chain(8, 100 * n)[:1]) == 1)
            uses = world.store.memory.stats.tenants
            assert uses.num_bytes(tenant), "promoted rows count against the tenant's quota"


@in_a_loop
async def test_tier_of_one_row_promotes_it():
    async with World(1) as world:
        world.remote.fill(chain(1))
        await world.until_resident(chain(1))


@pytest.mark.parametrize(("num_rows", "expected"), [(16, 4), (4, 1), (1, 1)])
@in_a_loop
async def test_one_tenant_promotes_a_quarter_of_the_tier_at_once_but_at_least_a_chunk(num_rows, expected):
    async with World(num_rows) as world:
        world.remote.fill(chain(20))
        world.remote.hold("load")
        lookup(world, b"first", chain(20))
        pending = world.store._promotions._pending
        await until(lambda: pending)
        await until(lambda: not world.store._promotions._probing)
        lookup(world, b"first", chain(20))
        await until(lambda: not world.store._promotions._probing)
        assert len(pending) == expected
