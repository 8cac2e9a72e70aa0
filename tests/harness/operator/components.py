"""A cluster on an in-memory API server, and the operator's real reconciler with a clock of the test."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self, cast

from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Component, Context
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Autoscaler, Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import NAME, NAMESPACE, UID, World, cluster

KEY = ClusterKey(NAMESPACE, NAME, UID)
CONTEXT = Context(STOCK_IMAGES)
GOOD = {"is_ready": True, "num_clients": {"attached": 1}}
"""The answer of a sidecar that an engine uses."""


class ReconciledCluster:
    """A cluster whose spec has ``changes``."""

    autoscaler: Autoscaler | None = None

    def __init__(
        self, components: Sequence[Component] = COMPONENTS, context: Context = CONTEXT, **changes: Any
    ) -> None:
        self.world, self.seconds = World(cluster(**changes)), 0.0
        self.components, self.context = components, context
        self.restart_operator()

    @classmethod
    def settled(cls, *arguments: Any, **changes: Any) -> Self:
        """A cluster that is as its spec says."""
        cluster = cls(*arguments, **changes)
        cluster.settle()
        return cluster

    def restart_operator(self) -> None:
        """Continue with an operator that remembers nothing."""
        self.reconciler = Reconciler(
            cast(KubeApi, self.world),
            self.context,
            self.world.ask,
            components=self.components,
            autoscaler=self.autoscaler,
            monotonic=lambda: self.seconds,
        )

    @property
    def writes(self) -> list[str]:
        """Writes of the latest reconciliation."""
        return self.world.writes

    def reconcile(self) -> float | None:
        """Reconcile once. Returns the seconds until the next time."""
        self.world.writes.clear()
        return asyncio.run(self.reconciler.reconcile(KEY))

    def run(self) -> list[str]:
        """Reconcile once, and return the writes."""
        self.reconcile()
        return list(self.world.writes)

    def settle(self) -> list[str]:
        """Reconcile and run the controllers in turn until nothing is written. Return the writes."""
        written: list[str] = []
        for _ in range(12):
            self.world.run_stateful_sets()
            if not (writes := self.run()):
                return written
            written += writes
        raise AssertionError(f"does not settle: {written}")

    def change(self, **changes: Any) -> list[str]:
        """Edit the spec as a user, settle, and return the writes."""
        self.world.change(**changes)
        return self.settle()

    def answer(self, *answers: Any) -> None:
        """Let the engine pods run, and their sidecars answer with these statistics. None: no answer."""
        for number, stats in enumerate(answers):
            address = f"10.0.0.{number}"
            self.world.pods[f"demo-engine-{number}"]["status"] |= {"phase": "Running", "podIP": address}
            self.world.stats[address] = stats

    def miss_answers(self) -> None:
        """Reconcile until the operator has missed two answers of the sidecars that are silent now."""
        self.run()
        self.seconds += 61
        self.run()

    def conditions(self) -> dict[str, str]:
        return {c["type"]: c["status"] for c in self.world.resource["status"]["conditions"]}

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason; empty texts: the cluster has no such condition."""
        matching = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return (matching[0]["status"], matching[0]["reason"]) if matching else ("", "")

    def message(self, kind: str) -> str:
        (condition,) = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return str(condition["message"])

    def degraded(self) -> tuple[str, str]:
        """Status and message of the condition Degraded."""
        return self.condition("Degraded")[0], self.message("Degraded")
