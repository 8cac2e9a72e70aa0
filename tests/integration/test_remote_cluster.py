"""Redis Cluster: objects spread over its slots, moved slots, and failing masters."""

import binascii
import contextlib
from functools import partial

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote.objects import hash_tag
from lmcache_store.tiers.remote.tier import RemoteTier
from testing.child_process import free_port, wait_until
from testing.processes import RedisProcess
from tests.harness.tiers.redis_topologies import Cluster, cluster
from tests.harness.tiers.remote_objects import load, pattern, row_name, tier_of

pytestmark = pytest.mark.redis

KEYS = [bytes([number]) * 64 for number in range(40)]
KEY = KEYS[7]
SLOT = binascii.crc_hqx(hash_tag(KEY).encode(), 0) % 16384


@pytest.fixture
def servers():
    with cluster() as servers:
        yield servers


@pytest.fixture
def remote(servers):
    tier = tier_of(servers.url)
    yield tier
    tier.close()


def fill(remote: RemoteTier) -> None:
    for key in KEYS:
        for column in range(2):
            assert remote.store(ObjectId(key, column), memoryview(key + bytes([column])))


def calls(servers: Cluster, index: int, command: str) -> int:
    stats = servers.nodes[index].client.info("commandstats")
    return stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]


def test_objects_are_spread_over_all_masters_and_found(remote, servers):
    fill(remote)
    assert sum(node.client.dbsize() for node in servers.nodes[:3]) == len(KEYS)
    assert all(node.client.dbsize() for node in servers.nodes[:3])
    assert num_leading(remote, KEYS, 2) == len(KEYS)
    for key in KEYS:
        assert load(remote, 1, key=key) == key + b"\x01"
    remote.touch(KEYS, 2)
    assert sum(calls(servers, index, "hexists") for index in range(3)) == 9 * len(KEYS)
    for node in servers.nodes:  # the client's slot map was right
        assert "errorstat_MOVED" not in node.client.info("errorstats")


def test_servers_may_announce_host_names(remote, servers):
    for node in servers.nodes:
        node.client.config_set("cluster-announce-hostname", "node.example")
    wait_until(lambda: "node.example" in str(servers.nodes[1].client.execute_command("CLUSTER NODES")))
    fill(remote)
    assert num_leading(remote, KEYS, 2) == len(KEYS)


def test_seed_without_cluster_is_skipped(servers):
    with RedisProcess(cluster_enabled="yes", cluster_port=free_port()) as standalone:
        remote = tier_of(f"redis-cluster://127.0.0.1:{standalone.port},127.0.0.1:{servers.nodes[0].port}")
        fill(remote)
        assert num_leading(remote, KEYS, 2) == len(KEYS)
        remote.close()


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("load", (ObjectId(KEY, 0), memoryview(bytearray(2 * PART_BYTES)))),
        ("store", (ObjectId(KEY, 0), memoryview(b"x"))),
        ("find_each", ([ObjectId(KEY, 0)],)),
    ],
    ids=["load", "store", "find_each"],
)
def test_operations_follow_a_slot_during_its_move_and_learn_it(remote, servers, operation, arguments):
    fill(remote)
    payload = pattern(PART_BYTES + 5)
    source = servers.owner_of(SLOT)
    target = (source + 1) % 3
    servers.set_slot(target, SLOT, "IMPORTING", servers.id_of(source))
    servers.set_slot(source, SLOT, "MIGRATING", servers.id_of(target))
    # The source serves rows that it still has. For other rows it redirects reads and writes (ASK).
    assert load(remote, key=KEY) == KEY + b"\x00"
    servers.nodes[source].client.delete(row_name(KEY))
    assert load(remote, key=KEY) is None
    assert remote.store(ObjectId(KEY, 0), memoryview(payload))
    assert load(remote, key=KEY) == payload
    assert servers.nodes[target].client.info("commandstats")["cmdstat_asking"]["calls"] > 3
    # The move is complete (MOVED).
    for index in (target, source):
        servers.set_slot(index, SLOT, "NODE", servers.id_of(target))
    assert getattr(remote, operation)(*arguments)
    num_calls_before = [calls(servers, source, command) for command in ("hexists", "hmget", "hset")]
    assert num_leading(remote, [KEY], 1) == 1
    assert load(remote, key=KEY) == payload
    assert remote.store(ObjectId(KEY, 0), memoryview(payload))
    num_calls = [calls(servers, source, command) for command in ("hexists", "hmget", "hset")]
    assert num_calls == num_calls_before, "the client has learned the move"
    assert remote.stats.invalid == {}
    assert not remote.health.is_open


def test_replica_of_a_dead_master_is_used(remote, servers):
    fill(remote)
    wait_until(lambda: servers.nodes[3].client.dbsize() == servers.nodes[0].client.dbsize())
    servers.nodes[0].kill()
    hits = [load(remote, key=key) is not None for key in KEYS]
    assert 0 < hits.count(True) < len(KEYS)
    assert not remote.health.is_open
    wait_until(lambda: num_leading(remote, KEYS, 2) == len(KEYS))
    assert all(load(remote, key=key) for key in KEYS)
    assert all(remote.store(ObjectId(key, 5), memoryview(b"x")) for key in KEYS)


def test_unreachable_cluster_raises():
    with contextlib.closing(tier_of("redis-cluster://127.0.0.1:1,127.0.0.1:2")) as remote:
        store = partial(remote.store, ObjectId(KEY, 0), memoryview(b"x"))
        find = partial(remote.find_each, [ObjectId(KEY, 0)])
        for call in (partial(load, remote), find, store) * 2:
            with pytest.raises(TierUnavailableError):
                call()
        assert remote.health.is_open
