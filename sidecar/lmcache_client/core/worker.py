"""The worker side of a connector: copies for one rank on three threads, and limits how long they hold blocks.

Loads and stores use separate threads, so that a request that waits for its load never queues behind stores.
The engine's model thread calls the methods, and no method waits longer than its docstring says. The contract
with the engine holds, whatever part of the cache fails:

- Every load is reported exactly once, and only after its copy has ended.
- Every held request is reported exactly once, at most ``hold_seconds`` later.

The time limit for a copy depends on its blocks. At the limit the worker side aborts the copy:

- **Finished requests**: the engine holds the blocks for at most ``hold_seconds``.
- **Reclaimed blocks**, such as those of a preempted request: the engine waits at most
  ``preemption_seconds`` for copies that read them.
- **Blocks left behind** by a window or a state: the engine waits at most ``left_behind_seconds`` in one step,
  and ``LEFT_BEHIND_SHARE`` of its time. Their copies have a thread of their own, because they are urgent.

The engine then reuses the blocks even if a copy still reads them. The bytes of such a copy may be torn, so
the slot of an aborted copy is never committed.

The engine's model runners call ``collect`` and ``start_stores`` of a step in either order: vLLM's V1 runner
collects first when it speculates. Some ranks never call ``start_stores``. So a step's stores count as running
from the first of the two calls, and begin with the next step at the latest.
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

from lmcache_client.core.copier import EngineCopier, Fence, use_all_cores
from lmcache_client.core.jobs import EngineIdentity, StepMeta, StoreJob, WorkerReport
from lmcache_client.core.part_speaker import PartSpeaker
from lmcache_client.core.parts import PartedIdentity, PartedReport, PartedStep, PartNames
from lmcache_client.core.transfers import EngineTransfer, LoadTransfer, StoreTransfer
from lmcache_client.off_notice import NOT_CACHED, OffNotice
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarError
from lmcache_store.common.timing import TIMING

logger = logging.getLogger(__name__)


LEFT_BEHIND_SHARE = 0.25
"""Largest share of the engine's time spent on these waits. Long steps, which leave many blocks behind, may
wait longer. The share also bounds the cost of a sidecar that hangs."""


LOAD_WAIT_SECONDS = 0.005
"""Longest wait of an idle engine for a load. Most loads end within such a step. Without the wait, the engine
would sleep 1 ms and take the GIL from the loading thread. A new request can be delayed by the same time."""

Attach = Callable[[Mapping[str, Any]], tuple[SidecarClient, EngineCopier, EngineIdentity]]
"""Attaches this rank to the sidecar, given the engine's KV tensors by layer."""


_NO_STEP = StepMeta()


