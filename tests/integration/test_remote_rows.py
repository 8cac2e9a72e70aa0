"""Rows of realistic sizes on a Redis that evicts."""

import contextlib
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.objects import MAX_PIECE_BYTES
from testing.child_process import wait_until
from testing.processes import RedisProcess
from tests.harness.scope import examples, third
from tests.harness.tiers.encryption import cipher
from tests.harness.tiers.remote_objects import KEY, encrypted_name, load, pattern, row_name, tier_of

pytestmark = pytest.mark.redis

MIB = 1 << 20
EVICTING = {"maxmemory_policy": "allkeys-lru", "lazyfree_lazy_eviction": "no", "activedefrag": "no"}


@pytest.fixture
def server():
    with RedisProcess(**EVICTING) as server:
        yield server


@pytest.mark.parametrize(
    ("row_mib", "num_columns", "maxmemory_mib"), third([(80, 8, 800), (4, 1, 64), (36, 8, 288), (32, 1, 256)])
)
def test_redis_evicts_whole_rows(server, row_mib, num_columns, maxmemory_mib):
    """Store five times as many rows as fit. If Redis evicted single parts, rows would soon be incomplete.

    Rows stay for less than a second here. Redis counts ages in seconds, so it may evict a row that was found
    a moment ago, which is a miss, or the row that is being written, whose store is refused. Each row is
    evicted with the same chance then, so one store in ``num_resident`` is refused on average. Four times as
    many are refused with a chance of less than 1 in 10,000. Rows of more than 64 fields (80 MiB) show whether
    the server evicts no more than necessary.
    """
    num_resident = maxmemory_mib // row_mib
    server.client.config_set("maxmemory", maxmemory_mib * MIB)
    column_bytes = row_mib * MIB // num_columns
    payload = memoryview(random.Random(1).randbytes(column_bytes))
    keys = [number.to_bytes(64, "big") for number in range(5 * num_resident)]
    rng, into = random.Random(2), memoryview(bytearray(column_bytes))
    num_found = num_read = 0
    with contextlib.closing(tier_of(server.unix_url)) as remote:
        for key in rng.choices(keys, [1 / (rank + 1) for rank in range(len(keys))], k=2 * len(keys)):
            if num_leading(remote, [key], num_columns):
                num_found += 1
                is_read = True
                for column in range(num_columns):
                    is_read &= remote.load(ObjectId(key, column), into) is not None
                    assert not is_read or into == payload
                assert is_read or not num_leading(remote, [key], num_columns), (
                    "a probe found a row that cannot be read"
                )
                num_read += is_read
            else:
                for column in range(num_columns):
                    remote.store(ObjectId(key, column), payload)
        assert server.client.info()["evicted_keys"] > 0
        assert num_read > 0.8 * num_found > 0
        assert set(remote.stats.invalid) <= {"evicted"}
        assert set(remote.stats.refused) <= {"EVICTED"}
        assert remote.stats.refused.total() < 4 * remote.stats.stored / num_resident
    num_fields = num_columns * (1 + len(objects.piece_sizes(column_bytes)))
    with server.client as client:
        num_whole = [client.hlen(name) for name in client.scan_iter()].count(num_fields)
        assert num_whole >= client.dbsize() - 1
    assert (num_whole + 1) * row_mib > 0.92 * maxmemory_mib


def test_row_evicted_during_its_store_is_refused(server, monkeypatch):
    read_replies = objects._read_replies
    num_replies = []

    def read_and_evict(connection, number):
        replies = read_replies(connection, number)
        num_replies.append(number)
        if len(num_replies) == 1:  # one piece has arrived
            server.client.delete(row_name(KEY))
        return replies

    monkeypatch.setattr(objects, "_read_replies", read_and_evict)
    with contextlib.closing(tier_of(server.unix_url)) as remote:
        payload = memoryview(pattern(8 * MAX_PIECE_BYTES))
        assert not remote.store(ObjectId(KEY, 0), payload)
        assert remote.stats.refused == {"EVICTED": 1}
        assert num_leading(remote, [KEY], 1) == 0
        assert server.client.dbsize() == 0, "a partial row takes memory"
        assert remote.store(ObjectId(KEY, 0), payload)
        assert load(remote) == payload


