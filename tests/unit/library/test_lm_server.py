"""The lm:// server and its connector: together, and each against a peer that misbehaves."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.protocol import ClientMetaMessage, Constants, ServerMetaMessage
from lmcache.server import LMCacheServer
from lmcache.server.__main__ import main
from lmcache.server.server_storage_backend import (
    CreateStorageBackend,
    LMSBackendInterface,
    LMSLocalBackend,
    LMSLocalDiskBackend,
)
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.tiers.resilience import CircuitBreaker

HOST = "127.0.0.1"
PUT, GET, EXIST, LIST = 1, 2, 3, 4


def key(number):
    return f"vllm@org/model@1@0@{number:064x}"


def head(command, name="", length=0):
    return struct.pack("ii150s", command, length, name.encode().ljust(150))


@contextlib.contextmanager
def serving(device="cpu", port=0, **options):
    server = LMCacheServer(HOST, port, device, **{"max_size_gb": 0.1, "timeout_seconds": 0.5, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def connected(server, timeout_seconds=5.0):
    connector = LMCServerConnector(HOST, server.port, timeout_seconds)
    try:
        yield connector
    finally:
        connector.close()


@contextlib.contextmanager
def dialled(port):
    with socket.create_connection((HOST, port), timeout=10) as peer:
        yield peer


def received(peer, num_bytes):
    """Return so many bytes, or fewer: the peer closed or reset the connection."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        while len(raw) < num_bytes and (part := peer.recv(num_bytes - len(raw))):
            raw += part
    return raw


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


# ---- together ----


def test_what_was_set_is_got(connector):
    payload = random.Random(1).randbytes(3 << 20)
    assert connector.get(key(1)) is None
    assert not connector.exists(key(1))
    connector.set(key(1), payload)
    assert connector.exists(key(1))
    assert connector.get(key(1)) == payload


def test_an_object_may_be_empty_and_is_replaced(connector):
    connector.set(key(1), b"")
    assert connector.get(key(1)) == b""
    connector.set(key(1), b"long")
    connector.set(key(1), b"more")
    assert connector.get(key(1)) == b"more"


def test_list_names_chunks_and_skips_what_is_none(connector):
    for name in (key(1), key(2), "foreign", "a@b", "ключ@é"):
        connector.set(name, b"x")
    assert sorted(connector.list()) == [key(1), key(2)]


def test_defect_01_threads_on_one_connector_get_their_own_payloads(connector):
    payloads = {key(number): bytes([number]) * (1 + 997 * number) for number in range(8)}
    for name, payload in payloads.items():
        connector.set(name, payload)
    wrong = []

    def ask(seed):
        dice = random.Random(seed)
        for _ in range(60):
            name = dice.choice(list(payloads))
            if connector.get(name) != payloads[name]:
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_the_server_does_not_take_is_an_error():
    with serving(max_size_gb=0.001, max_object_bytes=8 << 20) as server, connected(server) as connector:
        with pytest.raises(ValueError, match="did not take"):
            connector.set(key(1), bytes(4 << 20))
        connector.set(key(2), b"fits")
        assert connector.get(key(2)) == b"fits"


def test_memory_is_bounded_and_the_least_recently_used_go():
    with serving("cpu") as server, connected(server) as connector:
        for number in range(12):
            connector.set(key(number), bytes(10 << 20))
            connector.get(key(0))
        assert server.data_store.num_bytes <= 0.1 * 1024**3
        assert connector.exists(key(0))
        assert not connector.exists(key(1))


# ---- a client that misbehaves ----


def test_a_legacy_client_is_served_byte_for_byte(server):
    with dialled(server.port) as peer:
        peer.sendall(head(PUT, key(1), 3) + b"abc" + head(EXIST, key(1)) + head(EXIST, key(2)))
        assert received(peer, 16) == struct.pack("iiii", 200, 0, 400, 0)
        peer.sendall(head(GET, key(1)) + head(GET, key(2)))
        assert received(peer, 19) == struct.pack("ii", 200, 3) + b"abc" + struct.pack("ii", 400, 0)
        peer.sendall(head(LIST))
        assert received(peer, 8 + len(key(1))) == struct.pack("ii", 200, len(key(1))) + key(1).encode()


def test_defect_07_a_client_that_dies_in_a_put_harms_nobody(server, connector):
    connector.set(key(1), b"before")
    with dialled(server.port) as peer:
        peer.sendall(head(PUT, key(1), 1 << 20) + bytes(1000))
    assert connector.get(key(1)) == b"before"
    connector.set(key(2), b"after")
    assert connector.get(key(2)) == b"after"


