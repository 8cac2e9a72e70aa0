"""A second component on a real API server: the operator creates, reports and deletes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from lmcache_operator.components.base import Context
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.errors import UnavailableError
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES

from testing.kube.api import Object
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator_extra import Extra

pytestmark = pytest.mark.kube

CONFIG, STATEFUL_SET = ("v1/configmaps", f"{NAME}-extra"), ("apps/v1/statefulsets", f"{NAME}-extra")


async def no_stats(_: str) -> None:
    return None


def reconcile_until(plane: Any, namespace: str, is_done: Callable[[], bool]) -> None:
    """Reconcile in this process: the operator's process has no such component."""
    resource = plane.api.get(CLUSTERS, NAME, namespace)
    key = ClusterKey(namespace, NAME, resource["metadata"]["uid"])

    async def run(use: Callable[[KubeApi], Awaitable[None]]) -> None:
        async with connect() as api:
            await use(api)

    async def work(api: KubeApi) -> None:
        reconciler = Reconciler(api, Context(STOCK_IMAGES), no_stats, components=(*COMPONENTS, Extra()))
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(is_done):
                with contextlib.suppress(UnavailableError):
                    await reconciler.reconcile(key)

    asyncio.run(run(work))


def status_of(plane: Any, namespace: str) -> tuple[Object, dict[str, str]]:
    status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
    return status, {c["type"]: c["status"] for c in status.get("conditions", [])}


def test_second_component_is_created_and_deleted(plane, chart, operator_process, namespace, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    if operator_process.is_running:
        operator_process.terminate()
    resource = example()
    resource["spec"]["engine"] = {"replicas": 2}
    plane.api.create(CLUSTERS, resource, namespace)

    def is_ready() -> bool:
        conditions = status_of(plane, namespace)[1]
        return conditions.get("ExtraAvailable") == conditions.get("Ready") == "True"

    reconcile_until(plane, namespace, is_ready)
    (config,) = plane.api.objects("v1/configmaps", namespace, "lmcache.io/component=extra")
    assert config["data"] == {"engines": "2"}
    (pod,) = plane.api.objects("v1/pods", namespace, "lmcache.io/component=extra")

    # The operator must not delete another owner's ConfigMap with the same labels.
    foreign = {"metadata": {"name": "other", "labels": config["metadata"]["labels"]}}
    plane.api.create("v1/configmaps", foreign, namespace)
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"replicas": 1}}}, namespace)

    def is_deleted() -> bool:
        remains = any(plane.api.find(kind, name, namespace) for kind, name in (CONFIG, STATEFUL_SET))
        conditions = status_of(plane, namespace)[1]
        return not remains and "ExtraAvailable" not in conditions and conditions["Ready"] == "True"

    reconcile_until(plane, namespace, is_deleted)
    plane.wait(lambda: not plane.api.find("v1/pods", pod["metadata"]["name"], namespace))
    assert plane.api.find("v1/configmaps", "other", namespace)
    assert len(plane.api.objects("v1/pods", namespace, "lmcache.io/component=engine")) == 1
