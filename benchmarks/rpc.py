"""Measure lookups of 128 keys in the shared index and by a call, on an idle and on a busy sidecar.

A memory hit reads only the index. A miss costs a call that looks up the lower tiers, outside of the
scheduler's thread. The reference is a bare gRPC echo of the same bytes. The load has two parts. Another
process commits rows of 4 MiB as fast as the sidecar writes them to Redis. A thread reads /stats and /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.clients import EngineClients, row_keys, words
from benchmarks.report import Figure, Report, at_most, of, paired
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_store import keys
from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess

NUM_KEYS, CHUNK_BYTES, CALLS, ROUNDS = 128, 4 << 20, 200, 9
ARENA = "1280Mi"  # 320 rows: the rows of the lookups, and free rows for the load
WANTED_BYTES_PER_SECOND = 1 << 30
PATH = "/echo.Echo/Echo"
PAUSE_SECONDS = 0.001  # between two lookups; an engine's step is longer

Seconds = dict[str, list[float]]


def echo_server(socket: str, reply: bytes) -> None:
    """Serve an empty handler in the way of the sidecar: grpc.aio, one loop, a UNIX socket."""

    async def echo(request: bytes, context: Any) -> bytes:
        return reply

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("echo.Echo", {"Echo": handler}),)
        )
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def keep_storing(socket_path: str, stop: Any) -> None:
    """Commit new rows, at most at the wanted rate. Runs in a separate process, like another engine."""
    sidecar = SidecarProcess.__new__(SidecarProcess)
    sidecar.socket_path = socket_path
    with EngineClients(sidecar, CHUNK_BYTES) as engine:
        began, num_bytes = time.perf_counter(), 0
        for prompt in itertools.count(1_000):
            if stop.is_set():
                return
            num_bytes += CHUNK_BYTES * len(engine.fill(row_keys(prompt, 8)))
            ahead = num_bytes / WANTED_BYTES_PER_SECOND - (time.perf_counter() - began)
            time.sleep(max(0.001, ahead))  # keeps the wanted rate


def keep_scraping(url: str, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        for page in ("/metrics", "/stats"):
            with urllib.request.urlopen(url + page, timeout=5) as answer:
                answer.read()


@contextlib.contextmanager
def load(sidecar: SidecarProcess) -> Iterator[Callable[[], float]]:
    """Store rows and read pages during the context. Yields a function for the write-through rate."""
    spawn = multiprocessing.get_context("spawn")
    stop, stop_scraping = spawn.Event(), threading.Event()
    engine = spawn.Process(target=keep_storing, args=(sidecar.socket_path, stop), daemon=True)
    scraper = threading.Thread(target=keep_scraping, args=(sidecar.url, stop_scraping))

    def written() -> int:
        return int(sidecar.stats()["remote"]["written"])

    engine.start()
    scraper.start()
    before = written()
    wait_until(lambda: written() > before, what="rows are written through", timeout=60)
    began, before = time.perf_counter(), written()
    try:
        yield lambda: (written() - before) * CHUNK_BYTES / (time.perf_counter() - began)
    finally:
        stop.set()
        stop_scraping.set()
        engine.join(20)
        engine.kill()
        scraper.join()


def timed(call: Callable[[], object], number: int) -> list[float]:
    seconds = []
    for _ in range(number):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        time.sleep(PAUSE_SECONDS)
    return seconds


def start_seconds() -> float:
    """Return the time from exec until engines can attach and the HTTP port answers."""
    with SidecarProcess(memory_size="64Mi") as sidecar:
        sidecar.terminate()
        began = time.perf_counter()
        sidecar.start()
        return time.perf_counter() - began


@contextlib.contextmanager
def echo(engine: EngineClients, names: bytes) -> Iterator[Callable[[], object]]:
    """Yield a call that moves as many bytes as a lookup and does nothing."""
    request = pb.LookupRequest(
        epoch=engine.scheduler.epoch, client_uuid=bytes(16), request_id="request", hint=True,
        groups=[pb.GroupKeys(group=0, keys=names)],
    )  # fmt: skip
    reply = pb.LookupReply(num_resident=NUM_KEYS)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "echo.sock")
        server = spawn.Process(target=echo_server, args=(socket, reply.SerializeToString()), daemon=True)
        server.start()
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call, payload = channel.unary_unary(PATH, None, None), request.SerializeToString()
            call(payload, wait_for_ready=True, timeout=30)
            yield lambda: call(payload)
        server.terminate()


def ways(engine: EngineClients, names: bytes) -> dict[str, Callable[[], object]]:
    numbers, indexed = itertools.count(), words(names)
    absent = row_keys(77, NUM_KEYS)
    blocks = [names[start + 32 : start + 64] for start in range(0, len(names), 64)]

    def find() -> None:
        if len(engine.find(indexed).rows) != NUM_KEYS:
            raise RuntimeError("some rows are not in memory, so this lookup is no hit")

    def lease() -> None:
        request = f"lease-{next(numbers)}"
        if engine.scheduler.lookup(request, [(0, names)]).num_leased != NUM_KEYS:
            raise RuntimeError("not all rows were leased")
        engine.scheduler.release([request])

    return {
        "index": find,
        "names": lambda: keys.chunk_keys(blocks),
        "miss": lambda: engine.scheduler.lookup(f"miss-{next(numbers)}", [(0, absent)], hint=True),
        "lease and release": lease,
    }


def run() -> Report:
    starts = [start_seconds() for _ in range(ROUNDS)]
    names = row_keys(0, NUM_KEYS)
    with (
        RedisProcess(maxmemory="512mb", maxmemory_policy="allkeys-lru") as redis,
        SidecarProcess(memory_size=ARENA, remote_url=redis.unix_url) as sidecar,
        EngineClients(sidecar, CHUNK_BYTES) as engine,
    ):
        sidecar.wait_until(
            lambda stats: stats["memory"]["usable_rows"] == stats["memory"]["capacity_rows"] > 0
        )
        engine.fill(names)
        held = engine.scheduler.lookup("held", [(0, names)])  # the lease prevents eviction under load
        assert held.num_leased == NUM_KEYS, held
        idle: Seconds = {}
        with echo(engine, names) as echo_call:
            calls = {**ways(engine, names), "echo": echo_call}
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    idle.setdefault(name, []).extend(timed(call, CALLS))
        busy: Seconds = {}
        with load(sidecar) as rate:
            calls = ways(engine, names)
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    busy.setdefault(name, []).extend(timed(call, CALLS))
            bytes_per_second = rate()
    return Report("rpc", _conditions(bytes_per_second), list(_figures(idle, busy, starts)))


def _conditions(bytes_per_second: float) -> str:
    return (
        f"{NUM_KEYS} keys, {ROUNDS} x {CALLS} calls each, interleaved, {PAUSE_SECONDS * 1e3:g} ms apart;"
        f" median of all\nunder load: {bytes_per_second / 1e9:.2f} GB/s were written through to Redis,"
        " /metrics and /stats read ten times a second"
    )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds) * 1e6, statistics.quantiles(seconds, n=100)[98] * 1e6


def _figures(idle: Seconds, busy: Seconds, starts: list[float]) -> Iterator[Figure]:
    p50, p99 = _percentiles(idle["index"])
    yield at_most("hit, read from the index, p50", p50, "us", 200)
    yield of("    p99", p99, "us")
    p50, p99 = _percentiles(busy["index"])
    yield of("    under load, p50", p50, "us")
    yield at_most("    under load, p99", p99, "us", 2000)
    medians = {
        name: [statistics.median(seconds[start : start + CALLS]) for start in range(0, len(seconds), CALLS)]
        for name, seconds in idle.items()
    }
    yield of("miss, by a call, of an echo's p50", paired(medians["miss"], medians["echo"]), "x")
    for name in ("names", "miss", "lease and release", "echo"):
        p50, p99 = _percentiles(idle[name])
        yield of(f"{name}, p50", p50, "us")
        yield of("    p99", p99, "us")
        if name in busy:
            yield of("    under load, p99", _percentiles(busy[name])[1], "us")
    yield at_most("sidecar's start, from exec until it listens", statistics.median(starts), "s", 1.0)
