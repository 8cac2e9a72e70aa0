"""The scheduler side of an engine whose requests may ask for a blended prompt.

A request that asks gets a salt of its own in the engine, so that the engine's cache never offers its blocks
to other requests. Its lookups use the request as it was before (``ExactView``). Each document is looked up
with a ticket of its own. When enough is known, the whole prompt but its last token is claimed as one load::

    claim ──▶ BlendJob ──▶ all ranks have placed the stored KV ──▶ slices, step by step ──▶ loaded
                └──────────────── dropped: abort, reset, offline ────────▶ loaded, as failed

If the request names no documents, ``KnownDocuments`` proposes places of documents, and lookups prove them.
The request gets the salt only when the whole prompt can be claimed. The engine then asks again in the next
step. Until then the request is exact, and it remains exact if the engine allocates blocks for it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcache_client.core.blend_jobs import Blended, BlendStep
from lmcache_client.core.grid import BlockTables
from lmcache_client.core.hits import Rows, no_hit
from lmcache_client.core.jobs import EngineIdentity, LoadJob, Offer, StepMeta, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.requests import EngineRequest, RequestState
from lmcache_client.core.scheduler import GetTables
from lmcache_client.core.tracing import ENGINE_MEMORY, LOWER_TIERS
from lmcache_client.vllm.blend.asked import AskedBlend, OpenJob, can_blend
from lmcache_client.vllm.blend.documents import (
    Claim,
    ExactView,
    document_ticket,
    find_claim,
    num_reusable,
    slice_tokens,
)
from lmcache_client.vllm.blend.known import KnownDocuments
from lmcache_client.vllm.blend.marks import START_TOKENS
from lmcache_client.vllm.blend.params import ParamsError, is_document, read_blend
from lmcache_client.vllm.blend.separator import Separator
from lmcache_client.vllm.blend.taking import look_up_taken, plan_takes
from lmcache_client.vllm.hand_over import FIELD, wants_hand_over
from lmcache_client.vllm.scheduler import VLLMScheduler

if TYPE_CHECKING:
    from lmcache_client.vllm.attach import VLLMSettings

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Blended prompts that may fail on the workers. After that, no more prompts are blended."""

_STOPPED = (
    "LMCache Cluster blends no more prompts in this process, because %d of them failed on the workers. The"
    " last one was request %s. The engine computes such prompts itself. Read the errors of the workers above,"
    " and restart the engine. If they return, set lmcache.blend to off."
)
_MALFORMED = (
    "LMCache Cluster ignores what request %s says about documents in kv_transfer_params: %s. Correct the"
    " client. Later errors in this field are not logged."
)


