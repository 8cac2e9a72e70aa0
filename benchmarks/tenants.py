"""Bandwidth of two tenants of one engine on a real sidecar: each alone, and both at once.

The quiet tenant has few rows in flight, and the flooding tenant many. A queue without turns would give each
tenant a share in proportion to its rows in flight. With turns, each has half as long as both have rows to
move. The engine copies into and out of the arena, and computes nothing.

A store ends when the row is in the lower tier. A load ends when the row is in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, at_least, of, paired
from lmcache import keys
from lmcache.kv_groups import KVGroup
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.hello import ClientHello, Role
from lmcache.rpc.session import Session
from lmcache.tiers.base import ROW_KEY_BYTES, ObjectId, RowKey, StoredId
from lmcache.tiers.disk.files import path_of
from lmcache.tiers.remote.address import DEFAULT_PREFIX
from lmcache.tiers.remote.objects import marker_field, redis_name
from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess

NAMESPACE = bytes(32)
QUIET, FLOOD = "quiet", "flooding"
STORE, LOAD = "store", "load"
CHUNK_TOKENS = 256
POLL_SECONDS = 1e-3
ASK_AGAIN_SECONDS = 0.5
"""Pause between lookups of a request whose rows are not all in memory."""
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run. All numbers count rows."""

    row_bytes: int = 4 << 20
    arena: int = 128
    memory_percent: int = 45
    """Share of the arena that each tenant may use at most. Nine tenths of it are guaranteed."""
    measured: int = 48
    """Rows of the measured tenant in one phase."""
    ignored: int = 8
    """Rows that it moves before."""
    request: int = 4
    """Rows of one request. A request is loaded as a whole."""
    stored: int = 128
    """Rows of each tenant in the lower tier, for loads: more than its memory and all loads in flight hold."""
    in_flight: dict[tuple[str, str], int] = field(
        # All fit in a quarter of the arena. A full queue of writes drops rows, and the sidecar begins no more
        # loads at once.
        default_factory=lambda: {(STORE, QUIET): 8, (STORE, FLOOD): 24, (LOAD, QUIET): 8, (LOAD, FLOOD): 24}
    )
    """Rows in flight, by operation and tenant."""
    rounds: int = 9
    warm_up: int = 1


Contains = Callable[[Sequence[RowKey]], list[bool]]


