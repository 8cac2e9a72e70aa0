"""Owners of objects: rendezvous hashing with a previous list, and hash slots of a cluster."""

import binascii
import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote import stream
from lmcache_store.tiers.remote.address import Address, Endpoint
from lmcache_store.tiers.remote.cluster import RedisCluster, _slot_map, _target
from lmcache_store.tiers.remote.objects import hash_tag, redis_name
from lmcache_store.tiers.remote.server import RedisServer
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList, ShardsTopology, endpoint_of
from testing.child_process import wait_until
from tests.harness.tiers.remote_objects import probe

ENDPOINTS = [Endpoint(f"shard-{number}.cache", 6379) for number in range(6)]
KEYS = [number.to_bytes(64, "big") for number in range(600)]


def refuse_connection() -> None:
    raise ConnectionRefusedError("connection refused")


def shards_of(shards: ShardList, now: float = 0.0) -> ShardsTopology:
    return ShardsTopology(
        shards, lambda endpoint: RedisServer(str(endpoint), refuse_connection, lambda _: None), lambda: now
    )


def owners(shards: ShardsTopology) -> list[str]:
    return [shards.owners(ObjectId(key, 0))[0].name for key in KEYS]


class TestShards:
    @given(st.lists(st.sampled_from(ENDPOINTS), min_size=2, unique=True), st.data())
    def test_removed_shard_moves_only_its_own_rows(self, endpoints, data):
        removed = data.draw(st.sampled_from(endpoints))
        before = owners(shards_of(ShardList(tuple(endpoints))))
        remaining = tuple(endpoint for endpoint in endpoints if endpoint != removed)
        after = owners(shards_of(ShardList(remaining)))
        for old, new in zip(before, after, strict=True):
            assert new == old or old == str(removed)

    @given(st.permutations(ENDPOINTS))
    def test_order_of_the_list_does_not_matter(self, endpoints):
        assert owners(shards_of(ShardList(tuple(endpoints)))) == owners(
            shards_of(ShardList(tuple(ENDPOINTS)))
        )

    def test_each_shard_owns_a_fair_part(self):
        counts = Counter(owners(shards_of(ShardList(tuple(ENDPOINTS)))))
        assert len(counts) == len(ENDPOINTS)
        assert min(counts.values()) > len(KEYS) / len(ENDPOINTS) * 0.7

    def test_owners_never_change_between_processes_and_versions(self):
        """Another hash would make all stored objects unreachable."""
        names = owners(shards_of(ShardList(tuple(ENDPOINTS))))
        assert "".join(name[6] for name in names[:24]) == "144535112045051112105102"

    def test_columns_of_a_row_share_an_owner(self):
        shards = shards_of(ShardList(tuple(ENDPOINTS)))
        for key in KEYS:
            assert len({shards.owners(ObjectId(key, column)) for column in range(8)}) == 1

    def test_previous_owner_is_second_until_the_deadline(self):
        change = ShardList(tuple(ENDPOINTS[:4]), tuple(ENDPOINTS[1:6]), until=100.0)
        during, after = shards_of(change, now=99.9), shards_of(change, now=100.0)
        before = owners(shards_of(ShardList(change.previous)))
        for key, previous in zip(KEYS, before, strict=True):
            present = after.owners(ObjectId(key, 0))
            assert len(present) == 1
            names = [server.name for server in during.owners(ObjectId(key, 0))]
            assert names == list(dict.fromkeys([present[0].name, previous]))

    def test_change_keeps_servers_in_both_lists(self):
        shards = shards_of(ShardList(tuple(ENDPOINTS[:2])))
        remaining, removed = sorted(shards.servers(), key=lambda server: server.name)[::-1]
        remaining.circuit.failure()
        shards.change(ShardList((Endpoint("shard-1.cache", 6379), Endpoint("new", 1))))
        assert remaining in shards.servers()
        assert removed not in shards.servers()
        with pytest.raises(ValueError, match="needs a shard"):
            shards.change(ShardList(()))
        assert remaining in shards.servers()
        shards.close()


