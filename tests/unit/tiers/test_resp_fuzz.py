"""Fuzz test of the Redis connection: arbitrary replies never cause hangs, large buffers or unknown errors."""

import contextlib
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from lmcache_store.tiers.errors import ServerError
from lmcache_store.tiers.header import Header, checksum
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.server import RedisServer
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.value_formats import seal_of
from tests.fuzz.targets.resp_replies import OBJECT, OPERATIONS, PAYLOAD, TARGET, load, replying
from tests.harness.scope import examples

PING = OPERATIONS[0]
MARKER = Header(OBJECT.row_key, 0, len(PAYLOAD), checksum(PAYLOAD)).pack()
PIECE = PAYLOAD + seal_of(OBJECT, len(PAYLOAD), 0, memoryview(PAYLOAD))
COLUMN = b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(MARKER), MARKER, len(PIECE), PIECE)

PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*-1\r\n", b"-ERR no\r\n", b"\r\n", b"*0\r\n"]),
    st.integers(-(2**70), 2**70).map(lambda n: b"$%d\r\n" % n),
    st.integers(-(2**70), 2**70).map(lambda n: b"*%d\r\n" % n),
    st.integers(0, 9).map(lambda n: b"*%d\r\n" % n),
    st.just(COLUMN),
    st.integers(0, len(COLUMN)).map(lambda n: COLUMN[:n]),
)


@pytest.fixture
def connection(request):
    with replying(request.param) as connection:
        yield connection


@given(st.lists(PIECES, max_size=6).map(b"".join), st.sampled_from(OPERATIONS), st.booleans())
@example(b"$4611686018427387904\r\n", PING, False)
@example(b"*4611686018427387904\r\n", PING, False)
@example(b"$4611686018427387904\r\n", load, False)
@example(b"*1\r\n" * 1000, PING, False)
@example(b":" + b"1" * 5000, PING, False)
@example(b"+OK\r\n" + COLUMN, load, True)
@example(b"*4611686018427387904\r\n", load, False)
@settings(max_examples=examples(500))
def test_arbitrary_replies_end_in_a_value_or_a_known_error(reply_bytes, operation, asking):
    with replying(reply_bytes) as connection, contextlib.suppress(*TARGET.errors):
        connection.asking = asking
        operation(connection)


@pytest.mark.parametrize(
    "reply_bytes", [b"$%d\r\n", b"*%d\r\n", b"*1\r\n$%d\r\n", b"*2\r\n*60000\r\n$%d\r\n"], ids=repr
)
@pytest.mark.parametrize("length", [2**62, 2**31, 10**9, 1 << 20])
def test_announced_length_allocates_no_memory(reply_bytes, length):
    with replying(reply_bytes % length) as connection:
        tracemalloc.start()
        with pytest.raises(ConnectionError):
            connection.call("PING")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 18


@pytest.mark.parametrize(
    ("connection", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-12\r\n", -12),
        (b"$5\r\nhe\r\no\r\n", b"he\r\no"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"*3\r\n:1\r\n*1\r\n$-1\r\n$1\r\nx\r\n", [1, [None], b"x"]),
        (b"*1\r\n" * 4 + b"$1\r\nx\r\n", [[[[b"x"]]]]),  # as deep as CLUSTER SLOTS with host names
    ],
    indirect=["connection"],
)
def test_parses_replies_of_every_type(connection, reply):
    assert connection.call("PING") == reply
    assert connection.is_reusable


@pytest.mark.parametrize("connection", [b"-ERR no\r\n:1\r\n", b":1\r\n:2\r\n"], indirect=True)
def test_pipeline_returns_errors_as_values(connection):
    first, second = connection.call_all([("EXISTS", "a"), ("EXISTS", "b")])
    assert second in (1, 2)
    assert first == 1 or first.code == "ERR"
    assert connection.is_reusable


@pytest.mark.parametrize("connection", [b"+OK\r\n+more"], indirect=True)
def test_extra_bytes_make_the_connection_not_reusable(connection):
    connection.call("PING")
    assert not connection.is_reusable


@pytest.mark.parametrize("connection", [b"*2\r\n-ERR no\r\n" + b":1\r\n" * 40], indirect=True)
def test_unread_rest_of_an_array_makes_the_connection_not_reusable(connection):
    with pytest.raises(ServerError, match="ERR no"):
        connection.call("ROLE")
    connection._line.clear()  # as if the rest were not received yet
    assert not connection.is_reusable


@pytest.mark.parametrize("connection", [b"+OK\r\n:1\r\n+OK\r\n-ASK no\r\n"], indirect=True)
def test_asking_consumes_its_own_reply(connection):
    connection.asking = True
    replies = connection.call_all([("EXISTS", "a"), ("EXISTS", "b")])
    assert replies[0] == 1
    assert replies[1].code == "ASK"
    assert connection.is_reusable


def test_hostile_server_cannot_add_many_or_long_reasons(monkeypatch):
    """Reasons become keys of /stats and labels of metrics."""

    def answer(*_, **__):
        raise errors.pop()

    monkeypatch.setattr(RedisServer, "run", answer)
    remote = RemoteTier(Address.parse("unix:///nowhere"))
    for number in range(1000):
        errors = [ServerError(f"CODE{number} x" if number else "\N{FIRE}" * 3000) for _ in range(2)]
        assert not remote.store(OBJECT, memoryview(b"x"))
        assert remote.load(OBJECT, memoryview(bytearray(1))) is None
    for counts in (remote.stats.refused, remote.stats.invalid):
        assert counts.total() == 1000
        assert len(counts) <= 33
        assert counts["other"] > 900
        assert counts["ERR"] == 1
    remote.close()