def test_defect_07_a_put_of_nothing_leaves_no_lock_behind():
    storage = LMSLocalBackend()
    with pytest.raises(TypeError):
        storage.put("k", None)
    storage.put("k", b"v")
    assert storage.get("k") == b"v"


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
def test_a_request_that_is_none_is_refused_and_the_connection_closed(server, connector, request_bytes):
    with dialled(server.port) as peer:
        peer.sendall(request_bytes)
        assert received(peer, 9) == struct.pack("ii", 400, 0)
    connector.set(key(1), b"x")
    assert connector.get(key(1)) == b"x"


def test_keys_with_odd_bytes_are_keys(connector):
    for name in ("a/b", "../../etc", "tab\tand\x00zero", "naïve@ключ", " leading", "."):
        connector.set(name, name.encode())
        assert connector.get(name) == name.encode()


def test_half_a_request_ends_after_its_time_and_holds_nobody(server, connector):
    with dialled(server.port) as peer:
        peer.sendall(head(GET, "k")[:100])
        assert not connector.exists(key(1))
        assert received(peer, 1) == b""


def test_a_client_that_trickles_is_put_off():
    with serving(timeout_seconds=0.2) as server, dialled(server.port) as peer:
        for _ in range(157):  # never a whole head
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"\1")
            if select.select([peer], [], [], 0.01)[0]:
                break
        assert select.select([peer], [], [], 0)[0], "the server went on waiting"
        assert received(peer, 1) == b""


def test_an_idle_client_is_kept_longer_than_any_message():
    with serving(timeout_seconds=0.1) as server, dialled(server.port) as peer:
        assert select.select([peer], [], [], 0.35)[0] == []
        peer.sendall(head(EXIST, "k"))
        assert received(peer, 8) == struct.pack("ii", 400, 0)


def test_clients_beyond_the_bound_are_refused_and_others_served():
    with serving(max_clients=1) as server, dialled(server.port) as first:
        first.sendall(head(EXIST, "k"))
        assert received(first, 8) == struct.pack("ii", 400, 0)
        with dialled(server.port) as second:
            assert received(second, 1) == b""
        first.sendall(head(EXIST, "k"))
        assert received(first, 8) == struct.pack("ii", 400, 0)


