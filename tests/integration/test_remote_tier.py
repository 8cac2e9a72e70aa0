"""The remote tier on a real Redis: what is read back, what is refused, and what a sick server does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest

from lmcache.tiers.arena import HeapArena
from lmcache.tiers.base import Geometry, TierUnavailable
from lmcache.tiers.header import HEADER_BYTES, Header, checksum
from lmcache.tiers.remote import PART_BYTES, RemoteTier, part_name
from lmcache.tiers.tiered import TieredStore
from tests.harness.redis_server import RedisServer

pytestmark = pytest.mark.redis

KEY = b"n" * 32 + b"k" * 32
DEADLINE = 1.0


@pytest.fixture(scope="module")
def shared_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client.flushall()
    return shared_server


@pytest.fixture(params=["unix", "tcp"])
def remote(request, server):
    url = server.unix_url if request.param == "unix" else server.url
    tier = RemoteTier(url, timeout_seconds=DEADLINE)
    yield tier
    tier.close()


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def load(remote: RemoteTier, column: int = 0, room: int = 3 * PART_BYTES, key: bytes = KEY) -> bytes | None:
    into = memoryview(bytearray(room))
    length = remote.load(key, column, into)
    return None if length is None else bytes(into[:length])


def until(condition, seconds: float = 10.0) -> float:
    """Poll; return how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "never happened"
        time.sleep(0.005)
    return time.monotonic() - start


