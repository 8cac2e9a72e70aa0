"""The worker side of an engine that blends prompts.

The loader thread places the stored KV of a prompt. When all ranks have reported that, the scheduler side lets
its slices begin. They run on the engine's model thread, in the order in which the prompts got ready.

All ranks must run the same slices in the same steps, because the model's collective operations wait for all
ranks. So a rank that goes offline still runs its slices, and it places nothing for later prompts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from lmcache_client.core.blend_jobs import Blended, BlendJob, BlendStep
from lmcache_client.core.copier import EngineCopier
from lmcache_client.core.jobs import EngineIdentity, StoreJob
from lmcache_client.core.layout import KVCaches, Layout
from lmcache_client.core.transfers import EngineTransfer, StoreTransfer
from lmcache_client.core.worker import WorkerSide
from lmcache_client.errors import UnsupportedError
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.vllm.attach import attach_worker, can_wait, grid_tokens
from lmcache_client.vllm.blend.loads import BlendTransfer, Placer
from lmcache_client.vllm.blend.obstacles import obstacle
from lmcache_client.vllm.blend.taker import Taker, TakeTransfer
from lmcache_client.vllm.blend.taking import TakeJob
from lmcache_store.common.units import round_up

logger = logging.getLogger(__name__)

Slices = Generator[int, int, Blended]
"""Work for one prompt, see ``Blender.blend``."""

AttachStaged = Callable[[KVCaches, Layout | None], tuple[SidecarClient, EngineCopier, EngineIdentity]]
"""Attaches this rank to the sidecar, given the engine's KV tensors and the staging blocks."""


class Executor(Placer, Taker, Protocol):
    """The part of ``Blender`` that a worker side uses."""

    def blend(self, job: BlendJob, is_placed: torch.Tensor, stored_at: torch.Tensor) -> Slices:
        """See ``Blender``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See ``Blender``."""


