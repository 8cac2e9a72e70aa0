"""Several servers that know nothing of one another: one lost, one back, one more."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache.tiers.base import ObjectId
from lmcache.tiers.errors import TierUnavailableError
from lmcache.tiers.header import PART_BYTES
from lmcache.tiers.remote.address import Address, parse_endpoints
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList
from testing.child_process import wait_until
from testing.processes import RedisProcess
from tests.harness.remote_objects import is_available, load, pattern, probe, tier_of

pytestmark = pytest.mark.redis

KEYS = [number.to_bytes(64, "big") for number in range(40)]


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RedisProcess()) for _ in range(3)]


def name_of(server: RedisProcess) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def deadline():
    return 60.0


@pytest.fixture
def remote(servers, deadline):
    tier = tier_of(f"redis://{','.join(map(name_of, servers))}/0", deadline)
    yield tier
    tier.close()


def shard_list(current: list[str], previous: list[str], until: float) -> ShardList:
    return ShardList(parse_endpoints(current), parse_endpoints(previous), until)


def fill(remote: RemoteTier, num_columns: int = 2) -> None:
    for key in KEYS:
        for column in range(num_columns):
            assert remote.store(ObjectId(key, column), memoryview(payload_of(key, column)))


def payload_of(key: bytes, column: int) -> bytes:
    return (key + bytes([column])) * 100


def is_loaded(remote: RemoteTier, key: bytes, column: int = 0) -> bool:
    found = load(remote, column, key=key)
    assert found in (None, payload_of(key, column))
    return found is not None


def test_every_row_is_on_one_shard_and_found_again(remote, servers):
    fill(remote)
    counts = [server.client.dbsize() for server in servers]
    assert sum(counts) == len(KEYS)
    assert all(counts)
    assert remote.probe(KEYS, 2) == len(KEYS)
    assert remote.probe([*KEYS[:30], b"x" * 64, *KEYS], 2) == 30
    assert all(is_loaded(remote, key, 1) for key in KEYS)
    absent = [b"x" * 64, b"y" * 64]
    mixed = [absent[0], *KEYS[5:25], absent[1], KEYS[0]]
    assert remote.find_each([ObjectId(key, 1) for key in mixed]) == [key not in absent for key in mixed]


def test_a_probe_costs_one_round_trip_per_shard_and_window(remote, servers):
    fill(remote, 1)
    for server in servers:
        server.client.config_resetstat()
    assert remote.probe(KEYS[:16], 1) == 16
    for server in servers:
        stats = server.client.info("commandstats")
        assert stats["cmdstat_hexists"]["calls"] < 16
    assert sum(s.client.info("commandstats")["cmdstat_hexists"]["calls"] for s in servers) == 16


def frozen() -> None:
    raise TimeoutError


@pytest.mark.parametrize(("fault", "deadline"), [("kill", 60.0), ("freeze", 3.0)])
def test_a_lost_shard_costs_its_own_rows_only_until_it_is_available(remote, servers, fault, monkeypatch):
    fill(remote)
    getattr(servers[0], fault)()
    hits = [is_loaded(remote, key) for key in KEYS]
    lost = hits.count(False)
    assert 0 < lost < len(KEYS) * 0.7
    assert not remote.health.is_open
    assert remote.stats.failures == 1
    gone, kept = KEYS[hits.index(False)], KEYS[hits.index(True)]
    (unhealthy,) = (server for server in remote._topology.servers() if server.circuit.is_open)
    with monkeypatch.context() as patch:
        asked: list[object] = []
        patch.setattr(unhealthy.circuit, "_probe", frozen)
        patch.setattr(unhealthy, "_attempt", lambda operation, **_: asked.append(operation))
        assert remote.probe(KEYS, 2) == hits.index(False)
        assert not remote.store(ObjectId(gone, 0), memoryview(payload_of(gone, 0)))
        assert remote.stats.refused == {"unavailable": 1}
        assert remote.store(ObjectId(kept, 0), memoryview(payload_of(kept, 0)))
        remote.touch(KEYS, 2)
        assert not asked
    servers[0].start() if fault == "kill" else servers[0].thaw()
    # The tier as a whole is available meanwhile: the shard's own circuit brings it back.
    wait_until(lambda: remote.store(ObjectId(gone, 0), memoryview(payload_of(gone, 0))))
    assert is_loaded(remote, gone)


def test_shards_replaced_one_by_one_cost_each_row_one_hit(remote, servers):
    """As when they get other memory: each is empty then, and has time to fill before the next one."""
    fill(remote, 1)
    for server in servers:
        share = server.client.dbsize()
        server.restart()
        hits = [is_loaded(remote, key) for key in KEYS]
        assert hits.count(False) == share < len(KEYS)
        fill(remote, 1)  # what was missed was computed, and is written again
        assert all(is_loaded(remote, key) for key in KEYS)
    assert remote.stats.misses == len(KEYS)
    assert remote.stats.failures == 0


def test_all_shards_lost_and_one_back(remote, servers):
    fill(remote, 1)
    for server in servers:
        server.kill()
    with pytest.raises(TierUnavailableError):
        assert [load(remote, key=key) for key in KEYS]
    assert remote.health.is_open
    with pytest.raises(TierUnavailableError):
        remote.probe(KEYS, 1)
    with pytest.raises(TierUnavailableError):
        remote.store(ObjectId(KEYS[0], 0), memoryview(b"x"))
    with pytest.raises(TierUnavailableError):
        remote.touch(KEYS, 1)
    assert not probe(remote)
    servers[1].start()
    wait_until(lambda: is_available(remote))
    assert not remote.health.is_open
    fill_results = [remote.store(ObjectId(key, 0), memoryview(payload_of(key, 0))) for key in KEYS]
    assert fill_results.count(True) == servers[1].client.dbsize() > 0


def test_scale_out_reads_the_previous_owner_until_the_time_is_up(servers):
    old, new = [name_of(server) for server in servers[:2]], [name_of(server) for server in servers]
    remote = tier_of(f"redis://{','.join(old)}")
    fill(remote)
    remote.set_shards(shard_list(new, old, until=time.time() + 900))
    assert remote.probe(KEYS, 2) == len(KEYS)
    assert all(is_loaded(remote, key, 1) for key in KEYS)
    assert servers[2].client.dbsize() == 0
    remote.touch(KEYS, 2)
    # Writes go to the present owner: what is stored again has moved.
    fill(remote)
    moved = servers[2].client.dbsize()
    assert 0 < moved < len(KEYS) * 0.7
    servers[2].client.flushall()
    remote.set_shards(shard_list(new, old, until=time.time() - 1))
    hits = sum(is_loaded(remote, key) for key in KEYS)
    assert hits == len(KEYS) - moved
    remote.close()


def test_scale_in_stays_readable_though_the_leaving_shard_dies(remote, servers):
    fill(remote)
    left, all_of_them = [name_of(server) for server in servers[:2]], [name_of(server) for server in servers]
    remote.set_shards(shard_list(left, all_of_them, until=time.time() + 900))
    assert remote.probe(KEYS, 2) == len(KEYS)
    servers[2].kill()
    hits = sum(is_loaded(remote, key) for key in KEYS)
    assert 0 < hits < len(KEYS)
    fill(remote)
    assert remote.probe(KEYS, 2) == len(KEYS)
    assert not remote.health.is_open


def test_threads_share_the_tier_while_a_shard_dies_and_the_list_changes(remote, servers):
    """What is read is what was written, whatever happens; at the end all is well again."""
    is_over = threading.Event()
    left, all_of_them = [name_of(server) for server in servers[:2]], [name_of(server) for server in servers]

    def work(number: int) -> int:
        num_loads = 0
        while not is_over.is_set():
            for key in KEYS[number::4] + KEYS:
                with contextlib.suppress(TierUnavailableError):
                    remote.store(ObjectId(key, 0), memoryview(payload_of(key, 0)))
                    num_loads += is_loaded(remote, key)
                    remote.probe(KEYS, 1)
                    remote.touch(KEYS, 1)
        return num_loads

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(4)]
        try:
            for _ in range(3):
                servers[0].kill()
                wait_until(lambda: remote.stats.refused["unavailable"] or remote.health.is_open)
                remote.set_shards(shard_list(left, all_of_them, time.time() + 900))
                servers[0].start()
                wait_until(lambda: servers[0].client.dbsize())
                remote.set_shards(shard_list(all_of_them, left, time.time() + 900))
                remote.stats.refused.clear()
        finally:
            is_over.set()
    assert all(worker.result() for worker in workers)
    fill(remote, 1)
    assert remote.probe(KEYS, 1) == len(KEYS)


def test_servers_say_how_full_they_are_and_how_soon_they_forget(servers):
    now, numbers = [0.0], range(60)
    servers[0].client.config_set("maxmemory", 4 << 20)
    servers[0].client.config_set("maxmemory-policy", "allkeys-lru")
    remote = RemoteTier(Address.parse(f"redis://{','.join(map(name_of, servers[:2]))}"), clock=lambda: now[0])
    assert remote.used_bytes is None
    remote.check()
    empty = remote.used_bytes
    assert remote.residence_seconds == math.inf
    for number in numbers:
        assert remote.store(ObjectId(number.to_bytes(64, "big"), 0), memoryview(pattern(200_000)))
    now[0] = 10.0
    remote.check()
    assert remote.used_bytes > empty + (4 << 20) // 2
    evicted = servers[0].client.info("stats")["evicted_keys"]
    assert remote.stats.evicted == evicted > 0
    received = (evicted + servers[0].client.dbsize()) * 200_000
    assert remote.residence_seconds == pytest.approx(10.0 * (4 << 20) / received, rel=0.1)
    now[0] = 20.0
    remote.check()
    assert remote.residence_seconds > 1000  # nothing was written
    servers[0].client.acl_setuser("default", commands=["-info"])
    remote.check()
    assert not remote.health.is_open
    assert remote.used_bytes == pytest.approx(servers[1].client.info("memory")["used_memory"], rel=0.2)
    remote.close()


def test_columns_of_many_parts(remote):
    payload = pattern(2 * PART_BYTES + 5)
    assert remote.store(ObjectId(KEYS[0], 0), memoryview(payload))
    assert load(remote, key=KEYS[0]) == payload
    remote.touch(KEYS, 1)
