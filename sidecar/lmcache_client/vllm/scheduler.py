"""Translates vLLM's types for the scheduler side: requests, SchedulerOutput and KVConnectorOutput."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lmcache_client.core.grid import BlockTables
from lmcache_client.core.jobs import StepMeta, WorkerReport
from lmcache_client.core.scheduler import SchedulerSide
from lmcache_client.core.tracing import ENGINE_MEMORY
from lmcache_client.errors import private_until_restart
from lmcache_client.off_notice import OffNotice
from lmcache_client.vllm import hand_over
from lmcache_client.vllm.extra_keys import ExtraKeyFinder
from lmcache_client.vllm.hinted import HintedRequests
from lmcache_client.vllm.hints import read_hints
from lmcache_store.common.units import ceil_div

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenLoad:
    """A load that holds blocks of a request."""

    request: Any
    num_blocks: int
    """Blocks that the request needs in the end."""
    has_ended: bool = False


class OpenLoads:
    """Loads that hold blocks while their requests do not run. Prevents that they stop the engine.

    vLLM cannot preempt such requests. They could hold so many blocks that none of them gets the rest of its
    blocks. A load therefore begins only if all open loads could be completed together.

    The scheduler of vLLM 0.29 also stops at the first waiting request that gets no blocks. Later requests may
    hold all blocks, filled by loads that have ended. The scheduler would then stop there in every step. It
    skips the first request only if the connector has no answer for it yet.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks``: blocks that requests can use."""
        self.num_blocks = num_blocks
        self.loads: dict[str, OpenLoad] = {}
        self._num_steps = 0  # successive steps that computed nothing while requests were loaded

    def may_begin(self, request_id: str, num_blocks: int) -> bool:
        """Return True if the load of a request that needs ``num_blocks`` blocks can begin now."""
        num_needed = sum(load.num_blocks for name, load in self.loads.items() if name != request_id)
        return not num_needed or num_needed + num_blocks <= self.num_blocks

    def begin(self, request: Any, num_blocks: int) -> None:
        """Note that the request waits for a load."""
        self.loads[request.request_id] = OpenLoad(request, num_blocks)

    def end(self, request_id: str) -> None:
        """Note that the request's load has ended, successfully or not."""
        if request_id in self.loads:
            self.loads[request_id].has_ended = True

    def forget(self, request_id: str) -> None:
        """Note that the request is finished."""
        self.loads.pop(request_id, None)

    def note_step(self, scheduled: Iterable[str], num_tokens: int) -> None:
        """Note which requests a step computes, and how many tokens of all."""
        if self.loads:
            for request_id in scheduled:
                self.loads.pop(request_id, None)
        is_stuck = not num_tokens and any(load.has_ended for load in self.loads.values())
        self._num_steps = self._num_steps + 1 if is_stuck else 0

    def must_yield(self, request_id: str) -> bool:
        """Return True if this request must wait, so that vLLM considers the loaded requests.

        True only in every second step: if the loaded requests get no blocks either, this one may get some.
        """
        return self._num_steps % 2 == 1 and request_id not in self.loads


