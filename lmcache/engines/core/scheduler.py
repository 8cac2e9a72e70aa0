"""The scheduler side: decides what is loaded and stored. On the engine's scheduler thread.

The life of a request here, with the hooks of an engine's connector that call it::

    add ──▶ a hint: lower tiers may bring what they have
    num_loadable ──▶ the index in shared memory says how much can be loaded (the offer); None while more is
                     on its way
    note_allocated ──▶ the offer becomes a LoadJob; its lease follows as a message with the step, or with the
                       next one where nothing else is computed: most loads have ended by then and need none
    note_scheduled ──▶ a StoreJob for every chunk that this step completes
    finish ──▶ blocks are held while StoreJobs of the request are out
    take_report, note_loaded, note_released ──▶ what the workers ended

**The scheduler never waits** for anybody while it has something to compute. In a step without tokens it may
sleep ``IDLE_WAIT_SECONDS`` for an answer: an engine in its caller's process would spin otherwise, and its
spinning takes the GIL from the very thread that answers.

**A request waits** while more rows come sooner than it would compute them: rows that another request of this
engine is computing now are not computed twice, and for rows that the sidecar says are on their way see
``RowWait``.

**A reset** of the engine's caches begins a new namespace: what was stored before is not found any more, and
what requests of before still do under the old one stays there.

Without a lookup thread (no worker has said who it is, unsupported model, offline) it knows no requests, and
every method answers what an engine without a cache expects; a load that was promised before is still handed
out, to fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

from lmcache import keys
from lmcache.engines.core.events import Chunk, ChunkEvents
from lmcache.engines.core.grid import BlockTables, Grid
from lmcache.engines.core.jobs import EngineIdentity, LoadJob, Offer, StepMeta, WorkerReport
from lmcache.engines.core.lookups import LookupThread
from lmcache.engines.core.requests import Computing, EngineRequest, FindExtraKeys, RequestState, Ticket
from lmcache.engines.core.stores import Snapshot, Stores
from lmcache.engines.core.waiting import Arrivals, PrefillRate, RowWait
from lmcache.rpc.client import SidecarClient

IDLE_WAIT_SECONDS = 0.0005

ASK_AGAIN_SECONDS = 0.01
"""Between two questions what is still on its way, of all requests that wait."""

OLD_SECONDS = 1.0
"""An answer that was given so long ago says nothing any more: the request queued meanwhile."""

GetTables = Callable[[str], "BlockTables | None"]
"""The block tables of a request that is scheduled in this step, as they are now."""

_NOTHING, _NOTHING_IDLE = StepMeta(), StepMeta(is_idle=True)
"""For the steps without work for us: most of them."""


class SchedulerSide:
    """See the module. One thread calls it. Methods may raise; the connector then takes it offline."""

    def __init__(
        self,
        connect: Callable[[EngineIdentity], SidecarClient],
        extra_keys_of: Callable[[Any, int], FindExtraKeys | None],
        answer_seconds: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        events: ChunkEvents | None = None,
    ) -> None:
        """``connect`` starts a client; ``extra_keys_of`` takes a request and the size of chunks and returns
        what finds its extra keys, on the lookup thread; None for a request without any.

        The sidecar may be silent for ``answer_seconds`` before it answers, and between rows that it brings;
        0.0: as measured. So is the prefill rate. ``events`` is told of chunks that are stored and loaded.
        """
        self._events = events
        self._connect = connect
        self._extra_keys_of = extra_keys_of
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._lookups: LookupThread | None = None
        self._is_offline = False
        self._grid = Grid(1, 1, ())
        self._tenant_secret = b""
        self._namespace = b""  # the engine's, or of the last reset
        self._states: dict[str, RequestState] = {}
        self._computing = Computing()
        self._stores: Stores | None = None
        self._rate = PrefillRate(prefill_tokens_per_second)
        self._arrivals = Arrivals()
        self._num_waiting = 0  # requests that wait for an answer, or for rows, in this step
        self._num_waited = 1  # of the step before
        self._num_steps = 0  # in which something was computed
        self._next = StepMeta()  # what the workers are told with this step

    def adopt(self, messages: Iterable[Any]) -> None:
        """Begin to look up when the workers say who they are; messages of other connectors are ignored."""
        for message in messages:
            if isinstance(message, EngineIdentity) and self._lookups is None and not self._is_offline:
                self._grid, self._tenant_secret = message.grid, message.hello.namespace
                self._stores = Stores(self._grid, message.num_ranks, self._computing)
                self._namespace = self._namespace or message.hello.namespace
                self._lookups = LookupThread(
                    self._connect(message),
                    message,
                    lambda: self._rate.tokens_per_second,
                    self._answer_seconds,
                    self._clock,
                )

    def go_offline(self) -> None:
        """Release all leases, detach, forget all requests for good.

        What was promised to the engine is still handed to the workers.
        """
        self._is_offline = True
        for state in self._states.values():
            self._release(state)
            self._reclaim(state)  # nobody will hold the blocks that are read
        if self._lookups is not None:
            self._lookups.close()
        self._lookups = None
        self._stores = None
        self._states.clear()
        self._computing.clear()
        self._next.stores.clear()

    def reset_cache(self) -> bool:
        """Find nothing of what was stored so far any more: the weights may be others from now on.

        False: a load of it is under way, and its request will go on with it.
        """
        self._namespace = os.urandom(32)
        if self._events is not None:
            self._events.clear()
        self._computing.clear()
        for state in self._states.values():
            state.offer = None
            if not state.is_finished:
                self._reclaim(state)  # its blocks may be anybody's from now on
        return not any(state.is_loading for state in self._states.values())

    def add(self, request: EngineRequest) -> None:
        """Give a hint of a request that arrived; nothing is leased for it."""
        if self._lookups is not None:
            ticket = self._ask(request, self._lookups)
            self._states[request.request_id] = RequestState(request, ticket)

    def num_loadable(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Say how many tokens can be loaded beyond the computed ones; None: ask again."""
        state, lookups = self._states.get(request.request_id), self._lookups
        if state is None or lookups is None:
            return 0
        if state.is_allocated or state.ticket.namespace != self._namespace:
            # It was preempted, its load failed, or the engine was reset: nothing of it is computed any more.
            self._computing.end(state)
            state.restart(self._ask(request, lookups))
        if state.has_failed or request.skip_reading_prefix_cache:
            return 0
        grid = self._grid
        num_chunks = grid.num_loadable_chunks(len(request.block_hashes), request.num_tokens)
        state.num_held = grid.num_held_chunks(num_computed_tokens, request.num_tokens, num_chunks)
        if not grid.loadable_tokens(num_computed_tokens, request.num_tokens, num_chunks):
            return self._decline(state, lookups)
        num_here = num_computed_tokens // grid.chunk_tokens  # in the engine itself
        if self._is_computed_now(state.ticket, max(state.num_found, num_here), lookups):
            self._num_waiting += 1
            return None
        hit = lookups.find(state.ticket, num_here)
        num_found = hit.num_chunks if hit is not None else 0
        state.num_found = hit.num_leading if hit is not None else 0
        if num_found < num_chunks and self._must_wait(state, lookups, num_found, num_here):
            self._num_waiting += 1
            return None
        if hit is None:
            return 0
        num_tokens = grid.loadable_tokens(num_computed_tokens, request.num_tokens, num_found)
        if not num_tokens and not grid.is_full:
            return self._decline(state, lookups)
        state.num_stored_chunks = num_found
        state.offer = Offer(num_computed_tokens, num_tokens, hit.found)
        return num_tokens

    def note_allocated(self, request_id: str, tables: BlockTables, num_tokens: int) -> None:
        """Turn the offer into a load of ``num_tokens``, now that its blocks are allocated. The engine then
        waits for it."""
        state = self._states.get(request_id)
        offer = None
        if state is not None and not state.is_allocated:
            offer, state.offer, state.wait, state.is_allocated = state.offer, None, None, True
            self._computing.begin(state)
            if not num_tokens and self._lookups is not None and not state.has_failed:
                self._lookups.note_scheduled(state.ticket, state.num_held)
        if num_tokens == 0:
            return
        if state is None or self._lookups is None or offer is None or num_tokens > offer.num_tokens:
            self._next.loads.append(LoadJob.failing(request_id, self._grid, tables))
            return
        self._next.loads.append(LoadJob.from_offer(request_id, self._grid, offer, num_tokens, tables))
        if self._events is not None and state.ticket.keys:
            self._events.note_found(state.request, state.ticket.keys[0][: len(offer.found[0].rows)])
        self._lookups.note_scheduled(state.ticket, state.num_held, offer.start, num_tokens)
        state.is_loading = True

    def note_preempted(self, request_id: str) -> None:
        """Its blocks are given to others in this step."""
        state = self._states.get(request_id)
        if state is not None:  # its running stores may be aborted; Reserve says which chunks are there
            self._reclaim(state)
            self._computing.end(state)
            state.forget_progress()

    @property
    def reads_transient_blocks(self) -> bool:
        """Must ``reclaim_blocks`` be told what a step hands out?"""
        return self._stores is not None and self._stores.reads_transient_blocks

    def reclaim_blocks(self, handed_out: Set[int]) -> None:
        """Blocks get a new owner in this step: nothing that is read from them later is committed."""
        if self._stores is not None:
            loaded = (load.blocks for load in self._next.loads)
            self._next.left_behind |= self._stores.reclaim_blocks(set(handed_out).union(*loaded))

    def note_scheduled(
        self,
        request_id: str,
        get_tables: GetTables,
        num_computed_tokens: int,
        num_drafts: int = 0,
        snapshots: Iterable[Snapshot] = (),
    ) -> None:
        """Store what this step completes.

        ``num_computed_tokens``: when the step is over, without its drafts; ``snapshots``: see ``stores``.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if num_drafts:
            state.has_drafts = True
        # Most steps of most requests complete no chunk.
        if num_computed_tokens >= (state.num_stored_chunks + 1) * self._grid.chunk_tokens:
            self._store(state, get_tables, num_computed_tokens, snapshots=snapshots)

    def end_step(self, num_tokens: int) -> StepMeta:
        """Hand out the work of a step that computes ``num_tokens``."""
        if self._num_waiting and not num_tokens and self._lookups is not None:
            self._lookups.answered.wait(IDLE_WAIT_SECONDS)
            self._lookups.answered.clear()
        self._num_waiting, self._num_waited = 0, max(1, self._num_waiting)
        self._num_steps += num_tokens > 0
        step = self._rate.begin(num_tokens, self._clock()) if self._lookups else 0
        meta = self._next
        if self._lookups is not None and (num_tokens or not meta.loads):
            self._lookups.lease_loads()
        if not (meta.loads or meta.stores or meta.reclaimed or meta.left_behind or meta.held or step):
            return _NOTHING if num_tokens else _NOTHING_IDLE
        meta.is_idle, meta.timed_step = not num_tokens, step
        self._next = StepMeta()
        return meta

    def note_loaded(self, request_id: str) -> None:
        """Its load ended on all ranks."""
        state = self._states.get(request_id)
        if state is not None:
            state.is_loading = False
            self._release(state)
            if state.is_finished:
                del self._states[request_id]

    def note_released(self, request_id: str) -> None:
        """Its blocks are not held any more."""
        self._states.pop(request_id, None)

    def finish(self, request: EngineRequest, tables: BlockTables) -> bool:
        """Return whether the request's blocks must be held; the workers then say until when."""
        state = self._states.get(request.request_id)
        if state is None:
            return False
        state.is_finished = True
        if state.is_loading:  # the engine holds the blocks itself until the load is reported
            self._computing.end(state)
            return False
        # With async scheduling the last chunk may have got its hash only now. The last token has no KV yet.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._store(state, lambda _: tables, num_tokens, is_step_end=False)
        self._computing.end(state, slice(state.num_stored_chunks, None))
        if not state.num_stores:
            del self._states[request.request_id]
            return False
        self._next.held.append(request.request_id)
        return True

    def take_report(self, report: WorkerReport) -> None:
        """Note what the workers ended, of all ranks."""
        self.adopt([report.identity])
        self._rate.end(report.timed_step, self._clock())
        for request_id in report.failed_loads:
            state = self._states.get(request_id)
            if state is not None:
                state.has_failed = True
                state.num_stored_chunks = 0  # what was found is gone: store it again
        if self._stores is not None:
            for job_id, num_ranks in report.stores_ended.items():
                if self._stores.note_ended(job_id, num_ranks) and self._events is not None:
                    self._events.end_store(job_id)

    def take_changes(self) -> tuple[list[Chunk], list[tuple[bytes, ...]]]:
        """Chunks that came into memory and the hashes of those that left it; see ``ChunkEvents``."""
        if self._events is None:
            return [], []
        index = self._lookups.index if self._lookups is not None else None
        return self._events.take(index, self._grid.chunk_tokens // self._grid.hash_tokens)

    def _ask(self, request: EngineRequest, lookups: LookupThread) -> Ticket:
        num_chunks = self._grid.num_loadable_chunks(len(request.block_hashes), request.num_tokens)
        ticket = Ticket(
            request.request_id,
            self._grid.chunk_hashes(request.block_hashes, 0, num_chunks),
            self._namespace,
            request.cache_salt or "",
            keys.tenant(request.cache_salt or "", self._tenant_secret),
            self._extra_keys_of(request, self._grid.chunk_tokens),
            is_read=not request.skip_reading_prefix_cache,
        )
        lookups.ask(ticket)
        return ticket

    def _decline(self, state: RequestState, lookups: LookupThread) -> int:
        """Nothing is loaded; what is there already is not stored again."""
        hit = lookups.find(state.ticket)
        state.num_stored_chunks = hit.num_chunks if hit is not None else 0
        return 0

    def _must_wait(self, state: RequestState, lookups: LookupThread, num_found: int, num_here: int) -> bool:
        now, ticket = self._clock(), state.ticket
        if self._is_computed_now(ticket, max(state.num_found, num_here), lookups):
            return True
        rate = self._rate.tokens_per_second
        chunk_seconds = self._grid.chunk_tokens / rate if rate else 0.0
        num_missing = len(ticket.hashes) - num_found
        if ticket.keys is None:
            return lookups.is_attached and not lookups.is_late(ticket, num_missing * chunk_seconds)
        if lookups.knows_all(ticket):
            return False
        answer = ticket.answer
        if answer is not None and now - ticket.answered_at >= OLD_SECONDS and state.wait is None:
            ticket.answer = None
            if not ticket.is_asking:
                lookups.ask(ticket)
            return True
        if answer is None:
            return not lookups.is_late(ticket, num_missing * chunk_seconds)
        if num_found >= answer.num_expected and not answer.is_probing:
            return False
        if now - ticket.asked_at >= ASK_AGAIN_SECONDS * self._num_waited and not ticket.is_asking:
            lookups.ask(ticket)
        if state.wait is None:
            state.wait = RowWait(state.num_found, now, self._num_steps, self._answer_seconds)
        if not answer.is_probing:
            num_missing = answer.num_expected - num_found
        return not state.wait.is_over(
            state.num_found, num_missing, now, self._arrivals, chunk_seconds, self._num_steps
        )

    def _is_computed_now(self, ticket: Ticket, chunk: int, lookups: LookupThread) -> bool:
        """Is the first chunk that is not here being computed for another request, to be stored?"""
        chunks = ticket.keys[0] if ticket.keys else []
        return chunk < len(chunks) and chunks[chunk] in self._computing and lookups.is_attached

    def _release(self, state: RequestState) -> None:
        state.offer = None
        if self._lookups is not None:
            self._lookups.release(state.ticket)

    def _reclaim(self, state: RequestState) -> None:
        """Its stores, if any are under way, must not be committed from now on."""
        if self._stores is not None:
            self._next.reclaimed |= self._stores.reclaim(state)

    def _store(self, state: RequestState, get_tables: GetTables, num_tokens: int, **fields: Any) -> None:
        if self._stores is not None and state.ticket.namespace == self._namespace:
            tables = partial(get_tables, state.ticket.request_id)
            jobs = self._stores.plan(state, tables, num_tokens, **fields)
            self._next.stores += jobs
            if self._events is not None:
                self._events.begin_stores(state.request, jobs, self._grid.stored[0].group)
