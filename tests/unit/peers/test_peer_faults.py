"""Hostile, slow and lost peers, and lists of peers that change."""

import contextlib
import random
import socket
import threading
import time

import pytest

from lmcache_sidecar.peer_server.server import PeerServer
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.remote.address import Endpoint
from testing.child_process import free_port, wait_until
from tests.harness.tiers.peer_rows import PREFIX, key, load, reading, rows, serving

__all__ = ["rows"]


@contextlib.contextmanager
def hostile(answer):
    """A server that gives each connection to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = {}

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    held[connection] = threading.Thread(target=run, args=(connection,), daemon=True)
                    held[connection].start()

        def run(connection):
            with contextlib.suppress(OSError):
                answer(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield Endpoint(*listening.getsockname())
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection, answering in held.items():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                answering.join()
                connection.close()


def garbage(connection):
    while connection.recv(1 << 16):
        connection.sendall(random.Random(0).randbytes(4096))


def endless(connection):
    while True:
        connection.sendall(b":1\r\n" * 4096)


def claims_all(connection):
    while received := connection.recv(1 << 16):
        connection.sendall(b":1\r\n" * received.count(b"HEXISTS") + b"$-1\r\n" * received.count(b"HGET"))


def silent(connection):
    while connection.recv(1 << 16):
        pass


@pytest.mark.parametrize("answer", [garbage, endless, claims_all, silent, socket.socket.close])
def test_a_bad_peer_does_not_affect_a_good_one(rows, answer):
    ids = [rows.add(number, bytes([number]) * 5000)[0] for number in range(4)]
    with (
        hostile(answer) as bad,
        serving(rows) as (_, peer),
        reading(bad, peer, timeout_seconds=0.5, ask_seconds=2.0) as tier,
    ):
        for _ in range(12):  # a row that the bad peer claims is a miss at first
            tier.find_each(ids)
            loaded = [load(tier, object_id, 5000) for object_id in ids]
            assert all(each in (None, bytes([number]) * 5000) for number, each in enumerate(loaded))
        if answer is not claims_all:  # on a busy machine, an answer may be too late
            wait_until(lambda: all(tier.find_each(ids)) and all(load(tier, each, 5000) for each in ids))


def test_silent_peer_delays_a_question_by_the_deadline_only(rows):
    (object_id,) = rows.add(1, b"x")
    with hostile(silent) as bad, serving(rows) as (_, peer):

        def is_found() -> bool:
            """Whether the good peer answers in time. On a busy machine, it may be late, too."""
            with reading(bad, peer, ask_seconds=0.3) as tier:
                begin = time.monotonic()
                are_present = tier.find_each([object_id, ObjectId(key(9), 0)])
                assert time.monotonic() - begin >= 0.3  # real time: only a lower bound
                return are_present == [True, False] and tier.find_each([object_id]) == [True]

        wait_until(is_found)


def test_peer_that_starts_later_is_used(rows):
    (object_id,) = rows.add(1, b"x" * 1000)
    peer = Endpoint("127.0.0.1", free_port())
    with reading(peer) as tier:
        assert tier.find_each([object_id]) == [False]
        server = PeerServer(rows, PREFIX)
        server.start(*peer)
        try:
            wait_until(lambda: load(tier, object_id, 1000) == b"x" * 1000)
        finally:
            server.close()


def test_list_of_peers_changes(rows):
    (object_id,) = rows.add(1, b"x" * 1000)
    with serving(rows) as (server, peer), reading() as tier:
        assert tier.find_each([object_id]) == [False]
        assert not tier.health.is_open
        tier.set_peers([peer])
        assert load(tier, object_id, 1000) == b"x" * 1000
        tier.set_peers([])
        wait_until(lambda: not server._open)
        assert load(tier, object_id, 1000) is None


def test_peers_are_asked_again_after_threads_could_not_be_started(rows, monkeypatch):
    ids = rows.add(1, b"x")
    with serving(rows) as (_, peer), reading(peer) as tier:

        def fail(*_):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(tier._threads, "submit", fail)
            assert [tier.find_each(ids) for _ in range(10)] == [[False]] * 10
        assert tier.find_each(ids) == [True]
