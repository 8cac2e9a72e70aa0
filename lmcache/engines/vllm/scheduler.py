"""The scheduler half: decides what is loaded and stored. On the engine's scheduler thread: it never waits.

The life of a request here::

    on_new_request ──▶ a hint: lower tiers may bring what they have
    get_num_new_matched_tokens ──▶ the index in shared memory says how much can be loaded (the offer);
                                   None while more is on its way
    update_state_after_alloc ──▶ the offer becomes a LoadJob, the lease follows as a message
    build_connector_meta ──▶ a StoreJob for every chunk that this step completes
    request_finished ──▶ blocks are held while StoreJobs of the request are out
    update_connector_output ──▶ what the workers ended

**Waiting** is worth while more rows come sooner than the request would compute them: rows that another
request of this engine is computing now are not computed twice, and for rows that the sidecar says are on
their way see ``Patience``.

**A reset** of the engine's caches begins a new namespace: what was stored before is not found any more, and
what requests of before still do under the old name stays there.

Without a lookup thread (no sidecar half yet, unsupported model, offline) it knows no requests, and every hook
answers what an engine without a cache expects; a load that was promised before is still handed out, to fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lmcache.engines.core.jobs import (
    IDLE_WAIT_SECONDS,
    Arrivals,
    EngineIdentity,
    Grid,
    KeyContext,
    LoadJob,
    Marks,
    Offer,
    Patience,
    PrefillRate,
    StepMeta,
    StoreJob,
    WorkerReport,
    loadable_tokens,
)
from lmcache.engines.core.lookups import LookupThread, Ticket
from lmcache.engines.core.requests import Computing, RequestState
from lmcache.rpc.client import SidecarClient
from lmcache.units import ceil_div

ASK_AGAIN_SECONDS = 0.01
"""Between two questions what is still on its way, of all requests that wait."""

OLD_SECONDS = 1.0
"""An answer that was given so long ago says nothing any more: the request queued meanwhile."""

_NOTHING, _NOTHING_IDLE = StepMeta(), StepMeta(is_idle=True)
"""For the steps without work for us: most of them."""


class Scheduler:
    """See the module. One thread calls it. Hooks may raise; the facade then takes it offline."""

    def __init__(
        self,
        num_ranks: int,
        connect: Callable[[EngineIdentity], SidecarClient],
        find_marks: Callable[[Any, int], Marks | None],
        answer_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``connect`` starts a client; ``find_marks`` takes a request and the size of chunks, on the lookup
        thread.

        A question that is not answered within ``answer_seconds`` is not waited for; 0.0: as measured.
        """
        self._num_ranks = num_ranks
        self._connect = connect
        self._find_marks = find_marks
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._lookups: LookupThread | None = None
        self._is_offline = False
        self._grid = Grid(1, 1, 1)
        self._states: dict[str, RequestState] = {}
        # Job id -> (request, ranks that did not end it, chunks).
        self._jobs: dict[int, tuple[RequestState, int, tuple[bytes, ...]]] = {}
        self._num_jobs = 0
        self._computing = Computing()
        self._namespace = b""  # since the last reset
        self._rate = PrefillRate()
        self._arrivals = Arrivals()
        self._num_waiting = 0  # requests that wait for an answer, or for rows, in this step
        self._num_waited = 1  # of the step before
        self._num_steps = 0  # in which something was computed
        self._loads: list[LoadJob] = []
        self._stores: list[StoreJob] = []
        self._preempted: list[str] = []
        self._held: list[str] = []

    def adopt(self, messages: Iterable[Any]) -> None:
        """Begin to look up when the workers say who they are; messages of other connectors are ignored."""
        for message in messages:
            if isinstance(message, EngineIdentity) and self._lookups is None and not self._is_offline:
                self._grid = message.grid
                client = self._connect(message)
                self._lookups = LookupThread(
                    client,
                    message.namespace,
                    lambda: self._rate.tokens_per_second,
                    self._answer_seconds,
                    self._clock,
                )

    def go_offline(self) -> None:
        """Release all leases, detach, forget all requests for good.

        What was promised to the engine is still handed to the workers.
        """
        self._is_offline = True
        for request_id, state in self._states.items():
            self._release(state)
            if state.num_stores:  # nobody will hold the blocks that are read
                self._preempted.append(request_id)
        if self._lookups is not None:
            self._lookups.close()
        self._lookups = None
        self._states.clear()
        self._jobs.clear()
        self._computing.clear()
        self._stores.clear()

    def reset_cache(self) -> bool:
        """Find nothing of what was stored so far any more: the weights may be others from now on.

        False: a load of it is under way, and its request will go on with it.
        """
        self._namespace = os.urandom(32)
        self._computing.clear()
        for request_id, state in self._states.items():
            state.offer = None
            if state.num_stores and not state.is_finished:
                self._preempted.append(request_id)  # its blocks may be anybody's from now on
        return not any(state.is_loading for state in self._states.values())

    def on_new_request(self, request: Any) -> None:
        """Give a hint of a request that arrived; nothing is leased for it."""
        if self._lookups is None or getattr(request, "resumable", False):
            return  # a streaming session replaces tokens that were hashed already
        self._states[request.request_id] = RequestState(request, self._ask(request, self._lookups))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many more tokens can be loaded, and if there are any; (None, False): ask again."""
        state, lookups = self._states.get(request.request_id), self._lookups
        if state is None or lookups is None:
            return 0, False
        if state.is_settled or state.ticket.namespace != self._namespace:
            self._begin_anew(state, lookups)
        if state.has_failed or request.skip_reading_prefix_cache:
            return 0, False
        num_chunks = self._grid.num_full_chunks(len(request.block_hashes), request.num_tokens)
        if not loadable_tokens(self._grid, num_computed_tokens, request.num_tokens, num_chunks):
            found = lookups.find(state.ticket)
            state.num_stored_chunks = len(found.rows) if found is not None else 0
            return 0, False
        num_here = num_computed_tokens // self._grid.chunk_tokens  # in the engine itself
        if self._is_computed_now(state.ticket, max(state.num_found, num_here), lookups):
            self._num_waiting += 1
            return None, False
        found = lookups.find(state.ticket)
        num_found = state.num_found = len(found.rows) if found is not None else 0
        if num_found < num_chunks and self._must_wait(state, lookups, num_found, num_here):
            self._num_waiting += 1
            return None, False
        if found is None:
            return 0, False
        num_tokens = loadable_tokens(self._grid, num_computed_tokens, request.num_tokens, num_found)
        state.num_stored_chunks = num_found
        state.offer = Offer(num_computed_tokens, num_tokens, found)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Turn the offer into a load, now that its blocks are allocated. The engine then waits for it."""
        state = self._states.get(request.request_id)
        offer = None
        if state is not None and not state.is_settled:
            offer, state.offer, state.patience, state.is_settled = state.offer, None, None, True
            self._computing.begin(state)
            if self._lookups is not None:
                self._lookups.note_computed(state.ticket, state.num_stored_chunks)
        if num_external_tokens == 0:
            return
        (block_ids,) = blocks.get_block_ids()
        if state is None or self._lookups is None or offer is None or num_external_tokens > offer.num_tokens:
            self._loads.append(LoadJob(request.request_id, tuple(block_ids)))
            return
        self._loads.append(
            LoadJob.from_offer(request.request_id, self._grid, offer, num_external_tokens, block_ids)
        )
        num_chunks = ceil_div(offer.start + num_external_tokens, self._grid.chunk_tokens)
        self._lookups.lease(state.ticket, num_chunks)
        state.is_loading = True

    def build_connector_meta(self, output: Any) -> StepMeta:
        """Hand out the step's work. ``output`` is the engine's SchedulerOutput and stays as it is."""
        num_tokens = output.total_num_scheduled_tokens
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self._forget_progress(request_id)
            self._preempted.append(request_id)
        if self._states:
            self._follow_blocks(output)
        if self._num_waiting and not num_tokens and self._lookups is not None:
            self._lookups.answered.wait(IDLE_WAIT_SECONDS)
            self._lookups.answered.clear()
        self._num_waiting, self._num_waited = 0, max(1, self._num_waiting)
        self._num_steps += num_tokens > 0
        step = self._rate.begin(num_tokens, self._clock()) if self._lookups else 0
        if not (self._loads or self._stores or self._preempted or self._held or step):
            return _NOTHING if num_tokens else _NOTHING_IDLE
        meta = StepMeta(self._loads, self._stores, self._preempted, self._held, not num_tokens, step)
        self._loads, self._stores, self._preempted, self._held = [], [], [], []
        return meta

    def update_connector_output(self, output: Any) -> None:
        """Note what the workers ended; ``output`` is the engine's KVConnectorOutput, of all ranks."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            state = self._states.get(request_id)
            if state is not None:
                state.is_loading = False
                self._release(state)
                if state.is_finished:
                    del self._states[request_id]
        for request_id in output.finished_sending or ():
            self._states.pop(request_id, None)

    def request_finished(self, request: Any) -> bool:
        """Return whether the request's blocks must be held; the workers then say until when."""
        state = self._states.get(request.request_id)
        if state is None:
            return False
        state.is_finished = True
        if state.is_loading:  # the engine holds the blocks itself until the load is reported
            self._computing.end(state, state.ticket.names)
            return False
        # With async scheduling the last chunk may have got its name only now. The last token has no KV yet.
        self._store(state, min(request.num_computed_tokens, request.num_tokens - 1))
        self._computing.end(state, state.ticket.names[state.num_stored_chunks :])
        if not state.num_stores:
            del self._states[request.request_id]
            return False
        self._held.append(request.request_id)
        return True

    def _ask(self, request: Any, lookups: LookupThread) -> Ticket:
        num_chunks = self._grid.num_full_chunks(len(request.block_hashes), request.num_tokens)
        lora, media = request.lora_request, getattr(request, "mm_features", None)
        chunk_tokens = self._grid.chunk_tokens
        ticket = Ticket(
            request.request_id,
            self._grid.chunk_hashes(request.block_hashes, 0, num_chunks),
            request.cache_salt or "",
            None if lora is None and not media else partial(self._find_marks, request, chunk_tokens),
            self._namespace,
            is_read=not request.skip_reading_prefix_cache,
        )
        lookups.ask(ticket)
        return ticket

    def _begin_anew(self, state: RequestState, lookups: LookupThread) -> None:
        """It was preempted, its load failed, or the engine was reset: nothing of it is computed any more."""
        self._computing.end(state, state.ticket.names)
        state.begin_anew(self._ask(state.request, lookups))

    def _must_wait(self, state: RequestState, lookups: LookupThread, num_found: int, num_here: int) -> bool:
        now, ticket = self._clock(), state.ticket
        if self._is_computed_now(ticket, max(num_found, num_here), lookups):
            return True
        rate = self._rate.tokens_per_second
        chunk_seconds = self._grid.chunk_tokens / rate if rate else 0.0
        num_missing = len(ticket.hashes) - num_found
        if ticket.row_keys is None:
            return lookups.is_attached and not lookups.is_late(ticket, num_missing * chunk_seconds)
        if lookups.knows_all(ticket):
            return False
        answer = ticket.answer
        if answer is not None and now - ticket.answered_at >= OLD_SECONDS and state.patience is None:
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
        if state.patience is None:
            state.patience = Patience(num_found, now, self._num_steps)
        if not answer.is_probing:
            num_missing = answer.num_expected - num_found
        return not state.patience.is_over(
            num_found, num_missing, now, self._arrivals, chunk_seconds, self._num_steps
        )

    def _is_computed_now(self, ticket: Ticket, chunk: int, lookups: LookupThread) -> bool:
        """Is the first chunk that is not here being computed for another request, to be stored?"""
        is_computed = any(name in self._computing for name in ticket.names[chunk : chunk + 1])
        return is_computed and lookups.is_attached

    def _release(self, state: RequestState) -> None:
        state.offer = None
        if self._lookups is not None:
            self._lookups.release(state.ticket)

    def _follow_blocks(self, output: Any) -> None:
        """Keep the block tables and store what this step completes. Drafts don't count."""
        drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        whole = [  # with the V2 model runner also requests that were preempted
            (new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs
        ]
        grown = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        renewed = cached.resumed_req_ids | {request_id for request_id, *_ in whole}
        for request_id, block_ids, num_computed_tokens in (*whole, *grown):
            state = self._states.get(request_id)
            if state is None:
                continue
            if request_id in renewed:
                state.blocks = []
            if block_ids is not None:
                state.blocks.extend(block_ids[0])
            num_scheduled = output.num_scheduled_tokens[request_id] - len(drafts.get(request_id, ()))
            self._store(state, num_computed_tokens + num_scheduled)

    def _store(self, state: RequestState, num_computed_tokens: int) -> None:
        ticket = state.ticket
        context: KeyContext | None = ticket.context
        if context is None or ticket.namespace != self._namespace:
            return
        first = state.num_stored_chunks
        grid, hashes = self._grid, state.request.block_hashes
        end = grid.num_full_chunks(len(hashes), num_computed_tokens)
        if end <= first:
            return
        if len(state.blocks) < end * grid.blocks_per_chunk:
            self._computing.end(state, state.ticket.names)
            return
        self._num_jobs += 1
        blocks = state.blocks[first * grid.blocks_per_chunk : end * grid.blocks_per_chunk]
        names = grid.chunk_hashes(hashes, first, end)
        request_id = state.request.request_id
        self._stores.append(StoreJob(self._num_jobs, request_id, first, tuple(names), tuple(blocks), context))
        self._jobs[self._num_jobs] = (state, self._num_ranks, ticket.names[first:end])
        state.num_stores += 1
        state.num_stored_chunks = end

    def _forget_progress(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:  # its running stores may be aborted; Reserve says which chunks are there
            self._computing.end(state, state.ticket.names)
            state.forget_progress()

    def _take_report(self, report: WorkerReport) -> None:
        self.adopt([report.identity])
        self._rate.end(report.timed_step, self._clock())
        for request_id in report.failed_loads:
            state = self._states.get(request_id)
            if state is not None:
                state.has_failed = True
                state.num_stored_chunks = 0  # what was found is gone: store it again
        for job_id, num_ranks in report.stores_ended.items():
            state, missing, names = self._jobs.pop(job_id, (None, 0, ()))
            if state is None:
                continue
            if missing > num_ranks:
                self._jobs[job_id] = (state, missing - num_ranks, names)
            else:
                state.num_stores -= 1
                self._computing.end(state, names)
