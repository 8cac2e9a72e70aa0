"""Which server owns an object: rendezvous hashing with a previous list, and a cluster's hash slots."""

from __future__ import annotations

import binascii
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache.tiers.base import ObjectId
from lmcache.tiers.errors import ServerError, TierUnavailableError
from lmcache.tiers.remote import stream
from lmcache.tiers.remote.address import Address, Endpoint
from lmcache.tiers.remote.cluster import RedisCluster
from lmcache.tiers.remote.objects import hash_tag, redis_name
from lmcache.tiers.remote.server import RedisServer
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList, Shards, endpoint_of
from testing.child_process import wait_until
from tests.harness.remote_objects import probe

ENDPOINTS = [Endpoint(f"shard-{number}.cache", 6379) for number in range(6)]
KEYS = [number.to_bytes(64, "big") for number in range(600)]


def nobody() -> None:
    raise ConnectionRefusedError("nobody there")


def shards_of(shards: ShardList, now: float = 0.0) -> Shards:
    return Shards(shards, lambda endpoint: RedisServer(str(endpoint), nobody, lambda _: None), lambda: now)


def owners(shards: Shards) -> list[str]:
    return [shards.owners(ObjectId(key, 0))[0].name for key in KEYS]


class TestShards:
    @given(st.lists(st.sampled_from(ENDPOINTS), min_size=2, unique=True), st.data())
    def test_who_leaves_takes_only_its_own_rows_away(self, endpoints, data):
        gone = data.draw(st.sampled_from(endpoints))
        before = owners(shards_of(ShardList(tuple(endpoints))))
        left = tuple(endpoint for endpoint in endpoints if endpoint != gone)
        after = owners(shards_of(ShardList(left)))
        for old, new in zip(before, after, strict=True):
            assert new == old or old == str(gone)

    @given(st.permutations(ENDPOINTS))
    def test_the_order_of_the_list_is_of_no_account(self, endpoints):
        assert owners(shards_of(ShardList(tuple(endpoints)))) == owners(
            shards_of(ShardList(tuple(ENDPOINTS)))
        )

    def test_every_shard_has_its_part(self):
        counts = Counter(owners(shards_of(ShardList(tuple(ENDPOINTS)))))
        assert len(counts) == len(ENDPOINTS)
        assert min(counts.values()) > len(KEYS) / len(ENDPOINTS) * 0.7

    def test_owners_are_the_same_in_every_process_and_version(self):
        """Golden: another hash would lose everything that is stored."""
        names = owners(shards_of(ShardList(tuple(ENDPOINTS))))
        assert "".join(name[6] for name in names[:24]) == "144535112045051112105102"

    def test_all_columns_of_a_row_have_one_owner(self):
        shards = shards_of(ShardList(tuple(ENDPOINTS)))
        for key in KEYS:
            assert len({shards.owners(ObjectId(key, column)) for column in range(8)}) == 1

    def test_the_previous_owner_is_asked_next_until_the_time_is_up(self):
        change = ShardList(tuple(ENDPOINTS[:4]), tuple(ENDPOINTS[1:6]), until=100.0)
        during, after = shards_of(change, now=99.9), shards_of(change, now=100.0)
        before = owners(shards_of(ShardList(change.previous)))
        for key, previous in zip(KEYS, before, strict=True):
            present = after.owners(ObjectId(key, 0))
            assert len(present) == 1
            names = [server.name for server in during.owners(ObjectId(key, 0))]
            assert names == list(dict.fromkeys([present[0].name, previous]))

    def test_a_change_keeps_the_servers_that_stay(self):
        shards = shards_of(ShardList(tuple(ENDPOINTS[:2])))
        stays, goes = sorted(shards.servers(), key=lambda server: server.name)[::-1]
        stays.circuit.failure()
        shards.change(ShardList((Endpoint("shard-1.cache", 6379), Endpoint("new", 1))))
        assert stays in shards.servers()
        assert goes not in shards.servers()
        with pytest.raises(ValueError, match="needs a shard"):
            shards.change(ShardList(()))
        assert stays in shards.servers()
        shards.close()


