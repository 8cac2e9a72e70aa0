"""Statistics of a real sidecar in the status, read over the network with a real API server."""

import json

import pytest

from lmcache_operator.specs.names import SIDECAR_PORT
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.kube import CLUSTERS, example
from tests.harness.operator.clusters import (
    HELD,
    condition,
    pods,
    reconcile_once_more,
    set_running,
    wait_quiet,
    wait_ready,
    written,
)
from tests.harness.sidecar.wire import RawClient

pytestmark = pytest.mark.kube

ADDRESS = "127.94.64.1"
"""A loopback address that no other test uses."""


def wait_reported(plane, operator, namespace, kind: str, reason: str) -> None:
    """Reconcile until the condition has this reason. The operator gets no events from inside pods."""

    def is_reported() -> bool:
        reconcile_once_more(plane, operator, namespace)
        return condition(plane, namespace, kind).get("reason") == reason

    plane.wait(is_reported)


def test_failed_sidecar_start_is_reported_until_corrected(plane, operator, namespace, tmp_path):
    """The test plays the kubelet: a process of the test is the pod's sidecar container."""
    resource = example()
    resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": HELD}
    resource["spec"]["autoscaling"] = {"mode": "Off"}  # its first report, after half a minute, is a write
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: pods(plane, namespace))
    (pod,) = pods(plane, namespace).values()
    options = {"config": tmp_path / "sidecar.yaml", "http_host": ADDRESS, "http_port": SIDECAR_PORT}
    options["config"].write_text("remote_url: redis://h:99999\n")
    with RedisProcess() as redis, SidecarProcess(stay_up="true", **options) as sidecar:
        name = pod["metadata"]["name"]
        set_running(plane, namespace, name, ADDRESS)

        # The engine serves, and the status quotes the sidecar.
        wait_ready(plane, namespace)
        wait_reported(plane, operator, namespace, "SidecarAttached", "SidecarNotReady")
        attached = condition(plane, namespace, "SidecarAttached")
        reason = f"{options['config']}: remote_url: remote URL: the host or port can't be read"
        assert attached["message"].startswith(f"1 of 1 sidecars are not ready. First: pod {name}: {reason}")
        assert condition(plane, namespace, "Degraded")["message"] == attached["message"]
        assert condition(plane, namespace, "EngineAvailable")["status"] == "True"

        # An unchanged problem is not written again.
        wait_quiet(plane, operator, namespace)
        mark = plane.mark()
        reconcile_once_more(plane, operator, namespace)
        assert written(plane, operator, mark, namespace) == []

        # The kubelet updates the file.
        options["config"].write_text(f"remote_url: {json.dumps(redis.url)}\n")
        plane.wait(lambda: "The sidecar can't run" in sidecar.log and "LMCache sidecar" in sidecar.log)
        wait_reported(plane, operator, namespace, "SidecarAttached", "EngineNotAttached")
        with RawClient(sidecar) as engine:
            engine.attach()
            wait_reported(plane, operator, namespace, "SidecarAttached", "Attached")
            assert condition(plane, namespace, "RemoteTierReachable")["status"] == "True"
            assert condition(plane, namespace, "Degraded")["status"] == "False"
            assert condition(plane, namespace, "Ready")["reason"] == "Ready"
