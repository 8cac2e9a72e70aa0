"""Bounds of tenants in the disk tier, from the write queue to the files."""

import asyncio
from pathlib import Path

import pytest

from lmcache_store.tiers.budgets import Budget, Budgets, SaltedBudgets
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.stats import WriteSkipped
from tests.harness.tiers.tiered_world import NUM_COLUMNS, OWNER, SIZE, World, chain

ROW_BYTES = NUM_COLUMNS * 2 * SIZE  # each object has a page for its header


def put(world: World, keys: list[bytes], tenant: bytes) -> None:
    for column in range(NUM_COLUMNS):
        answers = world.store.reserve(keys, column, OWNER, length=SIZE, tenant=tenant)
        world.store.commit([answer.slot for answer in answers], column, OWNER)


async def write(path: Path, *stores: tuple[Budgets, bytes, int]) -> World:
    """Store the number of rows for each tenant in turn, under these budgets. None may wait for a retry."""
    disk = DiskTier(path / "disk", 1 << 20)
    assert disk.indexed.wait(60)
    try:
        async with World(disk=disk) as world:
            for position, (budgets, tenant, number) in enumerate(stores):
                world.store.memory.set_budgets(budgets)
                put(world, chain(number, 100 * position), tenant)
                assert await world.store.drain(60)
            worker = world.store.lower["disk"]
            assert not worker._refused, "a row that the bound refuses must not delay the retry of other rows"
            return world
    finally:
        disk.close()


@pytest.mark.parametrize(("tenants", "num_refused"), [((b"x", b"y"), 0), ((b"a", b"b"), 2)])
def test_bound_of_the_default_is_for_each_salt_alone(tmp_path: Path, tenants, num_refused):
    shared = Budget("shared", disk_bytes=2 * ROW_BYTES)
    salt_hashes = {b"a": b"one salt", b"b": b"one salt"}  # in two namespaces
    budgets = Budgets(Budget(disk_bytes=2 * ROW_BYTES), {b"a": shared, b"b": shared}, salt_hashes)
    world = asyncio.run(write(tmp_path, *((budgets, tenant, 2) for tenant in tenants)))
    stats = world.store.lower["disk"].stats
    assert (stats.written, stats.writes_skipped[WriteSkipped.BOUND]) == (4 - num_refused, num_refused)
    refused = world.store.memory.stats.tenant_counts.disk_refused
    assert refused == ({"shared": num_refused} if num_refused else {})


def test_renamed_tenant_has_the_rest_of_its_bound(tmp_path: Path):
    """A new name must not be a way to write more."""

    def named(name: str) -> Budgets:
        return SaltedBudgets(by_salt_hash={b"salt": Budget(name, disk_bytes=3 * ROW_BYTES)}).resolve([b"n"])

    (tenant,) = named("search").by_tenant
    stores = [(named("search"), tenant, 2), (named("renamed"), tenant, 1), (named("renamed"), tenant, 1)]
    world = asyncio.run(write(tmp_path, *stores))
    stats = world.store.lower["disk"].stats
    assert (stats.written, stats.writes_skipped[WriteSkipped.BOUND]) == (3, 1)


def test_bound_refuses_whole_rows_without_a_retry(tmp_path: Path):
    budgets = Budgets(Budget(disk_bytes=ROW_BYTES * 3 // 2))
    world = asyncio.run(write(tmp_path, *[(budgets, b"x", 1)] * 3))
    worker = world.store.lower["disk"]
    assert (worker.stats.written, worker.stats.writes_skipped[WriteSkipped.BOUND]) == (1, 2)
    assert not worker.stats.writes_skipped[WriteSkipped.REFUSED]
    assert worker._tier.stats.stored == NUM_COLUMNS, "no row has some of its columns"
