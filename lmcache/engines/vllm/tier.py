"""A disk or Redis tier under vLLM's own CPU offloading: ``lmcache.engines.vllm.tier.LMCacheTier``.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{"type": "LMCacheTier", "module_path": "lmcache.engines.vllm.tier",
                                 "remote_url": "rediss://cache:6379", "weights_path": "/models/llama"}]}}'

Experimental, because vLLM's interface is experimental. vLLM calls every method on the scheduler's thread, and
an exception would end the engine. So if a method fails, this tier goes offline, one log line shows the stack,
and the engine continues with its other tiers. Every job is reported exactly once, whatever happens.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent import futures
from typing import Any, TypeVar

import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from lmcache import keys
from lmcache.common.timing import TIMING
from lmcache.engines.errors import UnnamedError
from lmcache.engines.vllm.support import check_version

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
"""Length of block hashes by SHA-256. Authors of prompts can cause collisions of the others, by xxhash."""


_RESULTS = {None: LookupResult.RETRY, True: LookupResult.HIT, False: LookupResult.MISS}


def _guarded(neutral: Any) -> Callable[[F], F]:
    """Decorate a hook: return ``neutral`` while the tier is off, and take it offline if the hook raises."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(self: LMCacheTier, *args: Any) -> Any:
            if self._is_off:
                return neutral
            try:
                return hook(self, *args)
            except Exception:
                logger.exception("The LMCache tier goes offline, the engine runs on without it")
                self._go_offline()
                return neutral

        return guarded  # type: ignore[return-value]

    return decorate


class LMCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vllm is untyped
    """The tier, see the module. ``tier_settings`` has its settings; ``core.tier_access`` does its work."""

    medium = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: object,
    ) -> None:
        # There is no detector before 0.30.
        optional = {"backpressure_detector": backpressure_detector} if backpressure_detector else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **optional)
        self._is_off = True
        self._open: dict[int, Any] = {}
        """Jobs that vLLM waits for, by id."""
        self._refused: list[int] = []  # ids of jobs that could not begin, to be reported as failed
        self._namespace: bytes | None = None
        try:
            self._start(offloading_spec.config, primary_kv_view, settings)
            self._is_off = False
        except Exception as error:
            logger.warning("The LMCache tier is off, the engine runs without it: %s", error)

    def _start(self, config: Any, view: memoryview, given: dict[str, object]) -> None:
        # Imported here and not above, so that the engine runs even if an import fails.
        import numpy as np
        from vllm.platforms import current_platform

        from lmcache.engines.core import files
        from lmcache.engines.core.tier_access import TierAccess
        from lmcache.engines.vllm.tier_settings import TierSettings, listing

        check_version(vllm.__version__)
        settings = TierSettings.read(given)
        self.locality = base.Locality.REMOTE if settings.remote_url else base.Locality.LOCAL
        rows = np.asarray(view).view(np.uint8)
        # vLLM does not pass attention backend and model configuration: version and device replace them.
        minor, device = ".".join(vllm.__version__.split(".")[:2]), str(current_platform.get_device_name())
        self._listing = listing(config, row_bytes=rows.shape[1], version=minor, device=device)
        self._tier = settings.open(config.parallel)
        self._weights = files.in_background(settings.weights)
        futures.wait([self._weights], TIMING.start_seconds)
        self._access = TierAccess(self._tier, rows, settings.lookup_seconds, settings.job_seconds)

    # ---- lookups ----

    @_guarded(LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return if the tier has a chunk; RETRY until that is known."""
        row_keys = self._row_keys([key])
        return _RESULTS[self._access.find(req_context.req_id, row_keys[0])] if row_keys else LookupResult.MISS

    @_guarded(None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark chunks as recently used, because they were hit in a tier above."""
        self._access.touch(self._row_keys(keys))

    def on_new_request(self, req_context: Any) -> base.RequestOffloadingContext:
        """Return a context that requests only new chunks: this tier has those that were hit."""
        return base.RequestOffloadingContext()

    @_guarded(None)
    def on_request_finished(self, req_context: Any) -> None:
        """Drop the request's lookups: other engines may store its missing chunks."""
        self._access.forget(req_context.req_id)

    @_guarded(None)
    def on_schedule_end(self, context: Any) -> None:
        """Start the lookups of the step that ends."""
        self._access.flush()

    # ---- jobs ----

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write chunks, or to read them."""
        self._open[job_metadata.job_id] = job_metadata
        if not self._begin(job_metadata):
            self._refused.append(job_metadata.job_id)

    submit_load = submit_store

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of jobs that ended since the last call. Each job is reported once."""
        ended = [*self._take_ended(), *((job_id, []) for job_id in self._refused)]
        self._refused = []
        if self._is_off:  # no thread accesses the rows of open jobs any more
            ended += [(job_id, []) for job_id in self._open]
        results = []
        for job_id, done in ended:
            if (job := self._open.pop(job_id, None)) is None:
                continue
            all_keys = list(job.keys)
            keys = [all_keys[position] for position in done]
            if len(keys) < len(all_keys) and job.is_promotion:
                self._note_absent(job.req_context.req_id, set(all_keys) - set(keys))
            results.append(JobResult(job_id, len(keys) == len(all_keys), keys))
        return results

    @_guarded(None)
    def drain_jobs(self) -> None:
        """Wait for all jobs, before the engine empties its cache: it sleeps, or its weights may change.

        Chunks that are stored later get a new, private namespace.
        """
        self._access.drain()
        self._namespace = self._make_namespace("the engine's cache was reset, its weights may have changed")

    def shutdown(self) -> None:
        """End the threads and drop all references to the engine's memory."""
        if not self._is_off:
            self._go_offline()

    @_guarded(False)
    def _begin(self, job: Any) -> bool:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # the latter in 0.29
        row_keys = self._row_keys(job.keys)
        if row_keys:
            self._access.begin(job.job_id, row_keys, rows.tolist(), is_store=not job.is_promotion)
        return bool(row_keys)

    @_guarded(())
    def _take_ended(self) -> list[tuple[int, list[int]]]:
        return self._access.take_ended()

    @_guarded(None)
    def _note_absent(self, request_id: str, failed: Collection[bytes]) -> None:
        self._access.note_absent(request_id, self._row_keys(failed))

    def _row_keys(self, offload_keys: Collection[bytes]) -> list[bytes]:
        """Return the row keys of chunks, or none if that is impossible yet, or at all.

        The engine's block hashes already cover salts, LoRA adapters and media.
        """
        hashes = [(base.get_offload_block_hash(key), base.get_offload_group_idx(key)) for key in offload_keys]
        if self._namespace is None and self._weights.done():
            self._namespace = self._make_namespace()
        if self._namespace is None or any(len(block_hash) != _HASH_BYTES for block_hash, _ in hashes):
            return []
        return [self._namespace + keys.chunk_key(block_hash, group=group) for block_hash, group in hashes]

    def _make_namespace(self, private_reason: str = "") -> bytes:
        weights = ""
        if not private_reason:
            try:
                weights = self._weights.result()
            except (UnnamedError, OSError) as error:
                private_reason = str(error)
        if private_reason:
            logger.warning("Chunks in the LMCache tier stay private to this engine: %s", private_reason)
        private_to = os.urandom(16) if private_reason else b""
        return keys.namespace({**self._listing, "weights": weights, "private_to": private_to})

    def _go_offline(self) -> None:
        self._is_off = True
        try:
            self._close(TIMING.close_seconds)
        except Exception:
            logger.exception("The LMCache tier could not be closed")

    def _close(self, timeout_seconds: float | None) -> None:
        if self._access.close(timeout_seconds):
            self._tier.close()
        else:  # a thread still uses the tier: close it when the thread has ended
            threading.Thread(target=self._close, args=(None,), name="lmcache-close", daemon=True).start()
