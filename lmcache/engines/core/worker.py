"""The worker side: one rank's copies, on three threads, and the rules of how long blocks must live.

Loads and stores have a thread each: a request that waits for its load must not queue behind stores. The
methods are called on the engine's model thread; none waits longer than it says. Both sides of the engine's
contract are kept here, whatever fails: every load is reported exactly once, and only after its copy ended;
every held request is reported exactly once, at most ``HOLD_SECONDS`` later.

- **Finished**: blocks are held at most ``HOLD_SECONDS``, then what is not copied is aborted.
- **Reclaimed** (a preempted request's, say): waits at most ``PREEMPTION_SECONDS`` for copies that read the
  blocks, then aborts them.
- **Left behind** by a window or a state: the same, for at most ``LEFT_BEHIND_SHARE`` of the engine's time and
  ``LEFT_BEHIND_SECONDS`` at once. They have a thread of their own: what can wait must not be in their way.

The blocks then go back to the engine even if a copy still reads them: its bytes may be torn, so the slot of
an aborted copy is never committed.

The engine's model runners call ``collect`` and ``start_stores`` of a step in either order (vLLM's V1 runner
collects first when it speculates), and some ranks leave the latter out. So a step's stores count as under way
from whichever call comes first, and begin with the next step at the latest.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from contextlib import ExitStack
from typing import Any

from lmcache.engines.core.copier import EngineCopier, Fence, spread
from lmcache.engines.core.jobs import EngineIdentity, StepMeta, WorkerReport
from lmcache.engines.core.transfers import LoadTransfer, StoreTransfer
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.errors import SidecarError

logger = logging.getLogger(__name__)

HOLD_SECONDS = 2.0
PREEMPTION_SECONDS = 0.005

LEFT_BEHIND_SECONDS = 0.05
"""Of a step that computes in the blocks that windows left behind: without these copies nothing of a long
prompt could be resumed."""

LEFT_BEHIND_SHARE = 0.25
"""Of the engine's time that may be spent so. Long steps, which leave much behind, wait longer; a sidecar
that hangs costs no more, and when it is back, copies get their time again."""

ATTACH_WAIT_SECONDS = 2.0
"""Of the engine's start for the cache: time enough for weights whose hashes are known, so that the first
request is cached."""

LOAD_WAIT_SECONDS = 0.005
"""Of an engine with nothing to do but to wait for a load: most end within one step then, where a step without
a wait costs the engine 1 ms of sleep and the loading thread its GIL. A new request can be delayed by as much.
"""

Attach = Callable[[Mapping[str, Any]], tuple[SidecarClient, EngineCopier, EngineIdentity]]


_NO_STEP = StepMeta()


class WorkerSide:
    """See the module. Until ``register_kv_caches`` succeeds, loads fail and nothing is stored."""

    def __init__(self, attach: Attach, clock: Callable[[], float] = time.monotonic) -> None:
        """``attach`` takes the engine's KV tensors by layer; what it raises says why nothing is cached."""
        self.identity: EngineIdentity | None = None
        self._is_told = False  # the scheduler side knows the identity
        self._attach = attach
        self._clock = clock
        self._lock = threading.Lock()  # protects the next two against the thread that attaches
        self._is_offline = False
        self._client: SidecarClient | None = None  # None: nothing is copied
        self._copier: EngineCopier | None = None
        self._attached = ExitStack()  # is closed at the end, also after going offline
        self._loader = futures.ThreadPoolExecutor(1, "lmcache-load", spread)
        self._storer = futures.ThreadPoolExecutor(1, "lmcache-store", spread)
        self._urgent_storer = futures.ThreadPoolExecutor(1, "lmcache-urgent", spread)
        self._ended: queue.SimpleQueue[LoadTransfer | StoreTransfer] = queue.SimpleQueue()
        self._loading: set[str] = set()
        self._stores: dict[int, StoreTransfer] = {}  # by job: those that did not end
        self._step = StepMeta()  # whose stores were announced last
        self._waiting: list[StoreTransfer] = []  # of that step, not begun
        self._patience, self._patient_at = LEFT_BEHIND_SECONDS, clock()  # seconds that may be waited, then
        self._held: dict[str, float] = {}  # request id -> when it was first asked for
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = WorkerReport()
        self._figures: Counter[str] = Counter()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Begin to work on these tensors; on a reason not to, log it and stay idle.

        Naming the weights may take minutes: after ``ATTACH_WAIT_SECONDS`` the engine starts without a cache.
        """
        thread = threading.Thread(target=self._begin, args=(kv_caches,), name="lmcache-begin", daemon=True)
        thread.start()
        thread.join(ATTACH_WAIT_SECONDS)

    def go_offline(self) -> None:
        """Copy nothing any more. What is under way is still reported."""
        with self._lock:
            self._is_offline = True
            self._client = None
        _cancel(self._stores.values())

    def handle_preemptions(self, meta: Any) -> None:
        """Blocks are about to be overwritten: end what reads them, or abort it."""
        step = _step(meta)
        if step.reclaimed:
            self._end(step.reclaimed, PREEMPTION_SECONDS)
        if step.left_behind:
            began = self._clock()
            gained = LEFT_BEHIND_SHARE * (began - self._patient_at)
            patience = min(LEFT_BEHIND_SECONDS, self._patience + gained)
            self._end(step.left_behind, patience)
            self._patient_at = self._clock()
            self._patience = max(0.0, patience - (self._patient_at - began))

    def start_loads(self, meta: Any) -> None:
        """Begin the step's loads. A load that was begun already is not begun again."""
        if not (jobs := _step(meta).loads):
            return
        loads = [job for job in jobs if job.request_id not in self._loading]
        fence = self._fence() if loads else None
        for job in loads:
            self._loading.add(job.request_id)
            self._loader.submit(self._run, LoadTransfer(job, fence))

    def start_stores(self, meta: Any) -> None:
        """Begin the step's stores: its forward is done or, on a GPU, queued before the fence."""
        self._announce(_step(meta))
        self._begin_waiting()

    def collect(self, meta: Any) -> tuple[set[str], set[str]]:
        """Return (requests whose blocks are not needed any more, requests whose load ended)."""
        step = _step(meta)
        self._announce(step)
        if step.held:
            self._held |= dict.fromkeys(step.held, self._clock())
        loaded: set[str] = set()
        while not self._ended.empty():
            self._note_ended(self._ended.get(), loaded)
        if step.is_idle and self._loading and not loaded:
            self._wait_for_a_load(loaded)
        return (self._release_held() if self._held else set()), loaded

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the ended loads that hold no KV, of an engine that fails loads by block."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed_requests(self) -> set[str]:
        """Requests whose ended loads failed, of an engine that begins them again then."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self, meta: Any) -> WorkerReport | None:
        """What the scheduler side has to know."""
        timed_step = _step(meta).timed_step
        if not self._is_told and self.identity is not None:
            self._is_told, self._report.identity = True, self.identity
        if not (timed_step or self._report):
            return None
        report, self._report = self._report, WorkerReport()
        report.timed_step = timed_step
        return report

    def take_figures(self) -> dict[str, float]:
        """What copies that ended since the last call came to."""
        figures, self._figures = self._figures, Counter()
        return dict(figures)

    def close(self) -> None:
        """End the threads and detach; waits for the copy and the call under way."""
        self.go_offline()
        for thread in (self._loader, self._storer, self._urgent_storer):
            thread.shutdown()
        self._attached.close()

    def _begin(self, kv_caches: Mapping[str, Any]) -> None:
        try:
            client, copier, identity = self._attach(kv_caches)
        except Exception as error:  # of any kind: an engine that we don't understand must run untouched
            logger.warning("LMCache Cluster does not cache this engine: %s", error)
            return
        with self._lock:
            if not self._is_offline:
                self._copier, self.identity, self._client = copier, identity, client
                self._attached.callback(copier.close)
                self._attached.callback(client.close)
                return
        client.close()

    def _end(self, job_ids: Iterable[int], seconds: float) -> None:
        """Give copies time to end, then abort them."""
        transfers = [self._stores[job_id] for job_id in job_ids if job_id in self._stores]
        deadline = self._clock() + seconds
        for transfer in transfers:
            if transfer not in self._waiting:
                transfer.ended.wait(max(0.0, deadline - self._clock()))
        _cancel(transfers)

    def _announce(self, step: StepMeta) -> None:
        """Count the step's stores as under way, once; first begin those of the step before if nobody did."""
        if step is self._step:
            return
        self._begin_waiting()
        self._step = step
        if self.identity is not None and self.identity.is_replica:
            self._report.stores_ended.update(job.job_id for job in step.stores)
            return
        for job in step.stores:
            self._stores[job.job_id] = transfer = StoreTransfer(job)
            self._waiting.append(transfer)

    def _begin_waiting(self) -> None:
        if not self._waiting:
            return
        fence = self._fence()
        while self._waiting:
            transfer = self._waiting.pop(0)
            transfer.fence = fence
            storer = self._urgent_storer if transfer.job.is_transient else self._storer
            storer.submit(self._run, transfer)

    def _wait_for_a_load(self, loaded: set[str]) -> None:
        deadline = time.monotonic() + LOAD_WAIT_SECONDS
        while not loaded:
            try:
                ended = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._note_ended(ended, loaded)

    def _fence(self) -> Fence:
        return self._copier.fence() if self._client is not None and self._copier is not None else None

    def _run(self, transfer: LoadTransfer | StoreTransfer) -> None:
        client, copier = self._client, self._copier
        began = time.perf_counter()
        try:
            session = client.session if client is not None else None
            if session is not None and copier is not None:
                transfer.run(session, copier)
        except SidecarError as error:  # without an answer this session is over: no further store waits
            logger.debug("The sidecar did not take part in a copy: %s", error)
        except Exception:
            logger.exception("A copy failed; the cache goes on without it")
        finally:
            transfer.seconds = time.perf_counter() - began
            transfer.ended.set()
            self._ended.put(transfer)

    def _note_ended(self, transfer: LoadTransfer | StoreTransfer, loaded: set[str]) -> None:
        request_id = transfer.job.request_id
        self._figures.update(transfer.figures)
        if isinstance(transfer, StoreTransfer):
            self._report.stores_ended[transfer.job.job_id] += 1
            del self._stores[transfer.job.job_id]
            return
        self._loading.discard(request_id)
        loaded.add(request_id)
        if bad_blocks := transfer.bad_blocks:
            self._report.failed_loads.add(request_id)
            if transfer.job.fails_by_block:
                self._bad_blocks.update(bad_blocks)
            else:
                self._failed_requests.add(request_id)

    def _release_held(self) -> set[str]:
        ended_by = self._clock() - HOLD_SECONDS
        busy = {transfer.job.request_id for transfer in self._stores.values()}
        free = {name for name, since in self._held.items() if name not in busy or since <= ended_by}
        for request_id in free:
            del self._held[request_id]
        _cancel(transfer for transfer in self._stores.values() if transfer.job.request_id in free)
        return free


def _cancel(transfers: Iterable[StoreTransfer]) -> None:
    for transfer in transfers:
        transfer.cancel()


def _step(meta: Any) -> StepMeta:
    """The scheduler side's message; an empty one when that side does not run."""
    return meta if isinstance(meta, StepMeta) else _NO_STEP
