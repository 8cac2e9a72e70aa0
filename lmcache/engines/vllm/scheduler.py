"""The scheduler half: decides what is loaded and stored. On the engine's scheduler thread: it never waits.

The life of a request here::

    on_new_request ──▶ ticket to the lookup thread
    get_num_new_matched_tokens ──▶ None until answered, then how much can be loaded (the offer)
    update_state_after_alloc ──▶ the offer becomes a LoadJob, or the lease ends
    build_connector_meta ──▶ a StoreJob for every chunk that this step completes
    request_finished ──▶ blocks are held while StoreJobs of the request are out
    update_connector_output ──▶ what the workers ended

Without a lookup thread (no sidecar half yet, unsupported model, offline) it knows no requests, and every hook
answers what an engine without a cache expects; a load that was promised before is still handed out, to fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.engines.vllm.lookups import Answer, LookupThread, Ticket
from lmcache.engines.vllm.plan import (
    IDLE_WAIT_SECONDS,
    EngineIdentity,
    Grid,
    KeyContext,
    LoadJob,
    Marks,
    Offer,
    PrefillRate,
    StepMeta,
    StoreJob,
    WorkerReport,
    deferral_seconds,
    load_pieces,
    loadable_tokens,
)
from lmcache.rpc.client import SidecarClient

ASK_AGAIN_SECONDS = 0.005
"""Between two questions whether lower tiers have brought more."""


class RequestState:
    """What is known of one request."""

    def __init__(self, request: Any, ticket: Ticket, now: float) -> None:
        self.request = request
        self.ticket = ticket
        self.arrived_at = self.asked_at = now
        self.offer: Offer | None = None
        self.blocks: list[int] = []
        self.num_stored_chunks = 0  # leading chunks that need no store: stored, or found by the lookup
        self.num_stores = 0  # StoreJobs that not all ranks ended
        self.is_loading = False
        self.is_finished = False
        self.has_failed = False  # a load failed: don't try again, it could fail for ever


class Scheduler:
    """See the module. One thread calls it. Hooks may raise; the facade then takes it offline."""

    def __init__(
        self,
        num_ranks: int,
        connect: Callable[[EngineIdentity], SidecarClient],
        find_marks: Callable[[Any, int], Marks | None],
        answer_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``connect`` starts a client; ``find_marks`` takes a request and the size of chunks, on the lookup
        thread.

        A request that was not answered ``answer_seconds`` after it arrived is computed.
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
        self._jobs: dict[int, tuple[RequestState, int]] = {}  # job id -> (request, ranks that did not end it)
        self._num_jobs = 0
        self._rate = PrefillRate()
        self._is_waiting = False  # a request waits for an answer in this step
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
                self._lookups = LookupThread(client, message.namespace, lambda: self._rate.tokens_per_second)

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
        self._stores.clear()

    def on_new_request(self, request: Any) -> None:
        """Ask for a request that arrived."""
        if self._lookups is None or getattr(request, "resumable", False):
            return  # a streaming session replaces tokens that were hashed already
        self._states[request.request_id] = self._ask(request, self._lookups)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many more tokens can be loaded, and if there are any; (None, False): ask again."""
        state, lookups = self._states.get(request.request_id), self._lookups
        if state is None or lookups is None or state.has_failed or request.skip_reading_prefix_cache:
            return 0, False
        num_chunks = self._grid.num_full_chunks(len(request.block_hashes), request.num_tokens)
        if not loadable_tokens(self._grid, num_computed_tokens, request.num_tokens, num_chunks):
            return 0, False
        if state.ticket.is_settled and state.offer is None:  # preempted after the lease was given back
            self._states[request.request_id] = state = self._ask(request, lookups)
        if self._must_wait(state, lookups):
            self._is_waiting = True
            return None, False
        answer = state.ticket.answer
        if answer is None:
            return 0, False
        num_tokens = loadable_tokens(self._grid, num_computed_tokens, request.num_tokens, len(answer.slots))
        state.ticket.is_settled = True
        state.offer = Offer(num_computed_tokens, num_tokens, answer.slots)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Turn the offer into a load, now that its blocks are allocated. The engine then waits for it."""
        state = self._states.get(request.request_id)
        if num_external_tokens == 0:
            if state is not None and not state.is_loading:
                self._release(state)
            return
        (block_ids,) = blocks.get_block_ids()
        offer = state.offer if state is not None else None
        if state is None or offer is None or num_external_tokens > offer.num_tokens:
            self._loads.append(LoadJob(request.request_id, (), tuple(block_ids)))
            return
        pieces = load_pieces(self._grid, offer.start, num_external_tokens, offer.slots, block_ids)
        destination = tuple(block for piece in pieces for block in piece.blocks)
        self._loads.append(LoadJob(request.request_id, pieces, destination))
        state.is_loading = True
        state.offer = None

    def build_connector_meta(self, output: Any) -> StepMeta:
        """Hand out the step's work. ``output`` is the engine's SchedulerOutput and stays as it is."""
        is_idle = output.total_num_scheduled_tokens == 0
        preempted = getattr(output, "preempted_req_ids", None) or ()
        for request_id in preempted:
            self._forget_progress(request_id)
        self._preempted.extend(preempted)
        if self._states:
            self._follow_blocks(output)
        if self._is_waiting and is_idle and self._lookups is not None:
            self._lookups.answered.wait(IDLE_WAIT_SECONDS)
            self._lookups.answered.clear()
        self._is_waiting = False
        step = self._rate.begin(output.total_num_scheduled_tokens, self._clock()) if self._lookups else 0
        meta = StepMeta(self._loads, self._stores, self._preempted, self._held, is_idle, step)
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
            return False
        self._release(state)
        # With async scheduling the last chunk may have got its name only now. The last token has no KV yet.
        self._store(state, min(request.num_computed_tokens, request.num_tokens - 1))
        if not state.num_stores:
            del self._states[request.request_id]
            return False
        self._held.append(request.request_id)
        return True

    def _ask(self, request: Any, lookups: LookupThread) -> RequestState:
        num_chunks = self._grid.num_full_chunks(len(request.block_hashes), request.num_tokens)
        if request.skip_reading_prefix_cache:
            num_chunks = 0
        ticket = Ticket(
            request.request_id,
            self._grid.chunk_hashes(request.block_hashes, 0, num_chunks),
            request.cache_salt or "",
            lambda: self._find_marks(request, self._grid.chunk_tokens),
        )
        lookups.ask(ticket)
        return RequestState(request, ticket, self._clock())

    def _must_wait(self, state: RequestState, lookups: LookupThread) -> bool:
        if state.ticket.is_settled:
            return False
        now, answer = self._clock(), state.ticket.answer
        if answer is None:
            return now - state.arrived_at < self._answer_seconds
        missing = (len(state.ticket.hashes) - len(answer.slots)) * self._grid.chunk_tokens
        patience = deferral_seconds(missing, self._rate.tokens_per_second)
        if not answer.is_pending or now - state.arrived_at >= patience:
            return False
        if now - state.asked_at >= ASK_AGAIN_SECONDS:
            state.asked_at = now
            lookups.ask(state.ticket)
        return True

    def _release(self, state: RequestState) -> None:
        state.offer = None
        state.ticket.is_settled = True
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
        context: KeyContext | None = state.ticket.context
        if context is None:
            return
        answer = state.ticket.answer
        first = max(state.num_stored_chunks, answer.num_resident if answer else 0)
        grid, hashes = self._grid, state.request.block_hashes
        end = grid.num_full_chunks(len(hashes), num_computed_tokens)
        if end <= first or len(state.blocks) < end * grid.blocks_per_chunk:
            return
        self._num_jobs += 1
        blocks = state.blocks[first * grid.blocks_per_chunk : end * grid.blocks_per_chunk]
        names = grid.chunk_hashes(hashes, first, end)
        request_id = state.request.request_id
        self._stores.append(StoreJob(self._num_jobs, request_id, first, tuple(names), tuple(blocks), context))
        self._jobs[self._num_jobs] = (state, self._num_ranks)
        state.num_stores += 1
        state.num_stored_chunks = end

    def _forget_progress(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:  # its running stores may be aborted; Reserve says which chunks are there
            state.blocks, state.num_stored_chunks, state.offer = [], 0, None

    def _take_report(self, report: WorkerReport) -> None:
        self.adopt([report.identity])
        self._rate.end(report.timed_step, self._clock())
        for request_id in report.failed_loads:
            state = self._states.get(request_id)
            if state is not None:
                state.has_failed = True
                state.ticket.answer = Answer()  # what was found is gone: store it again
        for job_id, num_ranks in report.stores_ended.items():
            state, missing = self._jobs.pop(job_id, (None, 0))
            if state is None:
                continue
            if missing > num_ranks:
                self._jobs[job_id] = (state, missing - num_ranks)
            else:
                state.num_stores -= 1