class TestObjects:
    @pytest.mark.parametrize(
        "size", [0, 1, 4096, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 4096]
    )
    def test_round_trip(self, remote, server, size):
        payload = pattern(size)
        assert remote.store(KEY, 1, memoryview(payload), b"label")
        assert load(remote, 1) == payload
        assert load(remote, 0) is None
        assert server.client.dbsize() == max(1, -(-size // PART_BYTES))
        assert remote.stats.hits == remote.stats.stored == remote.stats.misses == 1
        assert not remote.stats.invalid

    def test_what_is_there_is_only_touched(self, remote, server):
        for _ in range(2):
            assert remote.store(KEY, 0, memoryview(pattern(PART_BYTES + 5)))
        assert (remote.stats.stored, remote.stats.touched) == (1, 1)
        # A part that Redis evicted is written again.
        server.client.delete(part_name(KEY, 0, 1))
        assert remote.store(KEY, 0, memoryview(pattern(PART_BYTES + 5)))
        assert remote.stats.stored == 2

    def test_the_presence_marker_is_written_last(self, remote, server):
        server.client.config_set("notify-keyspace-events", "E$")
        with server.client.pubsub(ignore_subscribe_messages=True) as events:
            events.subscribe("__keyevent@0__:set")
            events.get_message(timeout=5)  # subscribed
            remote.store(KEY, 0, memoryview(pattern(2 * PART_BYTES + 1)))
            names = []
            while len(names) < 3:
                message = events.get_message(timeout=5)
                names += [message["data"].decode()] if message else []
        assert names == [part_name(KEY, 0, part) for part in (1, 2, 0)]

    def test_parts_of_several_writers_make_one_object(self, remote, server):
        payload = pattern(2 * PART_BYTES)
        remote.store(KEY, 0, memoryview(payload), b"one writer")
        server.client.delete(part_name(KEY, 0, 0))
        remote.store(KEY, 0, memoryview(payload), b"another writer")
        assert load(remote) == payload

    @pytest.mark.parametrize("num_columns", [1, 3])
    @pytest.mark.parametrize("num_present", [0, 1, 15, 16, 17, 47, 48, 100])
    def test_probe_counts_leading_rows(self, remote, server, num_columns, num_present):
        keys = [number.to_bytes(64, "big") for number in range(100)]
        pipeline = server.client.pipeline()
        for key in [*keys[:num_present], *keys[num_present + 1 :]]:
            for column in range(num_columns):
                pipeline.set(part_name(key, column, 0), b"")
        pipeline.execute()
        assert remote.probe(keys, num_columns) == num_present
        if num_present:
            server.client.delete(part_name(keys[num_present - 1], num_columns - 1, 0))
            assert remote.probe(keys, num_columns) == num_present - 1

    def test_database_number(self, server):
        remote = RemoteTier(server.url.removesuffix("/0") + "/5")
        remote.store(KEY, 0, memoryview(b"x"))
        assert server.client.dbsize() == 0
        assert server.client.execute_command("INFO", "keyspace")["db5"]["keys"] == 1
        remote.close()


class TestDistrust:
    """What stands under our name and is not exactly ours is a miss, counted by reason, overwritten later."""

    def check(self, remote: RemoteTier, reason: str) -> None:
        assert load(remote) is None
        assert remote.stats.invalid == {reason: 1}
        assert not remote.breaker.is_open
        payload = pattern(PART_BYTES + 9)
        assert remote.store(KEY, 0, memoryview(payload))
        assert remote.stats.stored == 1
        assert load(remote) == payload

    @pytest.fixture(autouse=True)
    def stored(self, remote, server):
        self.client = server.client
        self.name = part_name(KEY, 0, 0)
        remote.store(KEY, 0, memoryview(pattern(PART_BYTES + 9)))
        remote.stats.stored = 0

    def test_flipped_byte_in_the_payload(self, remote):
        self.client.setrange(self.name, HEADER_BYTES + 1000, b"\xff")
        self.check(remote, "checksum")

    def test_flipped_byte_in_a_later_part(self, remote):
        self.client.setrange(part_name(KEY, 0, 1), HEADER_BYTES + 8, b"\xff")
        self.check(remote, "checksum")

    def test_flipped_byte_in_the_header(self, remote):
        self.client.setrange(self.name, 100, b"\xff")
        self.check(remote, "header")

    def test_another_version(self, remote):
        self.client.setrange(self.name, 8, b"\x02")
        self.check(remote, "header")

    def test_foreign_value(self, remote):
        self.client.set(self.name, b"hello")
        self.check(remote, "length")

    def test_foreign_value_of_the_right_length(self, remote):
        self.client.set(self.name, b"x" * (HEADER_BYTES + PART_BYTES))
        self.check(remote, "header")

    def test_foreign_value_of_another_type(self, remote):
        self.client.delete(self.name)
        self.client.rpush(self.name, "a", "b")
        self.check(remote, "type")

    def test_cut_value(self, remote):
        self.client.set(self.name, self.client.get(self.name)[:-1])
        self.check(remote, "length")

    def test_value_longer_than_a_part(self, remote):
        self.client.append(self.name, b"x")
        self.check(remote, "length")

    def test_object_of_another_name(self, remote):
        remote.store(KEY[::-1], 0, memoryview(pattern(PART_BYTES + 9)))
        remote.stats.stored = 0
        self.client.set(self.name, self.client.get(part_name(KEY[::-1], 0, 0)))
        self.check(remote, "name")

    def test_missing_part(self, remote):
        self.client.delete(part_name(KEY, 0, 1))
        self.check(remote, "part")

    def test_parts_of_objects_of_different_length(self, remote):
        other = Header(KEY, 0, 1, 2, 5, PART_BYTES + 5, checksum(b"abcde"))
        self.client.set(part_name(KEY, 0, 1), other.pack() + b"abcde")
        self.check(remote, "length")

    def test_object_longer_than_the_slot(self, remote):
        assert load(remote, room=PART_BYTES) is None
        assert remote.stats.invalid == {"length": 1}

    def test_foreign_keys_are_never_touched(self, remote):
        foreign = {b"other": b"1", part_name(KEY, 0, 0).encode()[:-1] + b"x": b"2"}
        self.client.mset(foreign)
        self.client.delete(self.name)
        assert load(remote) is None
        remote.store(KEY, 0, memoryview(pattern(10)))
        remote.probe([KEY], 1)
        assert dict(zip(foreign, self.client.mget(foreign), strict=True)) == foreign


class TestSickness:
    @pytest.fixture
    def server(self):
        with RedisServer() as server:
            yield server

    def back(self, remote: RemoteTier) -> bool:
        time.sleep(remote.breaker.seconds_to_trial)
        return remote.try_again()

    def test_down_from_the_start(self, tmp_path):
        remote = RemoteTier(f"unix://{tmp_path}/nobody.sock")
        with pytest.raises(TierUnavailable, match=r"nobody\.sock"):
            load(remote)
        assert remote.breaker.is_open

    def test_killed_and_restarted(self, remote, server):
        payload = memoryview(pattern(100))
        remote.store(KEY, 0, payload)
        server.kill()
        with pytest.raises(TierUnavailable):
            load(remote)
        assert not self.back(remote)
        server.start()
        assert until(lambda: self.back(remote)) < 2
        assert load(remote) is None  # no persistence
        assert remote.store(KEY, 0, payload)
        assert load(remote) == payload

    def test_restarted_while_nobody_asked(self, remote, server):
        remote.store(KEY, 0, memoryview(b"x"))
        server.restart()
        assert load(remote) is None
        assert not remote.breaker.is_open

    def test_frozen_costs_one_deadline_once(self, remote, server):
        remote.store(KEY, 0, memoryview(b"x"))
        server.freeze()
        with pytest.raises(TierUnavailable, match=r"within 1\.0 s"):
            load(remote)
        start = time.monotonic()
        for _ in range(100):
            with pytest.raises(TierUnavailable, match="is away"):
                load(remote)
        # Not a matter of speed: a hundred deadlines would be 50 s.
        assert time.monotonic() - start < DEADLINE * 10
        server.thaw()
        assert until(lambda: self.back(remote)) < 2
        assert load(remote) == b"x"

    def test_frozen_in_the_middle_of_a_value(self, remote, server):
        remote.store(KEY, 0, memoryview(pattern(PART_BYTES)))
        server.freeze()
        with pytest.raises(TierUnavailable):
            remote.store(KEY[::-1], 0, memoryview(pattern(3 * PART_BYTES)))
        server.thaw()
        until(lambda: self.back(remote))
        # The half-sent value died with its connection.
        assert load(remote) == pattern(PART_BYTES)
        assert load(remote, key=KEY[::-1]) is None

    def test_full(self, server):
        server.client.config_set("maxmemory", 24 << 20)
        remote = RemoteTier(server.unix_url)
        results = [
            remote.store(bytes([number]) * 64, 0, memoryview(pattern(PART_BYTES - HEADER_BYTES)))
            for number in range(8)
        ]
        assert results[0]
        assert not results[-1]
        assert remote.stats.refused["OOM"] == results.count(False)
        assert not remote.breaker.is_open
        assert load(remote, key=bytes([0]) * 64) is not None
        remote.close()

    def test_password(self, server):
        with RedisServer(password="s3cret") as guarded:
            remote = RemoteTier(guarded.url)
            assert remote.store(KEY, 0, memoryview(b"x"))
            assert load(remote) == b"x"
            for url in (guarded.url.replace("s3cret", "wr0ng"), guarded.url.replace(":s3cret@", "")):
                with pytest.raises(TierUnavailable, match=r"NOAUTH|WRONGPASS") as caught:
                    load(RemoteTier(url))
                assert "wr0ng" not in str(caught.value)

    def test_readonly_replica_takes_no_stores(self, remote, server):
        remote.store(KEY, 0, memoryview(b"x"))
        server.client.replicaof("127.0.0.1", "1")
        assert load(remote) in (b"x", None)
        assert not remote.store(KEY[::-1], 0, memoryview(b"x"))
        assert remote.stats.refused == {"READONLY": 1}


class TestTieredStore:
    """The whole way down and up, on a real server that dies and freezes."""

    def test_rows_survive_their_arena(self, server):
        async def main() -> None:
            async with store_of(server) as (store, arena):
                put(store, arena)
                assert await store.drain(20)
            async with store_of(server) as (store, arena):
                await brought(store, arena)
                assert store.stats.promoted == len(CHAIN)

        asyncio.run(main())

    def test_frozen_server_costs_lookups_nothing_and_writes_resume(self):
        async def main() -> None:
            with RedisServer() as server:
                async with store_of(server) as (store, arena):
                    server.freeze()
                    put(store, arena)
                    assert store.lookup(LEASE, [CHAIN]).num_resident == len(CHAIN)
                    assert not await store.drain(2 * DEADLINE)
                    assert not store.is_remote_well
                    missing = [NAMESPACE + bytes([99]) * 32]
                    assert not store.lookup((b"e" * 16, "other"), [missing]).probing
                    server.thaw()
                    start = time.monotonic()
                    assert await store.drain(20)
                    assert time.monotonic() - start < 2
                async with store_of(server) as (store, arena):
                    await brought(store, arena)

        asyncio.run(main())

    def test_killed_server_is_filled_again_after_its_restart(self):
        async def main() -> None:
            with RedisServer() as server:
                async with store_of(server) as (store, arena):
                    server.kill()
                    put(store, arena)
                    assert not await store.drain(0.2)
                    server.start()
                    start = time.monotonic()
                    assert await store.drain(20)
                    assert time.monotonic() - start < 2
                    assert store.stats.written == len(CHAIN)

        asyncio.run(main())


NAMESPACE = b"n" * 32
CHAIN = [NAMESPACE + bytes([number]) * 32 for number in range(4)]
LEASE = (b"e" * 16, "request")
PAYLOAD_BYTES = PART_BYTES + 4096


@contextlib.asynccontextmanager
async def store_of(server: RedisServer) -> AsyncIterator[tuple[TieredStore, HeapArena]]:
    arena = HeapArena(Geometry(2 * PART_BYTES, 2), 16)
    store = TieredStore(arena, RemoteTier(server.url, timeout_seconds=DEADLINE))
    await store.adopt()
    store.register(NAMESPACE, label=b"model")
    yield store, arena
    await store.close()


def payload_of(key: bytes, column: int) -> bytes:
    return (key + bytes([column]) * 64) * (PAYLOAD_BYTES // 128)


def put(store: TieredStore, arena: HeapArena) -> None:
    for column in range(2):
        slots = [answer.slot for answer in store.reserve(CHAIN, column, b"o" * 16, length=PAYLOAD_BYTES)]
        for key, slot in zip(CHAIN, slots, strict=True):
            arena.view(slot.row, column)[:PAYLOAD_BYTES] = payload_of(key, column)
        store.commit(slots, column, b"o" * 16)


async def brought(store: TieredStore, arena: HeapArena) -> None:
    deadline = time.monotonic() + 20
    while (found := store.lookup(LEASE, [CHAIN])).num_resident < len(CHAIN):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    for key, slot in zip(CHAIN, found.slots[0], strict=True):
        for column in range(2):
            assert bytes(arena.view(slot.row, column)[:PAYLOAD_BYTES]) == payload_of(key, column)


class TestBrokenServer:
    """A server that answers what no Redis would: each answer has a defined end."""

    @pytest.fixture
    def answer(self, tmp_path):
        """Return a function: serve these bytes to whoever asks, then close (or stay silent); give the URL."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        peers = []

        def serve(reply: bytes, *, is_silent_after: bool = False) -> str:
            def run() -> None:
                for _ in range(2):  # a reset connection is tried once more
                    try:
                        peer, _ = listener.accept()
                    except OSError:
                        return
                    peers.append(peer)
                    peer.recv(65536)
                    peer.sendall(reply)
                    if not is_silent_after:
                        peer.close()

            threading.Thread(target=run, daemon=True).start()
            return f"unix://{tmp_path}/s"

        yield serve
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for peer in peers:
            peer.close()

    @pytest.mark.parametrize(
        ("reply", "is_silent_after", "message"),
        [
            (b"", False, "closed the connection"),
            (b"", True, "no answer within"),
            (b"$5000\r\nshort", False, "closed the connection"),
            (b"$5000\r\nshort", True, "within"),
            (b"-LOADING Redis is loading\r\n", True, "LOADING"),
            (b"-NOAUTH Authentication required.\r\n", True, "NOAUTH"),
            (b"+OK\r\n", True, "unexpected reply"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "unexpected reply"),
            (b"x" * 10_000, True, "does not speak RESP"),
        ],
    )
    def test_no_answer_hangs_or_is_believed(self, answer, reply, is_silent_after, message):
        remote = RemoteTier(answer(reply, is_silent_after=is_silent_after), timeout_seconds=0.2)
        with pytest.raises(TierUnavailable, match=message):
            load(remote)
        assert remote.breaker.is_open
        remote.close()

    def test_nil_is_a_miss(self, answer):
        remote = RemoteTier(answer(b"$-1\r\n", is_silent_after=True), timeout_seconds=0.2)
        assert load(remote) is None
        remote.close()