class WorkerSide:
    """The worker side, see the module. Before ``register_kv_caches`` succeeds, it copies nothing."""

    def __init__(
        self, attach: Attach, clock: Callable[[], float] = time.monotonic, *, can_wait: bool = True
    ) -> None:
        """``attach`` attaches this rank to the sidecar. If it raises, its message is logged as the reason.

        ``can_wait``: False if other engines step together with this one, so that each wait would stop them.
        Copies that such a wait would await are then aborted at once, which costs rows but no bytes.
        """
        self._can_wait = can_wait
        self.identity: EngineIdentity | None = None
        """Identity of this rank's engine; None until it is attached."""
        self._names: PartNames | None = None  # None: the scheduler side is in this rank's part
        self._speaker: PartSpeaker | None = None  # None: this rank makes no calls for the scheduler side
        self._relayed: StepMeta | None = None  # the last step whose calls have begun
        self._is_identity_reported = False  # to the scheduler side
        self._attach = attach
        self._clock = clock
        self.off = OffNotice(clock=clock)
        """Warns that this rank is not cached, again with the steps of the engine."""
        self._lock = threading.Lock()  # protects the next two against the thread that attaches
        self._is_offline = False
        self._client: SidecarClient | None = None  # None: nothing is copied
        self._copier: EngineCopier | None = None
        self._resources = ExitStack()  # closed in ``close``, also after going offline
        self._loader = futures.ThreadPoolExecutor(1, "lmcache-load", use_all_cores)
        self._storer = futures.ThreadPoolExecutor(1, "lmcache-store", use_all_cores)
        self._urgent_storer = futures.ThreadPoolExecutor(1, "lmcache-urgent", use_all_cores)
        self._ended: queue.SimpleQueue[EngineTransfer] = queue.SimpleQueue()
        self._loading: set[str] = set()  # requests that wait for a transfer of the loader
        self._stores: dict[int, StoreTransfer] = {}  # job id -> store that has not ended
        self._step = StepMeta()  # the last step whose stores were announced
        self._waiting: list[StoreTransfer] = []  # stores of that step that have not begun
        # Seconds that a step may wait for copies of blocks left behind, as of the time ``_patience_at``.
        self._patience, self._patience_at = TIMING.left_behind_seconds, clock()
        self._held: dict[str, float] = {}  # finished request -> since when its blocks are held
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = WorkerReport()  # a PartedReport as soon as the engine is known to have parts
        self._figures: Counter[str] = Counter()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Start caching these tensors in the background. On failure, log the reason and stay idle.

        Waits at most ``start_seconds``. Hashing the weights may take minutes: meanwhile the engine runs
        without a cache.
        """
        thread = threading.Thread(target=self._begin, args=(kv_caches,), name="lmcache-begin", daemon=True)
        thread.start()
        thread.join(TIMING.start_seconds)

    def go_offline(self) -> None:
        """Begin no more copies. Running loads and stores are still reported."""
        with self._lock:
            self._is_offline = True
            self._client = None
            speaker, self._speaker = self._speaker, None
        if speaker is not None:
            speaker.close()
        _cancel(self._stores.values())

    def handle_preemptions(self, meta: Any) -> None:
        """Wait for copies of blocks that the engine is about to overwrite, and abort them at the limit."""
        step = _step(meta)
        self._relay(step)
        if step.reclaimed:
            self._end(step.reclaimed, TIMING.preemption_seconds)
        if step.left_behind:
            began = self._clock()
            gained = LEFT_BEHIND_SHARE * (began - self._patience_at)
            patience = min(TIMING.left_behind_seconds, self._patience + gained)
            self._end(step.left_behind, patience)
            self._patience_at = self._clock()
            self._patience = max(0.0, patience - (self._patience_at - began))

    def start_loads(self, meta: Any) -> None:
        """Begin the step's loads, unless they have already begun."""
        self._relay(step := _step(meta))
        if not (jobs := step.loads):
            return
        loads, client = [job for job in jobs if job.request_id not in self._loading], self._client
        fence = self._fence() if loads else None
        for job in loads:
            self._loading.add(job.request_id)
            self._loader.submit(self._run, LoadTransfer(job, fence, self._names), client)

    def start_stores(self, meta: Any) -> None:
        """Begin the step's stores. Its forward pass has ended or, on a GPU, is queued before the fence."""
        self._announce(_step(meta))
        self._begin_waiting()

    def collect(self, meta: Any) -> tuple[set[str], set[str]]:
        """Return (finished requests whose blocks are released, requests whose load ended).

        Waits at most ``LOAD_WAIT_SECONDS`` for a load, and only if the step computes nothing.
        """
        self.off.repeat()
        step = _step(meta)
        self._relay(step)
        self._announce(step)
        if step.held:
            self._held |= dict.fromkeys(step.held, self._clock())
        loaded: set[str] = set()
        num_loading = len(self._loading)
        while not self._ended.empty():
            self._note_ended(self._ended.get(), loaded)
        if step.is_idle and not loaded and len(self._loading) == num_loading and self._may_wait():
            self._wait_for_a_load(loaded)
        return (self._release_held() if self._held else set()), loaded

    def take_bad_blocks(self) -> set[int]:
        """Return blocks of ended loads that hold no valid KV, for an engine that fails loads by block."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed_requests(self) -> set[str]:
        """Return requests whose loads failed, for an engine that restarts such requests."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self, meta: Any) -> WorkerReport | None:
        """Return the report for the scheduler side since the last call; None if it would be empty."""
        timed_step = _step(meta).timed_step
        if not self._is_identity_reported and self.identity is not None:
            self._note_parts(isinstance(self.identity, PartedIdentity))
            self._is_identity_reported, self._report.identity = True, self.identity_to_report
        if self._speaker is not None and isinstance(self._report, PartedReport):
            self._report.answers |= self._speaker.take_answers()
        if not (timed_step or self._report):
            return None
        report, self._report = self._report, type(self._report)()
        report.timed_step = timed_step
        return report

    @property
    def identity_to_report(self) -> EngineIdentity | None:
        """Identity for the scheduler side, which needs that of one rank per part; None: it has none yet."""
        identity = self.identity
        is_silent = isinstance(identity, PartedIdentity) and identity.part > 0 and not identity.is_speaker
        return None if is_silent else identity

    def take_figures(self) -> dict[str, float]:
        """Return the summed figures of the copies that ended since the last call."""
        figures, self._figures = self._figures, Counter()
        return dict(figures)

    def close(self) -> None:
        """End the threads and detach. Waits for running copies and calls."""
        self.go_offline()
        for thread in (self._loader, self._storer, self._urgent_storer):
            thread.shutdown()
        self._resources.close()

    def _begin(self, kv_caches: Mapping[str, Any]) -> None:
        try:
            client, copier, identity = self._attach(kv_caches)
        except Exception as error:  # whatever it is: an engine that can't be cached must run unaffected
            self.off.warn(f"{NOT_CACHED}: {error}")
            return
        with self._lock:
            if not self._is_offline:
                if isinstance(identity, PartedIdentity) and identity.part:
                    self._names = PartNames(identity)
                    if identity.is_speaker:
                        self._speaker = PartSpeaker(client, identity, self._names)
                self._copier, self.identity, self._client = copier, identity, client
                self._resources.callback(copier.close)
                self._resources.callback(client.close)
                return
        client.close()

    def _relay(self, step: StepMeta) -> None:
        """Begin the step's calls for the scheduler side, once."""
        if self._speaker is not None and isinstance(step, PartedStep) and step is not self._relayed:
            self._relayed = step
            self._speaker.take(step.relays)

    def _note_parts(self, has_parts: bool) -> None:
        if has_parts and not isinstance(self._report, PartedReport):
            self._report = PartedReport(**vars(self._report))

    def _end(self, job_ids: Iterable[int], seconds: float) -> None:
        """Wait for copies at most ``seconds`` in total, then abort them."""
        transfers = [self._stores[job_id] for job_id in job_ids if job_id in self._stores]
        deadline = self._clock() + seconds * self._can_wait
        for transfer in transfers:
            if transfer not in self._waiting:
                transfer.ended.wait(max(0.0, deadline - self._clock()))
        _cancel(transfers)

    def _announce(self, step: StepMeta) -> None:
        """Count the step's stores as running, once. First begin stores of the last step, if necessary."""
        if step is self._step:
            return
        self._begin_waiting()
        self._step = step
        self._note_parts(isinstance(step, PartedStep))
        if self.identity is not None and self.identity.is_replica:
            self._report.stores_ended.update(job.job_id for job in step.stores)
            return
        for job in step.stores:
            self._stores[job.job_id] = transfer = self.make_store(job)
            self._waiting.append(transfer)

    def _begin_waiting(self) -> None:
        if not self._waiting:
            return
        client, fence = self._client, self._fence()
        salts = self._step.salts if isinstance(self._step, PartedStep) else {}
        while self._waiting:
            transfer = self._waiting.pop(0)
            transfer.fence = fence
            if self._names is not None:
                transfer.job = self._names.store(transfer.job, salts)
            storer = self._urgent_storer if transfer.job.is_transient else self._storer
            storer.submit(self._run, transfer, client)

    def make_store(self, job: StoreJob) -> StoreTransfer:
        """Create the transfer of a job."""
        return StoreTransfer(job)

    def _may_wait(self) -> bool:
        """Return True if an idle engine may wait for a load."""
        return self._can_wait and bool(self._loading)

    def _wait_for_a_load(self, loaded: set[str]) -> None:
        deadline, num_loading = time.monotonic() + LOAD_WAIT_SECONDS, len(self._loading)
        while len(self._loading) == num_loading:
            try:
                ended = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._note_ended(ended, loaded)

    def _fence(self) -> Fence:
        return self._copier.fence() if self._client is not None and self._copier is not None else None

    def _run(self, transfer: EngineTransfer, client: SidecarClient | None) -> None:
        """Copy, unless this rank had no ``client`` when the copy began: it would lack fence and names."""
        copier, began = self._copier, time.perf_counter()
        try:
            session = client.session if client is not None and self._client is not None else None
            if session is not None and copier is not None:
                transfer.run(session, copier)
        except SidecarError as error:  # an unanswered call ends the session, so later stores don't wait
            logger.debug("A copy for request %s failed: %s", transfer.request_id, error)
        except Exception:
            logger.exception("A copy for request %s failed; later copies go on", transfer.request_id)
        finally:
            transfer.seconds = time.perf_counter() - began
            transfer.ended.set()
            self._ended.put(transfer)

    def _note_ended(self, transfer: EngineTransfer, loaded: set[str]) -> None:
        self._figures.update(transfer.figures)
        if isinstance(transfer, StoreTransfer):
            self._report.stores_ended[transfer.job.job_id] += 1
            if isinstance(self._report, PartedReport) and not transfer.is_complete:
                self._report.incomplete.add(transfer.job.job_id)
            del self._stores[transfer.job.job_id]
            return
        self._loading.discard(transfer.request_id)
        if not isinstance(transfer, LoadTransfer):
            return
        loaded.add(transfer.request_id)
        if bad_blocks := transfer.bad_blocks:
            self._report.failed_loads.add(transfer.request_id)
            if transfer.job.fails_by_block:
                self._bad_blocks.update(bad_blocks)
            else:
                self._failed_requests.add(transfer.request_id)

    def _release_held(self) -> set[str]:
        expired_since = self._clock() - TIMING.hold_seconds
        busy = {transfer.job.request_id for transfer in self._stores.values()}
        released = {name for name, since in self._held.items() if name not in busy or since <= expired_since}
        for request_id in released:
            del self._held[request_id]
        _cancel(transfer for transfer in self._stores.values() if transfer.job.request_id in released)
        return released


def _cancel(transfers: Iterable[StoreTransfer]) -> None:
    for transfer in transfers:
        transfer.cancel()


def _step(meta: Any) -> StepMeta:
    """Return the scheduler side's message; an empty message if that side does not run."""
    return meta if isinstance(meta, StepMeta) else _NO_STEP
