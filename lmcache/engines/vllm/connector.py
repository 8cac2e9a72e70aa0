"""The vLLM KV connector: a facade whose every hook is one guarded call of a half.

::

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache.engines.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.socket": "/run/lmcache/kvcache.sock"}}'

**A cache failure is never an inference failure.** A hook that raises takes its half offline for the life of
the process: one log line with the stack, then every hook answers as if there were no cache. What was promised
to the engine before (loads that it waits for, blocks that it holds) is still reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    from lmcache.engines.vllm.plan import EngineIdentity, StepMeta, WorkerReport
    from lmcache.engines.vllm.scheduler import Scheduler
    from lmcache.engines.vllm.worker import Worker

logger = logging.getLogger("vllm.lmcache")  # below vLLM's logger: shown with the handlers that it configures

SUPPORTED_VERSIONS = ("0.29", "0.30", "0.31", "0.32")

T = TypeVar("T")


class LMCacheClusterConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is untyped
    """See the module. The scheduler's process has the scheduler half, each worker's the worker half."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        try:
            _check_version(vllm.__version__)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = _make_scheduler(vllm_config)
            else:
                self._worker = _make_worker(vllm_config, kv_cache_config)
        except Exception as error:
            logger.warning("LMCache Cluster is off, the engine runs without it: %s", error)

    @property
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: a dropped store is a future miss."""
        return False

    def shutdown(self) -> None:
        """End the threads and detach."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._guarded(half.close, neutral=_nothing)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's KV tensors."""
        if self._worker is not None:
            self._guarded(self._worker.register_kv_caches, kv_caches, neutral=_nothing)

    def get_handshake_metadata(self) -> EngineIdentity | None:
        """Tell the scheduler half who we are, before the first request."""
        return self._worker.identity if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        if self._worker is not None:
            self._guarded(self._worker.handle_preemptions, kv_connector_metadata, neutral=_nothing)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            # A second try after a fault: the offline half fails the loads that the first did not begin.
            load, meta = self._worker.start_loads, self._connector_metadata
            self._guarded(load, meta, neutral=lambda: load(meta))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored as a whole after the step."""

    def wait_for_save(self) -> None:
        """Begin the step's stores; waits for nothing."""
        if self._worker is not None:
            self._guarded(self._worker.start_stores, self._connector_metadata, neutral=_nothing)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report requests whose blocks are not needed any more, and ended loads."""
        if self._worker is None:
            return None, None
        collect, meta = self._worker.collect, self._connector_metadata
        return self._guarded(collect, meta, neutral=lambda: (None, None))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, in the step that reports the load as ended."""
        if self._worker is None:
            return set()
        return self._guarded(self._worker.take_bad_blocks, neutral=set)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler half has to know."""
        if self._worker is None:
            return None
        return self._guarded(self._worker.take_report, self._connector_metadata, neutral=_nothing)

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take what the workers said (older engines)."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): meta for rank, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take what the workers said. Inside a MultiConnector it may be another connector's."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.greet, list(metadata.values()), neutral=_nothing)

    def on_new_request(self, request: Any) -> None:
        """Begin to look up."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.on_new_request, request, neutral=_nothing)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the computed ones; None: ask again in the next step."""
        if self._scheduler is None:
            return 0, False
        match = self._scheduler.get_num_new_matched_tokens
        return self._guarded(match, request, num_computed_tokens, neutral=lambda: (0, False))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated: make the load."""
        if self._scheduler is not None:
            update, args = self._scheduler.update_state_after_alloc, (request, blocks, num_external_tokens)
            # The engine waits for this load from now on: the offline half makes one that fails.
            self._guarded(update, *args, neutral=lambda: update(*args))

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta | KVConnectorMetadata:
        """Hand out the step's loads and stores."""
        if self._scheduler is None:
            return KVConnectorMetadata()
        build = self._scheduler.build_connector_meta
        return self._guarded(build, scheduler_output, neutral=lambda: build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what the workers ended."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.update_connector_output, connector_output, neutral=_nothing)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must be held."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must be held."""
        if self._scheduler is None:
            return False, None
        return self._guarded(self._scheduler.request_finished, request, neutral=lambda: False), None

    def _guarded(self, hook: Callable[..., T], *args: Any, neutral: Callable[[], T]) -> T:
        try:
            return hook(*args)
        except Exception:
            logger.exception("LMCache Cluster goes offline in this process, the engine runs on without it")
            for half in (self._scheduler, self._worker):
                if half is not None:
                    half.go_offline()
            return neutral()


def _nothing() -> None:
    """The neutral value of hooks that return nothing."""


def _check_version(version: str) -> None:
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise RuntimeError(f"vLLM {version} is not supported (supported: {', '.join(SUPPORTED_VERSIONS)})")


# The halves are imported here and not above: an import that fails must leave an engine that runs.


def _make_scheduler(vllm_config: Any) -> Scheduler:
    from lmcache.engines.vllm.attach import attach_scheduler
    from lmcache.engines.vllm.fingerprint import lora_fingerprint
    from lmcache.engines.vllm.scheduler import Scheduler

    return Scheduler(vllm_config.parallel_config.world_size, attach_scheduler(vllm_config), lora_fingerprint)


def _make_worker(vllm_config: Any, kv_cache_config: Any) -> Worker:
    from lmcache.engines.vllm.attach import attach_worker
    from lmcache.engines.vllm.worker import Worker

    return Worker(lambda kv_caches: attach_worker(vllm_config, kv_cache_config, kv_caches))
