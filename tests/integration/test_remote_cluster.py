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
from testing.certificates import make_certificates
from testing.child_process import free_port, wait_until
from testing.processes import BINARY, RedisProcess
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


def prefer(servers: Cluster, endpoint_type: str) -> None:
    for node in servers.nodes:
        node.client.config_set("cluster-preferred-endpoint-type", endpoint_type)


def announce(servers: Cluster, index: int, name: str) -> None:
    """Let a server announce a host name, until all others know it."""
    port = servers.nodes[index].port
    servers.nodes[index].client.config_set("cluster-announce-hostname", name)

    def is_known(node: RedisProcess) -> bool:
        view = node.client.execute_command("CLUSTER NODES")
        return view[f"127.0.0.1:{port}"]["hostname"] == name

    wait_until(lambda: all(is_known(node) for node in servers.nodes))


def names(remote: RemoteTier) -> set[str]:
    """Names of all owners in the present map."""
    remote.check()
    return {server["name"] for server in remote.servers()}


def test_servers_may_announce_host_names(remote, servers, caplog):
    addresses = [f"127.0.0.1:{node.port}" for node in servers.nodes[:3]]
    announce(servers, 0, "node.example")
    fill(remote)
    assert names(remote) == {*addresses}, "the cluster prefers addresses"

    announce(servers, 0, "")
    prefer(servers, "hostname")  # no server has a name
    fill(remote)
    wait_until(lambda: names(remote) == {*addresses} and "announce none" in caplog.text)
    assert num_leading(remote, KEYS, 2) == len(KEYS)

    announce(servers, 0, "localhost")
    mixed = {f"localhost:{servers.nodes[0].port}", *addresses[1:]}
    wait_until(lambda: names(remote) == mixed)
    for node in servers.nodes:  # back to addresses, one server after the other
        node.client.config_set("cluster-preferred-endpoint-type", "ip")
        assert num_leading(remote, KEYS, 2) == len(KEYS)
        assert all(load(remote, key=key) for key in KEYS)
    wait_until(lambda: names(remote) == {*addresses})
    assert not remote.health.is_open
    assert remote.stats.invalid == {}
    assert caplog.text.count("announce none") == 1


@pytest.mark.skipif("valkey" in BINARY, reason="this valkey-server may be built without TLS")
def test_addresses_in_the_map_need_certificates_with_addresses(tmp_path):
    certificates = make_certificates(tmp_path, "DNS:localhost")
    store = partial(RemoteTier.store, object_id=ObjectId(KEY, 0), payload=memoryview(b"x"))
    with cluster(certificates) as servers:
        url = f"{servers.url.replace('127.0.0.1', 'localhost')}?ca={certificates.ca}"
        with contextlib.closing(tier_of(f"{url}&verify=ca")) as remote:
            assert store(remote)
        for endpoint_type in ("ip", "hostname"):  # no server has a name
            prefer(servers, endpoint_type)
            with contextlib.closing(tier_of(url)) as remote:
                assert not store(remote)
                problems = [server["problem"] for server in remote.servers()]
                assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in "".join(problems)
        for index in range(4):
            announce(servers, index, "localhost")
        with contextlib.closing(tier_of(url)) as remote:
            assert store(remote)


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
@pytest.mark.parametrize("endpoint_type", ["ip", "hostname"])
def test_operations_follow_a_slot_during_its_move_and_learn_it(
    remote, servers, endpoint_type, operation, arguments
):
    prefer(servers, endpoint_type)
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
