"""An in-memory cluster with a managed remote tier, and a clock that the test sets."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Self

import yaml

from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context, Observed, Plan
from lmcache_operator.policy.report import Report
from lmcache_operator.reconcile import plan as planning
from lmcache_operator.reconcile.status import derive_status
from lmcache_operator.specs.kinds import Ref, controller_uid
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import NAME, World, cluster, secret_of
from tests.harness.operator.plans import carry_out

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SET, LIST, ACCOUNT, CERTIFICATE = (
    Ref(kind, "demo-remote") for kind in ("StatefulSet", "ConfigMap", "ServiceAccount", "Certificate")
)
SECRET = secret_of("remote")
ENGINE = Ref("StatefulSet", "demo-engine")


def managed(shards: int = 2, **more: Any) -> dict[str, Any]:
    return {"remote": {"managed": {"shards": shards, "memoryPerShard": "1Gi", **more}}}


class Rig:
    """A cluster with a managed tier at a chosen time. Each plan is made as by an operator that has just
    started, without any memory of earlier plans."""

    def __init__(self, **tier: Any) -> None:
        self.world = World(cluster(tiers=managed(**tier)))
        self.now = NOON
        self.context = Context(STOCK_IMAGES)
        self.plans: dict[str, Plan] = {}
        self.report: Report | None = None
        self.nodes: dict[str, Any] = {}

    @classmethod
    def settled(cls, **tier: Any) -> Self:
        """A cluster that is as its spec says."""
        rig = cls(**tier)
        rig.settle()
        return rig

    def observed(self, component: Any) -> Observed:
        children = {ref: self.world.objects[ref] for ref in component.refs(NAME) if ref in self.world.objects}
        uids = {child["metadata"]["uid"] for child in children.values()}
        pods = tuple(pod for pod in self.world.pods.values() if controller_uid(pod) in uids)
        return Observed(
            resource=self.world.resource,
            children=children,
            pods=pods,
            now=self.now,
            autoscaling=self.report,
            nodes=self.nodes,
        )

    def run(self, *, is_ready: bool = True, max_writes: int = 99) -> list[str]:
        """Plan once and apply at most ``max_writes`` writes of each component. Returns the writes."""
        self.world.writes.clear()
        observed = {component.name: self.observed(component) for component in COMPONENTS}
        self.plans, fault = planning.plan(COMPONENTS, self.world.resource, observed, self.context)
        assert fault is None
        for component in COMPONENTS:
            due = self.plans[component.name]
            num_left = max(0, max_writes - len(due.apply))
            due = replace(
                due, apply=due.apply[:max_writes], delete=due.delete[:num_left], evict=due.evict[:num_left]
            )
            carry_out(self.world, due, is_ready=is_ready)
        return list(self.world.writes)

    def settle(self) -> None:
        while self.run():
            pass

    def declare(self, shards: int, **more: Any) -> None:
        self.world.change(tiers=managed(shards, **more))

    @property
    def list(self) -> tuple[int, int]:
        """Numbers of current and previous shards in the list."""
        document = yaml.load(self.world.objects[LIST]["data"]["shards.yaml"], yaml.BaseLoader)
        assert ("until" in document) == ("previous" in document)
        return len(document["current"]), len(document.get("previous", ()))

    @property
    def num_servers(self) -> int:
        return int(self.world.objects[SET]["spec"]["replicas"])

    def status(self) -> dict[str, Any]:
        statuses = [
            component.status(self.observed(component), self.plans[component.name]) for component in COMPONENTS
        ]
        return derive_status(self.world.resource, self.now, statuses, self.plans, ())

    def condition(self, kind: str) -> tuple[str, str]:
        (condition,) = [c for c in self.status()["conditions"] if c["type"] == kind]
        return condition["status"], condition["reason"]


def secure(rig: Rig) -> list[str]:
    """Numbers of the servers that sidecars use with TLS."""
    document = yaml.load(rig.world.objects[LIST]["data"]["shards.yaml"], yaml.BaseLoader)
    assert ("tls" in document) == (document.get("ca") == "/etc/lmcache/remote-auth/ca.crt")
    return [endpoint.partition(".")[0][-1] for endpoint in document.get("tls", ())]


def ready_at(rig: Rig, name: str, time: datetime) -> None:
    rig.world.set_ready(name, True)
    rig.world.pods[name]["status"]["conditions"][0]["lastTransitionTime"] = time.isoformat()
