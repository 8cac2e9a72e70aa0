"""Copies between the engine's KV and the arena, on two threads, and the rules of how long blocks must live.

Loads and stores have a thread each: a request that waits for its load must not queue behind stores. Both
sides of the engine's contract are kept here, whatever fails: every load is reported exactly once, and only
after its copy ended; every held request is reported exactly once, at most ``HOLD_SECONDS`` later.

- **Store**: waits for the fence that was set after the step's forward; a slot is committed only if its copy
  ended while the engine still owned the blocks (``StoreTransfer.note_copied``).
- **Finished**: blocks are held at most ``HOLD_SECONDS``, then what is not copied is aborted.
- **Preempted**: waits at most ``PREEMPTION_SECONDS`` for copies that read the blocks, then aborts them.
- **Load**: each slot is checked after its copy; was it given away meanwhile, the blocks count as not loaded.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from lmcache.engines.vllm.copier import EngineCopier, Fence
from lmcache.engines.vllm.pause import Pause
from lmcache.engines.vllm.plan import GROUP, EngineIdentity, LoadJob, StoreJob, WorkerReport
from lmcache.rpc.client import Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable
from lmcache.tiers.base import Reserved, Slot

logger = logging.getLogger(__name__)

HOLD_SECONDS = 2.0
PREEMPTION_SECONDS = 0.005
IDLE_WAIT_SECONDS = 0.0005
"""When there is nothing to do but to wait: an engine in its caller's process would spin for the GIL."""


class LoadTransfer:
    """A LoadJob under way."""

    def __init__(self, job: LoadJob, fence: Fence) -> None:
        self.job = job
        self._fence = fence
        self.bad_blocks: tuple[int, ...] = job.blocks
        """Blocks that can't be used: all, until their pieces are proven good."""

    def run(self, session: Session, copier: EngineCopier) -> None:
        """Copy piece by piece; the first bad one ends it: KV after a gap is useless. Raises SidecarError."""
        if session.slots is None:
            return
        with session.copying():
            for piece in self.job.pieces:
                if not session.holds(piece.slot):  # from an older arena: its row may not even exist
                    return
                copier.load(session.slots[piece.slot.row], piece.first_block, piece.blocks, self._fence)
                if not session.holds(piece.slot):
                    return
                self.bad_blocks = self.bad_blocks[len(piece.blocks) :]


class StoreTransfer:
    """A StoreJob under way. ``cancel`` may come at any time, from the engine's thread."""

    def __init__(self, job: StoreJob, fence: Fence) -> None:
        self.job = job
        self._fence = fence
        self._lock = threading.Lock()  # protects what follows
        self._is_cancelled = False
        self._copied: list[Slot] = []
        self.ended = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """True when the engine may have given the blocks away."""
        return self._is_cancelled

    def cancel(self) -> None:
        """From now on no copy of this job counts: the engine takes the blocks back."""
        with self._lock:
            self._is_cancelled = True

    def note_copied(self, slot: Slot) -> bool:
        """Count a copy that ended, unless the engine took the blocks back before: its bytes may be torn."""
        with self._lock:
            if not self._is_cancelled:
                self._copied.append(slot)
            return not self._is_cancelled

    def run(self, session: Session, copier: EngineCopier) -> None:
        """Reserve, copy, commit what was copied in time, abort the rest. Raises SidecarError."""
        if session.slots is None or self._is_cancelled:
            return
        with session.copying():
            reserved = self._reserve(session)
            try:
                per_chunk = len(self.job.blocks) // len(self.job.hashes)
                for chunk, slot in reserved:
                    blocks = self.job.blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
                    copier.store(session.slots[slot.row], blocks, self._fence)
                    if not self.note_copied(slot):
                        break
            finally:
                self._settle(session, [slot for _, slot in reserved])

    def _reserve(self, session: Session) -> list[tuple[int, Slot]]:
        names, tenant = self.job.context.chunk_keys(self.job.hashes), self.job.context.tenant
        answers = session.reserve(
            GROUP,
            names,
            request_id=self.job.request_id,
            first_chunk=self.job.first_chunk,
            tenant=tenant,
        )
        return [
            (chunk, answer.slot)
            for chunk, answer in enumerate(answers)
            if answer.result is Reserved.SLOT and answer.slot is not None
        ]

    def _settle(self, session: Session, reserved: list[Slot]) -> None:
        rest = [slot for slot in reserved if slot not in self._copied]
        try:
            if self._copied:
                session.commit(self._copied)
        finally:
            if rest:
                session.abort(rest)


