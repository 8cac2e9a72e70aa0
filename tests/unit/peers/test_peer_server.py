"""Reads of rows from a peer: right bytes, misses, passwords, limits, and hostile clients."""

import contextlib
import itertools
import random
import threading

import pytest

from lmcache_sidecar.peer_server.service import PeerServerStats
from lmcache_store.common.sockets import Stream
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.peers import peer as peer_module
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote import objects
from testing.child_process import wait_until
from tests.harness.tiers.peer_rows import (
    PATIENT,
    PREFIX,
    Row,
    Rows,
    ask_for,
    command,
    connect,
    is_closed,
    key,
    load,
    reading,
    rows,
    serving,
)

__all__ = ["rows"]


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 1 << 20, 3_500_001, 8 << 20])
def test_columns_are_read_whole(rows, size):
    payloads = [random.Random(column).randbytes(size) for column in range(3)]
    ids = rows.add(1, *payloads)
    with serving(rows) as (server, peer), reading(peer) as tier:
        assert tier.find_each([*ids, ObjectId(key(1), 3), ObjectId(key(2), 0)]) == [True] * 3 + [False] * 2
        for _ in range(2):
            assert [load(tier, each, size) for each in ids] == payloads
        wait_until(lambda: not rows.pinned)
    assert server.service.stats == PeerServerStats(read_columns=6)
    assert (tier.stats.hits, tier.stats.misses, tier.stats.invalid) == (6, 0, {})


def test_peers_are_reached_by_ipv6(rows):
    (name,) = rows.add(1, b"x")
    with serving(rows, "::1") as (_, peer), reading(peer) as tier:
        assert load(tier, name, 1) == b"x"


def test_column_is_counted_before_its_bytes_are_sent(rows, monkeypatch):
    rows.add(1, b"x" * 1000)
    counts, send_all = [], Stream.send_all
    with serving(rows) as (server, peer), connect(peer) as connection:

        def count_and_send(stream, buffers):
            counts.append(server.service.stats.read_columns)
            send_all(stream, buffers)

        monkeypatch.setattr(Stream, "send_all", count_and_send)
        connection.sendall(ask_for(0))
        assert connection.recv(100)
    assert counts == [1]


def test_leading_rows_are_counted(rows):
    for number in range(40):
        rows.add(number, b"a", b"b")
    rows.payloads.pop(key(30))
    with serving(rows) as (_, peer), reading(peer) as tier:
        assert num_leading(tier, [key(number) for number in range(40)], 2) == 30
        assert num_leading(tier, [key(number) for number in range(40)], 3) == 0


def test_each_row_comes_from_a_peer_that_has_it():
    several = [Rows() for _ in range(3)]
    ids = [several[number % 3].add(number, bytes([number]) * 5000)[0] for number in range(9)]
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(serving(each))[1] for each in several]
        tier = stack.enter_context(reading(*peers))
        assert tier.find_each(ids) == [True] * 9
        for number, object_id in enumerate(ids):
            assert load(tier, object_id, 5000) == bytes([number]) * 5000


def test_row_that_is_evicted_after_the_question_is_a_miss(rows):
    (object_id,) = rows.add(1, b"x" * 1000)
    with serving(rows) as (_, peer), reading(peer) as tier:
        assert tier.find_each([object_id]) == [True]
        del rows.payloads[key(1)]
        assert load(tier, object_id, 1000) is None
        assert tier.find_each([object_id]) == [False]
    assert tier.stats.misses == 1


def test_row_whose_arena_is_lost_while_it_is_read_is_a_miss(rows, monkeypatch):
    (object_id,) = rows.add(1, b"x" * 1000)
    monkeypatch.setattr(Row, "is_lost", True)
    with serving(rows) as (_, peer), reading(peer) as tier:
        assert load(tier, object_id, 1000) is None


def test_row_of_another_length_is_invalid(rows):
    (object_id,) = rows.add(1, b"x" * 1000)
    with serving(rows) as (_, peer), reading(peer) as tier:
        assert load(tier, object_id, 999) is None
        assert load(tier, object_id, 1001) is None
    assert tier.stats.invalid == {"length": 2}


def two():
    return ["first", "second"]


def unreadable():
    raise PermissionError("no")


@pytest.mark.parametrize(
    ("passwords", "password", "is_admitted"),
    [
        (two, "first", True),
        (two, "second", True),
        (two, "third", False),
        (two, "", False),
        (list, "any", False),
        (lambda: [""], "any", False),
        (unreadable, "any", False),
    ],
)
def test_only_the_valid_passwords_are_admitted(rows, passwords, password, is_admitted):
    (object_id,) = rows.add(1, b"x" * 1000)
    with serving(rows, passwords=passwords) as (server, peer), reading(peer, password=password) as tier:
        assert tier.find_each([object_id]) == [is_admitted]
        if not is_admitted:
            wait_until(lambda: server.service.stats.refused_connections)
    assert rows.num_pins == 0


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"*1000000\r\n", b"*1\r\n$9999999\r\n"]
)
def test_garbage_ends_its_connection_only(rows, sent):
    (object_id,) = rows.add(1, b"x" * 1000)
    with serving(rows) as (server, peer), reading(peer) as tier, connect(peer) as connection:
        connection.sendall(sent)
        assert is_closed(connection)
        assert load(tier, object_id, 1000) == b"x" * 1000
        assert server.service.stats.refused_connections == 1


