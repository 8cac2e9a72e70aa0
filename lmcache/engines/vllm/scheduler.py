"""vLLM's words for what the scheduler side does: its requests, its SchedulerOutput, its KVConnectorOutput."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from lmcache.engines.core.grid import BlockTables
from lmcache.engines.core.jobs import StepMeta, WorkerReport
from lmcache.engines.core.scheduler import SchedulerSide

logger = logging.getLogger(__name__)


class VLLMScheduler(SchedulerSide):
    """The hooks of vLLM's scheduler, as the facade calls them; each is documented there."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tables: dict[str, BlockTables] = {}  # with vLLM 0.29

    def on_new_request(self, request: Any) -> None:
        """A streaming session replaces tokens that were hashed already: it is left alone."""
        if not getattr(request, "resumable", False):
            self.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The load is asynchronous, if there is one; (None, False): ask again."""
        num_tokens = self.num_loadable(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks' ids are those of the whole request, a list per KV group."""
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self.note_allocated(request.request_id, tables, num_external_tokens)

    def build_connector_meta(self, output: Any) -> StepMeta:
        """``output`` is the engine's SchedulerOutput and stays as it is."""
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self.note_preempted(request_id)
        if self.reads_transient_blocks:
            self.reclaim_blocks(_handed_out(output))
        if self._states:
            self._follow(output)
        return self.end_step(output.total_num_scheduled_tokens)

    def update_connector_output(self, output: Any) -> None:
        """``output`` is the engine's KVConnectorOutput, of all ranks."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.take_report(report)
        for request_id in output.finished_recving or ():
            self.note_loaded(request_id)
        for request_id in output.finished_sending or ():
            self.note_released(request_id)

    def finish(self, request: Any, tables: BlockTables) -> bool:
        """``tables``: with null blocks where windows left some behind."""
        self._tables.pop(request.request_id, None)
        return super().finish(request, tables)

    def take_events(self) -> list[Any]:
        """KV events of what came into memory and what left it; a fault ends them and nothing else."""
        try:
            stored, removed = self.take_changes()
            if not (stored or removed):
                return []
            from lmcache.engines.vllm import events  # without vLLM, until there is one

            told: list[Any] = [events.removed_event(hashes, self._grid) for hashes in removed]
            return told + [events.stored_event(chunk, self._grid) for chunk in stored]
        except Exception:
            logger.exception("KV events of LMCache Cluster end in this process")
            self._events = None
            return []

    def _follow(self, output: Any) -> None:
        """With the V2 model runner a preempted request comes back among the new ones.

        Block tables are the engine's present ones: what it sends to its workers only grows, and names blocks
        that a window left behind.
        """
        drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        blocks = output.kv_connector_block_state
        get_tables = getattr(blocks, "get_block_ids", None)
        if get_tables is None:  # vLLM 0.29 shows only those that grew in this step
            self._tables |= blocks.block_ids
            get_tables = self._tables.get
        scheduled, snapshots = output.num_scheduled_tokens, blocks.boundary_state_offloads
        computed = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, num_tokens in computed:
            num_drafts = len(drafts.get(request_id, ())) if drafts else 0
            own = snapshots.get(request_id, ()) if snapshots else ()
            num_tokens += scheduled[request_id] - num_drafts
            self.note_scheduled(request_id, get_tables, num_tokens, num_drafts, own)


def _handed_out(output: Any) -> set[int]:
    """Blocks that requests may write to from this step on."""
    tables = itertools.chain(
        *(new.block_ids for new in output.scheduled_new_reqs),
        *filter(None, output.scheduled_cached_reqs.new_block_ids),
    )
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return {copy.dst_block_id for copy in copies}.union(*tables)
