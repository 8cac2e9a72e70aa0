"""The worker half: one rank's copies. On the engine's model thread; ``transfers`` does the copying."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lmcache.engines.vllm.copier import EngineCopier
from lmcache.engines.vllm.plan import EngineIdentity, StepMeta, WorkerReport
from lmcache.engines.vllm.transfers import Transfers
from lmcache.rpc.client import SidecarClient

logger = logging.getLogger("vllm.lmcache")

Attach = Callable[[Mapping[str, Any]], tuple[SidecarClient, EngineCopier, EngineIdentity]]


class Worker:
    """See the module. Until ``register_kv_caches`` succeeds, loads fail and nothing is stored."""

    def __init__(self, attach: Attach) -> None:
        """``attach`` takes the engine's KV tensors by layer; what it raises says why nothing is cached."""
        self.identity: EngineIdentity | None = None
        self._attach = attach
        self._copier: EngineCopier | None = None
        self._transfers = Transfers()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Begin to work on these tensors; on a reason not to, log it and stay idle."""
        try:
            client, self._copier, self.identity = self._attach(kv_caches)
        except Exception as error:  # of any kind: an engine that we don't understand must run untouched
            logger.warning("LMCache Cluster does not cache this engine: %s", error)
            return
        self._transfers.begin(client, self._copier, self.identity)

    def go_offline(self) -> None:
        """Copy nothing any more; report what is under way."""
        self._transfers.go_offline()

    def handle_preemptions(self, meta: Any) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        self._transfers.preempt(_step(meta).preempted)

    def start_loads(self, meta: Any) -> None:
        """Begin the step's loads. A load that was begun already is not begun again."""
        loads = _step(meta).loads
        fence = self._fence() if loads else None
        for job in loads:
            self._transfers.load(job, fence)

    def start_stores(self, meta: Any) -> None:
        """Begin the step's stores: its forward is done or, on a GPU, queued before the fence."""
        stores = _step(meta).stores
        fence = self._fence() if stores else None
        for job in stores:
            self._transfers.store(job, fence)

    def collect(self, meta: Any) -> tuple[set[str], set[str]]:
        """Return (requests whose blocks are not needed any more, requests whose load ended)."""
        step = _step(meta)
        return self._transfers.collect(step.held, step.is_idle)

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the ended loads that hold no KV."""
        return self._transfers.take_bad_blocks()

    def take_report(self, meta: Any) -> WorkerReport | None:
        """What the scheduler half has to know."""
        return self._transfers.take_report(_step(meta).timed_step)

    def close(self) -> None:
        """End the threads and detach."""
        self._transfers.close()

    def _fence(self) -> Any:
        return self._copier.fence() if self._copier is not None else None


def _step(meta: Any) -> StepMeta:
    """The scheduler half's message; an empty one when that half does not run."""
    return meta if isinstance(meta, StepMeta) else StepMeta()
