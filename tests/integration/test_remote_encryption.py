"""Encrypted rows on a real Redis that several writers share, some of them without keys."""

import contextlib
import itertools

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import EncryptionKeys
from lmcache_store.tiers.encryption.pieces import MAGIC
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.objects import MAX_PIECE_BYTES
from lmcache_store.tiers.remote.resp import RespConnection
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.value_formats import EncryptedValues
from tests.harness.tiers.encryption import cipher, flipped, key_of
from tests.harness.tiers.remote_objects import KEY, encrypted_name, load, pattern, row_name, tier_of

pytestmark = pytest.mark.redis

NAME = encrypted_name(KEY)
OTHER_KEY = KEY[:-1] + b"!"
OBJECT = ObjectId(KEY, 0)


@pytest.fixture
def open_tier(empty_redis):
    with contextlib.ExitStack() as opened:

        def start(used: AesGcm | None) -> RemoteTier:
            tier = tier_of(empty_redis.unix_url, cipher=used)
            opened.callback(tier.close)
            return tier

        yield start


@pytest.fixture
def redis(empty_redis):
    with empty_redis.client as client:
        yield client


def store(tier: RemoteTier, payload: bytes, object_id: ObjectId = OBJECT, label: bytes = b"") -> bool:
    return tier.store(object_id, memoryview(payload), label)


def test_redis_contains_no_plain_text_and_no_row_key(open_tier, redis):
    def visible() -> list[bool]:
        names = list(redis.scan_iter())
        values = [value for name in names for field in redis.hgetall(name).items() for value in field]
        everything = [*names, *values, *map(redis.dump, names)]
        searched = b"SECRET", KEY[32:], KEY[32:].hex().encode()
        return [any(text in each for each in everything) for text in searched]

    store(open_tier(cipher("remote", 1)), b"SECRET prompt " * 99_999, label=b"SECRET model")
    assert redis.dbsize() == 1
    assert visible() == [False] * 3
    store(open_tier(None), b"SECRET prompt " * 99_999, label=b"SECRET model")
    assert redis.dbsize() == 2
    assert visible() == [True] * 3, "a control"


def test_flipped_bits_are_refused(empty_redis, open_tier, redis):
    """One bit of each byte of a piece, and of each eighth byte of a marker. A unit test flips every bit."""
    size = 40
    store(open_tier(cipher("remote", 1)), pattern(size))
    form, into = EncryptedValues(cipher("remote", 1)), memoryview(bytearray(size))
    address = Address.parse(empty_redis.unix_url)
    accepted = []
    for field, bits in (("0:0", range(7, 8 * (size + 48), 8)), ("0", range(63, 8 * 752, 64))):
        stored = redis.hget(NAME, field)
        assert 8 * len(stored) == bits[-1] + 1
        for bit, damaged in zip(bits, flipped(stored, bits), strict=True):
            redis.hset(NAME, field, bytes(damaged))
            connection = RespConnection(address.endpoints[0], address, 60)
            with contextlib.closing(connection), contextlib.suppress(InvalidObjectError, KeyAbsentError):
                objects.load(connection, OBJECT, into, None, form)
                accepted.append((field, bit))
        redis.hset(NAME, field, stored)
    assert not accepted
    assert load(open_tier(cipher("remote", 1))) == pattern(size)


def test_values_of_other_places_are_refused(open_tier, redis):
    """Exchange pieces and markers between positions, columns, rows, namespaces and domains."""
    tier, size = open_tier(cipher("remote", 1)), 3 * MAX_PIECE_BYTES
    namespace_key = b"m" * 32 + KEY[32:]
    rows = {key: encrypted_name(key) for key in (KEY, OTHER_KEY, namespace_key)}
    for key, column in itertools.product(rows, range(2)):
        store(tier, pattern(size), ObjectId(key, column))
    other_domain = open_tier(cipher("disk", 1))
    stored = {field: redis.hget(NAME, field) for field in (b"0", b"0:0", b"0:1", b"0:2")}
    wrong = [(field, redis.hget(name, field)) for name in list(rows.values())[1:] for field in stored]
    wrong += [(field, redis.hget(NAME, b"1" + field[1:])) for field in stored]
    wrong += [
        (target, stored[source]) for target, source in itertools.permutations([b"0:0", b"0:1", b"0:2"], 2)
    ]
    wrong += [(b"0", stored[b"0:0"]), (b"0:0", stored[b"0"])]
    assert load(tier) == pattern(size)
    for field, value in wrong:
        redis.hset(NAME, field, value)
        assert load(tier) is None, field
        redis.hset(NAME, field, stored[field])
    assert load(tier) == pattern(size)
    assert load(other_domain) is None
    assert tier.stats.invalid.total() == len(wrong)