class TestCluster:
    @contextlib.contextmanager
    def cluster(self) -> Iterator[RedisCluster]:
        self.now = 0.0

        def connect(endpoint):
            self.num_connects += threading.current_thread() is threading.main_thread()  # no probe's
            raise ConnectionRefusedError("nobody there")

        self.num_connects = 0
        with contextlib.closing(
            RedisCluster(ENDPOINTS[:2], connect, lambda _: None, lambda: self.now)
        ) as made:
            yield made

    def test_the_hash_slot_is_that_of_the_specification(self):
        """The check value of CRC16, https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/."""
        assert binascii.crc_hqx(b"123456789", 0) == 0x31C3

    def test_the_tag_is_what_stands_in_the_first_braces(self):
        name = redis_name("a.b", KEYS[1])
        assert name.partition("{")[2].partition("}")[0] == hash_tag(KEYS[1])

    def test_without_a_map_nobody_owns_anything_and_the_seeds_stand_for_all(self):
        with self.cluster() as cluster:
            assert not cluster.owners(ObjectId(KEYS[0], 0))
            assert [server.name for server in cluster.servers()] == [
                "shard-0.cache:6379",
                "shard-1.cache:6379",
            ]
            assert all(server.circuit.is_open for server in cluster.servers())
            assert self.num_connects == 2
            cluster.owners(ObjectId(KEYS[0], 0))
            assert self.num_connects == 2  # once a second

    def test_a_slot_that_moved_is_learned_from_the_answer(self):
        with self.cluster() as cluster:
            slot = binascii.crc_hqx(hash_tag(KEYS[0]).encode(), 0) % 16384
            assert cluster.learn(ServerError(f"MOVED {slot} 10.0.0.7:7001"))
            assert [server.name for server in cluster.owners(ObjectId(KEYS[0], 3))] == ["10.0.0.7:7001"]
            assert not cluster.learn(ServerError("OOM command not allowed"))

    @given(st.text(max_size=40))
    @example("")
    @example("\N{SUPERSCRIPT TWO} h:1")  # a digit, but no number
    def test_a_moved_that_says_nothing_is_harmless(self, text):
        with self.cluster() as cluster:
            assert cluster.learn(ServerError("MOVED"))
            assert cluster.learn(ServerError(f"MOVED {text}"))
            cluster.learn(ServerError(text))


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
    ],
)
def test_what_is_no_address_is_not_believed(host, port):
    with pytest.raises(ConnectionError, match="unexpected address"):
        endpoint_of(host, port)


def test_a_server_that_nobody_reaches_is_away_and_tried_in_the_background():
    server = RedisServer("s", nobody, lambda _: None)
    with pytest.raises(TierUnavailableError, match="nobody there"):
        server.run(lambda connection: None)
    with pytest.raises(TierUnavailableError, match="is unavailable"):
        server.run(lambda connection: None)
    server.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("host", ["a..b", "a" * 64, ".cache", "a\0b"])
def test_a_name_that_no_host_can_have_is_an_outage(scheme, host):
    remote = RemoteTier(Address.parse(f"{scheme}://{host}:1"), timeout_seconds=0.2)
    with pytest.raises(TierUnavailableError):
        remote.probe(KEYS[:1], 1)
    assert remote.health.is_open
    remote.close()


def test_an_error_while_connecting_is_an_outage():
    """ROLE, or SELECT, that this user may not say: no answer is to be had, whatever is asked."""

    def connect():
        raise ServerError("NOPERM this user has no permissions to run the 'select' command")

    server = RedisServer("s", connect, lambda _: None)
    with pytest.raises(TierUnavailableError, match="NOPERM"):
        server.run(lambda connection: None)
    assert not server.circuit.probe()
    server.close()


def resolve_cache_example(monkeypatch, resolve):
    """By ``resolve``, that name alone: other tests' circuits may be probing in the background."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        return (resolve if host == "cache.example" else real)(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_resolver_that_never_answers_costs_a_deadline_and_one_thread(monkeypatch):
    answering, asked = threading.Event(), []

    def hang(*arguments, **_):
        asked.append(arguments)
        assert answering.wait(60)
        raise socket.gaierror("too late")

    resolve_cache_example(monkeypatch, hang)
    remote = RemoteTier(Address.parse("redis://cache.example:1"), timeout_seconds=0.1)
    with pytest.raises(TierUnavailableError, match=r"cache\.example was not resolved within 0\.1 s"):
        remote.probe(KEYS[:1], 1)
    assert not probe(remote)
    assert asked == [("cache.example", 1)]
    remote.close()
    answering.set()
    wait_until(lambda: not stream._resolving)


def test_the_next_address_of_a_name_is_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        found = [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 1)), (socket.AF_INET, 0, 0, "", address)]
        resolve_cache_example(monkeypatch, lambda *_, **__: found)
        stream.open_stream(Endpoint("cache.example", 1), 5, None).close()