class BlendingScheduler(VLLMScheduler):
    """The scheduler side of vLLM that also blends prompts, see the module."""

    def __init__(
        self,
        *args: Any,
        blend: VLLMSettings,
        separator: Separator,
        hash_algorithm: str,
        step_tokens: int,
        **settings: Any,
    ) -> None:
        """Create a side, see ``VLLMScheduler``.

        Args:
            args, settings: as there.
            blend: the settings of blended prompts.
            separator: the separator of documents in these settings.
            hash_algorithm: name of the engine's hash function for blocks.
            step_tokens: largest number of tokens of a step.
        """
        super().__init__(*args, **settings)
        self._settings, self._separator = blend, separator
        self._hash_algorithm, self._step_tokens = hash_algorithm, step_tokens
        self._num_ranks = 0  # 0: the engine can't blend, or has not said yet that it can
        self._asked: dict[str, AskedBlend | None] = {}  # None: the prompt is a document
        self._jobs: dict[str, OpenJob] = {}  # until all ranks have reported the load
        self._num_failures = 0
        self._warned: set[str] = set()  # fields with an error that was logged
        self._secret = secrets.token_hex(16)  # part of salts
        self._is_auto = blend.blend == "auto"
        self._known = KnownDocuments(learns_prompts=self._is_auto)

    def adopt(self, messages: Iterable[Any]) -> None:
        """Start looking up, see ``SchedulerSide``. Note whether the engine can blend."""
        messages = list(messages)
        super().adopt(messages)
        grid = self._grid
        if self._lookups is not None and grid.fails_by_block and grid.hash_tokens == grid.step_tokens:
            for message in messages:
                if isinstance(message, EngineIdentity) and message.can_blend:
                    self._num_ranks = message.num_ranks
                    self._known.poll(self._lookups)

    def forget(self, is_affected: Callable[[EngineRequest], bool]) -> None:
        """Drop the blended prompts of these requests, and forget the requests. Their answers still say it."""
        for request_id, state in self._states.items():
            if is_affected(state.request):
                self._drop(request_id)
        super().forget(is_affected)

    def begin_namespace(self, reason: str) -> None:
        """Drop all blended prompts, and start a new namespace: the weights may change."""
        for request_id in self._jobs:
            self._drop(request_id)
        self._known.clear()
        super().begin_namespace(reason)

    def on_new_request(self, request: Any) -> None:
        """Send hints of the request and of its documents."""
        super().on_new_request(request)
        params = getattr(request, "kv_transfer_params", None)
        if (params or self._is_auto) and self._num_ranks and (state := self._states.get(request.request_id)):
            try:
                self._read(request, state, params)
            except ParamsError as error:
                if error.field not in self._warned:
                    self._warned.add(error.field)
                    logger.warning(_MALFORMED, request.request_id, error)

    def _read(self, request: Any, state: RequestState, request_params: Any) -> None:
        settings, lookups = self._settings, self._lookups
        defaults = settings.blend_selection, settings.blend_ratio, self._separator
        params = read_blend(request_params, request.all_token_ids, *defaults, is_auto=self._is_auto)
        if params is None:
            if is_document(request_params):
                self._asked[request.request_id] = None
            return
        if lookups is None or self._num_failures >= MAX_FAILURES or not can_blend(request):
            return
        if params.is_detected:
            if wants_hand_over(request_params):  # blended KV is not stored, so the next engine can't load it
                return
            documents = self._known.find(request.all_token_ids, state.ticket, lookups)
            params = replace(params, documents=tuple(documents))
        if num_reusable(params, self._grid) < settings.blend_min_tokens:
            return
        blend = self._asked[request.request_id] = AskedBlend(params, ExactView(request))
        if not params.is_detected:
            self._isolate(request, blend, state)
        self._look_up(blend, state, lookups)

    def _isolate(self, request: Any, blend: AskedBlend, state: RequestState) -> None:
        """Give the request the salt of blended prompts."""
        blend.is_isolated, state.request = True, blend.view
        request.cache_salt = blend.params.salt(request.cache_salt, self._secret)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _look_up(self, blend: AskedBlend, state: RequestState, lookups: LookupThread) -> None:
        """Send hints of the documents."""
        grid, algorithm, blend.ticket = self._grid, self._hash_algorithm, state.ticket
        blend.taken, blend.may_take = set(), not blend.params.is_detected
        tickets = [
            document_ticket(state.ticket, number, document, blend.view, grid, algorithm)
            for number, document in enumerate(blend.params.documents)
        ]
        blend.documents = tuple(RequestState(blend.view, ticket) if ticket else None for ticket in tickets)
        for ticket in filter(None, tickets):
            lookups.ask(ticket)

    def _decide(self, request: Any, num_computed_tokens: int) -> int | None:
        """Offer the whole prompt if it can be blended, else what an exact request is offered."""
        if (blend := self._asked.get(request.request_id)) is None:
            return super()._decide(request, num_computed_tokens)
        num_exact = super()._decide(blend.view, num_computed_tokens)
        state, lookups, blend.claim = self._states.get(request.request_id), self._lookups, None
        if blend.is_isolated and blend.blended is None:
            blend.num_cached = max(blend.num_cached, num_computed_tokens)
        if state is None or lookups is None:
            return num_exact
        if blend.is_isolated and num_computed_tokens:
            # The engine's blocks under this salt may be blended, and the KV computed after them is not exact.
            # So the request never stores KV, even if it restarts and then finds none of these blocks.
            state.is_exact = False
        if state.has_failed or self._num_failures >= MAX_FAILURES:
            return num_exact
        if blend.ticket is not state.ticket:  # it starts again
            self._look_up(blend, state, lookups)
        hit = lookups.find(state.ticket) or no_hit(self._grid)
        num_known = max(num_computed_tokens, hit.num_chunks * self._grid.chunk_tokens)
        found, is_waiting = self._find_documents(blend, lookups, num_known)
        if num_exact is None or is_waiting:
            return None

        def find(begin: int) -> Claim | None:
            limits = self._settings.blend_min_tokens, request.num_prompt_tokens
            return find_claim(blend.params, self._grid, begin, hit.found[0], found, *limits, blend.taken)

        claim, num_blocks = find(num_computed_tokens), self._num_blocks(request)
        if claim is None or num_blocks > self._open_loads.num_blocks:
            return num_exact
        if not blend.is_isolated:
            # With the other salt, the engine has none of these tokens.
            whole, least = find(0), num_computed_tokens + self._settings.blend_min_tokens
            if whole is None or whole.num_exact + whole.num_document_tokens < least:
                return num_exact
            self._isolate(request, blend, state)
            state.offer = None
            return None
        if not self._open_loads.may_begin(request.request_id, num_blocks):
            self._tracer.hold(request.request_id, ENGINE_MEMORY)
            return None
        num_tokens: int = request.num_tokens - 1 - num_computed_tokens
        blend.claim, state.is_exact = claim, False
        state.offer = Offer(num_computed_tokens, num_tokens, ())
        return num_tokens

    def _find_documents(
        self, blend: AskedBlend, lookups: LookupThread, num_known: int
    ) -> tuple[Sequence[Rows], bool]:
        """Return the leading rows of each document, and whether the request must wait for more of them.

        ``num_known``: leading tokens of the prompt with KV.
        """
        tickets = [lookup.ticket if lookup else None for lookup in blend.documents]
        unknown = {ticket for ticket in tickets if ticket and ticket.keys is None}
        found = lookups.find_rows(tickets)
        is_waiting, chunk_tokens = False, self._grid.chunk_tokens
        for document, lookup, rows in zip(blend.params.documents, blend.documents, found, strict=True):
            if lookup is None or document.stop <= num_known:
                continue
            lookup.num_found = len(rows.rows)
            if lookup.num_found < len(lookup.ticket.hashes):
                # The lookup thread may have found the keys since the search.
                is_waiting |= lookup.ticket in unknown and lookup.ticket.keys is not None
                is_waiting |= self._waits.must_wait(lookup, lookups, lookup.num_found, 0, chunk_tokens)
        if is_waiting:
            self._tracer.hold(blend.view.request_id, LOWER_TIERS)
        elif look_up_taken(blend, lookups, num_known):
            return self._find_documents(blend, lookups, num_known)
        return found, is_waiting

    def note_scheduled(self, request_id: str, get_tables: GetTables, num_computed: int, *args: Any) -> None:
        """Store the chunks that this step completes, and then documents that are not stored yet."""
        super().note_scheduled(request_id, get_tables, num_computed, *args)
        blend, state = self._asked.get(request_id), self._states.get(request_id)
        if blend is None or not blend.may_take or num_computed < blend.params.documents[-1].stop:
            return
        blend.may_take = False
        if state is not None and self._stores is not None and state.ticket.namespace == self._namespace:
            jobs = plan_takes(blend, state, self._stores, self._grid, get_tables(request_id))
            self._next.stores += jobs
            for document in blend.params.documents if jobs else ():
                self._learn(blend, document, state)

    def _learn(self, blend: AskedBlend, document: range, state: RequestState) -> None:
        first = blend.view.all_token_ids[document.start : document.start + START_TOKENS]
        self._known.learn(first, len(document), state.ticket)

    def note_allocated(self, request_id: str, tables: BlockTables, num_tokens: int) -> None:
        """Create the load, see ``SchedulerSide``. Offers of blended prompts include tokens to compute."""
        if (blend := self._asked.get(request_id)) and not blend.is_isolated:
            del self._asked[request_id]
        elif blend and num_tokens and (claim := blend.claim):
            self._tracer.end_lookup(request_id, claim.num_exact + claim.num_document_tokens)
        super().note_allocated(request_id, tables, num_tokens)

    def _begin_load(self, state: RequestState, offer: Offer, num_tokens: int, tables: BlockTables) -> int:
        blend = self._asked.get(request_id := state.ticket.request_id)
        if blend is None or blend.claim is None or self._lookups is None:
            return super()._begin_load(state, offer, num_tokens, tables)
        claim, blend.claim = blend.claim, None
        if num_tokens != offer.num_tokens:
            self._next.loads.append(LoadJob.failing(request_id, self._grid, tables))
            return 0
        self._step().jobs.append(claim.job(request_id, state.request, tables[0]))
        leased = []
        for document, lookup, rows in zip(blend.params.documents, blend.documents, claim.rows, strict=True):
            if lookup is not None and rows:
                self._lookups.note_loading(lookup.ticket, rows)
                leased.append(lookup.ticket)
                if not blend.params.is_detected:
                    self._learn(blend, document, state)
        blend.num_documents = len(leased)
        self._jobs[request_id] = OpenJob(leased, self._num_ranks, claim.num_exact_in_documents)
        state.num_blended_tokens = claim.num_document_tokens
        self._tracer.begin_load(LoadJob(request_id, ()), claim.num_exact + claim.num_document_tokens)
        return claim.num_exact

    def build_connector_meta(self, output: Any) -> StepMeta:
        """Return the step's jobs, and how many tokens of blended prompts it may compute."""
        if self._jobs and any(job.is_ready for job in self._jobs.values()):
            self._step().max_tokens = slice_tokens(self._step_tokens, output.total_num_scheduled_tokens)
            self._rate.is_shared = True
        return super().build_connector_meta(output)

    def take_report(self, report: WorkerReport) -> None:
        """Record the jobs that ended, and the blended prompts whose slices may run."""
        super().take_report(report)
        for request_id, num_ranks in report.blends_placed.items():
            if job := self._jobs.get(request_id):
                job.num_missing -= num_ranks
                if job.is_ready:
                    self._release_documents(job)
                    self._step().ready.append(request_id)
        for request_id in report.blended.keys() - report.failed_loads:
            self._note_blended(request_id, report.blended[request_id])
        for request_id in report.failed_loads:
            if (job := self._jobs.get(request_id)) and not job.is_dropped:
                self._drop(request_id)  # ranks that have not failed must not go on
                self._num_failures += 1
                if self._num_failures == MAX_FAILURES:
                    logger.warning(_STOPPED, MAX_FAILURES, request_id)

    def _note_blended(self, request_id: str, blended: Blended) -> None:
        if blend := self._asked.get(request_id):
            blend.blended = blended
        if (job := self._jobs.get(request_id)) and (state := self._states.get(request_id)):
            num_blended = max(0, blended.reused - job.num_exact)
            self._times.end_blend(state, num_blended, blended.recomputed)

    def note_loaded(self, request_id: str) -> None:
        """Record that the request's load ended on all ranks, or its prompt is blended."""
        if job := self._jobs.pop(request_id, None):
            self._release_documents(job)
            if self._next.blend is not None and request_id in self._next.blend.dropped:
                self._next.blend.dropped.remove(request_id)
        super().note_loaded(request_id)

    def hand_over(self, request: Any) -> dict[str, Any] | None:
        """Return parameters for the next engine, see ``VLLMScheduler``, and what was blended."""
        params = super().hand_over(request)
        blend = self._asked.get(request.request_id)
        if blend is None or not (blended := blend.answer()):
            return params
        return {FIELD: {**(params or {}).get(FIELD, {}), "blended": blended}}

    def finish(self, request: Any, tables: BlockTables) -> bool:
        """Return True if the blocks must be held. Drop the prompt that is being blended.

        Later prompts find the request's prompt if it is a document, or if ``lmcache.blend`` is ``auto``.
        """
        state = self._states.get(request_id := request.request_id)
        if request_id in self._asked:
            blend, job = self._asked.pop(request_id), self._jobs.get(request_id)
            if state is not None and blend is None and not state.is_loading:
                self._end_document(request, state, tables)
            if state is not None and blend and not blend.blended and job and not job.is_dropped:
                self._times.end_blend(state, state.num_blended_tokens, 0)  # the engine computes none of them
            self._drop(request_id)
        is_held = super().finish(request, tables)
        if self._is_auto and self._num_ranks and state is not None:
            num_tokens = state.num_stored_chunks * self._grid.chunk_tokens
            is_exact = state.is_exact and state.ticket.namespace == self._namespace
            if num_tokens and is_exact and can_blend(request):
                self._known.learn_prompt(request.all_token_ids, num_tokens, state.ticket)
        return is_held

    def _end_document(self, request: Any, state: RequestState, tables: BlockTables) -> None:
        """Store the tail of a document that is computed, and let prompts find the document."""
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens
        if is_computed and self._stores is not None and state.ticket.namespace == self._namespace:
            self._next.stores += self._stores.plan_tail(state, tables[0], request.num_prompt_tokens)
            if can_blend(request):
                self._known.learn(request.all_token_ids, request.num_prompt_tokens, state.ticket)

    def _drop(self, request_id: str) -> None:
        """Let the workers end the blended prompt, once. They report its load as failed."""
        job = self._jobs.get(request_id)
        if job is None or job.is_dropped:
            return
        job.is_dropped = True
        self._release_documents(job)
        step = self._step()
        step.ready = [ready for ready in step.ready if ready != request_id]
        unsent = [unsent for unsent in step.jobs if unsent.request_id == request_id]
        for blend_job in unsent:
            step.jobs.remove(blend_job)
            private_blocks = blend_job.blocks[blend_job.begin // self._grid.step_tokens :]
            self._next.loads.append(LoadJob.failing(request_id, self._grid, (private_blocks,)))
        if not unsent:
            step.dropped.append(request_id)

    def _release_documents(self, job: OpenJob) -> None:
        if self._lookups is not None:
            for ticket in job.leased:
                self._lookups.release(ticket)
        job.leased.clear()

    def _step(self) -> BlendStep:
        """Return the message about blended prompts for the next step."""
        self._next.blend = self._next.blend or BlendStep()
        return self._next.blend
