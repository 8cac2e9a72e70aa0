"""The lm:// connector against servers that misbehave, go and come back."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.protocol import ServerMetaMessage
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.tiers.circuit import Circuit
from tests.harness.lm_server import (
    HOST,
    connected,
    key,
    received,
    serving,
)


@contextlib.contextmanager
def false_server(*replies):
    """Answers each connection's first request with the next reply, then closes it; None: never answers."""
    listener = socket.create_server((HOST, 0))
    listener.settimeout(60)
    is_over = threading.Event()

    def serve():
        for reply in replies:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(60)
                    received(peer, 158)
                    is_over.wait(60) if reply is None else peer.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    timeout_seconds = 0.2 if None in replies else 60
    connector = LMCServerConnector(HOST, listener.getsockname()[1], timeout_seconds=timeout_seconds)
    try:
        yield connector
    finally:
        is_over.set()
        listener.close()
        connector.close()
        thread.join(timeout=60)


def until(deadline_seconds, call):
    """Call until it does not raise ConnectionError."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        try:
            return call()
        except ConnectionError:
            assert time.monotonic() < deadline, "not back in time"
            time.sleep(0.01)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\0\0\0",
        struct.pack("ii", 200, -1),
        struct.pack("ii", 500, 0),
        struct.pack("ii", 200, 10) + b"short",
        struct.pack("ii", 200, 2**31 - 1) + b"little",
        None,
    ],
)
def test_defect_12_a_wrong_reply_is_a_connection_error_in_time(reply):
    with false_server(reply) as connector, pytest.raises(ConnectionError):
        connector.get(key(1))


@given(st.binary(max_size=30))
@settings(max_examples=15)
def test_a_connector_survives_any_bytes(reply):
    with false_server(reply) as connector:
        try:
            value = connector.get(key(1))
        except ConnectionError:
            return
    assert (
        value is None
        or reply == ServerMetaMessage(200, len(value)).serialize() + value + reply[8 + len(value) :]
    )


def test_defect_12_a_server_that_is_not_there_is_a_connection_error():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    connector = LMCServerConnector(HOST, port)
    for call in (connector.exists, connector.get, lambda name: connector.set(name, b"x")):
        with pytest.raises(ConnectionError):
            call(key(1))
    with pytest.raises(ConnectionError):
        connector.list()
    connector.close()


def test_defect_12_a_server_that_came_back_is_found_again():
    with serving() as server, connected(server) as connector:
        port = server.port
        connector.set(key(1), b"x")
    connector = LMCServerConnector(HOST, port)
    with pytest.raises(ConnectionError):
        connector.exists(key(1))
    with serving(port=port):
        assert until(60, lambda: connector.exists(key(1))) is False
        connector.set(key(1), b"y")
        assert connector.get(key(1)) == b"y"
    connector.close()


def test_defect_12_a_server_that_failed_is_left_alone_for_a_while():
    with false_server(b"", struct.pack("ii", 200, 0)) as connector:
        connector._circuit = Circuit("server", connector._probe, base=3600, cap=3600)
        for message in ("closed the connection", "unavailable", "unavailable"):
            with pytest.raises(ConnectionError, match=message):
                connector.get(key(1))
        assert connector._circuit.probe()
        assert connector.get(key(1)) == b""


def test_a_server_that_restarted_between_two_calls_is_not_noticed():
    with serving() as server:
        connector = LMCServerConnector(HOST, server.port)
        connector.set(key(1), b"x")
    with serving(port=server.port):
        connector.set(key(2), b"y")
        assert connector.get(key(2)) == b"y"
        connector.close()


def test_answers_that_nobody_asked_for_are_not_taken_for_ours():
    stray = struct.pack("ii", 400, 0) + struct.pack("ii", 200, 5) + b"stray"
    with false_server(stray, struct.pack("ii", 200, 4) + b"mine") as connector:
        assert connector.get(key(1)) is None
        assert connector.get(key(2)) == b"mine"


def test_while_a_probe_connects_calls_fail_at_once(monkeypatch):
    """A host that drops packets keeps who connects to it waiting, and nobody else."""
    go_on, has_begun = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        has_begun.set()
        assert go_on.wait(60)
        raise TimeoutError("timed out")

    connector = LMCServerConnector(HOST, 1)
    try:
        with pytest.raises(ConnectionError):
            connector.exists("key")
        monkeypatch.setattr(socket, "create_connection", hang)
        assert has_begun.wait(60)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(connector.exists, "key")
            try:
                with pytest.raises(ConnectionError, match="unavailable"):
                    call.result(60)
            finally:
                go_on.set()
    finally:
        connector.close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"probe lm server {HOST}:1"]
