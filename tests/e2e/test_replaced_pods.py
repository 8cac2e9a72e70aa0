"""Pods that go and come: a drained node, an image that is not there, a declaration that can't run."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.node.cluster import NODE
from testing.node.pods import SIDECAR_PORT
from tests.harness.pods import endings, is_going, is_in_service, kept, num_running, prompt

NUM_TOKENS = 600


def scale(app, replicas: int):
    """Its pods, when they are Ready."""
    app.spec["spec"]["engine"]["replicas"] = replicas
    app.apply()
    pods = [app.ready_pod(number) for number in range(replicas)]
    app.node.wait(lambda: len(app.pods()) == replicas, 180)
    return pods


def drain(node) -> str:
    """What kubectl says when it has given up."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        node.kubectl(
            "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=30s",
            "--pod-selector=lmcache.io/cluster=tiny",
        )  # fmt: skip
    return refused.value.stderr


def test_a_drained_node_loses_one_pod_at_a_time_and_no_request(tiny):
    node, pods = tiny.node, scale(tiny, 2)
    try:
        with kept(*pods), ThreadPoolExecutor(3) as threads:
            asked = [
                threads.submit(pod.complete, prompt(20 + i, 64), NUM_TOKENS) for i, pod in enumerate(pods)
            ]
            node.wait(lambda: all(num_running(pod) for pod in pods), 120)
            # However quick the engines are, the requests are still running when one has to go.
            with pods[0].stopped("engine"), pods[1].stopped("engine"):
                told = threads.submit(drain, node)
                node.wait(lambda: any(map(is_going, tiny.pods())), 60)
                assert not any(answer.done() for answer in asked)
            assert [len(answer.result().tokens) for answer in asked] == [NUM_TOKENS] * 2
            assert "disruption budget" in told.result()
            [gone] = [number for number in range(2) if is_going(tiny.pod(number))]
            engine, sidecar = node.wait(lambda: endings(tiny.pod(gone)), 180)
            assert (engine["exitCode"], sidecar["exitCode"]) == (0, 0)
            assert engine["finishedAt"] <= sidecar["finishedAt"]
        assert tiny.ready_pod(1 - gone).uid == pods[1 - gone].uid
        assert is_in_service(tiny)
        node.wait(lambda: tiny.conditions()["Degraded"]["reason"] == "Unschedulable")
    finally:
        node.kubectl("uncordon", NODE)
        scale(tiny, 1)
    tiny.wait_condition("Ready")


def test_an_image_that_is_not_there_and_a_setting_that_is_none(make_app, references):
    """Kubernetes starts no engine before its sidecar's image is there; a sidecar that is up and can't run
    keeps no engine from serving. The status says either.
    """
    app = make_app("broken")
    app.spec["spec"]["sidecar"] = {"image": "localhost/nowhere:1"}
    bad = {"name": "sidecar", "env": [{"name": "LMCACHE_DRAIN_GRACE_SECONDS", "value": "soon"}]}
    app.spec["spec"]["engine"]["podTemplate"]["spec"]["initContainers"] = [bad]
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
        app.node.wait(lambda: is_in_service(app), 60)  # the controller of slices follows the pod
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
