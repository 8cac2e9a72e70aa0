"""Budgets for tenants on a real API server: new shares replace no pod."""

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_operator.specs.names import SIDECAR_PORT
from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.processes import SidecarProcess
from tests.harness.kube import CLUSTERS, NAME, Operator, alone, example
from tests.harness.operator.clusters import HELD, condition, pods, set_running, wait_quiet, written
from tests.harness.sidecar.wire import RawClient

pytestmark = pytest.mark.kube

CONFIG = f"{NAME}-sidecar"
ADDRESS = "127.94.67.1"
"""A loopback address that no other test uses."""


def salted(digit: str, **more: Any) -> Object:
    return {"name": f"t{digit}", "saltHash": digit * 64, **more}


def patch(plane: Cluster, namespace: str, tenants: Object | None) -> None:
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tenants": tenants}}, namespace)


@pytest.fixture
def probing(plane, chart, no_operator, tmp_path) -> Iterator[Operator]:
    """An operator that often looks again at unsettled clusters."""
    with alone(plane, chart, tmp_path) as process:
        process.start()
        yield process
    assert process.refusals() == []


def test_new_shares_are_known_when_the_sidecar_uses_their_file(plane, probing, namespace, tmp_path):
    """The test plays the kubelet: a process of the test is the pod's sidecar container.

    Nothing but its own probes shows the operator that the sidecar uses the new file.
    """
    operator = probing
    resource = example(tenants={"named": [salted("b", memoryPercent=50)]})
    resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": HELD}
    resource["spec"]["autoscaling"] = {"mode": "Off"}  # its first report, after half a minute, is a write
    plane.api.create(CLUSTERS, resource, namespace)
    (pod,) = plane.wait(lambda: pods(plane, namespace).values())
    file = tmp_path / "tenants.yaml"

    def update_file() -> None:
        live = plane.api.get("v1/configmaps", CONFIG, namespace)["data"]["tenants.yaml"]
        changed = tmp_path / "changed"
        changed.write_text(live)
        changed.replace(file)

    update_file()
    options = {"tenants_file": file, "http_host": ADDRESS, "http_port": SIDECAR_PORT}
    with SidecarProcess(**options) as sidecar, RawClient(sidecar) as engine:
        engine.attach()  # an engine without its cache would degrade the cluster
        set_running(plane, namespace, pod["metadata"]["name"], ADDRESS)
        wait_known(plane, namespace, "True", "TenantsInUse")
        assert names_in_status(plane, namespace) == ["default", "tb"]
        patch(plane, namespace, {"named": [salted("b", memoryPercent=20)]})
        wait_known(plane, namespace, "False", "TenantsPending")
        wait_quiet(plane, operator, namespace)  # the operator posts an Event after it wrote the condition
        pending, mark = condition(plane, namespace, "TenantsKnown"), plane.mark()
        polled = operator.num_reconciliations() + 2
        plane.wait(lambda: operator.num_reconciliations() >= polled)
        assert pending["reason"] == "TenantsPending"
        assert condition(plane, namespace, "TenantsKnown") == pending
        assert written(plane, operator, mark, namespace) == []
        update_file()
        wait_known(plane, namespace, "True", "TenantsInUse")
        assert condition(plane, namespace, "Degraded")["status"] == "False"
        wait_quiet(plane, operator, namespace)
        patch(plane, namespace, {"named": [salted("c"), salted("b")]})
        plane.wait(lambda: names_in_status(plane, namespace) == ["default", "tb", "tc"])
        update_file()
        wait_known(plane, namespace, "True", "TenantsInUse")
        wait_quiet(plane, operator, namespace)
        assert pods(plane, namespace).keys() == {pod["metadata"]["uid"]}


def names_in_status(plane: Cluster, namespace: str) -> list[str]:
    """Names of the tenants whose figures the status has."""
    status = plane.api.get(CLUSTERS, NAME, namespace)["status"]
    return [tenant["name"] for tenant in status.get("tenants", ())]


def wait_known(plane: Cluster, namespace: str, status: str, reason: str) -> None:
    """Wait until the condition TenantsKnown has this status and reason."""

    def is_reported() -> bool:
        known = condition(plane, namespace, "TenantsKnown")
        return (known.get("status"), known.get("reason")) == (status, reason)

    plane.wait(is_reported)
