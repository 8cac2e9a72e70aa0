"""The remote tier on a real Redis: what is read back, and what is refused."""

from __future__ import annotations

import pytest

from lmcache.tiers.base import ObjectId
from lmcache.tiers.header import HEADER_BYTES, PART_BYTES, Header, checksum, digests
from lmcache.tiers.remote.tier import RemoteTier
from testing.child_process import wait_until
from testing.processes import RedisProcess
from tests.harness.remote_objects import KEY, load, part_name, pattern, tier_of

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def shared_server():
    with RedisProcess() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client.flushall()
    return shared_server


@pytest.fixture(params=["unix", "tcp"])
def remote(request, server):
    url = server.unix_url if request.param == "unix" else server.url
    tier = tier_of(url)
    yield tier
    tier.close()


class TestObjects:
    @pytest.mark.parametrize(
        "size", [0, 1, 4096, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 4096]
    )
    def test_round_trip(self, remote, server, size):
        payload = pattern(size)
        assert remote.store(ObjectId(KEY, 1), memoryview(payload), b"label")
        assert load(remote, 1) == payload
        assert load(remote, 0) is None
        assert server.client.dbsize() == max(1, -(-size // PART_BYTES))
        assert remote.stats.hits == remote.stats.stored == remote.stats.misses == 1
        assert not remote.stats.invalid

    def test_what_is_there_is_only_touched(self, remote, server):
        for _ in range(2):
            assert remote.store(ObjectId(KEY, 0), memoryview(pattern(PART_BYTES + 5)))
        assert (remote.stats.stored, remote.stats.touched) == (1, 1)
        # A part that Redis evicted is written again.
        server.client.delete(part_name(KEY, 0, 1))
        assert remote.store(ObjectId(KEY, 0), memoryview(pattern(PART_BYTES + 5)))
        assert remote.stats.stored == 2

    def test_the_presence_marker_is_written_last(self, remote, server):
        server.client.config_set("notify-keyspace-events", "E$")
        with server.client.pubsub(ignore_subscribe_messages=True) as events:
            events.subscribe("__keyevent@0__:set")
            events.get_message(timeout=60)  # subscribed
            remote.store(ObjectId(KEY, 0), memoryview(pattern(2 * PART_BYTES + 1)))
            names = []
            while len(names) < 3:
                message = events.get_message(timeout=60)
                names += [message["data"].decode()] if message else []
        assert names == [part_name(KEY, 0, part) for part in (1, 2, 0)]

    def test_parts_of_several_writers_make_one_object(self, remote, server):
        payload = pattern(2 * PART_BYTES)
        remote.store(ObjectId(KEY, 0), memoryview(payload), b"one writer")
        server.client.delete(part_name(KEY, 0, 0))
        remote.store(ObjectId(KEY, 0), memoryview(payload), b"another writer")
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

    def test_touch_refreshes_all_parts_and_says_what_is_absent(self, remote, server):
        length = PART_BYTES + 1
        for column in range(2):
            remote.store(ObjectId(KEY, column), memoryview(pattern(length)))
        names = [part_name(KEY, column, part) for column in range(2) for part in range(2)]

        def idle_seconds() -> list[int]:
            return [server.client.object("idletime", name) for name in names]

        wait_until(lambda: min(idle_seconds()) >= 1)
        assert remote.touch([KEY[::-1], KEY], 2, [length, length]) == {KEY[::-1]}
        assert idle_seconds() == [0, 0, 0, 0]
        server.client.delete(names[-1])
        assert remote.touch([KEY], 2, [length]) == {KEY}
        assert remote.touch([], 2) == set()

    @pytest.mark.parametrize("length", [0, 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
    @pytest.mark.parametrize("expected", [1, PART_BYTES, 2 * PART_BYTES])
    def test_an_object_of_another_length_is_a_miss_and_is_written_anew(self, remote, length, expected):
        """Sound in itself, by a writer with other chunks: the slot's rest would be somebody else's bytes."""
        remote.store(ObjectId(KEY, 0), memoryview(pattern(length)))
        into = memoryview(bytearray(3 * PART_BYTES))
        loaded = remote.load(ObjectId(KEY, 0), into, expected)
        if length == expected:
            assert loaded.length == length
            assert loaded.digests == digests(pattern(length))
            return
        assert loaded is None
        assert remote.stats.invalid == {"length": 1}
        assert remote.store(ObjectId(KEY, 0), memoryview(pattern(expected)))
        assert remote.load(ObjectId(KEY, 0), into, expected).length == expected

    def test_prefix(self, remote, server):
        other = tier_of(f"{server.url}?prefix=team-a")
        other.store(ObjectId(KEY, 0), memoryview(b"theirs"))
        assert server.client.keys() == [part_name(KEY, 0, 0).replace("lmc1", "team-a").encode()]
        assert load(remote) is None
        assert remote.store(ObjectId(KEY, 0), memoryview(b"ours"))
        assert load(other) == b"theirs"
        assert remote.probe([KEY], 1) == other.probe([KEY], 1) == 1
        other.close()

    def test_database_number(self, server):
        remote = tier_of(server.url.removesuffix("/0") + "/5")
        remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        assert server.client.dbsize() == 0
        assert server.client.execute_command("INFO", "keyspace")["db5"]["keys"] == 1
        remote.close()


class TestDistrust:
    """What stands under our name and is not exactly ours is a miss, counted by reason, overwritten later."""

    def check(self, remote: RemoteTier, reason: str) -> None:
        assert load(remote) is None
        assert remote.stats.invalid == {reason: 1}
        assert not remote.health.is_open
        payload = pattern(PART_BYTES + 9)
        assert remote.store(ObjectId(KEY, 0), memoryview(payload))
        assert remote.stats.stored == 1
        assert load(remote) == payload

    @pytest.fixture(autouse=True)
    def stored(self, remote, server):
        self.client = server.client
        self.name = part_name(KEY, 0, 0)
        remote.store(ObjectId(KEY, 0), memoryview(pattern(PART_BYTES + 9)))
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
        remote.store(ObjectId(KEY[::-1], 0), memoryview(pattern(PART_BYTES + 9)))
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
        remote.store(ObjectId(KEY, 0), memoryview(pattern(10)))
        remote.probe([KEY], 1)
        assert dict(zip(foreign, self.client.mget(foreign), strict=True)) == foreign
