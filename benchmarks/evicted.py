"""Rows of real sizes on a Redis that evicts: payload per memory, readable rows, and latency of other clients.

The benchmark requests five times as many rows as fit, by a Zipf law, and stores each row that it misses. A
second process sends GETs to the same server and measures their latency. The yardstick is a server that stores
values of 4 MiB, each under a separate key.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import redis

from benchmarks.report import Figure, at_least
from lmcache.tiers.base import ObjectId
from lmcache.tiers.remote.address import Address
from lmcache.tiers.remote.tier import RemoteTier
from testing.processes import RedisProcess

MIB = 1 << 20
ROWS = [*((mib, num_columns) for mib in (4, 8, 32, 36) for num_columns in (1, 8)), (64, 1), (80, 8)]
SERVER_BYTES, TURNOVERS, SKEW = 1536 * MIB, 4, 0.8
STORES_PER_SAMPLE = 4


def shard() -> RedisProcess:
    """Start a server with the operator's settings."""
    return RedisProcess(maxmemory=SERVER_BYTES, maxmemory_policy="allkeys-lru", lazyfree_lazy_eviction="no")


@dataclass(frozen=True)
class Outcome:
    """Result for one kind of rows. Shares are between 0 and 1."""

    payload: float
    """Payload of complete rows as a share of ``maxmemory``: median of samples from a full server."""
    readable: float
    """Complete rows that were read, as a share of the announced rows."""
    hits: float
    """Complete rows that were read, as a share of the requested rows."""
    residence_seconds: float
    """Time in which the server replaces all of its rows."""
    latencies: list[float]
    """Latencies of the other client's requests, in seconds."""


def store_rows(row_bytes: int, num_columns: int) -> Outcome:
    """Store and load rows until the server has replaced its whole content a few times."""
    column_bytes = row_bytes // num_columns
    num_rows = 5 * SERVER_BYTES // row_bytes
    ids = [
        [ObjectId(number.to_bytes(64, "big"), column) for column in range(num_columns)]
        for number in range(num_rows)
    ]
    weights = list(accumulate(1 / (rank + 1) ** SKEW for rank in range(num_rows)))
    chooser, payload = random.Random(7), memoryview(os.urandom(column_bytes))
    slot = memoryview(bytearray(column_bytes))
    announced = read = asked = num_stored = 0
    with shard() as server, server.client as client:
        remote = RemoteTier(Address.parse(server.unix_url), timeout_seconds=60)
        with other_client(server) as latencies:
            start, shares = time.monotonic(), list[float]()
            while num_stored * row_bytes < TURNOVERS * SERVER_BYTES:
                (row,) = chooser.choices(ids, cum_weights=weights)
                asked += 1
                if remote.probe([row[0].row_key], num_columns):
                    announced += 1
                    read += all(remote.load(object_id, slot) for object_id in row)
                else:
                    num_stored += [remote.store(object_id, payload) for object_id in row].count(False) == 0
                    if num_stored * row_bytes > SERVER_BYTES and num_stored % STORES_PER_SAMPLE == 0:
                        present = client.dbsize()  # a scan of all rows would mark them as used
                        shares.append(present * row_bytes / SERVER_BYTES)
            seconds = time.monotonic() - start
        present = sum(remote.probe([row[0].row_key], num_columns) for row in ids)
        complete = present / max(1, client.dbsize())
        remote.close()
    return Outcome(
        complete * statistics.median(shares), read / announced, read / asked, seconds / TURNOVERS, latencies()
    )


def store_values() -> list[float]:
    """Store values of 4 MiB, each under a separate key. Returns another client's latencies, in seconds."""
    with shard() as server, server.client as client:
        value = os.urandom(4 * MIB - 64)
        with other_client(server) as latencies:
            for number in range(TURNOVERS * SERVER_BYTES // len(value)):
                client.set(f"value:{number}", value)
    return latencies()


@contextlib.contextmanager
def other_client(server: RedisProcess) -> Iterator[Callable[[], list[float]]]:
    """Send requests from another process. The yielded function returns their latencies, after the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ask, args=(str(server.socket_path), theirs))
    process.start()
    theirs.close()  # so that recv() fails if the process dies
    ours.recv()
    latencies: list[float] = []
    try:
        yield lambda: latencies
    finally:
        ours.send("end")
        latencies += ours.recv()
        process.join()


def _ask(path: str, pipe: multiprocessing.connection.Connection) -> None:
    waits = []
    with redis.Redis(unix_socket_path=path) as client:
        client.ping()
        pipe.send("ready")
        while not pipe.poll(0.001):
            start = time.perf_counter()
            client.get("absent")
            waits.append(time.perf_counter() - start)
    pipe.send(waits)


def figures() -> Iterator[Figure]:
    """Yield the figures of each kind of row."""
    for mib, num_columns in ROWS:
        outcome = store_rows(mib * MIB, num_columns)
        name = f"rows of {mib} MiB in {num_columns} column{'s'[: num_columns != 1]}"
        yield at_least(f"{name}: payload, of maxmemory", 100 * outcome.payload, "%", 92)
        yield at_least(f"{name}: readable, of the announced", 100 * outcome.readable, "%", 98)
        yield Figure(f"{name}: hits", 100 * outcome.hits, "%")
        yield Figure(f"{name}: time until all is replaced", outcome.residence_seconds, "s")
        yield from _latency(name, outcome.latencies)
    yield from _latency("values of 4 MiB", store_values())


def _latency(name: str, seconds: list[float]) -> Iterator[Figure]:
    yield Figure(f"{name}: another client's latency, p50", 1e3 * statistics.median(seconds), "ms")
    p99 = statistics.quantiles(seconds, n=100)[98]
    yield Figure(f"{name}: another client's latency, p99", 1e3 * p99, "ms")
