"""Limits of promotions that run at once: in small tiers, and between tenants."""

import pytest

from lmcache.kv_groups import KVGroup
from lmcache.tiers.memory.contracts import Chains
from tests.harness.chains import CHUNK_TOKENS
from tests.harness.loops import in_a_loop
from tests.harness.tiered_world import LEASE, SIZE, World, chain, until

TENANTS = (b"first", b"second")


def lookup(world: World, tenant: bytes, keys: list[bytes]) -> int:
    """Look up a chain of this tenant; returns how many rows are in memory."""
    chains = Chains(CHUNK_TOKENS, (KVGroup(0, 16, SIZE),), (keys,), tenant=tenant)
    return world.store.lookup((LEASE[0], tenant.decode()), chains, chunk_seconds=0.0).num_resident


@pytest.mark.parametrize("num_rows", [2, 3, 7, 15])
@in_a_loop
async def test_each_of_two_tenants_promotes_a_chunk_at_once_in_a_small_tier(num_rows):
    async with World(num_rows) as world:
        world.remote.held = {"load"}
        world.remote.open.clear()
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
        world.remote.held = {"load"}
        world.remote.open.clear()
        lookup(world, b"first", chain(20))
        pending = world.store._promotions._pending
        await until(lambda: pending)
        await until(lambda: not world.store._promotions._probing)
        lookup(world, b"first", chain(20))
        await until(lambda: not world.store._promotions._probing)
        assert len(pending) == expected