@pytest.mark.parametrize(
    ("row_bytes", "num_columns", "share"),
    third([(24 << 10, 1, 0.94), (64 << 10, 1, 0.97), (1153433, 1, 0.97), (4 * MIB, 1, 0.99),
           (4 * MIB, 8, 0.97), (8 * MIB, 8, 0.99), (32 * MIB, 1, 0.99), (32 * MIB, 8, 0.99),
           (36 * MIB, 1, 0.97), (36 * MIB, 8, 0.96)]),
)  # fmt: skip
def test_server_memory_is_mostly_payload(server, row_bytes, num_columns, share):
    """Parts of 4 MiB and 704 bytes would take blocks of 5 MiB: a share of 0.8."""
    num_rows = max(4, 16 * MIB // row_bytes)
    payload = memoryview(random.Random(1).randbytes(row_bytes // num_columns))
    used_bytes = []
    for numbers in (range(num_rows // 2), range(num_rows // 2, num_rows)):
        with contextlib.closing(tier_of(server.unix_url)) as remote:
            for number, column in itertools.product(numbers, range(num_columns)):
                assert remote.store(ObjectId(number.to_bytes(64, "big"), column), payload)
        with server.client as client:
            # The server's buffers for the tier's connections are up to 1 MiB.
            wait_until(lambda client=client: len(client.client_list()) == 1)
            used_bytes.append(client.info("memory")["used_memory"])
    bytes_per_row = (used_bytes[1] - used_bytes[0]) / len(numbers)
    assert row_bytes / bytes_per_row > share
    if row_bytes == 64 << 10:
        assert bytes_per_row - row_bytes <= 1536, "benchmarks/replayed.py assumes this overhead per row"


@pytest.mark.parametrize("num_before", range(4))
def test_column_stored_by_two_writers_concurrently_can_be_read(server, monkeypatch, num_before):
    """Engines compute the same tokens in batches of other shapes, which changes the last bits of their KV."""
    contents = [memoryview(bytes([value]) * (6 * MAX_PIECE_BYTES + 5)) for value in (1, 2)]
    read_replies = objects._read_replies
    calls = []
    with (
        contextlib.closing(tier_of(server.unix_url)) as remote,
        contextlib.closing(tier_of(server.url)) as second_tier,
    ):

        def read_and_store(connection, number):
            replies = read_replies(connection, number)
            calls.append(number)
            if len(calls) == num_before + 1:
                assert second_tier.store(ObjectId(KEY, 0), contents[1])
            return replies

        monkeypatch.setattr(objects, "_read_replies", read_and_store)
        assert remote.store(ObjectId(KEY, 0), contents[0])
        assert len(calls) > num_before
        for reader in (remote, second_tier):
            content = load(reader, room=len(contents[0]))
            assert content is not None
            assert not reader.stats.invalid
            assert set(content) <= {1, 2}


def test_user_without_unlink_is_refused_without_an_outage(server):
    server.client.execute_command("ACL", "SETUSER", "default", "-unlink")
    with contextlib.closing(tier_of(server.unix_url)) as remote:
        server.client.set(row_name(KEY), "foreign value")
        assert not remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        assert remote.stats.refused == {"WRONGTYPE": 1}
        assert not remote.health.is_open


KEYS = [bytes([number]) * 64 for number in range(3)]
IDS = [ObjectId(key, column) for key in KEYS for column in range(2)]
SIZES = [0, 1, 700, 4096, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES + 1, 5 * MAX_PIECE_BYTES + 9]


class RowsMachine(RuleBasedStateMachine):
    """``contents``: the complete columns. ``broken``: those of them with a lost or changed field."""

    server: RedisProcess
    cipher: AesGcm | None = None

    @initialize(size=st.sampled_from(SIZES))
    def begin(self, size: int) -> None:
        self.client = self.server.client
        self.client.flushall()
        self.remote = tier_of(self.server.unix_url, cipher=self.cipher)
        self.size = size
        self.contents: dict[ObjectId, bytes] = {}
        self.broken: set[ObjectId] = set()

    def teardown(self) -> None:
        self.remote.close()
        self.client.close()

    def payload_of(self, object_id: ObjectId) -> bytes:
        return (bytes(object_id[:1]) + bytes([object_id.column])) * (self.size // 2) + b"x" * (self.size % 2)

    def name(self, key: bytes) -> str:
        return encrypted_name(key) if self.cipher else row_name(key)

    @rule(object_id=st.sampled_from(IDS))
    def store(self, object_id: ObjectId) -> None:
        is_known_broken = object_id in self.remote._rewrite
        is_written = object_id not in self.contents or is_known_broken
        if is_written and any(c not in self.contents for c in self.remote._earlier_columns(object_id)):
            assert not self.remote.store(object_id, memoryview(self.payload_of(object_id)))
            self.evict(object_id.row_key)
            return
        assert self.remote.store(object_id, memoryview(self.payload_of(object_id)))
        if is_written:
            self.broken.discard(object_id)
        self.contents[object_id] = self.payload_of(object_id)

    @rule(object_id=st.sampled_from(IDS))
    def load(self, object_id: ObjectId) -> None:
        content = load(self.remote, object_id.column, self.size + 9, object_id.row_key)
        assert content == (None if object_id in self.broken else self.contents.get(object_id))

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key: bytes) -> None:
        self.client.delete(self.name(key))
        for column in range(2):
            self.contents.pop(ObjectId(key, column), None)
            self.broken.discard(ObjectId(key, column))

    @rule(object_id=st.sampled_from(IDS), position=st.integers(0, 9), is_lost=st.booleans())
    def damage(self, object_id: ObjectId, position: int, is_lost: bool) -> None:
        if object_id not in self.contents:
            return
        fields = [f"{object_id.column}:{n}" for n in range(len(objects.piece_sizes(self.size)))]
        field = fields[position % len(fields)]
        name = self.name(object_id.row_key)
        if is_lost:
            self.client.hdel(name, field)
        else:
            self.client.hset(name, field, (self.client.hget(name, field) or b"") + b"x")
        self.broken.add(object_id)

    @rule(object_id=st.sampled_from(IDS))
    def lose_marker(self, object_id: ObjectId) -> None:
        self.client.hdel(self.name(object_id.row_key), str(object_id.column))
        if self.contents.pop(object_id, None) is not None:
            self.broken.discard(object_id)

    @invariant()
    def found_rows_are_complete_or_damaged(self) -> None:
        if not hasattr(self, "remote"):
            return
        assert self.remote.find_each(IDS) == [object_id in self.contents for object_id in IDS]
        for key in KEYS:
            is_whole = all(ObjectId(key, column) in self.contents for column in range(2))
            assert num_leading(self.remote, [key], 2) == is_whole
            assert (key in self.remote.touch([key], 2)) == (not is_whole)


@pytest.mark.parametrize("used", [None, cipher("remote", 1)], ids=["plain", "encrypted"])
def test_any_sequence_of_stores_evictions_and_damage(server, used):
    machine = type("Machine", (RowsMachine,), {"server": server, "cipher": used})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=20))
