"""The worker half: one rank's copies, on two threads, and the rules of how long blocks must live.

Loads and stores have a thread each: a request that waits for its load must not queue behind stores. The
methods are called on the engine's model thread; none waits longer than it says. Both sides of the engine's
contract are kept here, whatever fails: every load is reported exactly once, and only after its copy ended;
every held request is reported exactly once, at most ``HOLD_SECONDS`` later.

- **Finished**: blocks are held at most ``HOLD_SECONDS``, then what is not copied is aborted.
- **Preempted**: waits at most ``PREEMPTION_SECONDS`` for copies that read the blocks, then aborts them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

from lmcache.engines.vllm.copier import EngineCopier, Fence
from lmcache.engines.vllm.plan import IDLE_WAIT_SECONDS, EngineIdentity, StepMeta, WorkerReport
from lmcache.engines.vllm.transfers import LoadTransfer, StoreTransfer
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.errors import SidecarError

logger = logging.getLogger("vllm.lmcache")

HOLD_SECONDS = 2.0
PREEMPTION_SECONDS = 0.005

Attach = Callable[[Mapping[str, Any]], tuple[SidecarClient, EngineCopier, EngineIdentity]]


class Worker:
    """See the module. Until ``register_kv_caches`` succeeds, loads fail and nothing is stored."""

    def __init__(self, attach: Attach, clock: Callable[[], float] = time.monotonic) -> None:
        """``attach`` takes the engine's KV tensors by layer; what it raises says why nothing is cached."""
        self.identity: EngineIdentity | None = None
        self._attach = attach
        self._clock = clock
        self._client: SidecarClient | None = None  # None: nothing is copied
        self._copier: EngineCopier | None = None
        self._loader = futures.ThreadPoolExecutor(1, "lmcache-load")
        self._storer = futures.ThreadPoolExecutor(1, "lmcache-store")
        self._ended: queue.SimpleQueue[LoadTransfer | StoreTransfer] = queue.SimpleQueue()
        self._loading: set[str] = set()
        self._stores: dict[str, dict[StoreTransfer, futures.Future[None]]] = {}  # by request, not ended
        self._held: dict[str, float] = {}  # request id -> when it was first asked for
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Begin to work on these tensors; on a reason not to, log it and stay idle."""
        try:
            self._client, self._copier, self.identity = self._attach(kv_caches)
        except Exception as error:  # of any kind: an engine that we don't understand must run untouched
            logger.warning("LMCache Cluster does not cache this engine: %s", error)
        self._report.identity = self.identity

    def go_offline(self) -> None:
        """Copy nothing any more. What is under way is still reported."""
        self._client = None
        for stores in self._stores.values():
            for transfer in stores:
                transfer.cancel()

    def handle_preemptions(self, meta: Any) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        stores: dict[StoreTransfer, futures.Future[None]] = {}
        for request_id in _step(meta).preempted:
            stores |= self._stores.get(request_id, {})
        futures.wait(stores.values(), PREEMPTION_SECONDS)
        for transfer in stores:
            transfer.cancel()

    def start_loads(self, meta: Any) -> None:
        """Begin the step's loads. A load that was begun already is not begun again."""
        loads = [job for job in _step(meta).loads if job.request_id not in self._loading]
        fence = self._fence() if loads else None
        for job in loads:
            self._loading.add(job.request_id)
            self._loader.submit(self._run, LoadTransfer(job, fence))

    def start_stores(self, meta: Any) -> None:
        """Begin the step's stores: its forward is done or, on a GPU, queued before the fence."""
        stores = _step(meta).stores
        fence = self._fence() if stores else None
        for job in stores:
            transfer = StoreTransfer(job, fence)
            under_way = self._stores.setdefault(job.request_id, {})
            under_way[transfer] = self._storer.submit(self._run, transfer)

    def collect(self, meta: Any) -> tuple[set[str], set[str]]:
        """Return (requests whose blocks are not needed any more, requests whose load ended)."""
        step = _step(meta)
        self._held |= dict.fromkeys(step.held, self._clock())
        patience = IDLE_WAIT_SECONDS if step.is_idle and self._loading else 0.0
        loaded: set[str] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._note_ended(self._ended.get(timeout=patience), loaded)
                patience = 0.0
        return self._let_go(), loaded

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the ended loads that hold no KV."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self, meta: Any) -> WorkerReport | None:
        """What the scheduler half has to know."""
        report, self._report = self._report, WorkerReport()
        report.timed_step = _step(meta).timed_step
        return report or None

    def close(self) -> None:
        """End the threads and detach; waits for the copy and the call under way."""
        client = self._client
        self.go_offline()
        for thread in (self._loader, self._storer):
            thread.shutdown()
        if client is not None:
            client.close()

    def _fence(self) -> Fence:
        return self._copier.fence() if self._client is not None and self._copier is not None else None

    def _run(self, transfer: LoadTransfer | StoreTransfer) -> None:
        client, copier = self._client, self._copier
        try:
            session = client.session if client is not None else None
            if session is not None and copier is not None:
                transfer.run(session, copier)
        except SidecarError as error:  # without an answer this session is over: no further store waits
            logger.debug("The sidecar did not take part in a copy: %s", error)
        except Exception:
            logger.exception("A copy failed; the cache goes on without it")
        finally:
            self._ended.put(transfer)

    def _note_ended(self, transfer: LoadTransfer | StoreTransfer, loaded: set[str]) -> None:
        request_id = transfer.job.request_id
        if isinstance(transfer, StoreTransfer):
            self._report.stores_ended[transfer.job.job_id] += 1
            del self._stores[request_id][transfer]
            if not self._stores[request_id]:
                del self._stores[request_id]
            return
        self._loading.discard(request_id)
        loaded.add(request_id)
        if transfer.bad_blocks:
            self._bad_blocks.update(transfer.bad_blocks)
            self._report.failed_loads.add(request_id)

    def _let_go(self) -> set[str]:
        ended_by = self._clock() - HOLD_SECONDS
        free = {name for name, since in self._held.items() if name not in self._stores or since <= ended_by}
        for request_id in free:
            del self._held[request_id]
            for transfer in self._stores.get(request_id, ()):
                transfer.cancel()
        return free


def _step(meta: Any) -> StepMeta:
    """The scheduler half's message; an empty one when that half does not run."""
    return meta if isinstance(meta, StepMeta) else StepMeta()
