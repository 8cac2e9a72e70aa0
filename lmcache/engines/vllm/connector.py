"""The vLLM KV connector: a facade whose every hook is one guarded call of a side.

::

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache.engines.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.socket": "/run/lmcache/kvcache.sock"}}'

**A cache failure is never an inference failure.** A hook that raises takes its side offline for the life of
the process: one log line with the stack, then every hook answers as if there were no cache. What was promised
to the engine before is still reported.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from lmcache.engines.errors import UnsupportedError
from lmcache.engines.vllm.support import check_version

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

    from lmcache.engines.core.jobs import EngineIdentity, StepMeta, WorkerReport
    from lmcache.engines.core.worker import WorkerSide
    from lmcache.engines.vllm.scheduler import VLLMScheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LMCacheClusterConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is untyped
    """See the module. The scheduler's process has the scheduler side, each worker's the worker side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: VLLMScheduler | None = None
        self._worker: WorkerSide | None = None
        try:
            check_version(vllm.__version__)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = _make_scheduler(vllm_config)
            else:
                self._worker = _make_worker(vllm_config, kv_cache_config)
        except Exception as error:
            # One line for an engine, whatever the number of its workers.
            is_said = isinstance(error, UnsupportedError) and role == KVConnectorRole.WORKER
            level = logging.DEBUG if is_said else logging.WARNING
            logger.log(level, "LMCache Cluster is off, the engine runs without it: %s", error)

    @property
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: a dropped store is a future miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """What is asked for; an attention that can't have it makes vLLM take another one, with a warning.

        Only if it is set: in a MultiConnector, layouts that differ from another child's end the engine.
        """
        try:
            return _wanted_layout(vllm_config)
        except Exception as error:  # a wrong setting: the worker says so
            logger.debug("No layout of KV is asked for: %s", error)
            return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by 0.33, which refuses to start where the answer is no. An engine that may sleep is not
        cached (``layouts``), so there is nothing to follow."""
        return True

    def shutdown(self) -> None:
        """End the threads and detach."""
        _call(self._scheduler, "go_offline", None)
        _call(self._worker, "close", None)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's KV tensors."""
        _call(self._worker, "register_kv_caches", None, kv_caches)

    def get_handshake_metadata(self) -> EngineIdentity | None:
        """Tell the scheduler side who we are, before the first request.

        Inside another connector (MultiConnector) it would be given to all of its children, who don't know
        what to do with it: there the first step's report says it.
        """
        if self._worker is None or not has_kv_transfer_group() or get_kv_transfer_group() is not self:
            return None
        return self._worker.identity

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        _call(self._worker, "handle_preemptions", None, kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        _call(self._worker, "start_loads", None, self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored as a whole after the step."""

    def wait_for_save(self) -> None:
        """Begin the step's stores; waits for nothing."""
        _call(self._worker, "start_stores", None, self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report requests whose blocks are not needed any more, and ended loads."""
        return _call(self._worker, "collect", (None, None), self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, and loads that failed as a whole (vLLM 0.30 and later)."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = _call(self._worker, "take_failed_requests", set())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, in the step that reports the load as ended."""
        return _call(self._worker, "take_bad_blocks", set())

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler side has to know."""
        return _call(self._worker, "take_report", None, self._connector_metadata)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the copies that ended in this step came to."""
        figures: dict[str, float] = _call(self._worker, "take_figures", {})
        return self.build_kv_connector_stats(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """The same where vLLM logs and counts it, made of its ``data``."""
        from lmcache.engines.vllm.stats import LMCacheStats

        return LMCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        """Where vLLM counts it for Prometheus."""
        from lmcache.engines.vllm.stats import LMCachePromMetrics

        return LMCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take what the workers said (older engines)."""
        _call(self._scheduler, "adopt", None, metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take what the workers said. Inside a MultiConnector it may be another connector's."""
        _call(self._scheduler, "adopt", None, metadata.values())

    def on_new_request(self, request: Any) -> None:
        """Begin to look up."""
        _call(self._scheduler, "on_new_request", None, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the computed ones; None: ask again in the next step."""
        return _call(self._scheduler, "get_num_new_matched_tokens", (0, False), request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated: make the load."""
        _call(self._scheduler, "update_state_after_alloc", None, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta | KVConnectorMetadata:
        """Hand out the step's loads and stores."""
        return _call(self._scheduler, "build_connector_meta", KVConnectorMetadata(), scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what the workers ended."""
        _call(self._scheduler, "update_connector_output", None, connector_output)

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call, for vLLM's publisher."""
        return _call(self._scheduler, "take_events", [])

    def reset_cache(self) -> bool:
        """Forget what is cached: the weights may have changed. False: not possible now."""
        return _call(self._scheduler, "reset_cache", True)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must be held."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks must be held."""
        return _call(self._scheduler, "finish", False, request, block_ids), None


with contextlib.suppress(ValueError):  # a MultiConnector finds the figures of its children by their names
    KVConnectorFactory.register_connector(
        LMCacheClusterConnector.__name__, __name__, LMCacheClusterConnector.__name__
    )


def _call(side: VLLMScheduler | WorkerSide | None, hook: str, neutral: T, *args: Any) -> T:
    """Call a hook of a side. If it raises, the side goes offline and is asked once more: offline it keeps the
    promises that were made (fails the loads that the engine waits for, gives held blocks back).
    """
    if side is None:
        return neutral
    try:
        return cast("T", getattr(side, hook)(*args))
    except Exception:
        logger.exception("LMCache Cluster goes offline in this process, the engine runs on without it")
    try:
        side.go_offline()
        return cast("T", getattr(side, hook)(*args))
    except Exception:
        return neutral


# The sides are imported here and not above: an import that fails must leave an engine that runs.


def _make_scheduler(vllm_config: Any) -> VLLMScheduler:
    from lmcache.engines.core.events import ChunkEvents
    from lmcache.engines.vllm.attach import Settings, start_scheduler_client
    from lmcache.engines.vllm.extra_keys import ExtraKeyFinder
    from lmcache.engines.vllm.scheduler import VLLMScheduler

    settings = Settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
    connect = partial(start_scheduler_client, settings.socket)
    events = vllm_config.kv_events_config
    return VLLMScheduler(
        connect,
        ExtraKeyFinder().extra_keys_of,
        settings.answer_seconds,
        settings.prefill_tokens_per_second,
        events=ChunkEvents() if events is not None and events.enable_kv_cache_events else None,
    )


def _wanted_layout(vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    from lmcache.engines.vllm.attach import Settings

    if current_platform.is_cpu():  # its attention knows one layout
        return None
    return Settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_cache_layout


def _make_worker(vllm_config: Any, kv_cache_config: Any) -> WorkerSide:
    from lmcache.engines.core.worker import WorkerSide
    from lmcache.engines.vllm.attach import attach_worker

    return WorkerSide(lambda kv_caches: attach_worker(vllm_config, kv_cache_config, kv_caches))
