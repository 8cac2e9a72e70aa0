"""Marks of documents in a real Redis: sidecars share them, and members of other programs do no harm."""

import binascii
import contextlib
import struct
from typing import Any

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.errors import InvalidObjectError, ServerError, TierUnavailableError
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX
from lmcache_store.tiers.remote.marks import COMMANDS, MarksQuery, row_key_of, set_name
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.value_formats import PLAIN
from testing.processes import RedisProcess
from tests.harness.tiers.encryption import cipher
from tests.harness.tiers.redis_topologies import cluster
from tests.harness.tiers.remote_objects import KEY, encrypted_name, load, tier_of

pytestmark = pytest.mark.redis

NAMESPACE = b"n" * 32
NAME = set_name(DEFAULT_PREFIX, NAMESPACE, PLAIN)
ENCRYPTED_NAME = f"{encrypted_name(row_key_of(NAMESPACE))}:documents"
CAPACITY = 1 << 17
NOW = 1_700_000_000
PLANT = """
for i = 1, 1000 do
  redis.call('ZADD', KEYS[1], ARGV[1], struct.pack('<I8', ARGV[1] * 1000 + i))
end
"""


def pack(*marks: int) -> bytes:
    return struct.pack(f"<{len(marks)}Q", *marks)


def share(
    tier: RemoteTier, *added: int, now: int = NOW, since: int = 0, limit: int = CAPACITY, keep: int = CAPACITY
) -> list[int]:
    packed = tier.exchange_marks(NAMESPACE, pack(*added), now, keep, MarksQuery(since, limit))
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


@pytest.fixture
def tiers(empty_redis):
    with contextlib.ExitStack() as opened:

        def start(used: AesGcm | None = None, **options: Any) -> RemoteTier:
            tier = tier_of(empty_redis.unix_url, cipher=used, **options)
            opened.callback(tier.close)
            return tier

        yield start


@pytest.fixture
def redis(empty_redis):
    with empty_redis.client as client:
        yield client


def test_tiers_share_marks(tiers, redis):
    first, second = tiers(), tiers()
    assert share(first) == []
    assert share(first, 7, (1 << 64) - 1) == [7, (1 << 64) - 1]
    assert share(second, 9, now=NOW + 5) == [7, (1 << 64) - 1, 9], "the oldest first"
    assert share(first, since=NOW + 5) == [9]
    assert redis.zscore(NAME, pack(7)) == NOW
    assert 0 < redis.ttl(NAME) <= 30 * 24 * 3600
    assert NAME.startswith(f"{DEFAULT_PREFIX}:{NAMESPACE.hex()}:")
    assert redis.keys() == [NAME.encode()]


def test_redis_keeps_the_newest_marks(tiers, redis):
    tier = tiers()
    share(tier, *range(100), keep=60)
    assert redis.zcard(NAME) == 60
    assert share(tier, 500, now=NOW + 1, keep=60)[-1] == 500
    assert share(tier, limit=1) == [500], "of too many, the newest are read"


def test_of_many_planted_members_the_newest_are_read(tiers, redis):
    tier = tiers()
    for score in range(200):
        redis.eval(PLANT, 1, NAME, score)
    assert redis.zcard(NAME) == 200_000
    assert len(set(share(tier))) == CAPACITY
    assert share(tier, 5)[-1] == 5
    assert redis.zcard(NAME) == CAPACITY


def test_members_that_are_no_marks_are_ignored(tiers, redis):
    tier = tiers()
    redis.zadd(NAME, {b"": 1, b"short": 2, b"x" * 9: 3, b"x" * 64: float("inf"), pack(3): 4})
    assert share(tier, 4) == [3, 4]


@pytest.mark.parametrize("size", [65, 1 << 20])
def test_huge_member_is_not_read_and_is_no_outage(tiers, redis, size):
    tier = tiers()
    redis.zadd(NAME, {b"x" * size: NOW})
    with pytest.raises(InvalidObjectError, match=f"another program wrote members of {NAME}: delete the key"):
        share(tier)
    assert tier.store(ObjectId(KEY, 0), memoryview(b"row"))
    assert load(tier) == b"row"
    assert not tier.health.num_outages
    redis.delete(NAME)
    assert share(tier, 4) == [4]


@pytest.mark.parametrize("added", [(), (4,)])
def test_value_of_another_type_is_deleted(tiers, redis, added):
    tier = tiers()
    redis.set(NAME, "of another program")
    with pytest.raises(ServerError, match="WRONGTYPE"):
        share(tier, *added)
    assert share(tier, 4) == [4]
    assert not tier.health.num_outages


def test_encrypted_marks_need_the_key(tiers, redis):
    first, second, stranger = (tiers(cipher("remote", *versions)) for versions in ((1,), (1, 2), (3,)))
    assert share(first, 7, 8) == share(first, 7) == [7, 8]
    assert redis.zcard(ENCRYPTED_NAME) == 2, "each mark has one member"
    assert sorted(share(second, 9)) == [7, 8, 9]
    assert share(stranger) == []
    assert redis.keys() == [ENCRYPTED_NAME.encode()]
    members = redis.zrange(ENCRYPTED_NAME, 0, -1)
    assert not any(pack(mark) in member for mark in (7, 8, 9) for member in members)
    damaged = bytes([members[0][0] ^ 1]) + members[0][1:]
    redis.zadd(ENCRYPTED_NAME, {damaged: NOW, b"x" * 8: NOW})
    assert sorted(share(second)) == [7, 8, 9]
    assert share(tiers()) == [], "marks without encryption have another name"


def test_each_command_needs_its_right_and_a_refusal_is_no_outage(empty_redis, redis):
    rules = ">secret", "~lmc1:*", "-@all", "+ping", "+hset", "+hexists"
    redis.execute_command("ACL", "SETUSER", "kv", "on", *rules)
    with contextlib.closing(tier_of(empty_redis.url.replace("redis://", "redis://kv:secret@"))) as tier:
        for command in COMMANDS:
            with pytest.raises(ServerError, match=f"NOPERM.*'{command.lower()}'"):
                share(tier, 1)
            redis.execute_command("ACL", "SETUSER", "kv", f"+{command}")
        assert share(tier, 1) == [1]
        assert tier.store(ObjectId(KEY, 0), memoryview(b"row"))
        assert not tier.health.num_outages
    redis.execute_command("ACL", "DELUSER", "kv")


def test_marks_follow_their_slot_in_a_cluster():
    with cluster() as servers, contextlib.closing(tier_of(servers.url)) as tier:
        slot = binascii.crc_hqx(NAMESPACE.hex().encode(), 0) % 16384
        owner = servers.owner_of(slot)
        target = (owner + 1) % 3
        assert share(tier, 1) == [1]
        assert servers.nodes[owner].client.zcard(NAME) == 1
        servers.nodes[owner].client.delete(NAME)
        for index in (target, owner):
            servers.set_slot(index, slot, "NODE", servers.id_of(target))
        assert share(tier, 2) == [2]
        assert servers.nodes[target].client.zcard(NAME) == 1


def test_marks_of_a_lost_shard_are_unavailable_until_it_is_back():
    with RedisProcess() as first, RedisProcess() as second:
        url = f"redis://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with contextlib.closing(tier_of(url)) as tier:
            assert share(tier, 1) == [1]
            owner = first if first.client.dbsize() else second
            owner.kill()
            for _ in range(2):
                with pytest.raises(TierUnavailableError):
                    share(tier, 2)
            owner.start()
            for server in tier._topology.servers():
                server.circuit.probe()
            assert share(tier, 2) == [2]
