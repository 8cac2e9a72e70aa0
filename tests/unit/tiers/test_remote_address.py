"""Parsing of remote tier URLs."""

import contextlib
from urllib.parse import quote

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache_store.tiers.remote.address import Address, AddressKind, Endpoint, Tls
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList

CACHE = (Endpoint("cache", 6379),)
FOUR = (Endpoint("a", 6379), Endpoint("b", 7), Endpoint("::1", 6379), Endpoint("::2", 8))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", Address(AddressKind.SHARDS, CACHE)),
        ("redis://cache:7000/3", Address(AddressKind.SHARDS, (Endpoint("cache", 7000),), database=3)),
        ("redis://:s%40c@cache/1", Address(AddressKind.SHARDS, CACHE, database=1, password="s@c")),
        ("redis://me:p:w@cache", Address(AddressKind.SHARDS, CACHE, username="me", password="p:w")),
        ("redis://[::1]:7000", Address(AddressKind.SHARDS, (Endpoint("::1", 7000),))),
        (
            "redis://a,b:7,[::1],[::2]:8/2?prefix=x.y",
            Address(AddressKind.SHARDS, FOUR, database=2, prefix="x.y"),
        ),
        ("unix:///run/redis.sock", Address(AddressKind.UNIX, (Endpoint("/run/redis.sock"),))),
        (
            "unix://me:pw@/run/a%40b.sock?db=2",
            Address(AddressKind.UNIX, (Endpoint("/run/a@b.sock"),), "", 2, "me", "pw"),
        ),
        ("rediss://cache", Address(AddressKind.SHARDS, CACHE, tls=Tls())),
        (
            "rediss://cache?ca=/etc/ca.pem&cert=/c&key=/k&verify=ca",
            Address(AddressKind.SHARDS, CACHE, tls=Tls("/etc/ca.pem", "/c", "/k", "ca")),
        ),
        (
            "redis-sentinel://:pw@a,b:7/my%20master/4",
            Address(AddressKind.SENTINEL, (Endpoint("a", 26379), Endpoint("b", 7)), "my master", 4, "", "pw"),
        ),
        ("rediss-sentinel://a/m", Address(AddressKind.SENTINEL, (Endpoint("a", 26379),), "m", tls=Tls())),
        ("redis-cluster://cache/0", Address(AddressKind.CLUSTER, CACHE)),
        ("rediss-cluster://cache", Address(AddressKind.CLUSTER, CACHE, tls=Tls())),
    ],
)
def test_parses_urls(url, address):
    assert Address.parse(url) == address


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://:secret@cache", "scheme 'http' is not one of"),
        ("cache:6379", "scheme 'cache' is not one of"),
        (":secret@cache:6379", "scheme '' is not one of"),
        ("unix-cluster:///run/redis.sock", "scheme 'unix-cluster' is not one of"),
        ("redis://:secret@", "needs a host"),
        ("redis://:secret@cache:port", "host or port"),
        ("redis://:secret@cache:99999", "host or port"),
        ("redis://:secret@cache:0", "host or port"),
        ("redis://:secret@a,,b", "host or port"),
        ("redis://:secret@a,b,a:6379", "listed twice"),
        ("redis://:secret@cache/zero", "database is not a number"),
        ("redis://me:1/secret@cache", "as %XX"),
        ("redis://me:1?secret@cache", "as %XX"),
        ("redis://:secret@cache?ca=/x", "'ca' is not one of prefix, it needs rediss://"),
        ("redis://:secret@cache?prefx=x", "'prefx' is not one of prefix"),
        ("redis://:secret@cache?prefix={x}", "prefix '{x}' may hold"),
        ("redis://:secret@cache?prefix=", "prefix '' may hold"),
        ("rediss://:secret@cache?verify=no", "'no' is not one of full, ca, none"),
        ("rediss://:secret@cache?key=/k", "needs cert="),
        ("redis-sentinel://:secret@cache", "needs a service"),
        ("redis-sentinel://:secret@cache/service/one", "database is not a number"),
        ("redis-cluster://:secret@cache/1", "database 0 only"),
        ("unix://run/redis.sock", "absolute path"),
        ("unix://", "absolute path"),
        ("unix:///run/redis.sock?db=x", "database is not a number"),
    ],
)
def test_error_names_the_problem_of_a_url_without_its_password(url, message):
    with pytest.raises(ValueError, match=message) as error:
        Address.parse(url)
    assert "secret" not in str(error.value)


def test_address_never_shows_the_password():
    address = Address.parse("redis-sentinel://me:secret@cache:7000/master")
    assert str(address) == "master of cache:7000"
    assert "secret" not in repr(address)


SIGNS = list("/@:,[]?&=%#\0\né٣²")
WORDS = ["redis", "rediss", "unix", "-sentinel", "-cluster", "://", "prefix", "db", "verify", "host", "6379"]


@given(st.text(max_size=60) | st.lists(st.sampled_from(SIGNS + WORDS), max_size=14).map("".join))
@example("redis://[::1%25eth0]")
@example("redis://cache/²")
def test_any_text_parses_or_raises_value_error(text):
    with contextlib.suppress(ValueError):
        address = Address.parse(text)
        assert address.endpoints
        assert str(address)


@given(st.text(min_size=4, max_size=20), st.sampled_from(["", "cache:x", "cache/x", "cache?x=1"]))
def test_quoted_password_is_decoded_and_never_shown(password, invalid_rest):
    password += "~secret~"
    url = f"redis://me:{quote(password, safe='')}@"
    address = Address.parse(f"{url}cache")
    assert address.password == password
    assert "~secret~" not in repr(address)
    with pytest.raises(ValueError, match="remote URL") as error:
        Address.parse(url + invalid_rest)
    assert "~secret~" not in str(error.value)


def test_refuses_shards_without_a_list_of_shards():
    remote = RemoteTier(Address.parse("redis-sentinel://cache/master"))
    with pytest.raises(ValueError, match="has no list of shards"):
        remote.set_shards(ShardList((Endpoint("a", 1),)))
    remote = RemoteTier(Address.parse("redis://a:1"))
    with pytest.raises(ValueError, match="needs a shard"):
        remote.set_shards(ShardList(()))
