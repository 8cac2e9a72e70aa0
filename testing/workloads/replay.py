"""A workload replayed against real sidecars, faster than it was: an hour of it takes a minute or so."""

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

from lmcache.rpc.client import ClientHello, KVGroup, Role, Scheduled, Session, SidecarClient
from lmcache.tiers.base import ROW_KEY_BYTES
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.workloads.clock import Clock
from testing.workloads.closed_loop import Routing, sticky
from testing.workloads.requests import HOUR, TOKENS, Workload

PREFILL_TOKENS_PER_SECOND = 10_000.0
"""What the engine would compute, if there were one."""
_RPC_SECONDS = 60.0
_ASK_SECONDS = 0.002
"""How often to ask for rows that are on their way; a scheduler does so at every step."""


class Served(NamedTuple):
    """What became of one request."""

    hour: float
    """Of the workload."""
    num_rows: int
    num_hits: int
    """In memory, without waiting."""
    num_brought: int = 0
    """From a lower tier."""


@lru_cache(maxsize=1 << 20)
def _digest(key: int) -> bytes:
    return hashlib.sha256(key.to_bytes(8, "big")).digest()


class Engine:
    """What an engine does with its sidecar for each request, but compute and copy."""

    def __init__(
        self,
        sidecar: SidecarProcess,
        namespace: bytes,
        row_bytes: int,
        prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND,
    ) -> None:
        """``prefill_tokens_per_second``: what is brought slower than that is not brought."""
        self._namespace, self._prefill = namespace, prefill_tokens_per_second
        uid, group = uuid.uuid4().bytes, KVGroup(group=0, block_tokens=16, chunk_bytes=row_bytes)
        self._clients = [
            SidecarClient(sidecar.socket_path, ClientHello(role, uid, namespace, TOKENS, (group,)))
            for role in (Role.SCHEDULER, Role.WORKER)
        ]
        for client in self._clients:
            client.start()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _session(self, number: int) -> Session:
        found: Session = wait_until(partial(getattr, self._clients[number], "session"), what="attached")
        return found

    def serve(self, name: str, keys: tuple[int, ...]) -> tuple[int, int]:
        """How many of its leading rows are in memory, and how many more lower tiers brought; all are there
        afterwards."""
        scheduler, worker = self._session(0), self._session(1)
        names = b"".join(self._namespace + _digest(key) for key in keys)
        look_up = partial(
            scheduler.lookup, name,
            prefill_tokens_per_second=self._prefill, timeout=_RPC_SECONDS,
        )  # fmt: skip
        in_memory = num_hits = _num_leading(scheduler, names)
        if not scheduler.memory_only and num_hits < len(keys):
            deadline = time.monotonic() + _RPC_SECONDS
            while (found := look_up([(0, names)], hint=True)).num_pending or found.is_probing:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rows of {name} are on their way for {_RPC_SECONDS:.0f} s: {found}")
                time.sleep(_ASK_SECONDS)
            num_hits = max(num_hits, _num_leading(scheduler, names))
        if num_hits:
            look_up([(0, names[: num_hits * ROW_KEY_BYTES])])
        scheduled = Scheduled(num_hit_chunks=num_hits, num_loaded_tokens=num_hits * TOKENS)
        look_up([(0, names)], hint=True, scheduled=scheduled)
        if missing := names[num_hits * ROW_KEY_BYTES :]:
            given = worker.reserve(0, missing, request_id=name, first_chunk=num_hits, timeout=_RPC_SECONDS)
            if slots := [reservation.slot for reservation in given if reservation.slot]:
                with worker.copying():
                    worker.commit(slots, timeout=_RPC_SECONDS)
        scheduler.release([name], timeout=_RPC_SECONDS)
        return in_memory, num_hits - in_memory


def _num_leading(scheduler: Session, names: bytes) -> int:
    found = scheduler.index.find(np.frombuffer(names, np.uint64).reshape(-1, ROW_KEY_BYTES // 8))
    return len(found.rows)


class Replay:
    """A context manager: requests are served in a thread, each by its pod, at their time."""

    def __init__(
        self,
        workload: Workload,
        row_bytes: int,
        clock: Clock,
        name: str = "",
        route: Callable[[int], Routing] = sticky,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """``before``: called before each request."""
        self.namespace = hashlib.sha256(name.encode()).digest()
        """Of its keys."""
        self._workload, self._row_bytes, self._clock = workload, row_bytes, clock
        self._route, self._before = route, before
        self._engines: list[Engine] = []
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay")
        self.served: list[Served] = []
        self.begin = 0.0
        """The workload's time when it began."""
        self.longest_lag = 0.0
        """Seconds of the workload's time by which a request was served too late."""

    def __enter__(self) -> Self:
        return self

    def start(self, sidecars: Sequence[SidecarProcess]) -> None:
        """Begin, with so many pods."""
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
        """Of the workload, of a real time in seconds since 1970."""
        return (self._clock.at(real) - self.begin) / HOUR

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
