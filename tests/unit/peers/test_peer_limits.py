"""Limits of a peer server: connections, pins, rate and questions."""

import contextlib
import itertools
import math
import select
import threading
import time

from lmcache_sidecar.peer_server import limits
from lmcache_sidecar.peer_server import session as module
from lmcache_sidecar.peer_server.limits import Pace
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.remote import objects
from testing.child_process import wait_until
from tests.harness.tiers.peer_rows import PATIENT, ask_for, connect, is_closed, load, reading, rows, serving

__all__ = ["rows"]

PING = b"*1\r\n$4\r\nPING\r\n"


def answers_ping(connection):
    connection.sendall(PING)
    return connection.recv(100) == b"+PONG\r\n"


def wait_idle(server, number, newest=None):
    """Wait until the server has ``number`` connections, and each of them waits for a command.

    If ``newest`` is given, it must be one of them.
    """

    def is_newest(connection):
        with contextlib.suppress(OSError):  # the server has ended this one
            return connection.getpeername() == newest.getsockname()
        return False

    def are_idle():
        sessions = dict(server._sessions)
        return (
            len(sessions) == len(server._open) == number
            and all(session.idle_since < math.inf for session in sessions.values())
            and (newest is None or any(map(is_newest, sessions)))
        )

    wait_until(are_idle)


def test_new_connection_takes_the_place_of_the_one_that_is_idle_longest(rows):
    with serving(rows, max_connections=3) as (server, peer), contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(peer)) for _ in range(3)]
        for connection in (held[1], held[2], held[0], held[2]):
            assert answers_ping(connection)
            wait_idle(server, 3)
        new = stack.enter_context(connect(peer))
        assert answers_ping(new)
        assert is_closed(held[1])
        wait_idle(server, 3)
        assert all(map(answers_ping, (held[0], held[2], new)))


