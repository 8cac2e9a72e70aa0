"""The lm:// connector with faulty servers and restarted servers."""

import contextlib
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.protocol import ServerMetaMessage
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache_store.tiers.circuit import Circuit
from testing.child_process import free_port
from tests.harness.library.lm_server import HOST, connected, key, received, serving
from tests.harness.loops import retried
from tests.harness.scope import examples


@contextlib.contextmanager
def fake_server(*replies):
    """Yield a connector to a server that answers each connection's first request with the next reply.

    The server closes each connection after its reply. It never answers if the reply is None.
    """
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
def test_defect_12_invalid_reply_raises_connection_error(reply):
    with fake_server(reply) as connector, pytest.raises(ConnectionError):
        connector.get(key(1))


@given(st.binary(max_size=30))
@settings(max_examples=examples(15))
def test_survives_any_reply_bytes(reply):
    with fake_server(reply) as connector:
        try:
            value = connector.get(key(1))
        except ConnectionError:
            return
    assert (
        value is None
        or reply == ServerMetaMessage(200, len(value)).serialize() + value + reply[8 + len(value) :]
    )


def test_defect_12_reconnects_to_a_restarted_server():
    port = free_port()
    with serving(port=port) as server, connected(server) as connector:
        connector.set(key(1), b"x")
    connector = LMCServerConnector(HOST, port)
    with pytest.raises(ConnectionError):
        connector.exists(key(1))
    with serving(port=port):
        assert retried(lambda: connector.exists(key(1))) is False
        connector.set(key(1), b"y")
        assert connector.get(key(1)) == b"y"
    connector.close()


def test_defect_12_failed_server_gets_no_requests_until_a_probe():
    with fake_server(b"", struct.pack("ii", 200, 0)) as connector:
        connector._circuit = Circuit("server", connector._probe, base=3600, cap=3600)
        for message in ("closed the connection", "unavailable", "unavailable"):
            with pytest.raises(ConnectionError, match=message):
                connector.get(key(1))
        assert connector._circuit.probe()
        assert connector.get(key(1)) == b""


def test_restart_between_two_calls_causes_no_error():
    port = free_port()
    with serving(port=port):
        connector = LMCServerConnector(HOST, port)
        connector.set(key(1), b"x")
    with serving(port=port):
        connector.set(key(2), b"y")
        assert connector.get(key(2)) == b"y"
        connector.close()


def test_unexpected_reply_is_not_used_for_the_next_request():
    stray = struct.pack("ii", 400, 0) + struct.pack("ii", 200, 5) + b"stray"
    with fake_server(stray, struct.pack("ii", 200, 4) + b"next") as connector:
        assert connector.get(key(1)) is None
        assert connector.get(key(2)) == b"next"


def test_calls_fail_at_once_while_a_probe_connects(monkeypatch):
    """A host that drops packets delays only the thread that connects."""
    may_finish, has_started = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        has_started.set()
        assert may_finish.wait(60)
        raise TimeoutError("timed out")

    connector = LMCServerConnector(HOST, 1)
    try:
        with pytest.raises(ConnectionError):
            connector.exists("key")
        monkeypatch.setattr(socket, "create_connection", hang)
        assert has_started.wait(60)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(connector.exists, "key")
            try:
                with pytest.raises(ConnectionError, match="unavailable"):
                    call.result(60)
            finally:
                may_finish.set()
    finally:
        connector.close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"probe lm server {HOST}:1"]