@pytest.mark.parametrize("length", [0, 1, 751, 753, (1 << 16) + 1, 64 << 20, "absent version", "wrong key"])
def test_unreadable_row_is_replaced_by_a_store(open_tier, redis, length):
    """Rows of an absent or wrong key, and markers of another program, also one too large for a reply."""
    tier = open_tier(cipher("remote", 2))
    if length == "absent version":
        assert store(open_tier(cipher("remote", 1)), pattern(5000))
    elif length == "wrong key":
        assert store(open_tier(AesGcm("remote", EncryptionKeys({2: key_of(9)}, 2))), pattern(5000))
        assert load(tier) is None
        assert tier.stats.invalid == {"authentication": 1}
    else:
        redis.hset(NAME, "0", bytes(length))
    assert store(tier, pattern(5000))
    assert (tier.stats.stored, tier.stats.failures, tier.health.is_open) == (1, 0, False)
    assert load(tier) == pattern(5000)
    assert store(tier, pattern(5000))
    assert (tier.stats.stored, tier.stats.touched) == (1, 1)
    for field, value in redis.hgetall(NAME).items():
        assert value[:8] == MAGIC + (2).to_bytes(4, "little"), field


def test_pieces_of_several_writers_and_versions_make_one_column(open_tier, redis):
    """Two pods store different bytes for one row; a reader gets each piece from one of them, whole."""
    size = 4 * MAX_PIECE_BYTES
    first, second = open_tier(cipher("remote", 1)), open_tier(cipher("remote", 1, 2))
    assert store(first, b"1" * size)
    by_first = redis.hgetall(NAME)
    redis.flushall()
    assert store(second, b"2" * size)
    redis.hset(NAME, mapping={field: by_first[field] for field in (b"0:1", b"0:3")})
    mixed = b"".join(digit * MAX_PIECE_BYTES for digit in (b"2", b"1", b"2", b"1"))
    assert load(second, room=size) == mixed
    assert load(first, room=size) is None
    assert first.stats.key_absent == 1


def test_pods_with_and_without_keys_share_a_redis(empty_redis, open_tier, redis):
    encrypted, plain = open_tier(cipher("remote", 1)), tier_of(empty_redis.unix_url)
    with contextlib.closing(plain):
        assert store(encrypted, b"e" * 3000)
        assert num_leading(plain, [KEY], 1) == 0
        assert plain.find_each([OBJECT]) == [False]
        assert plain.touch([KEY], 1) == {KEY}
        assert load(plain) is None
        assert store(plain, b"p" * 3000)
        assert store(plain, b"p" * 100, ObjectId(OTHER_KEY, 0))
        assert num_leading(encrypted, [KEY, OTHER_KEY], 1) == 1
        assert load(encrypted, key=OTHER_KEY) is None
        assert (load(encrypted), load(plain)) == (b"e" * 3000, b"p" * 3000)
        assert redis.dbsize() == 3
        for tier in (encrypted, plain):
            assert (tier.stats.invalid, tier.stats.failures, tier.health.is_open) == ({}, 0, False)


def test_plain_values_under_an_encrypted_name_are_refused(empty_redis, open_tier, redis):
    """An attacker who may write to Redis renames rows of the other format."""
    encrypted, plain = open_tier(cipher("remote", 1)), tier_of(empty_redis.unix_url)
    with contextlib.closing(plain):
        assert store(plain, pattern(3000))
        redis.rename(row_name(KEY), NAME)
        assert load(encrypted) is None
        assert store(encrypted, pattern(3000)), "the row is replaced"
        assert load(encrypted) == pattern(3000)
        redis.rename(NAME, row_name(KEY))
        assert load(plain) is None
        assert redis.dbsize() == 1
        assert (encrypted.stats.invalid, plain.stats.invalid) == ({"header": 1}, {"header": 1})
