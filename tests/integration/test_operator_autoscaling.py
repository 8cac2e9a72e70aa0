"""Autoscaling on a real API server: the status, and persistence across restarts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from lmcache_operator import metrics
from lmcache_operator.autoscaling.policy.report import Choice, Report, tier_status
from lmcache_operator.autoscaling.policy.state import Decision, Point
from lmcache_operator.components.base import Context, Observed
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.autoscaling import GIB
from tests.harness.kube import CLUSTERS, NAME, Operator, example

pytestmark = pytest.mark.kube

ENGINE = f"{NAME}-engine"
AUTO = {"mode": "Auto", "memory": {"minSize": "16Gi", "maxSize": "512Gi"}}
GROW = Decision(64 * GIB, 108 * GIB, 108 * GIB, 108 * GIB, "108Gi instead of 64Gi", "Cooldown", 0.16, 0.04)
POINTS = [Point(size * GIB, 0.4, 0.38, 0.42, -0.01) for size in (16, 32, 64, 108, 128, 256, 512)]
STATUS = {
    "observedAt": "2026-01-01T00:00:00Z", "window": "24h", "samples": 412334,
    "memory": tier_status(GROW, POINTS) | {"keysInSize": 2048},
    "remote": tier_status(GROW, POINTS, shard_bytes=4 * GIB),
    "engineHit": "0.01", "localityLoss": {"points": "0.3", "usdPerHour": "0.01"}, "breakEvenAge": "512s",
}  # fmt: skip


def declared(autoscaling: Object, tiers: Object) -> Object:
    return example(autoscaling=autoscaling, tiers={"memory": {"size": "64Gi"}} | tiers)


def _num_writes() -> float:
    samples = metrics.WRITES.collect()[0].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


@dataclass
class ScriptedAutoscaler:
    """An autoscaler that reports what the test sets."""

    next_report: Report | None = None

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        return self.next_report

    def forget(self, key: ClusterKey) -> None:
        raise AssertionError("the cluster still exists")


class Rig:
    """A cluster of 64 GiB, with an operator in this process."""

    def __init__(self, plane: Cluster, namespace: str, api: KubeApi) -> None:
        self.plane, self.namespace, self.api = plane, namespace, api
        resource = declared(AUTO, {})
        resource["spec"]["engine"]["replicas"] = 0
        created = plane.api.create(CLUSTERS, resource, namespace)
        self.key = ClusterKey(namespace, NAME, created["metadata"]["uid"])
        self.start()

    def start(self) -> None:
        async def no_stats(_: str) -> None:
            return None

        self.autoscaler = ScriptedAutoscaler()
        self.reconciler = Reconciler(self.api, Context(STOCK_IMAGES), no_stats, autoscaler=self.autoscaler)

    async def reconcile(self) -> float:
        """Reconcile once. Returns the number of writes."""
        num_writes_before = _num_writes()
        await self.reconciler.reconcile(self.key)
        return _num_writes() - num_writes_before

    async def settle(self) -> None:
        async with asyncio.timeout(300):
            while await self.reconcile() or not await asyncio.to_thread(self.is_observed):
                pass

    def is_observed(self) -> bool:
        """Whether the StatefulSet controller has observed the latest generation."""
        live = self.plane.api.get("apps/v1/statefulsets", ENGINE, self.namespace)
        return bool(live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"])

    def size(self) -> int:
        """GiB of the memory tier of new pods."""
        template = self.plane.api.get("apps/v1/statefulsets", ENGINE, self.namespace)["spec"]["template"]
        arguments = template["spec"]["initContainers"][0]["args"]
        (size,) = [arg for arg in arguments if arg.startswith("--memory-size=")]
        return int(size.partition("=")[2]) // GIB

    def status(self) -> Object:
        status: Object = self.plane.api.get(CLUSTERS, NAME, self.namespace)["status"]["autoscaling"]
        return status


def test_chosen_size_is_in_the_status_and_survives_operator_restarts(
    plane, operator_process: Operator, namespace, monkeypatch
):
    if operator_process.is_running:
        operator_process.terminate()
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))

    async def scenario() -> None:
        async with connect() as api:
            rig = Rig(plane, namespace, api)
            await rig.settle()
            assert rig.size() == 64
            rig.autoscaler.next_report = Report(STATUS, memory=Choice(108 * GIB, 64 * GIB), state="counted")
            await rig.settle()
            assert rig.size() == 108
            assert rig.status() == STATUS  # the definition has every field of the status
            rig.start()
            assert not await rig.reconcile(), "a restart writes nothing"
            assert rig.size() == 108
            edit = {"data": {"state": "edited by hand"}}
            plane.api.patch("v1/configmaps", f"{NAME}-autoscaling", edit, namespace)
            rig.start()
            await rig.settle()
            assert rig.size() == 64
            assert not plane.api.find("v1/configmaps", f"{NAME}-autoscaling", namespace)

    asyncio.run(scenario())