class TestCluster:
    @contextlib.contextmanager
    def cluster(self) -> Iterator[RedisCluster]:
        self.now = 0.0

        def connect(endpoint):
            self.num_connects += (
                threading.current_thread() is threading.main_thread()
            )  # without connections of probes
            raise ConnectionRefusedError("connection refused")

        self.num_connects = 0
        with contextlib.closing(
            RedisCluster(ENDPOINTS[:2], connect, lambda _: None, lambda: self.now)
        ) as cluster:
            yield cluster

    def test_hash_tag_is_in_the_first_braces(self):
        name = redis_name("a.b", KEYS[1])
        assert name.partition("{")[2].partition("}")[0] == hash_tag(KEYS[1])

    def test_without_a_slot_map_no_server_owns_objects(self):
        with self.cluster() as cluster:
            assert not cluster.owners(ObjectId(KEYS[0], 0))
            assert [server.name for server in cluster.servers()] == [
                "shard-0.cache:6379",
                "shard-1.cache:6379",
            ]
            assert all(server.circuit.is_open for server in cluster.servers())
            assert self.num_connects == 2
            cluster.owners(ObjectId(KEYS[0], 0))
            assert self.num_connects == 2  # at most once a second

    def test_moved_reply_changes_the_owner(self):
        with self.cluster() as cluster:
            slot = binascii.crc_hqx(hash_tag(KEYS[0]).encode(), 0) % 16384
            seed = cluster.servers()[0]
            for host in ("10.0.0.7:7001", "10.0.0.9:7001"):  # the seed is the owner only before the first
                assert cluster.learn(ServerError(f"MOVED {slot} {host}"), seed)
                (owner,) = cluster.owners(ObjectId(KEYS[0], 3))
                assert owner.name == "10.0.0.7:7001"
            assert cluster.learn(ServerError(f"MOVED {slot} ?:7003"), owner)
            assert [server.name for server in cluster.owners(ObjectId(KEYS[0], 3))] == ["10.0.0.7:7003"]
            assert not cluster.learn(ServerError("OOM command not allowed"), seed)

    @given(st.text(max_size=40))
    @example("")
    @example("\N{SUPERSCRIPT TWO} h:1")  # a digit character but not a number
    def test_invalid_moved_reply_is_ignored(self, text):
        with self.cluster() as cluster:
            seed = cluster.servers()[0]
            assert cluster.learn(ServerError("MOVED"), seed)
            assert cluster.learn(ServerError(f"MOVED {text}"), seed)
            cluster.learn(ServerError(text), seed)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("10.0.0.8:7001", "10.0.0.8:7001"),
        ("node.example:7001", "node.example:7001"),
        ("::1:7001", "[::1]:7001"),
        ("[::1]:7001", "[::1]:7001"),
        ("?:7001", "10.0.0.7:7001"),
        (":7001", "10.0.0.7:7001"),  # cluster-preferred-endpoint-type unknown-endpoint
        ("?:6379", None),  # the server that replied
        ("?:0", None),
        ("?", None),
    ],
)
def test_redirection_without_a_host_stays_on_the_asked_host(target, expected):
    for code in ("MOVED", "ASK"):
        endpoint = _target(ServerError(f"{code} 3999 {target}"), Endpoint("10.0.0.7", 6379))
        assert (endpoint and str(endpoint)) == expected