class BlendingWorker(WorkerSide):
    """A worker side that also blends prompts, see the module."""

    def __init__(
        self,
        attach: AttachStaged,
        create: Callable[[KVCaches], Executor | None],
        chunk_tokens: int,
        **settings: Any,
    ) -> None:
        """``create`` returns None, on all ranks, if the engine can't blend.

        ``settings``: those of ``WorkerSide``.
        """
        self.blender: Executor | None = None
        """Blends prompts of this rank. None before ``register_kv_caches``, and if the engine can't blend."""
        super().__init__(
            lambda kv: attach(kv, self.blender.staging if self.blender is not None else None), **settings
        )
        self._create, self._chunk_tokens = create, chunk_tokens
        self._blends: dict[str, BlendTransfer] = {}  # request id -> blend whose end is not reported
        self._running: dict[str, Slices | None] = {}  # ready requests in order; None: not begun
        self._last_step: Any = None  # whose slices have run
        self._staging_lock = threading.Lock()  # of the staging blocks: the loader and the storer use them

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See ``WorkerSide``. First prepares and tests blending, on the calling thread."""
        self.blender = self._create(kv_caches)
        super().register_kv_caches(kv_caches)

    def start_loads(self, meta: Any) -> None:
        """See ``WorkerSide``. Then runs the step's slices, once."""
        super().start_loads(meta)
        blend: BlendStep | None = getattr(meta, "blend", None)
        if blend is None or meta is self._last_step or self.blender is None:
            return
        self._take(blend, self.blender)
        self._last_step = meta
        if self._running:
            began = time.perf_counter()
            with torch.inference_mode():
                self._run_slices(blend.max_tokens, self.blender)
            self._figures.update({"blend_compute_seconds": time.perf_counter() - began})

    def make_store(self, job: StoreJob) -> StoreTransfer:
        """See ``WorkerSide``."""
        if isinstance(job, TakeJob) and self.blender is not None:
            return TakeTransfer(job, self.blender, self._staging_lock)
        return super().make_store(job)

    def _take(self, blend: BlendStep, blender: Executor) -> None:
        jobs = [job for job in blend.jobs if job.request_id not in self._blends]
        client, fence = self._client, self._fence() if jobs else None
        for job in jobs:
            transfer = BlendTransfer(job, blender, self._chunk_tokens, fence, self._staging_lock)
            self._blends[job.request_id] = transfer
            self._loading.add(job.request_id)
            self._loader.submit(self._run, transfer, client)
        for transfer in self._open(blend.ready):
            self._running.setdefault(transfer.request_id)
        for transfer in self._open(blend.dropped):
            self._running.pop(transfer.request_id, None)
            transfer.is_over = True
            if transfer.request_id not in self._loading:
                self._ended.put(transfer)  # otherwise the loader does, when it writes no more blocks

    def _open(self, request_ids: list[str]) -> list[BlendTransfer]:
        transfers = (self._blends.get(request_id) for request_id in request_ids)
        return [transfer for transfer in transfers if transfer is not None and not transfer.is_over]

    def _run_slices(self, num_tokens: int, blender: Executor) -> None:
        """Compute at most ``num_tokens`` tokens.

        On a GPU, kernels of the last pass may still run on the engine's stream afterwards. Yet the blocks of
        a prompt are reported with its last slice: the engine's later work is behind it on the same stream,
        and a copy of other requests to or from these blocks waits for a fence that is recorded there later.
        """
        while self._running:
            request_id = next(iter(self._running))
            transfer = self._blends[request_id]
            try:
                if (slices := self._running[request_id]) is None:
                    slices = blender.blend(transfer.job, transfer.is_placed, transfer.stored_at)
                    self._running[request_id] = slices
                    next(slices)
                while cost := slices.send(num_tokens):
                    num_tokens -= cost
                return
            except StopIteration as end:
                transfer.result = end.value
                self._count(end.value)
            except Exception:
                self._figures["failed_blends"] += 1
                logger.exception("Blending the prompt of request %s failed; vLLM computes it", request_id)
            del self._running[request_id]
            transfer.is_over = True
            self._ended.put(transfer)

    def _count(self, result: Blended) -> None:
        """Count a blended prompt on the rank that stores the first column: all ranks compute the same."""
        if self.identity is not None and not (self.identity.is_replica or self.identity.hello.column):
            tokens = {f"blend_{kind}_tokens": number for kind, number in result._asdict().items()}
            self._figures.update(tokens, blends=1)

    def _may_wait(self) -> bool:
        return not self._running and super()._may_wait()

    def _note_ended(self, transfer: EngineTransfer, loaded: set[str]) -> None:
        super()._note_ended(transfer, loaded)
        if not isinstance(transfer, BlendTransfer):
            return
        request_id = transfer.request_id
        if not transfer.is_over:
            self._report.blends_placed[request_id] += 1
            self._figures.update({"blend_place_seconds": transfer.seconds})
            return
        del self._blends[request_id]
        loaded.add(request_id)
        if transfer.result is not None:
            self._report.blended[request_id] = transfer.result
        else:
            self._report.failed_loads.add(request_id)
            self._bad_blocks.update(transfer.bad_blocks)


def make_worker(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> BlendingWorker:
    """Create the worker side of an engine that may blend. ``chunk_tokens``: value of the setting."""
    chunk_tokens = round_up(chunk_tokens, grid_tokens(kv_cache_config)[0])
    return BlendingWorker(
        partial(attach_worker, vllm_config, kv_cache_config),
        partial(_create, vllm_config, kv_cache_config, chunk_tokens),
        chunk_tokens,
        can_wait=can_wait(vllm_config),
    )


def _create(
    vllm_config: Any, kv_cache_config: Any, chunk_tokens: int, kv_caches: KVCaches
) -> Executor | None:
    """Prepare blending. If that is impossible, log the reason once per engine and return None."""
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        from lmcache_client.vllm.blend.blender import Blender

        is_child = has_kv_transfer_group() and isinstance(get_kv_transfer_group(), MultiConnector)
        reason = obstacle(vllm_config, kv_cache_config, has_other_connectors=is_child)
        if reason is not None:
            raise UnsupportedError(reason)
        return Blender.create(vllm_config, kv_cache_config, kv_caches, chunk_tokens)
    except Exception as error:
        is_refusal = isinstance(error, UnsupportedError)
        if vllm_config.parallel_config.rank == 0 or not is_refusal:
            text = "LMCache Cluster blends no prompts, so all answers are exact (see lmcache.blend): %s"
            logger.warning(text, error, exc_info=not is_refusal)
        return None