class Transfers:
    """All transfers of one rank. The engine's thread calls the methods; none waits longer than it says."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._client: SidecarClient | None = None  # None: nothing can be copied
        self._copier: EngineCopier | None = None
        self._loader = ThreadPoolExecutor(1, "lmcache-load")
        self._storer = ThreadPoolExecutor(1, "lmcache-store")
        self._pause = Pause()  # of stores; a load is asked for by somebody who was just answered
        self._ended: queue.SimpleQueue[LoadTransfer | StoreTransfer] = queue.SimpleQueue()
        self._progress = threading.Event()  # set after each put into _ended
        self._loading: set[str] = set()
        self._stores: dict[str, set[StoreTransfer]] = {}  # request id -> not ended
        self._held: dict[str, float] = {}  # request id -> when it was first asked for
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()

    def begin(self, client: SidecarClient, copier: EngineCopier, identity: EngineIdentity) -> None:
        """From now on jobs are carried out; before, loads fail and stores are dropped."""
        self._client, self._copier = client, copier
        self._report.identity = identity

    def go_offline(self) -> None:
        """Copy nothing any more. What is under way is still reported."""
        self._client = None
        for transfer in [store for stores in self._stores.values() for store in stores]:
            transfer.cancel()

    def load(self, job: LoadJob, fence: Fence) -> None:
        """Begin a load."""
        if job.request_id in self._loading:
            return
        self._loading.add(job.request_id)
        self._loader.submit(self._run, LoadTransfer(job, fence))

    def store(self, job: StoreJob, fence: Fence) -> None:
        """Begin a store."""
        transfer = StoreTransfer(job, fence)
        self._stores.setdefault(job.request_id, set()).add(transfer)
        self._storer.submit(self._run, transfer)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """The engine is about to overwrite these requests' blocks."""
        transfers = [store for request_id in request_ids for store in self._stores.get(request_id, ())]
        deadline = time.monotonic() + PREEMPTION_SECONDS
        for transfer in transfers:
            if not transfer.ended.wait(max(0.0, deadline - time.monotonic())):
                transfer.cancel()

    def collect(self, newly_held: Iterable[str], is_idle: bool) -> tuple[set[str], set[str]]:
        """Return the requests that are not held any more, and those whose load ended."""
        for request_id in newly_held:
            self._held[request_id] = self._clock()
        if is_idle and self._loading and self._ended.empty():
            self._progress.wait(IDLE_WAIT_SECONDS)
        self._progress.clear()
        loaded: set[str] = set()
        while not self._ended.empty():
            self._note_ended(self._ended.get(), loaded)
        return self._let_go(), loaded

    def take_bad_blocks(self) -> set[int]:
        """Blocks of ended loads that hold no KV."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self, timed_step: int) -> WorkerReport | None:
        """What the scheduler half has to know."""
        report, self._report = self._report, WorkerReport()
        report.timed_step = timed_step
        return report or None

    def close(self) -> None:
        """End the threads and detach; waits for the copy and the call under way."""
        client = self._client
        self.go_offline()
        for thread in (self._loader, self._storer):
            thread.shutdown()
        if client is not None:
            client.close()

    def _run(self, transfer: LoadTransfer | StoreTransfer) -> None:
        client, copier = self._client, self._copier
        session = client.session if client is not None else None
        try:
            if session is not None and copier is not None and not self._is_paused(transfer, session):
                transfer.run(session, copier)
        except SidecarUnavailable as error:
            if session is not None:
                self._pause.begin(session)
            logger.debug("The sidecar did not answer: %s", error)
        except SidecarError as error:
            logger.debug("The sidecar refused: %s", error)
        except Exception:
            logger.exception("A copy failed; the cache goes on without it")
        finally:
            self._end(transfer)

    def _is_paused(self, transfer: LoadTransfer | StoreTransfer, session: Session) -> bool:
        return isinstance(transfer, StoreTransfer) and self._pause.covers(session)

    def _end(self, transfer: LoadTransfer | StoreTransfer) -> None:
        if isinstance(transfer, StoreTransfer):
            transfer.ended.set()
        self._ended.put(transfer)
        self._progress.set()

    def _note_ended(self, transfer: LoadTransfer | StoreTransfer, loaded: set[str]) -> None:
        request_id = transfer.job.request_id
        if isinstance(transfer, StoreTransfer):
            self._report.stores_ended[transfer.job.job_id] += 1
            stores = self._stores[request_id]
            stores.discard(transfer)
            if not stores:
                del self._stores[request_id]
            return
        self._loading.discard(request_id)
        loaded.add(request_id)
        if transfer.bad_blocks:
            self._bad_blocks.update(transfer.bad_blocks)
            self._report.failed_loads.add(request_id)

    def _let_go(self) -> set[str]:
        now = self._clock()
        free = {request_id for request_id in self._held if request_id not in self._stores}
        for request_id in self._held.keys() - free:
            if now - self._held[request_id] >= HOLD_SECONDS:
                for transfer in self._stores[request_id]:
                    transfer.cancel()
                free.add(request_id)
        for request_id in free:
            del self._held[request_id]
        return free