class Engine:
    """Both sides of an engine with two tenants, attached to a sidecar."""

    def __init__(self, sidecar: SidecarProcess, row_bytes: int) -> None:
        uid, group = uuid.uuid4().bytes, KVGroup(group=0, block_tokens=16, chunk_bytes=row_bytes)
        self.row_bytes = row_bytes
        self._clients = [
            SidecarClient(sidecar.socket_path, ClientHello(role, uid, NAMESPACE, CHUNK_TOKENS, (group,)))
            for role in (Role.SCHEDULER, Role.WORKER)
        ]
        for client in self._clients:
            client.start()
        self.scheduler, self.worker = map(self._session, self._clients)
        sidecar.wait_usable()

    def _session(self, client: SidecarClient) -> Session:
        session: Session = wait_until(partial(getattr, client, "session"), what="attached")
        return session

    def store(self, tenant: bytes, row_keys: Sequence[RowKey], request: str) -> None:
        """Store rows of random bytes. Raises RuntimeError if the sidecar has no slot for a row."""
        with self.worker.copying():
            answers = self.worker.reserve(
                0, b"".join(row_keys), request_id=request, tenant=tenant, timeout=LIMIT_SECONDS
            )
            slots = [answer.slot for answer in answers if answer.slot is not None]
            if len(slots) < len(row_keys):
                raise RuntimeError(f"{len(row_keys) - len(slots)} of {len(row_keys)} rows got no slot")
            for slot, key in zip(slots, row_keys, strict=True):
                row = self.worker.view(slot.row, self.row_bytes)
                row[:] = key[-1]
                row[:ROW_KEY_BYTES] = np.frombuffer(key, np.uint8)
            self.worker.commit(slots, timeout=LIMIT_SECONDS)

    def num_in_memory(self, row_keys: Sequence[RowKey]) -> int:
        """Return how many leading rows are in memory."""
        names = np.frombuffer(b"".join(row_keys), np.uint64).reshape(-1, ROW_KEY_BYTES // 8)
        return len(self.scheduler.index.find(names).rows)

    def promote(self, tenant: bytes, row_keys: Sequence[RowKey], request: str) -> None:
        """Look up a request, so that the sidecar loads its rows."""
        self.scheduler.lookup(
            request, [(0, b"".join(row_keys))], tenant=tenant, hint=True, timeout=LIMIT_SECONDS
        )

    def close(self) -> None:
        for client in self._clients:
            client.close()


@dataclass
class _Request:
    name: str
    row_keys: list[RowKey]
    asked_at: float = 0.0


class Stream(ABC):
    """Requests of one tenant, of which a number of rows is always in flight. A request is done as a whole."""

    def __init__(self, engine: Engine, tenant: str, num_in_flight: int, request_rows: int) -> None:
        self.engine, self.name = engine, tenant
        self.tenant = keys.tenant(tenant, NAMESPACE)
        self.num_done = 0
        self._max_open, self._request_rows = max(1, num_in_flight // request_rows), request_rows
        self._open: deque[_Request] = deque()
        self._numbers = itertools.count()

    def step(self, *, is_ending: bool = False) -> bool:
        """Count the requests that are done, and begin one more unless ``is_ending``.

        Begins only one, so that no tenant waits for calls of the other one. Returns whether it began one."""
        while self._open and self._is_done(self._open[0]):
            self.num_done += len(self._open.popleft().row_keys)
        if is_ending or len(self._open) == self._max_open:
            return False
        request = _Request(f"{self.name}-{next(self._numbers)}", self._next_keys())
        self._begin(request)
        self._open.append(request)
        return True

    @property
    def is_idle(self) -> bool:
        """Is no request in flight?"""
        return not self._open

    @abstractmethod
    def _next_keys(self) -> list[RowKey]:
        """Return the rows of the next request."""

    @abstractmethod
    def _begin(self, request: _Request) -> None:
        """Start a request."""

    @abstractmethod
    def _is_done(self, request: _Request) -> bool:
        """Are all rows of the request moved?"""


class Stores(Stream):
    """Stores of new rows. ``contains`` says which rows are in the lower tier."""

    def __init__(
        self, engine: Engine, tenant: str, num_in_flight: int, request_rows: int, contains: Contains
    ) -> None:
        super().__init__(engine, tenant, num_in_flight, request_rows)
        self._contains = contains
        self.stored: list[RowKey] = []

    def _next_keys(self) -> list[RowKey]:
        return [NAMESPACE + os.urandom(32) for _ in range(self._request_rows)]

    def _begin(self, request: _Request) -> None:
        self.engine.store(self.tenant, request.row_keys, request.name)
        self.stored += request.row_keys

    def _is_done(self, request: _Request) -> bool:
        return all(self._contains(request.row_keys))


class Loads(Stream):
    """Loads of ``row_keys``, again and again in their order, so that the next rows are the first evicted."""

    def __init__(
        self, engine: Engine, tenant: str, num_in_flight: int, request_rows: int, row_keys: Sequence[RowKey]
    ) -> None:
        super().__init__(engine, tenant, num_in_flight, request_rows)
        self._next = itertools.cycle(row_keys)

    def _next_keys(self) -> list[RowKey]:
        return list(itertools.islice(self._next, self._request_rows))

    def _begin(self, request: _Request) -> None:
        if self.engine.num_in_memory(request.row_keys):
            raise RuntimeError(f"rows of {request.name} are still in memory: the lower tier needs more rows")
        self._ask(request)

    def _is_done(self, request: _Request) -> bool:
        return self.engine.num_in_memory(request.row_keys) == len(request.row_keys)

    def step(self, *, is_ending: bool = False) -> bool:
        """See Stream. Looks up again what the sidecar did not begin to load."""
        for request in self._open:
            if time.monotonic() - request.asked_at > ASK_AGAIN_SECONDS and not self._is_done(request):
                self._ask(request)
        return super().step(is_ending=is_ending)

    def _ask(self, request: _Request) -> None:
        request.asked_at = time.monotonic()
        self.engine.promote(self.tenant, request.row_keys, request.name)


@dataclass(frozen=True)
class Phase:
    """Rows that a measured tenant, and the flooding one next to it, moved in the same time."""

    seconds: float
    num_rows: int
    num_flood_rows: int

    @property
    def rate(self) -> float:
        """Rows of the measured tenant per second."""
        return self.num_rows / self.seconds

    @property
    def share(self) -> float:
        """The measured tenant's share of all rows."""
        return self.num_rows / (self.num_rows + self.num_flood_rows)


def run_phase(measured: Stream, competing: Sequence[Stream], sizes: Sizes) -> Phase:
    """Let a tenant move rows while ``competing`` do the same. All streams are idle before and afterwards."""
    streams = [*competing, measured]
    _run(streams, measured, sizes.ignored)
    begin, first = time.perf_counter(), [stream.num_done for stream in streams]
    _run(streams, measured, sizes.measured)
    seconds = time.perf_counter() - begin
    *moved_by_flood, moved = (stream.num_done - number for stream, number in zip(streams, first, strict=True))
    _run_until(streams, lambda: all(stream.is_idle for stream in streams), is_ending=True)
    return Phase(seconds, moved, sum(moved_by_flood))


def _run(streams: Sequence[Stream], measured: Stream, num_rows: int) -> None:
    """Run until ``measured`` has moved a number of rows more."""
    end = measured.num_done + num_rows
    _run_until(streams, lambda: measured.num_done >= end)


def _run_until(streams: Sequence[Stream], is_over: Callable[[], bool], *, is_ending: bool = False) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rows of {[stream.name for stream in streams]} took {LIMIT_SECONDS:.0f} s")
        if not sum(stream.step(is_ending=is_ending) for stream in streams):
            time.sleep(POLL_SECONDS)


Phases = dict[str, list[Phase]]
"""Phases by the names of the measured tenants: one tenant alone, or QUIET next to FLOOD."""

BOTH = "both"


def rounds(streams: dict[str, Stream], sizes: Sizes) -> Phases:
    """Measure each tenant alone and the quiet one next to the other, in random order, again and again."""
    quiet, flood = streams[QUIET], streams[FLOOD]
    ways: dict[str, Callable[[], Phase]] = {
        QUIET: lambda: run_phase(quiet, [], sizes),
        FLOOD: lambda: run_phase(flood, [], sizes),
        BOTH: lambda: run_phase(quiet, [flood], sizes),
    }
    phases: Phases = {name: [] for name in ways}
    for turn in range(sizes.warm_up + sizes.rounds):
        for name in random.sample(list(ways), len(ways)):
            phase = ways[name]()
            if turn >= sizes.warm_up:
                phases[name].append(phase)
    return phases


def figures(what: str, phases: Phases, row_bytes: int) -> Iterator[Figure]:
    """Compare the bandwidth of each tenant next to the other one with its bandwidth alone."""
    quiet, flood, both = phases[QUIET], phases[FLOOD], phases[BOTH]
    contended = paired([phase.rate for phase in both], [phase.rate for phase in quiet])
    yield at_least(f"{what}: quiet tenant next to the flooding one, of its rate alone", contended, "%", 45)
    share = paired([phase.share for phase in both], [1.0] * len(both))
    yield at_least("    its share of the bytes of both", share, "%", 45)
    rates = [phase.num_flood_rows / phase.seconds for phase in both]
    of_alone = paired(rates, [phase.rate for phase in flood])
    yield of("    flooding tenant next to the quiet one, of its rate alone", of_alone, "%")
    for name, alone in ((QUIET, quiet), (FLOOD, flood)):
        rate = statistics.median(phase.rate for phase in alone) * row_bytes / 1e9
        yield of(f"    rate of the {name} tenant alone", rate, "GB/s")


def measure(sidecar: SidecarProcess, contains: Contains, sizes: Sizes) -> dict[str, Phases]:
    """Measure stores and loads of both tenants, by operation."""
    with contextlib.closing(Engine(sidecar, sizes.row_bytes)) as engine:
        writers = {
            name: Stores(engine, name, sizes.in_flight[STORE, name], 1, contains) for name in (QUIET, FLOOD)
        }
        for writer in writers.values():
            _run([writer], writer, sizes.stored)
            _run_until([writer], lambda: writer.is_idle, is_ending=True)  # noqa: B023
        readers = {
            name: Loads(engine, name, sizes.in_flight[LOAD, name], sizes.request, writer.stored)
            for name, writer in writers.items()
        }
        return {LOAD: rounds({**readers}, sizes), STORE: rounds({**writers}, sizes)}


def tenants_file(folder: Path, sizes: Sizes) -> Path:
    """Write the budgets of both tenants."""
    budget = f"memoryPercent: {sizes.memory_percent}, minMemoryPercent: {sizes.memory_percent * 9 // 10}"
    named = [f"{{name: {name}, saltHash: {keys.salt_hash(name).hex()}, {budget}}}" for name in (QUIET, FLOOD)]
    path = folder / "tenants"
    path.write_text(f"named: [{', '.join(named)}]\n")
    return path


@contextlib.contextmanager
def disk_sidecar(sizes: Sizes) -> Iterator[tuple[SidecarProcess, Contains]]:
    """Start a sidecar with a disk on the volume of TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        folder = Path(name)

        def contains(row_keys: Sequence[RowKey]) -> list[bool]:
            return [(folder / "disk" / path_of(StoredId(ObjectId(key, 0)))).exists() for key in row_keys]

        options = {"disk_path": folder / "disk", "disk_size": 4 * sizes.stored * sizes.row_bytes}
        with _sidecar(folder, sizes, options) as sidecar:
            yield sidecar, contains


@contextlib.contextmanager
def redis_sidecar(sizes: Sizes) -> Iterator[tuple[SidecarProcess, Contains]]:
    """Start a sidecar with a Redis behind a UNIX socket."""
    with tempfile.TemporaryDirectory() as name, _redis(sizes) as server, server.client as client:

        def contains(row_keys: Sequence[RowKey]) -> list[bool]:
            pipeline = client.pipeline(transaction=False)
            for key in row_keys:
                pipeline.hexists(redis_name(DEFAULT_PREFIX, key), marker_field(ObjectId(key, 0)))
            return [bool(answer) for answer in pipeline.execute()]

        with _sidecar(Path(name), sizes, {"remote_url": server.unix_url}) as sidecar:
            yield sidecar, contains


def _redis(sizes: Sizes) -> RedisProcess:
    max_bytes = 4 * sizes.stored * sizes.row_bytes
    return RedisProcess(maxmemory=max_bytes, maxmemory_policy="allkeys-lru")


def _sidecar(folder: Path, sizes: Sizes, options: dict[str, object]) -> SidecarProcess:
    memory = sizes.arena * sizes.row_bytes
    return SidecarProcess(memory_size=memory, tenants_file=tenants_file(folder, sizes), **options)


def run() -> Report:
    sizes, measured = Sizes(), list[Figure]()
    for name, start in (("disk", disk_sidecar), ("Redis", redis_sidecar)):
        with start(sizes) as (sidecar, contains):
            for operation, phases in measure(sidecar, contains, sizes).items():
                measured += figures(f"{operation}, {name}", phases, sizes.row_bytes)
    return Report("tenants", _conditions(sizes), measured)


def _conditions(sizes: Sizes) -> str:
    in_flight = ", ".join(
        f"{operation} {tenant} {number}" for (operation, tenant), number in sizes.in_flight.items()
    )
    return (
        f"one engine, one sidecar, rows of {sizes.row_bytes >> 20} MiB, {sizes.rounds} rounds, random order,"
        f" {sizes.measured} rows of the measured tenant in each\nRows in flight: {in_flight}. The disk is the"
        f" volume of {tempfile.gettempdir()}, O_DIRECT. Redis is behind a UNIX socket"
    )
