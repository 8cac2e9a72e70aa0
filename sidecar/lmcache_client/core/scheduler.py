"""The scheduler side of a connector: decides what is loaded and stored, on the engine's scheduler thread.

The hooks of an engine's connector call these methods for each request, in this order::

    add ──▶ sends a hint, so that lower tiers can start promoting
    num_loadable ──▶ reads the index in shared memory and offers what can be loaded. If it returns None, more
                     rows are on their way, and the engine asks again in the next step
    note_allocated ──▶ turns the offer into a LoadJob. A message to the sidecar takes a lease, which
                       protects the rows from eviction. If this step computes something, the message is sent
                       at once. Else it waits for the next step, and a load that ends before needs none
    note_scheduled ──▶ creates a StoreJob for every chunk that this step completes
    finish ──▶ holds blocks while StoreJobs of the request are running
    take_report, note_loaded, note_released ──▶ record the jobs that the workers ended

**The scheduler never waits** while it has something to compute: the lookup thread calls the sidecar for it.
In a step without tokens it may sleep ``wait_decisions.IDLE_WAIT_SECONDS`` for an answer of this thread.
Otherwise an engine that runs in its caller's process would spin, and take the GIL from the thread.

**A request may wait** while rows arrive sooner than the engine would compute them (``wait_decisions``).

**Without a lookup thread** (no worker has identified itself, the model is unsupported, or this side is
offline, after an exception or at shutdown) the scheduler side knows no requests. Every method then returns
what an engine without a cache expects. Loads that were offered before are still handed out, and fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

from lmcache_client.core.events import Chunk, ChunkEvents
from lmcache_client.core.grid import BlockTables, Grid
from lmcache_client.core.jobs import EngineIdentity, LoadJob, Offer, StepMeta, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parted_lookups import start_lookups
from lmcache_client.core.parts import Introductions
from lmcache_client.core.requests import Computing, EngineRequest, FindExtraKeys, RequestState, Ticket
from lmcache_client.core.stores import Snapshot, Stores
from lmcache_client.core.timed_requests import TimedRequests
from lmcache_client.core.tracing import NO_TRACER, Tracer
from lmcache_client.core.wait_decisions import WaitDecisions
from lmcache_client.core.waiting import PrefillRate
from lmcache_client.rpc.client import SidecarClient
from lmcache_store import keys

GetTables = Callable[[str], "BlockTables | None"]
"""Returns the present block tables of a request that this step schedules."""

_NOTHING, _NOTHING_IDLE = StepMeta(), StepMeta(is_idle=True)
"""Messages of steps without work for the connector, which are most steps."""


class SchedulerSide:
    """The scheduler side, see the module. Not thread-safe. Methods may raise: then it is taken offline."""

    def __init__(
        self,
        connect: Callable[[EngineIdentity], SidecarClient],
        extra_keys_of: Callable[[Any, int], FindExtraKeys | None],
        answer_seconds: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        events: ChunkEvents | None = None,
        tracer: Tracer = NO_TRACER,
        can_wait: bool = True,
    ) -> None:
        """Create a side that knows no requests until a worker has identified itself.

        Args:
            connect: starts a client of the sidecar.
            extra_keys_of: takes a request and the tokens of a chunk. Returns a function that finds the
                request's extra keys and runs on the lookup thread, or None if the request has none.
            answer_seconds: longest silence of the sidecar before an answer, and between two promoted rows;
                0.0: as measured.
            prefill_tokens_per_second: the engine's prefill rate; 0.0: as measured.
            events: records chunks that are stored and loaded, for the engine's KV events.
            tracer: records spans of requests.
            can_wait: True if idle steps may sleep. False if other engines step together with this one.
        """
        self._tracer, self._events = tracer, events
        self._connect, self._extra_keys_of = connect, extra_keys_of
        self._answer_seconds, self._clock = answer_seconds, clock
        self._introductions = Introductions()
        self._lookups: LookupThread | None = None
        self._is_offline = False
        self._grid, self._tenant_secret = Grid(1, 1, ()), b""
        self._namespace = b""  # the engine's namespace, replaced at every reset
        self._private_reason = ""  # why other engines can't find what is stored in this namespace
        self._states: dict[str, RequestState] = {}
        self._computing, self._times = Computing(), TimedRequests(clock)
        self._stores: Stores | None = None
        self._rate = PrefillRate(prefill_tokens_per_second)
        self._waits = WaitDecisions(self._computing, self._rate, answer_seconds, clock, tracer, can_wait)
        self._next = StepMeta()  # the message to the workers for this step
        self._complete: Callable[[StepMeta], StepMeta] = lambda meta: meta  # also used while offline

    def adopt(self, messages: Iterable[Any]) -> None:
        """Start looking up when workers have identified the engine. Ignores messages of other connectors."""
        for message in self._introductions.take(messages):
            if self._lookups is None and not self._is_offline:
                self._grid, self._tenant_secret = message.grid, message.hello.namespace
                self._stores = Stores(self._grid, message.num_ranks, self._computing)
                self._namespace = self._namespace or message.hello.namespace
                settings = self._rate, self._answer_seconds, self._clock
                self._lookups = start_lookups(self._connect(message), message, *settings)
                self._complete = self._lookups.end_step
                self._lookups.private_reason = self._private_reason
                self._private_reason = self._private_reason or message.hello.private_reason
                self._times.report = self._lookups.note_times
                if message.conflict:
                    self.begin_namespace(message.conflict)

    def go_offline(self) -> None:
        """Release all leases, detach and forget all requests, for the life of the process.

        Loads that the engine already waits for are still handed to the workers.
        """
        self._is_offline = True
        self._tracer.clear()
        self.forget(lambda _: True)
        if self._lookups is not None:
            self._lookups.close()
        self._lookups = self._stores = None
        self._computing.clear()
        self._next.stores.clear()

    def forget(self, is_affected: Callable[[EngineRequest], bool]) -> None:
        """Release the leases of these requests. Neither load nor store more of their KV."""
        for state in [state for state in self._states.values() if is_affected(state.request)]:
            self._release(state)
            self._times.end(state)
            self._tracer.end_load(state.request.request_id)
            self._tracer.finish(state.request.request_id)
            self._computing.end(state)
            self._reclaim(state)  # the engine can now reuse blocks that stores still read
            del self._states[state.request.request_id]

    def begin_namespace(self, reason: str) -> None:
        """Invalidate all cached KV by starting a new namespace. Call this when the weights may change.

        ``reason``: why other engines can't find what is stored from now on.
        A request whose load of old KV is still running uses this KV, and stores nothing.
        """
        self._namespace, self._private_reason = os.urandom(32), reason
        if self._lookups is not None:
            self._lookups.private_reason = reason
        if self._events is not None:
            self._events.clear()
        self._computing.clear()
        for state in self._states.values():
            state.offer = None
            if not state.is_finished:
                self._reclaim(state)  # the engine may give its blocks to other requests

    def add(self, request: EngineRequest, num_handed_over: int = 0) -> None:
        """Tell the sidecar that a request arrived, so that it can start promoting chunks. Takes no lease.

        ``num_handed_over``: leading tokens that another engine has computed a moment ago.
        """
        if self._lookups is not None:
            arrived_at = self._clock()
            ticket = self._ask(request, self._lookups, num_handed_over // self._grid.chunk_tokens)
            self._states[request.request_id] = state = RequestState(request, ticket)
            self._times.start(state, arrived_at, state.ticket.asked_at)
            self._tracer.begin(state)

    def num_loadable(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Return how many tokens can be loaded after the computed ones; None: ask again in the next step."""
        num_tokens = self._decide(request, num_computed_tokens)
        self._times.note_decision(self._states.get(request.request_id), is_held=num_tokens is None)
        return num_tokens

    def _decide(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        state, lookups = self._states.get(request.request_id), self._lookups
        if state is None or lookups is None:
            return 0
        if state.is_allocated or state.ticket.namespace != self._namespace:
            # The request was preempted, its load failed, or the engine was reset: it starts again.
            self._computing.end(state)
            self._times.restart(state)
            # Announced rows were stored by now, or never will be. The request does not wait for them again.
            state.restart(self._ask(request, lookups, num_handed_over=0))
            self._tracer.begin(state)
        state.num_engine_tokens = num_computed_tokens
        if state.has_failed or request.skip_reading_prefix_cache:
            return 0
        grid, waits = self._grid, self._waits
        num_chunks = grid.num_loadable_chunks(len(request.block_hashes), request.num_tokens)
        state.num_held = grid.num_held_chunks(num_computed_tokens, request.num_tokens, num_chunks)
        if not grid.loadable_tokens(num_computed_tokens, request.num_tokens, num_chunks):
            return self._decline(state, lookups)
        num_engine = num_computed_tokens // grid.chunk_tokens  # chunks that the engine itself has
        if waits.is_computed_elsewhere(state, num_engine, lookups):
            return None
        hit = lookups.find(state.ticket, num_engine)
        num_hit, state.num_found = (hit.num_chunks, hit.num_leading) if hit is not None else (0, 0)
        if num_hit < num_chunks and waits.must_wait(state, lookups, num_hit, num_engine, grid.chunk_tokens):
            return None
        if hit is None:  # the lookup thread may have found the keys since
            return None if state.ticket.keys else 0
        num_tokens = grid.loadable_tokens(num_computed_tokens, request.num_tokens, num_hit)
        if not num_tokens and not grid.is_full:
            return self._decline(state, lookups)
        state.num_stored_chunks = num_hit
        state.offer = Offer(num_computed_tokens, num_tokens, hit.found)
        return num_tokens

    def note_allocated(self, request_id: str, tables: BlockTables, num_tokens: int) -> None:
        """Turn the offer into a load of ``num_tokens`` into the blocks that the engine has allocated."""
        state = self._states.get(request_id)
        offer = None
        if state is not None and not state.is_allocated:
            offer, state.offer, state.wait, state.is_allocated = state.offer, None, None, True
            self._computing.begin(state)
            state.progressed_at = self._clock()
            self._tracer.end_lookup(request_id, num_tokens)
            if not num_tokens and self._lookups is not None and not state.has_failed:
                self._lookups.note_scheduled(state)
        if num_tokens == 0:
            return
        if state is None or self._lookups is None or offer is None or num_tokens > offer.num_tokens:
            self._next.loads.append(LoadJob.failing(request_id, self._grid, tables))
            return
        state.is_loading, num_loaded = True, self._begin_load(state, offer, num_tokens, tables)
        self._lookups.note_scheduled(state, num_loaded)
        self._times.begin_load(state, offer.start, num_loaded)

    def _begin_load(self, state: RequestState, offer: Offer, num_tokens: int, tables: BlockTables) -> int:
        job = LoadJob.from_offer(state.ticket.request_id, self._grid, offer, num_tokens, tables)
        self._next.loads.append(job)
        self._tracer.begin_load(job, num_tokens)
        if self._events is not None and state.ticket.keys:
            self._events.note_found(state.request, state.ticket.keys[0][: len(offer.found[0].rows)])
        return num_tokens  # to count as loaded, and to protect by the request's lease

    def note_preempted(self, request_id: str) -> None:
        """Record that the engine preempts the request and reuses its blocks in this step."""
        if state := self._states.get(request_id):
            self._reclaim(state)  # stores may be aborted; a later Reserve finds out which chunks were stored
            self._computing.end(state)
            state.forget_progress()

    @property
    def reads_transient_blocks(self) -> bool:
        """True if ``reclaim_blocks`` must be called with the blocks that a step allocates."""
        return self._stores is not None and self._stores.reads_transient_blocks

    def reclaim_blocks(self, allocated: Set[int]) -> None:
        """Record that this step gives blocks to another request: copies that read them later don't count."""
        if self._stores is not None:
            loaded = (load.blocks for load in self._next.loads)
            self._next.left_behind |= self._stores.reclaim_blocks(set(allocated).union(*loaded))

    def note_scheduled(
        self,
        request_id: str,
        get_tables: GetTables,
        num_computed_tokens: int,
        num_drafts: int = 0,
        snapshots: Iterable[Snapshot] = (),
        num_new_tokens: int = 0,
    ) -> None:
        """Store the chunks that this step completes.

        ``num_computed_tokens``: the request's tokens after the step, without drafts; ``snapshots``: see
        ``stores``; ``num_new_tokens``: tokens that the step computes.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if state.clock is not None:  # a step of the prompt
            state.progressed_at = self._clock()
            self._times.note_scheduled(state, state.clock, num_computed_tokens, num_new_tokens)
        state.has_drafts |= num_drafts > 0
        # Most steps of most requests complete no chunk.
        if num_computed_tokens >= (state.num_stored_chunks + 1) * self._grid.chunk_tokens:
            self._store(state, get_tables, num_computed_tokens, snapshots=snapshots)

    def end_step(self, num_tokens: int) -> StepMeta:
        """Return the workers' jobs for a step that computes ``num_tokens``."""
        self._waits.end_step(num_tokens, self._lookups)
        is_watched = self._times.is_step_watched
        step = self._rate.begin(num_tokens, self._clock(), is_watched=is_watched) if self._lookups else 0
        self._times.begin_step(step)
        meta = self._next
        if self._lookups is not None and (num_tokens or not meta.loads):
            self._lookups.lease_loads()
        if meta.loads or meta.stores or meta.reclaimed or meta.left_behind or meta.held or meta.blend or step:
            meta.is_idle, meta.timed_step = not num_tokens, step
        else:
            meta = _NOTHING if num_tokens else _NOTHING_IDLE
        complete, self._complete = self._complete, lambda message: message  # used if it raises
        message, self._complete = complete(meta), complete
        self._next = StepMeta() if meta is self._next else self._next
        return message

    def note_loaded(self, request_id: str) -> None:
        """Record that the request's load ended on all ranks."""
        if state := self._states.get(request_id):
            state.is_loading = False
            self._times.end_load(state)
            self._release(state)
            self._tracer.end_load(request_id)
            if state.is_finished:
                self._times.end(state)
                del self._states[request_id]

    def note_released(self, request_id: str) -> None:
        """Record that the workers no longer hold the finished request's blocks."""
        self._states.pop(request_id, None)

    def finish(self, request: EngineRequest, tables: BlockTables) -> bool:
        """Return True if the engine must hold the finished request's blocks until a worker releases them."""
        state = self._states.get(request.request_id)
        if state is None:
            return False
        state.is_finished = True
        if state.is_loading:  # the engine itself holds the blocks until the load is reported
            self._tracer.finish(request.request_id)
            self._computing.end(state)
            return False
        self._times.end(state)
        if self._lookups is not None:
            self._lookups.end(state.ticket)
        # With async scheduling the last chunk may have its hash only now. The last token has no KV yet.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._store(state, lambda _: tables, num_tokens, is_step_end=False)
        self._tracer.finish(request.request_id)
        self._computing.end(state, slice(state.num_stored_chunks, None))
        if not state.num_stores:
            del self._states[request.request_id]
            return False
        self._next.held.append(request.request_id)
        return True

    def take_report(self, report: WorkerReport) -> None:
        """Record the jobs that ended, from the joined report of all ranks."""
        self.adopt([report.identity])
        self._rate.end(report.timed_step, now := self._clock())
        self._times.end_step(report.timed_step, now)
        for request_id in report.failed_loads:
            if state := self._states.get(request_id):
                state.has_failed = True
                state.num_stored_chunks = 0  # the rows are gone: store the chunks again
                self._times.fail_load(state)
        if self._stores is not None:
            for job_id, num_ranks in report.stores_ended.items():
                if self._stores.note_ended(job_id, num_ranks):
                    self._tracer.end_store(job_id)
                    if self._events is not None:
                        self._events.end_store(job_id)

    def take_changes(self, describe: Callable[[Chunk], Any]) -> tuple[list[Any], list[Any]]:
        """Return descriptions of chunks in memory, and of removed ones, see ``ChunkEvents.take``."""
        if self._events is None:
            return [], []
        return self._events.take(self._lookups.index if self._lookups is not None else None, describe)

    def _ask(self, request: EngineRequest, lookups: LookupThread, num_handed_over: int) -> Ticket:
        num_chunks = self._grid.num_loadable_chunks(len(request.block_hashes), request.num_tokens)
        ticket = Ticket(
            request.request_id,
            self._grid.chunk_hashes(request.block_hashes, 0, num_chunks),
            self._namespace,
            request.cache_salt or "",
            keys.tenant(request.cache_salt or "", self._tenant_secret),
            self._extra_keys_of(request, self._grid.chunk_tokens),
            first_hashes=self._grid.first_hashes(request.block_hashes) if num_chunks else (),
            is_read=not request.skip_reading_prefix_cache,
            num_handed_over=0 if self._private_reason else min(num_handed_over, num_chunks),
        )
        lookups.ask(ticket)
        return ticket

    def _decline(self, state: RequestState, lookups: LookupThread) -> int:
        """Load nothing. Note which chunks are already stored, so that they are not stored again."""
        state.num_stored_chunks = hit.num_chunks if (hit := lookups.find(state.ticket)) else 0
        return 0

    def _release(self, state: RequestState) -> None:
        state.offer = None
        if self._lookups is not None:
            self._lookups.release(state.ticket)

    def _reclaim(self, state: RequestState) -> None:
        """Make sure that running stores of the request are no longer committed."""
        if self._stores is not None:
            self._next.reclaimed |= self._stores.reclaim(state)

    def _store(self, state: RequestState, get_tables: GetTables, num_tokens: int, **fields: Any) -> None:
        if self._stores is not None and state.ticket.namespace == self._namespace:
            tables = partial(get_tables, state.ticket.request_id)
            jobs = self._stores.plan(state, tables, num_tokens, **fields)
            self._next.stores += jobs
            self._tracer.begin_stores(state.ticket.request_id, jobs)
            if self._events is not None:
                self._events.begin_stores(state.request, jobs, self._grid.stored[0].group)
