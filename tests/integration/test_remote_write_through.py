"""The tiered store on a real Redis: write-through and promotion while the server dies and freezes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from lmcache.tiers.header import PART_BYTES
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.tiered.store import TieredStore
from testing.processes import RedisProcess
from tests.harness.chains import one_chain
from tests.harness.remote_objects import tier_of
from tests.harness.tiered_world import slots_of

pytestmark = pytest.mark.redis

NAMESPACE = b"n" * 32
CHAIN = [NAMESPACE + bytes([number]) * 32 for number in range(4)]
LEASE = (b"e" * 16, "request")
PAYLOAD_BYTES = PART_BYTES + 4096


@contextlib.asynccontextmanager
async def store_of(
    server: RedisProcess, deadline: float = 60.0
) -> AsyncIterator[tuple[TieredStore, PrivateArena]]:
    arena = PrivateArena(Geometry(2 * PART_BYTES, 2), 16)
    remote = tier_of(server.url, deadline)
    store = TieredStore(arena, {"remote": remote})
    await store.adopt()
    store.register(NAMESPACE, label=b"model")
    yield store, arena
    await store.close()
    remote.close()


def payload_of(key: bytes, column: int) -> bytes:
    return (key + bytes([column]) * 64) * (PAYLOAD_BYTES // 128)


def put(store: TieredStore, arena: PrivateArena) -> None:
    for column in range(2):
        slots = [answer.slot for answer in store.reserve(CHAIN, column, b"o" * 16, length=PAYLOAD_BYTES)]
        for key, slot in zip(CHAIN, slots, strict=True):
            arena.view(slot.row, column)[:PAYLOAD_BYTES] = payload_of(key, column)
        store.commit(slots, column, b"o" * 16)


async def check_promoted(store: TieredStore, arena: PrivateArena) -> None:
    async with asyncio.timeout(60):
        # Engines poll in the same way: promotion has no event of its own.
        while store.lookup(LEASE, one_chain(CHAIN, PAYLOAD_BYTES)).num_resident < len(CHAIN):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for key, slot in zip(CHAIN, slots_of(store, CHAIN), strict=True):
        for column in range(2):
            assert bytes(arena.view(slot.row, column)[:PAYLOAD_BYTES]) == payload_of(key, column)


async def wait_until_unhealthy(store: TieredStore) -> None:
    async with asyncio.timeout(60):
        while store.lower["remote"].is_healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class TestTieredStore:
    """Write-through and promotion on a real server that dies and freezes."""

    def test_rows_are_promoted_into_a_new_arena(self):
        async def main() -> None:
            with RedisProcess() as server:
                async with store_of(server) as (store, arena):
                    put(store, arena)
                    assert await store.drain(60)
                async with store_of(server) as (store, arena):
                    await check_promoted(store, arena)
                    assert store.lower["remote"].stats.promoted == len(CHAIN)

        asyncio.run(main())

    def test_frozen_server_does_not_delay_lookups_and_writes_resume(self):
        async def main() -> None:
            with RedisProcess() as server:
                async with store_of(server, deadline=1.0) as (store, arena):
                    server.freeze()
                    put(store, arena)
                    assert store.lookup(LEASE, one_chain(CHAIN, PAYLOAD_BYTES)).num_resident == len(CHAIN)
                    await wait_until_unhealthy(store)
                    assert not await store.drain(0.2)
                    missing = [NAMESPACE + bytes([99]) * 32]
                    assert not store.lookup((b"e" * 16, "other"), one_chain(missing, 1)).is_probing
                    server.thaw()
                    assert await store.drain(60)
                async with store_of(server) as (store, arena):
                    await check_promoted(store, arena)

        asyncio.run(main())

    def test_restarted_server_gets_the_queued_rows(self):
        async def main() -> None:
            with RedisProcess() as server:
                async with store_of(server) as (store, arena):
                    server.kill()
                    put(store, arena)
                    assert not await store.drain(0.2)
                    server.start()
                    assert await store.drain(60)
                    assert store.lower["remote"].stats.written == len(CHAIN)

        asyncio.run(main())