@given(st.lists(st.binary(max_size=400) | st.just(head(PUT, "k", 4)) | st.just(head(LIST)), max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_server_survives_any_bytes(fuzzed, packets):
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


def test_a_stop_ends_idle_clients_and_what_was_sent_is_stored(tmp_path):
    directory = str(tmp_path / "objects")
    with serving(directory) as server, dialled(server.port) as peer:
        peer.sendall(head(PUT, key(1), 4) + b"data" + head(EXIST, key(1)))
        assert received(peer, 8) == struct.pack("ii", 200, 0)
    with serving(directory) as server, connected(server) as connector:
        assert connector.get(key(1)) == b"data"
        assert connector.list() == [key(1)]


# ---- a server that misbehaves ----


@contextlib.contextmanager
def false_server(*replies):
    """Answers each connection's first request with the next reply, then closes it; None: never answers."""
    listener = socket.create_server((HOST, 0))
    listener.settimeout(10)
    is_over = threading.Event()

    def serve():
        for reply in replies:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(10)
                    received(peer, 158)
                    is_over.wait(10) if reply is None else peer.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    connector = LMCServerConnector(HOST, listener.getsockname()[1], timeout_seconds=0.2)
    try:
        yield connector
    finally:
        is_over.set()
        listener.close()
        connector.close()
        thread.join(timeout=20)


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
@settings(max_examples=15, deadline=None)
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
        assert until(5, lambda: connector.exists(key(1))) is False
        connector.set(key(1), b"y")
        assert connector.get(key(1)) == b"y"
    connector.close()


def test_defect_12_a_server_that_failed_is_left_alone_for_a_while():
    now = 0.0
    with false_server(b"", struct.pack("ii", 200, 0)) as connector:
        connector._breaker = CircuitBreaker(base=5, clock=lambda: now)
        for message in ("closed the connection", "left alone", "left alone"):
            with pytest.raises(ConnectionError, match=message):
                connector.get(key(1))
        now = 5.0
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


# ---- storage ----


class OnlyAsked(OrderedDict):
    """Counts questions for one key, and allows no others."""

    num_asked = 0

    def __contains__(self, name):
        self.num_asked += 1
        return super().__contains__(name)

    def __iter__(self):
        raise AssertionError("the keys were listed")

    __len__ = keys = items = values = copy = __reversed__ = __iter__


@pytest.mark.parametrize("num_keys", [1, 5000])
def test_defect_15_exist_costs_the_same_for_any_number_of_keys(num_keys):
    storage = LMSLocalBackend()
    storage.dict = OnlyAsked((key(number), b"x") for number in range(num_keys))
    assert storage.contains(key(0))
    assert not storage.contains("none")
    assert storage.dict.num_asked == 2


def test_storage_is_chosen_by_name(tmp_path):
    assert isinstance(CreateStorageBackend("cpu"), LMSLocalBackend)
    storage = CreateStorageBackend(str(tmp_path / "a" / "b"))
    assert isinstance(storage, LMSLocalDiskBackend)
    storage.close()
    assert issubclass(LMSLocalDiskBackend, LMSBackendInterface)
    with pytest.raises(ValueError, match="cuda"):
        CreateStorageBackend("cuda")
    for size in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a size"):
            CreateStorageBackend("cpu", size)


def test_a_flipped_byte_on_disk_is_a_miss(tmp_path):
    storage = LMSLocalDiskBackend(str(tmp_path), 1 << 24)
    storage.put(key(1), b"payload" * 1000)
    (path,) = tmp_path.rglob("*.0")
    raw = bytearray(path.read_bytes())
    raw[4096 + 100] ^= 1
    path.write_bytes(raw)
    assert storage.get(key(1)) is None
    storage.close()


# ---- the program ----


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, "-m", "lmcache.server", HOST, "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child, int(child.stdout.readline().rpartition(":")[2])
        finally:
            child.kill()


def test_defect_04_after_a_kill_in_a_put_what_was_acknowledged_is_right(tmp_path):
    dice = random.Random(4)
    payloads = {key(number): dice.randbytes(1 << 20) for number in range(6)}
    with process(str(tmp_path)) as (child, port), dialled(port) as peer:
        for name, payload in payloads.items():
            peer.sendall(head(PUT, name, len(payload)) + payload + head(EXIST, name))
            assert received(peer, 8) == struct.pack("ii", 200, 0)
        peer.sendall(head(PUT, key(9), 1 << 20) + bytes(1 << 19))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with serving(str(tmp_path)) as server, connected(server) as connector:
        assert {name: connector.get(name) for name in payloads} == payloads
        assert connector.get(key(9)) is None
        assert sorted(connector.list()) == sorted(payloads)


def test_the_program_ends_at_sigterm_and_needs_no_torch(tmp_path):
    with process() as (child, port):
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        with dialled(port) as peer:
            peer.sendall(head(EXIST, "k"))
            assert received(peer, 8) == struct.pack("ii", 400, 0)
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=20) == 0
            assert received(peer, 1) == b""
    assert "libtorch" not in maps


def test_memory_is_taken_for_what_comes_not_for_what_is_declared():
    with process() as (child, port), contextlib.ExitStack() as peers:
        for _ in range(20):
            peer = peers.enter_context(dialled(port))
            peer.sendall(head(PUT, "k", 1 << 30) + bytes(1000))
        last = peers.enter_context(dialled(port))
        last.sendall(head(EXIST, "k"))
        assert received(last, 8) == struct.pack("ii", 400, 0)
        status = Path(f"/proc/{child.pid}/status").read_text()
    (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert resident < 500 << 10  # KiB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.invalid", "0"], "lmcache_server: "),
        ([HOST, "99999"], "lmcache_server: "),
        ([HOST, "0", "cuda"], "not supported"),
        ([HOST, "0", "/proc/none"], "lmcache_server: "),
        ([HOST, "0", "cpu", "--max-size-gb", "-1"], "not a size"),
    ],
)
def test_the_program_says_why_it_does_not_start(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)


def test_the_program_explains_itself(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--max-size-gb" in capsys.readouterr().out


def test_commands_are_those_of_the_protocol():
    assert (PUT, GET, EXIST, LIST) == (
        Constants.CLIENT_PUT,
        Constants.CLIENT_GET,
        Constants.CLIENT_EXIST,
        Constants.CLIENT_LIST,
    )
    assert head(GET, "k", 3) == ClientMetaMessage(GET, "k", 3).serialize()
