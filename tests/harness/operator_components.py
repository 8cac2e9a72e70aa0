"""A cluster on an in-memory API server, handled by the operator's real reconciler with chosen components."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

from lmcache_operator.components.base import Component, Context
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster


class ReconciledCluster:
    """A cluster whose spec has ``changes``."""

    def __init__(self, components: Sequence[Component], **changes: Any) -> None:
        self.world = World(cluster(**changes))
        self.skipped_seconds = 0.0
        """Seconds by which the operator's clock is ahead."""
        self._components = components
        self.restart_operator()

    def restart_operator(self) -> None:
        """Continue with an operator that remembers nothing."""
        self.reconciler = Reconciler(
            cast(KubeApi, self.world),
            Context(STOCK_IMAGES),
            self.world.ask,
            components=self._components,
            monotonic=lambda: time.monotonic() + self.skipped_seconds,
        )

    def run(self) -> list[str]:
        """Reconcile once, and return the writes."""
        self.world.writes.clear()
        asyncio.run(self.reconciler.reconcile(ClusterKey(NAMESPACE, NAME, UID)))
        return list(self.world.writes)

    def settle(self) -> list[str]:
        """Reconcile and run the controllers in turn until nothing is written. Return the writes."""
        written: list[str] = []
        for _ in range(10):
            self.world.run_stateful_sets()
            if not (writes := self.run()):
                return written
            written += writes
        raise AssertionError(f"does not settle: {written}")

    def conditions(self) -> dict[str, str]:
        return {c["type"]: c["status"] for c in self.world.resource["status"]["conditions"]}

    def message(self, kind: str) -> str:
        (condition,) = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return str(condition["message"])