class VLLMScheduler(SchedulerSide):
    """The scheduler side with vLLM's hooks, which ``connector`` documents and calls."""

    def __init__(
        self,
        connect: Any,
        finder: ExtraKeyFinder,
        *args: Any,
        num_blocks: int,
        draft_slots: int = 0,
        max_tokens: int = sys.maxsize,
        **settings: Any,
    ) -> None:
        """Create a side, see ``SchedulerSide``.

        Args:
            connect, args, settings: as there.
            finder: finds adapters and media of requests.
            num_blocks: blocks of the engine's KV memory; one of them is vLLM's null block.
            draft_slots: slots for KV that a step needs after the tokens of a request, if it has drafts.
            max_tokens: longest request, with its answer.
        """
        super().__init__(connect, finder.extra_keys_of, *args, **settings)
        self._finder = finder
        self._draft_slots, self._max_tokens = draft_slots, max_tokens
        self.are_weights_watched = False
        """True if the weights can't change without a call of ``note_change``."""
        self._change = ""  # the last call that may have changed the weights
        self._has_older_kv = False  # vLLM's own cache may hold KV from before this call
        self._tables: dict[str, BlockTables] = {}  # with vLLM 0.29
        self._open_loads = OpenLoads(num_blocks - 1)
        self._hinted = HintedRequests(self._clock)
        self.off = OffNotice()
        """Warns that this side is offline."""
        self.free_blocks: Callable[[Any], object] | None = None
        """Returns the blocks of a request to vLLM; None with vLLM 0.29."""

    def reset_cache(self) -> None:
        """Invalidate all cached KV, unless the weights are certainly the same as before the reset."""
        if not self._change and self.are_weights_watched:
            return
        reason = self._change or private_until_restart("vLLM's caches were reset")
        level = logging.DEBUG if self._private_reason else logging.WARNING
        logger.log(level, "Cached KV stays private to this engine: %s", reason)
        self.begin_namespace(reason)

    def note_change(self, reason: str) -> None:
        """Invalidate all cached KV, before a call that may change the weights."""
        self._change, self._has_older_kv = reason, True
        self.reset_cache()

    def note_engine_reset(self) -> None:
        """Record that vLLM emptied its own cache: new requests no longer continue KV of older weights."""
        if self._has_older_kv:
            self._has_older_kv = False
            self.reset_cache()

    def note_adapter(self, adapter: Any) -> None:
        """Record that vLLM is about to load an adapter, perhaps in place of that of running requests."""
        if self._finder.note_load(adapter):
            self.forget(lambda request: _has_adapter(request, adapter.lora_int_id))

    def on_new_request(self, request: Any) -> None:
        """Look the request up, and send its KV hints.

        Ignores streaming sessions, because they replace tokens that were already hashed.
        """
        if not getattr(request, "resumable", False):
            params = getattr(request, "kv_transfer_params", None)
            self.add(request, hand_over.num_announced_tokens(params, self._namespace))
        if (hints := read_hints(request)) is not None:
            state = self._states.get(request.request_id)
            groups = [group.group for group in self._grid.stored]
            self._hinted.add(request, hints, state.ticket if state else None, self._lookups, groups)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens to load, True if there is a load); (None, False): ask again in the next step."""
        if self._lookups is not None and self._hinted.is_held(request.request_id):
            self._waits.hold()
            return None, False
        num_tokens = self.num_loadable(request, num_computed_tokens)
        if num_tokens is not None:
            self._tracer.resume(request.request_id)
        return num_tokens, bool(num_tokens)

    def _decide(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return the core's decision, as far as the engine's memory allows it."""
        if self._open_loads.must_yield(request.request_id):
            return None
        num_tokens = super()._decide(request, num_computed_tokens)
        if num_tokens:
            num_tokens = self._num_fitting(num_computed_tokens, num_tokens)
        if num_tokens and not self._open_loads.may_begin(request.request_id, self._num_blocks(request)):
            self._tracer.hold(request.request_id, ENGINE_MEMORY)
            return None
        return num_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Create the load. ``blocks`` holds the ids of the whole request's blocks, a list per KV group."""
        if num_external_tokens:
            self._open_loads.begin(request, self._num_blocks(request))
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self.note_allocated(request.request_id, tables, num_external_tokens)

    def build_connector_meta(self, output: Any) -> StepMeta:
        """Return the step's jobs. ``output`` is the engine's SchedulerOutput and is not changed."""
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self.note_preempted(request_id)
        if self.reads_transient_blocks:
            self.reclaim_blocks(_allocated_blocks(output))
        if self._states:
            self._follow(output)
        self._open_loads.note_step(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
        return self.end_step(output.total_num_scheduled_tokens)

    def update_connector_output(self, output: Any) -> None:
        """Record ended jobs. ``output`` is the engine's KVConnectorOutput, merged over all ranks."""
        report = output.kv_connector_worker_meta
        if self._lookups is not None:
            self._lookups.note_output(report)
        if isinstance(report, WorkerReport):
            self.take_report(report)
        for request_id in output.finished_recving or ():
            self._open_loads.end(request_id)
            self.note_loaded(request_id)
        for request_id in output.finished_sending or ():
            self.note_released(request_id)

    def has_loads_to_await(self) -> bool:
        """Return True while a load runs. If all have ended, return the blocks of their requests to vLLM.

        vLLM asks only if it may compute no request, because it is idle or paused. At the end of a pause it
        resets its caches, which fails while a request that waits holds blocks. The requests start again.
        """
        loads = self._open_loads.loads.values()
        if self.free_blocks is None or not all(load.has_ended for load in loads):
            return self.free_blocks is not None
        for load in loads:
            self.free_blocks(load.request)
            load.request.num_computed_tokens = 0
            if state := self._states.get(load.request.request_id):
                # vLLM still reserves the blocks of this load. It might wait for them before another load.
                state.has_failed = True
        self._open_loads.loads.clear()
        return False

    def end_answer(self, request: Any) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of the response, which may be for the next engine.

        Call this once, before ``finish``.
        """
        params, hints = self.hand_over(request), self._hinted.end(request.request_id)
        return (
            {hand_over.FIELD: {**(params or {}).get(hand_over.FIELD, {}), "hints": hints}}
            if hints
            else params
        )

    def hand_over(self, request: Any) -> dict[str, Any] | None:
        """Return parameters for the engine that continues this request.

        Returns None if no engine continues it, or if there is no KV for that engine.
        """
        if not hand_over.wants_hand_over(getattr(request, "kv_transfer_params", None)):
            return None
        state = self._states.get(request.request_id)
        if state is None or state.has_failed or self._private_reason:
            return None
        num_tokens = state.num_stored_chunks * self._grid.chunk_tokens
        return hand_over.announce(self._namespace, num_tokens) if num_tokens else None

    def finish(self, request: Any, tables: BlockTables) -> bool:
        """Return True if the blocks must be held. ``tables`` has null blocks that windows left behind."""
        self._tables.pop(request.request_id, None)
        self._open_loads.forget(request.request_id)
        return super().finish(request, tables)

    def take_events(self) -> list[Any]:
        """Return KV events of chunks that came into memory or left it. If this fails, only the events end."""
        if self._events is None:
            return []
        try:
            from lmcache_client.vllm import events  # imported here, so that this module does not need vLLM

            stored, removed = self.take_changes(lambda chunk: events.describe(chunk, self._grid))
            removals: list[Any] = [events.removed_event(chunk, self._grid) for chunk in removed]
            return removals + [events.stored_event(chunk, self._grid) for chunk in stored]
        except Exception:
            logger.exception("LMCache Cluster sends no more KV events in this process")
            self._events = None
            return []

    def _num_blocks(self, request: Any) -> int:
        """Return how many blocks the request needs for its next step, at most."""
        return self._grid.num_blocks(min(request.num_tokens + self._draft_slots, self._max_tokens))

    def _num_fitting(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return how many of these tokens can be loaded such that blocks for the drafts are left.

        vLLM 0.31 and later would never begin a larger load, and ask again in each step.
        """
        grid, end = self._grid, num_computed_tokens + num_tokens
        num_needed = sum(len(grid.needed_blocks(group, 0, end)) for group in grid.groups)
        num_lacking = num_needed + grid.num_blocks(self._draft_slots) - self._open_loads.num_blocks
        if num_lacking <= 0:
            return num_tokens
        num_left_out = ceil_div(num_lacking, len(grid.groups)) * grid.step_tokens
        return max(0, num_tokens - num_left_out) if grid.is_full else 0

    def _follow(self, output: Any) -> None:
        """Record what the step computes of each request.

        With the V2 model runner, a preempted request returns as a new request. Block tables are read from the
        engine's present state. The tables that it sends to its workers would still name blocks that a window
        left behind.
        """
        drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        blocks = output.kv_connector_block_state
        get_tables = getattr(blocks, "get_block_ids", None)
        if get_tables is None:  # vLLM 0.29 has only the tables that grew in this step
            self._tables |= blocks.block_ids
            get_tables = self._tables.get
        scheduled, snapshots = output.num_scheduled_tokens, blocks.boundary_state_offloads
        computed = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, num_tokens in computed:
            num_drafts = len(drafts.get(request_id, ())) if drafts else 0
            states = snapshots.get(request_id, ()) if snapshots else ()
            num_new = scheduled[request_id] - num_drafts
            self.note_scheduled(request_id, get_tables, num_tokens + num_new, num_drafts, states, num_new)


def _has_adapter(request: Any, number: int) -> bool:
    return request.lora_request is not None and request.lora_request.lora_int_id == number


def _allocated_blocks(output: Any) -> set[int]:
    """Return the blocks that requests may write to from this step on."""
    tables = itertools.chain(
        *(new.block_ids for new in output.scheduled_new_reqs),
        *filter(None, output.scheduled_cached_reqs.new_block_ids),
    )
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return {copy.dst_block_id for copy in copies}.union(*tables)
