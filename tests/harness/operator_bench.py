"""A reconciler on a world in memory, with a clock that a test sets."""

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
    """A world and a reconciler on it; with an autoscaler if a test gives it one."""

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
        """Once; what it wrote is in `writes`."""
        self.world.writes.clear()
        return asyncio.run(self.reconciler.reconcile(KEY))

    def settle(self) -> None:
        """Reconciliations and controllers in turn, until nothing is written."""
        for _ in range(10):
            self.world.run_stateful_sets()
            self.reconcile()
            if not self.writes:
                return
        raise AssertionError(f"does not come to rest: {self.writes}")

    @property
    def writes(self) -> list[str]:
        return self.world.writes

    def ready(self) -> tuple[str, str]:
        found = next(c for c in self.world.resource["status"]["conditions"] if c["type"] == "Ready")
        return found["status"], found["message"]
