"""vLLM's words for what the scheduler side does: its requests, its SchedulerOutput, its KVConnectorOutput."""

from __future__ import annotations

from typing import Any

from lmcache.engines.core.jobs import StepMeta, WorkerReport
from lmcache.engines.core.scheduler import SchedulerSide


class VLLMScheduler(SchedulerSide):
    """The hooks of vLLM's scheduler, as the facade calls them; each is documented there."""

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

    def _follow(self, output: Any) -> None:
        """With the V2 model runner a preempted request comes back among the new ones."""
        drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        whole = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        grown = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        renewed = cached.resumed_req_ids | {request_id for request_id, *_ in whole}
        for request_id, block_ids, num_computed_tokens in (*whole, *grown):
            num_scheduled = output.num_scheduled_tokens[request_id] - len(drafts.get(request_id, ()))
            num_tokens = num_computed_tokens + num_scheduled
            self.note_scheduled(request_id, block_ids, num_tokens, is_renewed=request_id in renewed)
