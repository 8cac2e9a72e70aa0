"""The remote tier on a real Redis: reads return what was stored, and invalid values are misses."""

from collections.abc import Callable

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.header import PART_BYTES, digests
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote.objects import MAX_PIECE_BYTES
from lmcache_store.tiers.remote.tier import RemoteTier
from testing.child_process import wait_until
from tests.harness.tiers.remote_objects import KEY, load, pattern, row_name, tier_of

pytestmark = pytest.mark.redis

NAME = row_name(KEY)
SEVERAL_PIECES = 4 * MAX_PIECE_BYTES + 5


@pytest.fixture(params=["unix", "tcp"])
def remote(request, empty_redis):
    url = empty_redis.unix_url if request.param == "unix" else empty_redis.url
    tier = tier_of(url)
    yield tier
    tier.close()


class TestObjects:
    @pytest.mark.parametrize(
        "size",
        [0, 1, 4096, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 4096],
    )
    def test_stored_object_is_read_back(self, remote, empty_redis, size):
        payload = pattern(size)
        assert remote.store(ObjectId(KEY, 1), memoryview(payload), b"label")
        assert load(remote, 1) == payload
        assert load(remote, 0) is None
        assert empty_redis.client.keys() == [NAME.encode()], "a row is one key, which Redis evicts as a whole"
        assert remote.stats.hits == remote.stats.stored == remote.stats.misses == 1
        assert not remote.stats.invalid

    def test_storing_a_present_object_only_marks_it_as_used(self, remote, empty_redis):
        remote.store(ObjectId(KEY, 0), memoryview(pattern(SEVERAL_PIECES)))
        wait_until(lambda: empty_redis.client.object("idletime", NAME) >= 1)
        num_calls_before = empty_redis.client.info("commandstats")["cmdstat_hset"]["calls"]
        assert remote.store(ObjectId(KEY, 0), memoryview(pattern(SEVERAL_PIECES)))
        assert (remote.stats.stored, remote.stats.touched) == (1, 1)
        assert empty_redis.client.info("commandstats")["cmdstat_hset"]["calls"] == num_calls_before
        assert empty_redis.client.object("idletime", NAME) == 0

    def test_marker_is_written_with_the_last_piece(self, remote, empty_redis):
        with empty_redis.client.monitor() as monitor:
            remote.store(ObjectId(KEY, 7), memoryview(b"x" * (2 * MAX_PIECE_BYTES + 1)))
            commands = []
            while len(commands) < 3:
                words = monitor.next_command()["command"].split(" ")
                commands += [words] if words[0] == "HSET" else []
        fields = [words[2::2] for words in commands]
        assert fields == [["7:0"], ["7:1"], ["7:2", "7"]]

    @pytest.mark.parametrize("num_columns", [1, 3])
    @pytest.mark.parametrize("num_present", [0, 1, 15, 16, 17, 47, 48, 100])
    def test_probe_counts_leading_rows(self, remote, empty_redis, num_columns, num_present):
        keys = [number.to_bytes(64, "big") for number in range(100)]
        pipeline = empty_redis.client.pipeline()
        for key in [*keys[:num_present], *keys[num_present + 1 :]]:
            for column in range(num_columns):
                pipeline.hset(row_name(key), str(column), b"")
        pipeline.execute()
        assert num_leading(remote, keys, num_columns) == num_present
        if num_present:
            empty_redis.client.hdel(row_name(keys[num_present - 1]), str(num_columns - 1))
            assert num_leading(remote, keys, num_columns) == num_present - 1

    def test_touch_marks_rows_as_used_and_returns_absent_ones(self, remote, empty_redis):
        for column in range(2):
            remote.store(ObjectId(KEY, column), memoryview(pattern(SEVERAL_PIECES)))
        wait_until(lambda: empty_redis.client.object("idletime", NAME) >= 1)
        assert remote.touch([KEY[::-1], KEY], 2) == {KEY[::-1]}
        assert empty_redis.client.object("idletime", NAME) == 0
        empty_redis.client.hdel(NAME, "1")
        assert remote.touch([KEY], 2) == {KEY}
        assert remote.touch([], 2) == set()

    @pytest.mark.parametrize("length", [0, 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
    @pytest.mark.parametrize("expected", [1, PART_BYTES, 2 * PART_BYTES])
    def test_object_of_another_length_is_a_miss_and_replaced(self, remote, length, expected):
        """The writer has another chunk size. The rest of the slot would hold foreign bytes."""
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

    def test_prefixes_separate_tiers(self, remote, empty_redis):
        prefixed = tier_of(f"{empty_redis.url}?prefix=team-a")
        prefixed.store(ObjectId(KEY, 0), memoryview(b"theirs"))
        assert empty_redis.client.keys() == [NAME.replace("lmc1", "team-a").encode()]
        assert load(remote) is None
        assert remote.store(ObjectId(KEY, 0), memoryview(b"ours"))
        assert load(prefixed) == b"theirs"
        assert num_leading(remote, [KEY], 1) == num_leading(prefixed, [KEY], 1) == 1
        prefixed.close()


def overwriting(start: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda stored: stored[:start] + content + stored[start + len(content) :]


class TestDistrust:
    """Values under the row's key that this tier did not write are misses, counted by reason, and replaced."""

    def check(self, remote: RemoteTier, reason: str) -> None:
        assert load(remote) is None
        assert remote.stats.invalid == {reason: 1}
        assert not remote.health.is_open
        payload = pattern(SEVERAL_PIECES)
        assert remote.store(ObjectId(KEY, 0), memoryview(payload))
        assert remote.stats.stored == 1
        assert load(remote) == payload

    @pytest.fixture(autouse=True)
    def store_object(self, remote, empty_redis):
        self.client = empty_redis.client
        remote.store(ObjectId(KEY, 0), memoryview(pattern(SEVERAL_PIECES)))
        remote.stats.stored = 0
        with self.client:
            yield

    @pytest.mark.parametrize(
        ("field", "damage", "reason"),
        [
            *((f"0:{piece}", overwriting(3, b"\xff"), "checksum") for piece in (0, 1, 4)),
            *((f"0:{piece}", lambda stored: stored[:-1], "length") for piece in (0, 2, 4)),
            *((f"0:{piece}", lambda stored: stored + b"x", "length") for piece in (0, 2, 4)),
            ("0", overwriting(100, b"\xff"), "header"),
            ("0", overwriting(8, b"\x03"), "header"),  # another version
            *(("0", lambda _, text=text: text, "header") for text in (b"", b"hello", b"x" * 704, b"x" * 705)),
            *((f"0:{piece}", None, "evicted") for piece in (0, 3, 4)),
        ],
    )
    def test_damaged_value_is_a_miss(self, remote, field, damage, reason):
        if damage:
            self.client.hset(NAME, field, damage(self.client.hget(NAME, field)))
        else:
            self.client.hdel(NAME, field)
        self.check(remote, reason)

    @pytest.mark.parametrize(
        ("key", "column", "field", "target", "reason"),
        [
            pytest.param(KEY, 0, "0:2", "0:1", "checksum", id="piece of another place"),
            pytest.param(KEY, 1, "1:1", "0:1", "checksum", id="piece of another column"),
            pytest.param(KEY[::-1], 0, "0:1", "0:1", "checksum", id="piece of another row"),
            pytest.param(KEY, 1, "1", "0", "name", id="marker of another column"),
            pytest.param(KEY[::-1], 0, "0", "0", "name", id="marker of another row"),
        ],
    )
    def test_value_of_another_place_is_a_miss(self, remote, key, column, field, target, reason):
        """All values have the same bytes: a checksum of the bytes alone would accept them."""
        self.client.delete(NAME)
        for name in dict.fromkeys([(KEY, 0), (key, column)]):  # the columns of a row are stored in order
            remote.store(ObjectId(*name), memoryview(bytes(SEVERAL_PIECES)))
        remote.stats.stored = 0
        self.client.hset(NAME, target, self.client.hget(row_name(key), field))
        self.check(remote, reason)

    @pytest.mark.parametrize("command", ["set", "rpush", "sadd"])
    def test_foreign_value_of_another_type_is_a_miss(self, remote, command):
        self.client.delete(NAME)
        getattr(self.client, command)(NAME, "a")
        self.check(remote, "type")

    def test_column_longer_than_the_slot_is_a_miss(self, remote):
        assert load(remote, room=PART_BYTES - 512) is None
        assert remote.stats.invalid == {"length": 1}

    def test_foreign_keys_are_never_changed(self, remote):
        foreign = {b"other": b"1", NAME.encode() + b"x": b"2", NAME.encode()[:-1]: b"3"}
        self.client.mset(foreign)
        self.client.delete(NAME)
        assert load(remote) is None
        remote.store(ObjectId(KEY, 0), memoryview(pattern(10)))
        num_leading(remote, [KEY], 1)
        assert dict(zip(foreign, self.client.mget(foreign), strict=True)) == foreign