def test_strangers_do_not_take_the_places_of_peers(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_password_seconds", PATIENT)
    with contextlib.ExitStack() as stack:
        server, peer = stack.enter_context(serving(rows, passwords=lambda: ["p"], max_connections=4))
        peers = [stack.enter_context(connect(peer)) for _ in range(3)]
        for connection in peers:
            connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$1\r\np\r\n")
            assert connection.recv(100) == b"+OK\r\n"
        stranger = stack.enter_context(connect(peer))
        for _ in range(5):
            wait_idle(server, 4, stranger)
            former, stranger = stranger, stack.enter_context(connect(peer))
            assert is_closed(former)
        assert all(map(answers_ping, peers))


def test_busy_connections_keep_their_places(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_send_seconds", 30.0)
    rows.add(1, bytes(64 << 20))
    with serving(rows, max_connections=2) as (server, peer), contextlib.ExitStack() as stack:
        for connection in (stack.enter_context(connect(peer)) for _ in range(2)):
            connection.sendall(b"".join(map(ask_for, range(20))))  # and does not read the answers
        wait_until(lambda: len(rows.pinned) == 2)
        assert all(session.idle_since == math.inf for session in server._sessions.values())
        with connect(peer) as refused:
            assert is_closed(refused)
        assert server.service.stats.refused_connections == 1


def test_connection_without_a_password_is_closed_in_time(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_password_seconds", 0.2)
    with serving(rows, passwords=lambda: ["p"]) as (_, peer), connect(peer) as connection:
        assert is_closed(connection)


def test_password_that_arrives_byte_by_byte_is_too_late(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_password_seconds", 0.2)
    with serving(rows, passwords=lambda: ["p"]) as (_, peer), connect(peer) as connection:
        for byte in b"*2\r\n$4\r\nAUTH\r\n$99\r\n" + b"p" * 98:
            with contextlib.suppress(ConnectionError):  # the server closed it a moment ago
                connection.sendall(bytes([byte]))
            if select.select([connection], [], [], 0.02)[0]:
                break
        assert is_closed(connection)


def test_client_that_does_not_read_loses_its_pin(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_send_seconds", 0.2)
    rows.add(1, bytes(64 << 20))
    with serving(rows) as (server, peer), connect(peer) as connection:
        connection.sendall(b"".join(map(ask_for, range(20))))
        wait_until(lambda: rows.num_pins and not rows.pinned and not server._open)


def test_other_commands_do_not_extend_a_pin(rows, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_pin_seconds", PATIENT)
    (object_id,) = rows.add(1, bytes(8 << 20))
    with serving(rows) as (_, peer), connect(peer) as connection:
        connection.sendall(ask_for(0))
        size = len(b"$%d\r\n" % 0) + objects.piece_sizes(8 << 20)[0]
        while size > 0:
            size -= len(connection.recv(1 << 20))
        assert rows.pinned == [object_id.row_key]
        monkeypatch.setattr(TIMING, "peer_pin_seconds", 0.3)
        wait_until(lambda: connection.sendall(PING) or (connection.recv(1 << 16) and not rows.pinned))


def test_row_that_is_read_without_end_is_pinned_again(rows, monkeypatch):
    """A store that closes refuses the second pin."""
    monkeypatch.setattr(module, "_PIN_SECONDS", 0.1)
    rows.add(1, bytes(8 << 20))
    with serving(rows) as (_, peer), connect(peer) as connection:
        for _ in itertools.count():
            connection.sendall(ask_for(0))
            connection.recv(1 << 22)
            if rows.num_pins > 2:
                break
        assert len(rows.pinned) <= 1


def test_rate_of_all_clients_is_limited(monkeypatch):
    monkeypatch.setattr(limits, "MAX_DELAY_SECONDS", PATIENT)
    pace, began = Pace(100.0), time.monotonic()
    assert all(pace.reserve(20).wait_for(20) for _ in range(2))
    assert time.monotonic() - began >= 0.39  # real time: only a lower bound


def test_columns_that_would_wait_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MAX_DELAY_SECONDS", 0.0)
    pace = Pace(1.0)
    assert pace.reserve(10)
    assert pace.reserve(1) is None
    assert all(Pace(0.0).reserve(1e12).wait_for(1e12) for _ in range(3)), "no limit"


def test_refused_column_is_a_miss_and_not_invalid(rows, monkeypatch):
    (object_id,) = rows.add(1, bytes(4 << 20))
    with serving(rows) as (server, peer), reading(peer) as tier:
        assert tier.find_each([object_id]) == [True]
        monkeypatch.setattr(server.service.pace, "reserve", lambda num_bytes: None)
        assert load(tier, object_id, 4 << 20) is None
        assert not tier.stats.invalid
        assert not rows.pinned


def test_piece_that_is_read_again_is_paid_again(rows):
    size = 4 << 20
    rows.add(1, bytes(size))
    with serving(rows, bytes_per_second=size) as (_, peer), connect(peer) as connection:
        for _ in range(2):
            connection.sendall(ask_for(0))
        with connection.makefile("rb") as replies:
            length = int(replies.readline()[1:])
            assert replies.read(length + 2)
            assert replies.readline() == b"$-1\r\n"


def test_wait_for_the_rate_ends_when_the_server_closes():
    pace, results = Pace(1.0), []
    turn = pace.reserve(1000)
    waiting = threading.Thread(target=lambda: results.append(turn.wait_for(999)))
    waiting.start()
    pace.close()
    waiting.join(PATIENT)
    assert results == [False]


def test_questions_have_a_budget(rows, monkeypatch):
    monkeypatch.setattr(limits, "_SECONDS_PER_ROW", 1e-3)
    ids = rows.add(1, b"x") * 1000
    with serving(rows) as (_, peer), reading(peer) as tier:
        wait_until(lambda: not all(tier.find_each(ids)))
        wait_until(lambda: tier.find_each(ids[:1]) == [True])
