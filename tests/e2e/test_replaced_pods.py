"""Pods that are replaced: a drained node, a missing image, an invalid setting."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.node.cluster import NODE
from testing.node.pods import SIDECAR_PORT
from tests.harness.operator.pods import is_in_service, is_terminating, prompt, retained, termination_states

NUM_TOKENS = 300  # of requests that run while a pod is evicted


def scale(app, replicas: int):
    """Scale the engines. Returns the pods when they are Ready."""
    app.spec["spec"]["engine"]["replicas"] = replicas
    app.apply()
    pods = [app.ready_pod(number) for number in range(replicas)]
    app.node.wait(lambda: len(app.pods()) == replicas, 180)
    return pods


def drain(node) -> str:
    """Drain the node until kubectl gives up. Returns its error output."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        node.kubectl(
            "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=30s",
            "--pod-selector=lmcache.io/cluster=tiny",
        )  # fmt: skip
    return refused.value.stderr


def test_drain_evicts_one_pod_at_a_time_without_failing_requests(tiny):
    node, pods = tiny.node, scale(tiny, 2)
    try:
        with retained(*pods), ThreadPoolExecutor(3) as threads:
            # However fast the engines are, the requests must still run when a pod is evicted.
            with (
                pods[0].stopped_during(threads, prompt(20, 64), NUM_TOKENS) as first,
                pods[1].stopped_during(threads, prompt(21, 64), NUM_TOKENS) as second,
            ):
                requests = [first, second]
                drain_output = threads.submit(drain, node)
                node.wait(lambda: any(map(is_terminating, tiny.pods())), 60)
                assert not any(answer.done() for answer in requests)
            assert [len(answer.result().tokens) for answer in requests] == [NUM_TOKENS] * 2
            assert "disruption budget" in drain_output.result()
            [evicted] = [number for number in range(2) if is_terminating(tiny.pod(number))]
            engine, sidecar = node.wait(lambda: termination_states(tiny.pod(evicted)), 180)
            assert (engine["exitCode"], sidecar["exitCode"]) == (0, 0)
            assert engine["finishedAt"] <= sidecar["finishedAt"]
        assert tiny.ready_pod(1 - evicted).uid == pods[1 - evicted].uid
        assert is_in_service(tiny)
        node.wait(lambda: tiny.conditions()["Degraded"]["reason"] == "Unschedulable")
    finally:
        node.kubectl("uncordon", NODE)
        scale(tiny, 1)
    tiny.wait_condition("Ready")


def test_missing_image_and_invalid_setting_are_reported(make_app, references):
    """Kubernetes starts no engine before its sidecar's image is present. A running sidecar that cannot serve
    does not prevent the engine from serving. The status reports both problems.
    """
    app = make_app("broken")
    app.spec["spec"]["sidecar"] = {"image": "localhost/nowhere:1"}
    invalid_setting = {"name": "sidecar", "env": [{"name": "LMCACHE_DRAIN_GRACE_SECONDS", "value": "soon"}]}
    app.spec["spec"]["engine"]["podTemplate"]["spec"]["initContainers"] = [invalid_setting]
    app.apply()
    try:
        app.node.wait(lambda: "nowhere" in app.conditions().get("Degraded", {}).get("message", ""), 120)
        degraded = app.conditions()["Degraded"]
        assert degraded["reason"] in ("ErrImagePull", "ImagePullBackOff")
        assert "container sidecar" in degraded["message"]
        assert app.conditions()["Ready"]["status"] == "False"

        app.spec["spec"]["sidecar"] = {"image": references["sidecar"]}
        app.apply()
        pod = app.ready_pod()
        app.node.wait(lambda: is_in_service(app), 60)  # the endpoint slices follow the pod with a delay
        assert len(pod.complete(prompt(5, 512)).tokens) == 8
        assert "drain_grace_seconds" in pod.stats()["not_ready_reason"].lower()
        with pytest.raises(OSError, match="503"):
            pod.get(SIDECAR_PORT, "/readyz")
        condition = app.wait_condition("SidecarAttached", "False")
        assert condition["reason"] == "SidecarNotReady"
        assert "soon" in condition["message"]
        app.wait_condition("EngineAvailable")
    finally:
        app.delete()
