"""Compare loads and stores of the remote tier over one connection with a bare loop on the same Redis.

The bare loops do the minimum: GET by ``recv_into`` into the target, SET by ``sendall``, one value of 4 MiB
after another, without headers and checksums.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Figure, Report, at_least
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.tier import RemoteTier
from testing.certificates import make_certificates
from testing.processes import RedisProcess

NUM_PARTS, ROUNDS = 8, 41
VALUE_BYTES = PART_BYTES
SLOT_BYTES = NUM_PARTS * PART_BYTES
KEY = b"n" * 32 + b"k" * 32
BARS = {"unix": 90, "tcp": 90, "tls": 85}  # per cent of the bare loop


class BareLoop:
    """Minimal code that stores and loads values of 4 MiB.

    It cycles through ``num_places`` places, as an arena does, because cached memory is faster.
    """

    def __init__(self, connection: socket.socket, flags: int, num_parts: int, num_places: int) -> None:
        self._connection, self._flags = connection, flags
        memory = memoryview(bytearray(os.urandom(VALUE_BYTES) * num_parts * num_places))
        values = [memory[start : start + VALUE_BYTES] for start in range(0, len(memory), VALUE_BYTES)]
        places = [values[first : first + num_parts] for first in range(0, len(values), num_parts)]
        self._places = itertools.cycle(places)
        self._line = memoryview(bytearray(64))

    def store(self) -> None:
        for part, value in enumerate(next(self._places)):
            name = b"bare:%d" % part
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(value))
            self._connection.sendall(head)
            self._connection.sendall(value)
            self._connection.sendall(b"\r\n")
            self._receive(5)  # +OK

    def load(self) -> None:
        for part, value in enumerate(next(self._places)):
            name = b"bare:%d" % part
            self._connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            self._receive(len(b"$%d\r\n" % len(value)))
            done = 0
            while done < len(value):
                done += self._connection.recv_into(value[done:], 0, self._flags)
            self._receive(2)

    def _receive(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= self._connection.recv_into(self._line[:num_bytes])


def connect(kind: str, server: RedisProcess, num_parts: int = NUM_PARTS, num_places: int = 1) -> BareLoop:
    if kind == "unix":
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(str(server.socket_path))
        return BareLoop(plain, socket.MSG_WAITALL, num_parts, num_places)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tcp":
        return BareLoop(connection, socket.MSG_WAITALL, num_parts, num_places)
    assert server.tls is not None
    context = ssl.create_default_context(cafile=str(server.tls.ca))
    return BareLoop(context.wrap_socket(connection, server_hostname="127.0.0.1"), 0, num_parts, num_places)


def url_of(kind: str, server: RedisProcess) -> str:
    if kind == "unix":
        return server.unix_url
    return f"{server.url}?ca={server.tls.ca}" if server.tls else server.url


def interleaved(
    ways: dict[str, Callable[[], None]], before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            before()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(kind: str, server: RedisProcess) -> list[Figure]:
    remote, bare_loop = (
        RemoteTier(Address.parse(url_of(kind, server)), timeout_seconds=10),
        connect(kind, server),
    )
    payload, slot = memoryview(bytearray(os.urandom(SLOT_BYTES))), memoryview(bytearray(SLOT_BYTES))
    client = server.client

    def store() -> None:
        assert remote.store(ObjectId(KEY, 0), payload)

    def load() -> None:
        loaded = remote.load(ObjectId(KEY, 0), slot)
        assert loaded is not None
        assert loaded.length == SLOT_BYTES

    seconds = interleaved({"bare store": bare_loop.store, "store": store}, before=client.flushall)
    store()
    bare_loop.store()
    seconds |= interleaved({"bare load": bare_loop.load, "load": load})
    assert slot == payload
    remote.close()
    return [figure for name in ("load", "store") for figure in _figures(kind, name, seconds)]


def _figures(kind: str, name: str, seconds: dict[str, list[float]]) -> list[Figure]:
    # Ratios of neighbours in time cancel out other load on the machine.
    ratios = [
        bare_loop / ours for bare_loop, ours in zip(seconds[f"bare {name}"], seconds[name], strict=True)
    ]
    rate = SLOT_BYTES / statistics.median(seconds[name]) / 1e9
    return [
        at_least(
            f"{name}, {kind}, of the bare loop's rate", statistics.median(ratios) * 100, "%", BARS[kind]
        ),
        Figure(f"{name}, {kind}", rate, "GB/s"),
    ]


def run() -> Report:
    figures = []
    with RedisProcess() as server:
        figures += measure("unix", server)
        figures += measure("tcp", server)
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisProcess(tls=make_certificates(Path(folder))) as server,
    ):
        figures += measure("tls", server)
    size = f"{NUM_PARTS} parts of {PART_BYTES >> 20} MiB"
    return Report("remote", f"{size}, one connection, {ROUNDS} rounds, interleaved, medians", figures)
