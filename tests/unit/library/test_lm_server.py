"""The lm:// server with its connector, and with faulty clients."""

import contextlib
import random
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.utils import CacheEngineKey
from testing.child_process import wait_readable, wait_until
from tests.harness.library.lm_server import (
    EXIST,
    GET,
    LIST,
    PUT,
    connected,
    dialled,
    head,
    key,
    received,
    serving,
)
from tests.harness.loops import in_threads
from tests.harness.scope import examples


@pytest.fixture(params=["cpu", "directory"])
def device(request, tmp_path):
    return "cpu" if request.param == "cpu" else str(tmp_path / "objects")


@pytest.fixture
def server(device):
    with serving(device) as server:
        yield server


@pytest.fixture
def connector(server):
    with connected(server) as connector:
        yield connector


# ---- with the connector ----


def test_objects_may_be_empty_and_are_replaced(connector):
    connector.set(key(1), b"")
    assert connector.get(key(1)) == b""
    connector.set(key(1), b"long")
    connector.set(key(1), b"more")
    assert connector.get(key(1)) == b"more"


def test_list_returns_each_name(connector):
    assert connector.list() == []
    names = [key(1), key(2), "foreign", "a@b", "ключ@é"]
    for name in names:
        connector.set(name, b"x")
    assert sorted(connector.list()) == sorted(names)


def test_keys_with_long_model_names_stay_distinct(connector):
    names = [f"vllm@/models/{'x' * 120}/{number}@1@0@{7:064x}" for number in range(3)]
    for number, name in enumerate(names):
        connector.set(name, bytes([number]))
    assert [connector.get(name) for name in names] == [b"\0", b"\1", b"\2"]
    assert all(connector.exists(name) for name in names)
    listed = [CacheEngineKey.from_string(name) for name in connector.list()]
    assert {listed_key.chunk_hash for listed_key in listed} == {f"{7:064x}"}
    assert len(listed) == 3


def test_key_of_maximum_length_is_listed_unchanged(connector):
    name = f"vllm@{'m' * (150 - len('vllm@@1@0@') - 64)}@1@0@{1:064x}"
    assert len(name) == 150
    connector.set(name, b"x")
    assert connector.list() == [name]


def test_batched_calls_return_results_in_order(connector):
    for number in range(0, 20, 2):
        connector.set(key(number), bytes([number]))
    names = [key(number) for number in range(20)]
    assert connector.exists_many(names) == [number % 2 == 0 for number in range(20)]
    assert connector.get_many(names) == [bytes([number]) if number % 2 == 0 else None for number in range(20)]
    assert connector.get_many([]) == []


def test_defect_01_threads_on_a_shared_connector_get_their_own_payloads(connector):
    payloads = {key(number): bytes([number]) * (1 + 997 * number) for number in range(8)}
    for name, payload in payloads.items():
        connector.set(name, payload)

    def read(seed):
        dice = random.Random(seed)
        for _ in range(60):
            name = dice.choice(list(payloads))
            assert connector.get(name) == payloads[name]

    in_threads(read, range(4))


def test_set_beyond_the_capacity_of_the_server_raises_value_error():
    with serving(max_size_gb=0.001, max_object_bytes=8 << 20) as server, connected(server) as connector:
        with pytest.raises(ValueError, match="did not take"):
            connector.set(key(1), bytes(4 << 20))
        connector.set(key(2), b"fits")
        assert connector.get(key(2)) == b"fits"


def test_memory_is_bounded_and_evicts_the_least_recently_used():
    with serving("cpu") as server, connected(server) as connector:
        for number in range(12):
            connector.set(key(number), bytes(10 << 20))
            connector.get(key(0))
        assert server.data_store.num_bytes <= 0.1 * 1024**3
        assert connector.exists(key(0))
        assert not connector.exists(key(1))


# ---- with faulty clients ----


def test_serves_legacy_clients(server):
    with dialled(server.port) as peer:
        peer.sendall(head(PUT, key(1), 3) + b"abc" + head(EXIST, key(1)) + head(EXIST, key(2)))
        assert received(peer, 16) == struct.pack("iiii", 200, 0, 400, 0)
        peer.sendall(head(GET, key(1)) + head(GET, key(2)))
        assert received(peer, 19) == struct.pack("ii", 200, 3) + b"abc" + struct.pack("ii", 400, 0)
        peer.sendall(head(LIST))
        assert received(peer, 8 + len(key(1))) == struct.pack("ii", 200, len(key(1))) + key(1).encode()


def test_defect_07_client_death_during_a_put_changes_nothing(server, connector):
    connector.set(key(1), b"before")
    with dialled(server.port) as peer:
        peer.sendall(head(PUT, key(1), 1 << 20) + bytes(1000))
    assert connector.get(key(1)) == b"before"
    connector.set(key(2), b"after")
    assert connector.get(key(2)) == b"after"


@pytest.mark.parametrize(
    "request_bytes",
    [
        head(PUT, "k", -1),
        head(PUT, "k", -(2**31)),
        head(PUT, "k", 2**31 - 1),
        head(GET, "k", -5),
        head(0, "k"),
        head(77, "k"),
        struct.pack("ii", EXIST, 0) + b"\xff\xfe".ljust(150),
    ],
)
def test_invalid_request_is_refused_and_its_connection_closed(server, connector, request_bytes):
    with dialled(server.port) as peer:
        peer.sendall(request_bytes)
        assert received(peer, 9) == struct.pack("ii", 400, 0)
    connector.set(key(1), b"x")
    assert connector.get(key(1)) == b"x"


