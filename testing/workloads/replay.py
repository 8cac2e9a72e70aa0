"""Replays a workload on real sidecars, accelerated: an hour takes about a minute."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import SidecarSession
from lmcache_client.rpc.times import RequestTimes
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import ROW_KEY_BYTES
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.workloads.clock import Clock
from testing.workloads.closed_loop import Routing, sticky
from testing.workloads.requests import HOUR, TOKENS, Workload

PREFILL_TOKENS_PER_SECOND = 10_000.0
"""Assumed speed of the engine, which does not exist."""
_RPC_SECONDS = 60.0
_ASK_SECONDS = 0.002
"""Pause between lookups while rows are pending. A scheduler looks up at every step."""


class Served(NamedTuple):
    """The result of one request."""

    hour: float
    """Hour in the workload's time."""
    num_rows: int
    num_hits: int
    """Rows in memory without waiting."""
    num_promoted: int = 0
    """Rows from a lower tier."""


@lru_cache(maxsize=1 << 20)
def _digest(key: int) -> bytes:
    return hashlib.sha256(key.to_bytes(8, "big")).digest()


class Engine:
    """Makes an engine's calls to its sidecar for each request, without computing and copying."""

    def __init__(
        self,
        sidecar: SidecarProcess,
        namespace: bytes,
        row_bytes: int,
        prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND,
        model: str = "",
        tenant: bytes = b"",
    ) -> None:
        """Attach, and wait until all memory of the sidecar can be used.

        Promotions that would be slower than ``prefill_tokens_per_second`` are not awaited.
        """
        self._namespace, self._prefill = namespace, prefill_tokens_per_second
        self.tenant = tenant
        """Tenant of the requests from now on."""
        uid, group = uuid.uuid4().bytes, KVGroup(group=0, block_tokens=16, chunk_bytes=row_bytes)
        self._clients = [
            SidecarClient(
                sidecar.socket_path, ClientHello(role, uid, namespace, TOKENS, (group,), model=model)
            )
            for role in (Role.SCHEDULER, Role.WORKER)
        ]
        for client in self._clients:
            client.start()
        try:
            sidecar.wait_usable()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _session(self, number: int) -> SidecarSession:
        session: SidecarSession = wait_until(
            partial(getattr, self._clients[number], "session"), what="attached"
        )
        return session

    def serve(self, name: str, keys: tuple[int, ...], num_in_engine: int = 0) -> tuple[int, int]:
        """Serve a request. Returns the number of leading rows in memory, and of further rows that lower tiers
        promoted. Afterwards all rows are stored.

        ``num_in_engine`` leading rows are in the engine's own cache, too, and are not loaded. The engine
        reports the time of the lookup, which is also the time to the first token: it computes nothing.
        """
        scheduler, worker = self._session(0), self._session(1)
        begin = time.monotonic()
        names = b"".join(self._namespace + _digest(key) for key in keys)
        look_up = partial(
            scheduler.lookup, name, tenant=self.tenant,
            prefill_tokens_per_second=self._prefill, timeout=_RPC_SECONDS,
        )  # fmt: skip
        in_memory = num_hits = _num_leading(scheduler, names)
        if not scheduler.memory_only and num_hits < len(keys):
            deadline = time.monotonic() + _RPC_SECONDS
            while (result := look_up([(0, names)], hint=True)).num_pending or result.is_probing:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rows of {name} are pending for {_RPC_SECONDS:.0f} s: {result}")
                time.sleep(_ASK_SECONDS)
            num_hits = max(num_hits, _num_leading(scheduler, names))
        if num_hits:
            look_up([(0, names[: num_hits * ROW_KEY_BYTES])])
        num_loaded = max(0, num_hits - num_in_engine)
        scheduled = Scheduled(
            num_engine_chunks=num_in_engine,
            num_hit_chunks=num_in_engine + num_loaded,
            num_loaded_tokens=num_loaded * TOKENS,
            reports_times=True,
        )
        seconds = time.monotonic() - begin
        look_up([(0, names)], hint=True, scheduled=scheduled)
        if missing := names[num_hits * ROW_KEY_BYTES :]:
            reserved = worker.reserve(
                0, missing, request_id=name, first_chunk=num_hits, tenant=self.tenant, timeout=_RPC_SECONDS
            )
            if slots := [reservation.slot for reservation in reserved if reservation.slot]:
                with worker.copying():
                    worker.commit(slots, timeout=_RPC_SECONDS)
        times = RequestTimes(name, lookup_seconds=seconds, first_token_seconds=seconds)
        scheduler.release([name], timeout=_RPC_SECONDS, times=[times])
        return in_memory, num_hits - in_memory


def _num_leading(scheduler: SidecarSession, names: bytes) -> int:
    slots = scheduler.index.find(np.frombuffer(names, np.uint64).reshape(-1, ROW_KEY_BYTES // 8))
    return len(slots.rows)


class Replay:
    """A context manager that serves requests in a thread, each by its pod and at its time."""

    def __init__(
        self,
        workload: Workload,
        row_bytes: int,
        clock: Clock,
        name: str = "",
        route: Callable[[int], Routing] = sticky,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """``before`` is called before each request."""
        self.namespace = hashlib.sha256(name.encode()).digest()
        """Namespace of the keys."""
        self._workload, self._row_bytes, self._clock = workload, row_bytes, clock
        self._route, self._before = route, before
        self._engines: list[Engine] = []
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay")
        self.served: list[Served] = []
        self.begin = 0.0
        """The workload's time at the start."""
        self.longest_lag = 0.0
        """Maximum delay of a request in seconds of the workload's time."""

    def __enter__(self) -> Self:
        return self

    def start(self, sidecars: Sequence[SidecarProcess]) -> None:
        """Start with one pod for each sidecar."""
        self._engines = [Engine(sidecar, self.namespace, self._row_bytes) for sidecar in sidecars]
        self.begin = self._clock.now()
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether all was served. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        return bool(self.begin) and not self._thread.is_alive()

    @property
    def hour(self) -> float:
        """In the workload, from its begin on."""
        return self.hour_of(time.time())

    def hour_of(self, real: float) -> float:
        """Return the workload's hour at a real time in seconds since 1970."""
        return (self._clock.workload_time(real) - self.begin) / HOUR

    def _run(self) -> None:
        route = self._route(len(self._engines))
        try:
            for number, request in enumerate(self._workload.requests):
                due = self.begin + request.time
                self._clock.wait_until(due, self._stop)
                if self._stop.is_set():
                    return
                self.longest_lag = max(self.longest_lag, self._clock.now() - due)
                self._before()
                hits = self._engines[route(request)].serve(f"request-{number}", request.keys)
                self.served.append(Served(request.time / HOUR, len(request.keys), *hits))
        except BaseException as error:
            self._failure = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for engine in self._engines:
            engine.close()
