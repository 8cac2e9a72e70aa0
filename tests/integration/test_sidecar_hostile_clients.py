"""Clients that use the sidecar's socket to hurt it: wrong users, bytes without end, and leases without end.

In each test another engine stores and loads as before.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import grpc
import psutil
import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.service import LOOKUP, MAX_KEYS_PER_LOOKUP, MAX_MESSAGE_BYTES, RESERVE
from lmcache_operator.stats import MAX_STATS_BYTES
from lmcache_sidecar.clients.registry import MAX_CLIENTS
from lmcache_sidecar.pages.stats import MAX_LISTED_CLIENTS
from lmcache_sidecar.server import MAX_CONNECTIONS, MAX_STREAMS
from testing.child_process import wait_until
from testing.deadlines import CALLS
from testing.processes import SidecarProcess
from tests.harness.engine import CHUNK_BYTES, assert_stored, load, mapped_slots, session_of, store
from tests.harness.sidecar.wire import (
    SEPARATE_CONNECTION,
    RawClient,
    make_hello,
    make_keys,
    slots_of,
    usable,
)

DEADLINES = CALLS

MAX_GROWTH = 10 << 20
"""Bytes by which the process may grow while a client sends more than twice as many."""
SENT = 256 << 20
OTHER_USER = 65534
MAX_CONNECTION_BYTES = 64 << 10
"""Memory that a connection may take. Measured: 14 KiB."""
MAX_MESSAGES_GROWTH = 128 << 20
"""Growth of the process while one client sends 200 of the largest messages. Measured: 66 MiB."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""First bytes of each client of HTTP/2: the preface, and a frame of empty settings."""


def resident_bytes(sidecar: SidecarProcess) -> int:
    """Private memory of the process, without the arena."""
    memory = psutil.Process(sidecar.pid).memory_info()
    return int(memory.rss - memory.shared)


def channel_of(sidecar: SidecarProcess) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{sidecar.socket_path}", options=SEPARATE_CONNECTION)


