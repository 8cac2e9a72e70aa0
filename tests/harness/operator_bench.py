"""A reconciler on an in-memory world, with a clock that the test sets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from lmcache_operator.components.base import Context
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Autoscaler, Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster

KEY = ClusterKey(NAMESPACE, NAME, UID)
STATEFUL_SET = Ref("StatefulSet", "demo-engine")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A world and its reconciler, with an autoscaler if the test sets one."""

    autoscaler: Autoscaler | None = None

    def __init__(self, **changes: Any) -> None:
        self.world, self.clock = World(cluster(**changes)), Clock()
        self.restart()

    def restart(self) -> None:
        self.reconciler = Reconciler(
            cast(KubeApi, self.world),
            Context(STOCK_IMAGES),
            self.world.ask,
            autoscaler=self.autoscaler,
            monotonic=self.clock,
        )

    def reconcile(self) -> float | None:
        """Reconcile once. Its writes are in `writes`."""
        self.world.writes.clear()
        return asyncio.run(self.reconciler.reconcile(KEY))

    def settle(self) -> None:
        """Run reconciliations and controllers in turn, until nothing is written."""
        for _ in range(10):
            self.world.run_stateful_sets()
            self.reconcile()
            if not self.writes:
                return
        raise AssertionError(f"does not settle: {self.writes}")

    @property
    def writes(self) -> list[str]:
        return self.world.writes

    def ready(self) -> tuple[str, str]:
        ready = next(c for c in self.world.resource["status"]["conditions"] if c["type"] == "Ready")
        return ready["status"], ready["message"]
