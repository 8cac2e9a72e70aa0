"""Independent servers as shards: rows spread over them, lost shards, threads, usage.

``test_remote_shards_model`` shows which rows are found while the shard list and the servers change.
"""

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote.address import parse_endpoints
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList
from testing.child_process import wait_until
from testing.processes import RedisProcess
from tests.harness.tiers.remote_objects import load, pattern, tier_of

pytestmark = pytest.mark.redis

KEYS = [number.to_bytes(64, "big") for number in range(40)]


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RedisProcess()) for _ in range(3)]


def name_of(server: RedisProcess) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def remote(request, servers):
    tier = tier_of(f"redis://{','.join(map(name_of, servers))}/0", getattr(request, "param", 60.0))
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
    content = load(remote, column, key=key)
    assert content in (None, payload_of(key, column))
    return content is not None


def test_probe_asks_for_each_row_of_the_window_once(remote, servers):
    fill(remote, 1)
    for server in servers:
        server.client.config_resetstat()
    assert num_leading(remote, KEYS[:16], 1) == 16
    stats = [server.client.info("commandstats") for server in servers]
    # Ports decide which shard owns a row, so a shard may own none.
    calls = [each.get("cmdstat_hexists", {"calls": 0})["calls"] for each in stats]
    assert max(calls) < 16
    assert sum(calls) == 16


@pytest.mark.parametrize(("fault", "remote"), [("kill", 60.0), ("freeze", 3.0)], indirect=["remote"])
def test_lost_shard_costs_only_its_own_rows(remote, servers, fault, monkeypatch):
    fill(remote)
    getattr(servers[0], fault)()
    hits = [is_loaded(remote, key) for key in KEYS]
    num_lost = hits.count(False)
    assert 0 < num_lost < len(KEYS) * 0.7
    assert not remote.health.is_open
    assert remote.stats.failures == 1
    lost_key, served_key = KEYS[hits.index(False)], KEYS[hits.index(True)]
    (unhealthy,) = (server for server in remote._topology.servers() if server.circuit.is_open)
    with monkeypatch.context() as patch:
        patch.setattr(unhealthy.circuit, "_probe", mock.Mock(side_effect=TimeoutError))
        patch.setattr(unhealthy, "_attempt", attempt := mock.Mock())
        assert num_leading(remote, KEYS, 2) == hits.index(False)
        assert not remote.store(ObjectId(lost_key, 0), memoryview(payload_of(lost_key, 0)))
        assert remote.stats.refused == {"unavailable": 1}
        assert remote.store(ObjectId(served_key, 0), memoryview(payload_of(served_key, 0)))
        remote.touch(KEYS, 2)
        attempt.assert_not_called()
    servers[0].start() if fault == "kill" else servers[0].thaw()
    # The tier as a whole stayed available: the shard's own circuit closes again.
    wait_until(lambda: remote.store(ObjectId(lost_key, 0), memoryview(payload_of(lost_key, 0))))
    assert is_loaded(remote, lost_key)


def test_threads_share_the_tier_while_shards_die_and_change(remote, servers):
    """Every read returns what was written, and at the end all rows are found."""
    is_over = threading.Event()
    all_names = [name_of(server) for server in servers]
    remaining = all_names[:2]

    def work(number: int) -> int:
        num_loads = 0
        while not is_over.is_set():
            for key in KEYS[number::4] + KEYS:
                with contextlib.suppress(TierUnavailableError):
                    remote.store(ObjectId(key, 0), memoryview(payload_of(key, 0)))
                    num_loads += is_loaded(remote, key)
                    num_leading(remote, KEYS, 1)
                    remote.touch(KEYS, 1)
        return num_loads

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(4)]
        try:
            for _ in range(3):
                servers[0].kill()
                wait_until(lambda: remote.stats.refused["unavailable"] or remote.health.is_open)
                remote.set_shards(shard_list(remaining, all_names, time.time() + 900))
                servers[0].start()
                wait_until(lambda: servers[0].client.dbsize())
                remote.set_shards(shard_list(all_names, remaining, time.time() + 900))
                remote.stats.refused.clear()
        finally:
            is_over.set()
    assert all(worker.result() for worker in workers)
    fill(remote, 1)
    assert num_leading(remote, KEYS, 1) == len(KEYS)


def test_servers_report_their_usage_and_residence(servers):
    now, numbers = [0.0], range(60)
    servers[0].client.config_set("maxmemory", 4 << 20)
    servers[0].client.config_set("maxmemory-policy", "allkeys-lru")
    remote = tier_of(f"redis://{','.join(map(name_of, servers[:2]))}", clock=lambda: now[0])
    assert remote.used_bytes is None
    remote.check()
    used_bytes_empty = remote.used_bytes
    assert remote.residence_seconds == math.inf
    for number in numbers:
        assert remote.store(ObjectId(number.to_bytes(64, "big"), 0), memoryview(pattern(200_000)))
    now[0] = 10.0
    remote.check()
    assert remote.used_bytes > used_bytes_empty + (4 << 20) // 2
    first, second = remote.servers()
    assert (first["name"], first["problem"], first["policy"]) == (name_of(servers[0]), "", "allkeys-lru")
    assert (first["max_bytes"], second["policy"]) == (4 << 20, "noeviction")
    assert first["used_bytes"] + second["used_bytes"] == remote.used_bytes
    assert 0 < first["answer_seconds"] < 60
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
    assert remote.servers()[0] == {"name": name_of(servers[0]), "problem": ""}
    servers[0].kill()
    remote.check()
    assert "refused" in remote.servers()[0]["problem"]
    remote.close()