def _nothing_until(event: threading.Event) -> Iterator[bytes]:
    event.wait()
    yield from ()


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7) if number > 0x7F else bytes([number])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _opened(stream: int) -> bytes:
    """Frame of HTTP/2 that opens a call of Attach. The header's fields are not compressed."""
    fields = (
        (":path", service.ATTACH_PATH),
        (":authority", "l"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    post_over_http = b"\x83\x86"
    texts = (text.encode() for field in fields for text in ("", *field))
    block = b"".join(b"\0" if not text else bytes([len(text)]) + text for text in texts)
    return _frame(1, 4, stream, post_over_http + block)


def send_repeatedly(connection: socket.socket, piece: bytes) -> None:
    for _ in range(SENT // len(piece)):
        connection.sendall(piece)


@pytest.fixture
def honest(sidecar: SidecarProcess) -> Iterator[SidecarProcess]:
    """The sidecar. At the end of the test, an honest engine must be able to store and load."""
    yield sidecar
    assert_serves(sidecar)


def assert_serves(sidecar: SidecarProcess, first: int = 7001) -> None:
    """Store and load the rows ``first`` and the next one, which must be new."""
    numbers = first, first + 1
    with session_of(sidecar, engine_uuid=b"h" * 16) as session:
        store(session, *numbers)
        assert_stored(load(session, session, "honest", *numbers), *numbers)
    assert sidecar.get("/readyz") == "ready\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_cannot_connect(honest):
    os.chmod(honest.folder, 0o755)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(honest.socket_path)
        except PermissionError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("piece", [b"\0" * 65536, b"GET / HTTP/1.1\r\n" * 4096, os.urandom(65536)])
def test_bytes_of_another_protocol_end_their_connection(honest, piece):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(honest.socket_path)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_repeatedly(connection, piece)


def test_stream_without_end_takes_bounded_memory(honest):
    """One client repeats a message of its stream, with a long text, as fast as it can."""
    text, last = "x" * 512, 4096
    with RawClient(honest) as client:
        client.attach()
        before = resident_bytes(honest)
        for _ in range(2 * MAX_GROWTH // len(text)):
            client.send(pinned=pb.Pinned(problem=text))
        client.send(pinned=pb.Pinned(pinned_bytes=last))
        honest.wait_until(
            lambda stats: (stats["clients"][0]["pins"] or {}).get("pinned_bytes") == last, timeout=300
        )
        assert resident_bytes(honest) - before < MAX_GROWTH


@pytest.mark.parametrize(
    "first_bytes", [b"", b"PRI * HTTP/2.0\r\n", PREFACE], ids=["none", "half", "settings"]
)
def test_silent_connections_are_few_and_are_closed(honest, first_bytes):
    """The sidecar closes connections above its limit at once, and the others after a few seconds."""
    process = psutil.Process(honest.pid)
    with session_of(honest) as session, contextlib.ExitStack() as stack:
        num_fds, num_bytes = process.num_fds(), resident_bytes(honest)
        for _ in range(1000):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(honest.socket_path)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(first_bytes)
        assert process.num_fds() - num_fds <= MAX_CONNECTIONS + 2  # two to answer /stats and to accept
        store(session, 1)
        assert resident_bytes(honest) - num_bytes < 1000 * MAX_CONNECTION_BYTES
        wait_until(lambda: process.num_fds() <= num_fds + 1)


def test_streams_without_hello_are_ended(honest):
    silence, num_streams = threading.Event(), MAX_STREAMS // 2
    with session_of(honest) as session, channel_of(honest) as channel:
        attach = channel.stream_stream(service.ATTACH_PATH, None, None)
        streams = [attach(_nothing_until(silence)) for _ in range(num_streams)]
        try:
            store(session, 1)
            for stream in streams:
                assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert stream.details() == "no hello arrived in 5 s: send it as soon as the stream is open"
        finally:
            silence.set()
    refused = f'lmcache_rpcs_total{{code="DEADLINE_EXCEEDED",method="Attach"}} {num_streams}.0'
    wait_until(lambda: refused in honest.get("/metrics"))  # a call is counted after its answer


def test_calls_of_one_connection_are_limited(honest):
    """Without a limit, a call of an engine waits until thousands of calls of one client are answered."""
    num_extra, refused_stream = 50, 7
    with session_of(honest) as session, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(honest.socket_path)
        settings_received = _frame(4, 1, 0, b"")
        numbers = range(1, 2 * (MAX_STREAMS + num_extra), 2)
        connection.sendall(PREFACE + settings_received + b"".join(map(_opened, numbers)))
        with connection.makefile("rb") as frames:
            num_refused = 0
            while num_refused < num_extra:
                head = frames.read(9)
                payload = frames.read(int.from_bytes(head[:3]))
                num_refused += head[3] == 3 and int.from_bytes(payload) == refused_stream
        store(session, 1)


def test_streams_that_are_reset_at_once_cancel_no_call_of_an_engine(honest):
    """Rapid reset: the client opens streams and ends them in the same packet."""
    cancel = struct.pack(">I", 8)
    with session_of(honest) as session, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(honest.socket_path)
        connection.sendall(PREFACE)
        connection.settimeout(5)
        with contextlib.suppress(OSError):  # the sidecar may close it, or read no more
            for first in range(1, 60_000, 200):
                numbers = range(first, first + 200, 2)
                opened = (_opened(number) + _frame(3, 0, number, cancel) for number in numbers)
                connection.sendall(b"".join(opened))
        for number in range(20):
            session.lookup(f"r{number}", [(0, make_keys(number))])


def test_attached_clients_are_limited_and_hide_no_figures(honest):
    """The operator reads at most 256 KiB of the sidecar's figures."""
    with session_of(honest, engine_uuid=b"g" * 16) as session, contextlib.ExitStack() as stack:
        for _ in range(MAX_CLIENTS - 1):
            stack.enter_context(RawClient(honest)).attach()
        with pytest.raises(grpc.RpcError, match=f"has {MAX_CLIENTS} clients already.*stop engines") as caught:
            stack.enter_context(RawClient(honest)).attach()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        store(session, 1)
        assert_stored(load(session, session, "attached before", 1), 1)
        stats = honest.stats()
        assert stats["num_clients"]["attached"] == MAX_CLIENTS
        assert len(stats["clients"]) == MAX_LISTED_CLIENTS
        assert len(honest.get("/stats")) < MAX_STATS_BYTES // 2
    honest.wait_until(lambda stats: not stats["num_clients"]["attached"])


def test_client_cannot_change_its_engine(honest):
    """Leases belong to engines. Those of the first engine would never end: only its last client ends them."""
    with RawClient(honest) as client:
        client.attach()
        client.break_stream()
        client.hello.engine_uuid = b"o" * 16
        with pytest.raises(grpc.RpcError, match="this client_uuid has another engine_uuid") as caught:
            client.attach()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert_serves(honest, 7012)


def test_largest_messages_take_bounded_memory(honest):
    """One client sends the largest message again and again."""
    with session_of(honest) as session, channel_of(honest) as channel:
        data = b"\xa2\x06" + _varint(MAX_MESSAGE_BYTES - 16) + bytes(MAX_MESSAGE_BYTES - 16)  # unknown field
        assert MAX_MESSAGE_BYTES - 32 < len(data) <= MAX_MESSAGE_BYTES
        before, lookup = resident_bytes(honest), channel.unary_unary(LOOKUP.path, None, None)
        for _ in range(200):
            with pytest.raises(grpc.RpcError, match="not attached"):
                lookup(data, timeout=60)
        assert resident_bytes(honest) - before < MAX_MESSAGES_GROWTH
        store(session, 1)


def test_keys_are_limited_by_call_and_leave_no_memory_behind(honest):
    """65,536 keys in one call are refused. In calls of the largest size, they are answered."""
    with RawClient(honest) as client:
        client.attach()
        with pytest.raises(grpc.RpcError, match=f"at most {MAX_KEYS_PER_LOOKUP} keys|larger than max"):
            client.call(LOOKUP, request_id="r", groups=[pb.GroupKeys(group=0, keys=b"k" * 64 * 65_536)])
        before = resident_bytes(honest)
        for number in range(2 * MAX_GROWTH // (64 * MAX_KEYS_PER_LOOKUP)):
            keys = os.urandom(64 * MAX_KEYS_PER_LOOKUP)
            client.call(LOOKUP, request_id=f"r{number}", groups=[pb.GroupKeys(group=0, keys=keys)])
        assert resident_bytes(honest) - before < MAX_GROWTH


def test_leases_without_end_take_at_most_half_of_the_memory(honest):
    """The client never releases. Other engines of the pod store in the other half, and load without leases.

    The client's end returns its half.
    """
    with session_of(honest, engine_uuid=b"g" * 16) as session:
        num_rows = honest.stats()["memory"]["capacity_rows"]
        for number in range(num_rows):
            store(session, number)
        for number in range(num_rows):
            session.lookup(f"never released {number}", [(0, make_keys(number))])
        memory = honest.settled()["memory"]  # a row can't be evicted before the sidecar has its checksum
        assert num_rows // 2 - 1 <= memory["leased_rows"] <= num_rows // 2
        with session_of(honest, engine_uuid=b"o" * 16) as other:
            store(other, *range(8000, 8010))
            keys = make_keys(*range(8000, 8010))
            assert other.lookup("late", [(0, keys)]).num_leased == 0
            slots = slots_of(other, keys)
            with other.copying():
                copies = [mapped_slots(other)[slot.row, :CHUNK_BYTES].copy() for slot in slots]
                assert all(map(other.holds, slots))
            assert_stored(copies, *range(8000, 8010))
    honest.wait_until(lambda stats: not stats["memory"]["leased_rows"])


def test_reservations_without_end_are_returned_when_the_client_ends(honest):
    """The client reserves all slots and commits none."""
    with RawClient(honest, make_hello(engine_uuid=b"g" * 16)) as client:
        client.attach()
        usable(honest)
        num_rows, refused = honest.stats()["memory"]["capacity_rows"], False
        for start in range(0, 2 * num_rows, 256):
            reply = client.call(RESERVE, group=0, keys=make_keys(*range(start, start + 256)))
            refused = refused or pb.SLOT not in reply.results
        assert refused
    honest.wait_until(lambda stats: not stats["memory"]["used_rows"])