@pytest.mark.parametrize(
    ("server", "expected", "lacks_names"),
    [
        ([b"10.0.0.7", 7000, b"id"], "10.0.0.7:7000", False),
        ([b"::1", 7000, b"id", []], "[::1]:7000", False),
        ([b"node.example", 7000, b"id", [b"ip", b"10.0.0.7"]], "node.example:7000", False),
        ([b"?", 7000, b"id", [b"ip", b"10.0.0.7"]], "10.0.0.7:7000", True),
        ([b"?", 7000, b"id", [b"zone", b"a", b"ip", b"10.0.0.7"]], "10.0.0.7:7000", True),
        ([b"?", 7000, b"id", [b"ip", b""]], "seed:7000", True),
        ([b"?", 7000, b"id", [b"ip", 7]], "seed:7000", True),
        ([b"?", 7000, b"id", [b"ip", b"?"]], None, True),
        ([b"?", 7000, b"id"], "seed:7000", True),
        ([b"", 7000, b"id", []], "seed:7000", False),
        ([None, 7000, b"id", [b"ip", b"10.0.0.7"]], "seed:7000", False),  # unknown-endpoint
        ([b"", 0, b"id", []], None, False),  # a server of which the cluster lost the address
    ],
)
def test_map_has_no_name_that_no_server_announces(server, expected, lacks_names):
    slots, lacks = _slot_map([[0, 9, server, [b"10.0.0.9", 7000, b"id"]], [10, 10, [b"h", 1]]], "seed")
    assert [endpoint and str(endpoint) for endpoint in slots[9:12]] == [expected, "h:1", None]
    assert lacks == lacks_names


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (b"", b"1"),
        (b"/run/s", b"1"),
        (b"h", b"0"),
        (b"h", b"65536"),
        (b"h", b"x"),
        (b"\xff", b"1"),
        (1, 1),
        (b"h", None),
        (b"?", b"1"),
    ],
)
def test_refuses_invalid_addresses(host, port):
    with pytest.raises(ConnectionError, match="unexpected address"):
        endpoint_of(host, port)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(ConnectionRefusedError("connection refused"), "connection refused", id="unreachable"),
        pytest.param(ServerError("NOPERM no permission for ROLE or SELECT"), "NOPERM", id="an error reply"),
    ],
)
def test_server_that_takes_no_connection_is_unavailable_until_a_probe_succeeds(error, message):
    def connect():
        raise error

    server = RedisServer("s", connect, lambda _: None)
    for expected in (message, "is unavailable"):
        with pytest.raises(TierUnavailableError, match=expected):
            server.run(lambda connection: None)
    assert not server.circuit.probe()
    server.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("host", ["a..b", "a" * 64, ".cache", "a\0b"])
def test_invalid_host_name_is_an_outage(scheme, host):
    remote = RemoteTier(Address.parse(f"{scheme}://{host}:1"), timeout_seconds=0.2)
    with pytest.raises(TierUnavailableError):
        num_leading(remote, KEYS[:1], 1)
    assert remote.health.is_open
    remote.close()


def resolve_cache_example(monkeypatch, resolve):
    """Resolve only ``cache.example`` by ``resolve``: circuits of other tests may probe in the background."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        return (resolve if host == "cache.example" else real)(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_hung_resolver_costs_a_timeout_and_a_single_thread(monkeypatch):
    may_answer, requests = threading.Event(), []

    def hang(*arguments, **_):
        requests.append(arguments)
        assert may_answer.wait(60)
        raise socket.gaierror("too late")

    resolve_cache_example(monkeypatch, hang)
    remote = RemoteTier(Address.parse("redis://cache.example:1"), timeout_seconds=0.1)
    with pytest.raises(TierUnavailableError, match=r"cache\.example was not resolved within 0\.1 s"):
        num_leading(remote, KEYS[:1], 1)
    assert not probe(remote)
    assert requests == [("cache.example", 1)]
    remote.close()
    may_answer.set()
    wait_until(lambda: not stream._resolving)


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("no-such-host.invalid", "cannot resolve the host: "),
        ("127.0.0.1", r"\[Errno 111\] Connection refused \(127\.0\.0\.1\)"),
    ],
)
def test_problem_names_the_server(host: str, problem: str) -> None:
    with contextlib.closing(RemoteTier(Address.parse(f"redis://user:secret@{host}:1"))) as remote:
        with pytest.raises(TierUnavailableError):
            num_leading(remote, KEYS[:1], 1)
        assert re.match(f"remote tier {host}:1: {problem}", remote.health.problem)
        assert "secret" not in remote.health.problem


def test_connects_to_the_next_address_of_a_name(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        addresses = [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 1)), (socket.AF_INET, 0, 0, "", address)]
        resolve_cache_example(monkeypatch, lambda *_, **__: addresses)
        stream.open_stream(Endpoint("cache.example", 1), 5, None).close()