@pytest.mark.parametrize(
    "text", ["SET a b", "HSET a b c", "FLUSHALL", "KEYS *", "CONFIG GET x", "UNLINK a", "HGETALL a"]
)
def test_other_commands_are_refused(rows, text):
    with serving(rows) as (_, peer), connect(peer) as connection:
        connection.sendall(command(*text.encode().split()))
        assert connection.recv(100).startswith(b"-ERR")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (b"lmc1:zz", b"0:0"),
        (b"other:" + b"00" * 32 + b":{" + b"00" * 32 + b"}", b"0:0"),
        (objects.redis_name(PREFIX, key(1)).encode(), b"0:1"),
        (objects.redis_name(PREFIX, key(1)).encode(), b"7:0"),
        (objects.redis_name(PREFIX, key(1)).encode(), b"-1:0"),
        (objects.redis_name(PREFIX, key(1)).encode(), b"0:999999999"),
        (objects.redis_name(PREFIX, key(1)).encode(), b"0"),
        (objects.redis_name(PREFIX, key(1)).encode().upper(), b"0:0"),
    ],
)
def test_names_and_fields_that_do_not_exist_are_nil(rows, name, field):
    rows.add(1, b"x" * 1000)
    with serving(rows) as (_, peer), connect(peer) as connection:
        connection.sendall(command(b"HGET", name, field))
        assert connection.recv(100) == b"$-1\r\n"
        assert not rows.pinned


def test_rate_of_each_peer_is_measured(monkeypatch):
    measured, unmeasured = Rows(), Rows()
    size, moments = 4 << 20, itertools.count(100.0, 0.5)  # each load takes half a second
    monkeypatch.setattr(peer_module, "monotonic", lambda: next(moments))
    ids = [measured.add(number, bytes(size))[0] for number in range(3)]
    (other,) = unmeasured.add(3, bytes(size))
    with serving(measured) as (_, first), serving(unmeasured) as (_, second), reading(first, second) as tier:
        assert tier.find_each([*ids, other]) == [True] * 4
        assert tier.rate_of([ids[0].row_key]) == 0.0, "not measured yet"
        for object_id in ids:
            assert load(tier, object_id, size)
        assert tier.rate_of([each.row_key for each in ids]) == pytest.approx(size / 0.5)
        assert tier.rate_of([ids[0].row_key, other.row_key]) == 0.0
        assert tier.rate_of([key(9)]) == 0.0


class MeetingRows(Rows):
    """Rows that take the first one when all peers have an offer."""

    def __init__(self, meeting):
        super().__init__()
        self._meeting = meeting

    def take_over(self, row_key, length, tenant, peer):
        if not self.taken:
            self._meeting.wait(PATIENT)
        return super().take_over(row_key, length, tenant, peer)


def test_each_row_is_offered_to_one_peer():
    offered = [(key(number), 100, b"\0tenant" if number % 2 else b"") for number in range(40)]
    meeting = threading.Barrier(3)
    several = [MeetingRows(meeting) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(serving(each))[1] for each in several]
        tier = stack.enter_context(reading(*peers))
        assert tier.hand_over(offered, "me:1", PATIENT) == 40
        assert tier.hand_over([], "me:1", PATIENT) == 0
    assert sorted(row for each in several for row in each.taken) == sorted((*row, "me:1") for row in offered)
    assert all(each.taken for each in several)


def test_damaged_tenant_of_an_offer_counts_as_none(rows):
    name = objects.redis_name(PREFIX, key(1)).encode()
    with serving(rows) as (_, peer), connect(peer) as connection:
        for number, tenant in enumerate((b"", b"0", b"xy", b"00" * 9, b"A0", b"\xff\xff"), 1):
            connection.sendall(command(b"OFFER", name, b"100", b"me:1", tenant))
            wait_until(lambda number=number: len(rows.taken) == number)
        connection.sendall(command(b"OFFER", name, b"100", b"me:1", b"01ff00"))
        wait_until(lambda: rows.taken[-1] == (key(1), 100, b"\1\xff", "me:1"))
    assert {tenant for _, _, tenant, _ in rows.taken[:-1]} == {b""}


def test_offers_end_in_time(rows):
    with serving(rows) as (_, peer), reading(peer) as tier:
        assert tier.hand_over([(key(1), 100, b"")], "me:1", -1.0) == 0
    assert not rows.taken


def test_misses_do_not_count_in_the_rate(rows, monkeypatch):
    seconds = itertools.count(100.0)
    monkeypatch.setattr(peer_module, "monotonic", lambda: next(seconds))
    with serving(rows) as (_, peer), reading(peer) as tier:
        for _ in range(4):  # a rate is certain after a second of loads
            assert tier.note_offer(key(1), 1, peer)
            assert load(tier, ObjectId(key(1), 0), 1 << 20) is None
        assert tier.note_offer(key(1), 1, peer)
        assert tier.rate_of([key(1)]) == 0.0


def test_rows_that_a_peer_refuses_are_offered_to_another_one():
    willing, unwilling = Rows(), Rows()
    with serving(willing) as (_, first), serving(unwilling) as (stopping, second):
        stopping.refuse_offers()
        with reading(first, second) as tier:
            assert tier.hand_over([(key(number), 100, b"") for number in range(20)], "me:1", PATIENT) == 20
    assert len(willing.taken) == 20
    assert not unwilling.taken