def test_accepts_keys_with_unusual_bytes(connector):
    for name in ("a/b", "../../etc", "tab\tand\x00zero", "naïve@ключ", " leading", "."):
        connector.set(name, name.encode())
        assert connector.get(name) == name.encode()


def test_very_slow_client_is_disconnected():
    with serving(timeout_seconds=0.2) as server, dialled(server.port) as peer:
        for _ in range(157):  # never a whole head
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"\1")
            if wait_readable(peer, 0.1):
                break
        assert wait_readable(peer, 0), "the server did not close the connection"
        assert received(peer, 1) == b""


def test_idle_client_may_exceed_the_message_timeout():
    with serving(timeout_seconds=0.1) as server, dialled(server.port) as peer:
        assert not wait_readable(peer, 0.35)
        peer.sendall(head(EXIST, "k"))
        assert received(peer, 8) == struct.pack("ii", 400, 0)


def test_refuses_clients_beyond_the_maximum_when_all_are_active():
    with serving(max_clients=1, timeout_seconds=60) as server, dialled(server.port) as first:
        first.sendall(head(PUT, "k", 2) + b"x")
        wait_until(lambda: server._incomplete.num_free < server._max_object_bytes)
        with dialled(server.port) as second:
            assert received(second, 1) == b""
        first.sendall(b"y" + head(GET, "k"))
        assert received(first, 10) == struct.pack("ii", 200, 2) + b"xy"


def test_longest_idle_client_is_disconnected_for_a_new_client():
    """Without this rule, as many idle clients as the maximum would block all other clients."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(max_clients=3))
        idle: list[socket.socket] = []
        while len(idle) < 3:
            idle.append(stack.enter_context(dialled(server.port)))
            wait_until(lambda: len(server._idle) == len(idle))
        idle[0].sendall(head(EXIST, "k"))  # the next client is now the longest idle
        assert received(idle[0], 8) == struct.pack("ii", 400, 0)
        wait_until(lambda: len(server._idle) == 3)
        with connected(server) as connector:
            connector.set(key(1), b"x")
            assert connector.get(key(1)) == b"x"
            assert received(idle[1], 1) == b"", "the longest idle client is disconnected"
            idle[0].sendall(head(GET, key(1)))
            assert received(idle[0], 9) == struct.pack("ii", 200, 1) + b"x"


def test_idle_client_is_disconnected_after_idle_seconds():
    with serving(idle_seconds=0.05) as server, dialled(server.port) as peer:
        assert received(peer, 1) == b""
        wait_until(lambda: not server._clients)


def test_incomplete_payloads_share_a_memory_limit():
    size = 1 << 20
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(max_object_bytes=size))
        first, second = (stack.enter_context(dialled(server.port)) for _ in range(2))
        first.sendall(head(PUT, key(1), size))
        wait_until(lambda: server._incomplete.num_free == 0)
        second.sendall(head(PUT, key(2), size))
        wait_until(lambda: server._incomplete.num_waiting == 1)
        first.sendall(bytes(size) + head(EXIST, key(1)))
        assert received(first, 8) == struct.pack("ii", 200, 0)
        second.sendall(bytes(size) + head(EXIST, key(2)))
        assert received(second, 8) == struct.pack("ii", 200, 0)
        assert server._incomplete.num_free == size


def test_unfinished_put_delays_others_at_most_until_its_timeout(monkeypatch):
    reserved: list[int] = []

    @contextlib.contextmanager
    def reserve_patiently(num_bytes, _seconds):
        with reserve(num_bytes, 60.0):
            reserved.append(num_bytes)
            yield

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(max_object_bytes=100, timeout_seconds=0.2))
        reserve = server._incomplete.reserve
        monkeypatch.setattr(server._incomplete, "reserve", reserve_patiently)
        first, second = (stack.enter_context(dialled(server.port)) for _ in range(2))
        first.sendall(head(PUT, key(1), 100))
        wait_until(lambda: reserved)
        second.sendall(head(PUT, key(2), 100) + bytes(100) + head(EXIST, key(2)))
        assert received(second, 8) == struct.pack("ii", 200, 0)
        assert received(first, 1) == b""
        wait_until(lambda: server._incomplete.num_free == 100)


def test_refuses_newlines_in_keys(server, connector):
    forged = f"{key(1)}\n{key(2)}"[:150]
    with pytest.raises(ValueError, match="newline"):
        connector.set(forged, b"x")
    with dialled(server.port) as peer:
        peer.sendall(head(PUT, "a\nb", 1) + b"x")
        assert received(peer, 8) == struct.pack("ii", 400, 0)
    assert connector.list() == []


@given(st.lists(st.binary(max_size=400) | st.just(head(PUT, "k", 4)) | st.just(head(LIST)), max_size=4))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_survives_any_request_bytes(fuzzed, packets):
    with dialled(fuzzed.port) as peer, contextlib.suppress(OSError):
        for packet in packets:
            peer.sendall(packet)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
            pass
    with dialled(fuzzed.port) as peer:
        peer.sendall(head(EXIST, "no such key"))
        assert received(peer, 8) == struct.pack("ii", 400, 0)


@pytest.fixture(scope="module")
def fuzzed():
    with serving(max_object_bytes=1 << 20) as server:
        yield server
