"""The vLLM KV connector: a facade whose every hook is one guarded call of a side.

::

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache_client.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.socket": "/run/lmcache/kvcache.sock"}}'

**A cache failure is never an inference failure.** If a hook raises, its side goes offline for the life of the
process, and one log line shows the stack. After that, every hook returns what an engine without a cache
expects. Loads that the engine already waits for are still reported.
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

from lmcache_client.errors import UnsupportedError
from lmcache_client.off_notice import NOT_CACHED, OffNotice
from lmcache_client.vllm.support import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

    from lmcache_client.core.jobs import EngineIdentity, StepMeta, WorkerReport
    from lmcache_client.core.worker import WorkerSide
    from lmcache_client.vllm.blend.worker import Executor
    from lmcache_client.vllm.scheduler import VLLMScheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LMCacheClusterConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is untyped
    """The connector, see the module: the scheduler side in the scheduler's process, else a worker side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: VLLMScheduler | None = None
        self._worker: WorkerSide | None = None
        self._blender: Executor | None = None
        self._off = OffNotice()
        try:
            _share_handlers()
            check_version(vllm.__version__)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = _make_scheduler(vllm_config, kv_cache_config)
                self._off = self._scheduler.off
            else:
                self._worker = _make_worker(vllm_config, kv_cache_config)
        except Exception as error:
            # The scheduler side warns for the engine, so the workers need not.
            if role == KVConnectorRole.SCHEDULER or not isinstance(error, UnsupportedError):
                self._off.warn(f"{NOT_CACHED}: {error}")

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped store is only a future miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the KV layout of the settings, or None if none is set.

        If the attention backend does not support it, vLLM uses another layout and logs a warning. There is no
        default, because an engine ends if two children of a MultiConnector require different layouts.
        """
        try:
            return _wanted_layout(vllm_config)
        except Exception as error:  # an invalid setting, about which the worker warns
            logger.debug("The connector requires no KV layout: %s", error)
            return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True, because vLLM 0.33 would otherwise refuse to start.

        An engine that may sleep is not cached (``layouts``), so the connector need not follow its sleep.
        """
        return True

    def shutdown(self) -> None:
        """End the threads and detach."""
        _call(self._scheduler, "go_offline", None)
        _call(self._worker, "close", None)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start caching the engine's KV tensors. If prompts are blended, test that first."""
        _call(self._worker, "register_kv_caches", None, kv_caches)
        self._blender = getattr(self._worker, "blender", None)

    def get_handshake_metadata(self) -> EngineIdentity | None:
        """Return the engine's identity for the scheduler side, before the first request.

        Inside a MultiConnector, all of its children would get the identity and fail. So it returns None
        there, and the report of the first step carries the identity.
        """
        if self._worker is None or not has_kv_transfer_group() or get_kv_transfer_group() is not self:
            return None
        return self._worker.identity_to_report

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait shortly for copies of blocks that the engine is about to overwrite, or abort them."""
        _call(self._worker, "handle_preemptions", None, kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads, and compute the step's slices of prompts to blend."""
        _call(self._worker, "start_loads", None, self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """End a pass of ``Blender`` that needs no more layers. Loads are asynchronous: no layer waits."""
        if self._blender is not None:
            self._blender.wait_for_layer_load(layer_name)  # what it raises is for the pass, not for ``_call``

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole chunks are stored after the step."""

    def wait_for_save(self) -> None:
        """Begin the step's stores without waiting for them."""
        _call(self._worker, "start_stores", None, self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks are released, and the requests whose loads ended."""
        return _call(self._worker, "collect", (None, None), self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same as ``get_finished``, and loads that failed as a whole (vLLM 0.30 and later)."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = _call(self._worker, "take_failed_requests", set())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks of failed loads, in the step that reports the load as ended."""
        return _call(self._worker, "take_bad_blocks", set())

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the worker's report for the scheduler side; None if it would be empty."""
        return _call(self._worker, "take_report", None, self._connector_metadata)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the figures of copies that ended in this step, if any did."""
        figures: dict[str, float] = _call(self._worker, "take_figures", {})
        return self.build_kv_connector_stats(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Create the statistics from the ``data`` of another process, where vLLM logs and counts them."""
        from lmcache_client.vllm.stats import LMCacheStats

        return LMCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        """Create the Prometheus metrics in which vLLM counts the statistics."""
        from lmcache_client.vllm.stats import LMCachePromMetrics

        return LMCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler ----

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Take the workers' identities. Inside a MultiConnector, messages may be another connector's."""
        _call(self._scheduler, "adopt", None, metadata.values())

    set_xfer_handshake_metadata = set_xfer_handshake_metadata_pp_aware  # older engines call this name

    def on_new_request(self, request: Any) -> None:
        """Ask the sidecar for the request's rows, and send it the request's KV hints."""
        _call(self._scheduler, "on_new_request", None, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens to load after the computed ones, True if the load is asynchronous).

        None tokens: vLLM asks again in the next step.
        """
        return _call(self._scheduler, "get_num_new_matched_tokens", (0, False), request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Create the load, now that vLLM has allocated its blocks."""
        _call(self._scheduler, "update_state_after_alloc", None, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta | KVConnectorMetadata:
        """Return the step's loads and stores for the workers."""
        self._off.repeat()
        return _call(self._scheduler, "build_connector_meta", KVConnectorMetadata(), scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record the jobs that the workers ended."""
        _call(self._scheduler, "update_connector_output", None, connector_output)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Note how requests return their blocks, and watch vLLM's own cache (vLLM 0.30 and later)."""
        if self._scheduler is not None:
            self._scheduler.free_blocks = kv_cache_manager.free
            reset = kv_cache_manager.reset_prefix_cache
            kv_cache_manager.reset_prefix_cache = partial(_reset_engine_cache, self._scheduler, reset)

    def has_pending_push_work(self) -> bool:
        """Return True while a paused engine must run steps, until its loads have ended."""
        return _call(self._scheduler, "has_loads_to_await", False)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call, for vLLM's publisher."""
        return _call(self._scheduler, "take_events", [])

    def reset_cache(self) -> bool:
        """Invalidate all cached KV if the weights may change. Always succeeds."""
        _call(self._scheduler, "reset_cache", None)
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return (True if the engine must hold the blocks, parameters for the next engine or None)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (True if the engine must hold the blocks, parameters for the next engine or None)."""
        params = _call(self._scheduler, "end_answer", None, request)
        return _call(self._scheduler, "finish", False, request, block_ids), params


with contextlib.suppress(ValueError):  # a MultiConnector finds its children's statistics by their names
    KVConnectorFactory.register_connector(
        LMCacheClusterConnector.__name__, __name__, LMCacheClusterConnector.__name__
    )


def _share_handlers() -> None:
    """Log as vLLM does, which configures only the logger of its name: others print no level.

    Does nothing if our messages have handlers, as with VLLM_LOGGING_CONFIG_PATH.
    """
    engine = logging.getLogger("vllm")
    for name in ("lmcache_client", "lmcache_store"):
        if not (ours := logging.getLogger(name)).hasHandlers():
            ours.handlers, ours.propagate = engine.handlers, engine.propagate
            ours.setLevel(ours.level or engine.level)


def _reset_engine_cache(scheduler: VLLMScheduler, reset: Callable[[], bool]) -> bool:
    is_reset = reset()
    if is_reset:
        _call(scheduler, "note_engine_reset", None)
    return is_reset


def _call(side: VLLMScheduler | WorkerSide | None, hook: str, neutral: T, *args: Any) -> T:
    """Call a hook of a side. If it raises, take the side offline and call the hook once more.

    An offline side still fails the loads that the engine waits for, and releases held blocks.
    """
    if side is None:
        return neutral
    try:
        return cast("T", getattr(side, hook)(*args))
    except Exception:
        logger.exception("LMCache Cluster goes offline in this process: %s failed, the engine goes on", hook)
    try:
        side.go_offline()
        side.off.warn(f"{hook} failed, and this process stays offline until the engine restarts")
        return cast("T", getattr(side, hook)(*args))
    except Exception:
        return neutral


# Imported here and not above, so that the engine runs even if an import fails.


def _make_scheduler(vllm_config: Any, kv_cache_config: Any) -> VLLMScheduler:
    import zmq

    from lmcache_client.core.events import ChunkEvents
    from lmcache_client.core.tracer_choice import make_tracer
    from lmcache_client.vllm.attach import VLLMSettings, can_wait, start_scheduler_client
    from lmcache_client.vllm.extra_keys import ExtraKeyFinder
    from lmcache_client.vllm.scheduler import VLLMScheduler
    from lmcache_client.vllm.weights import watch_weights

    settings = VLLMSettings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
    connect = partial(start_scheduler_client, settings.socket)
    events = vllm_config.kv_events_config
    publishes = events is not None and events.enable_kv_cache_events
    if publishes and "*" in str(events.endpoint):
        # vLLM opens the publisher's socket after this. Without the option, "*" means all IPv4 addresses.
        zmq.Context.instance().setsockopt(zmq.IPV6, 1)
    observability = getattr(vllm_config, "observability_config", None)
    num_drafts = vllm_config.num_speculative_tokens
    make: Callable[..., VLLMScheduler] = VLLMScheduler
    if settings.blend != "off":
        from lmcache_client.vllm.blend.scheduler import BlendingScheduler
        from lmcache_client.vllm.blend.separator import Separator

        make = partial(
            BlendingScheduler,
            blend=settings,
            separator=Separator.load(settings.blend_separator, vllm_config.model_config),
            hash_algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        )
    scheduler = make(
        connect,
        ExtraKeyFinder(lora_config=getattr(vllm_config, "lora_config", None)),
        settings.answer_seconds,
        settings.prefill_tokens_per_second,
        num_blocks=kv_cache_config.num_blocks,
        draft_slots=1 + num_drafts + vllm_config.num_lookahead_tokens if num_drafts else 0,
        max_tokens=vllm_config.model_config.max_model_len,
        events=ChunkEvents() if publishes else None,
        tracer=make_tracer(getattr(observability, "otlp_traces_endpoint", None)),
        can_wait=can_wait(vllm_config),
    )
    notes = (partial(_call, scheduler, hook, None) for hook in ("note_change", "note_adapter"))
    scheduler.are_weights_watched = watch_weights(vllm_config, *notes)
    return scheduler


def _wanted_layout(vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    from lmcache_client.vllm.attach import VLLMSettings

    if current_platform.is_cpu():  # its attention supports only one layout
        return None
    return VLLMSettings.read(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_cache_layout


def _make_worker(vllm_config: Any, kv_cache_config: Any) -> WorkerSide:
    from lmcache_client.core.worker import WorkerSide
    from lmcache_client.vllm.attach import VLLMSettings, attach_worker, can_wait

    settings = VLLMSettings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if settings.blend != "off":
        from lmcache_client.vllm.blend.worker import make_worker

        return make_worker(vllm_config, kv_cache_config, settings.chunk_tokens)
    attach = partial(attach_worker, vllm_config, kv_cache_config)
    return WorkerSide(attach, can_wait=can_wait(vllm_config))
