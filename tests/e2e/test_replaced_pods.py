"""Pods that go and come: a drained node, an image that is not there, a declaration that can't run."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.kube.api import ApiError
from testing.node.cluster import NODE
from testing.node.pods import ENGINE_PORT, SIDECAR_PORT
from tests.harness.pods import is_in_service, prompt

NUM_TOKENS = 1500
"""Of a request that is still running when its pod has to go: some 15 s."""


class LastSeen:
    """A pod's object until it is gone: the last one has how its containers ended."""

    def __init__(self, node, pod) -> None:
        self.object, self.is_gone = pod.object, False
        self._node, self._pod = node, pod
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.is_gone:
            try:
                now = self._node.api.get("v1/pods", self._pod.name, self._pod.namespace)
            except ApiError as error:
                self.is_gone = error.code == 404
                continue
            except OSError:
                continue
            self.is_gone = now["metadata"]["uid"] != self._pod.uid
            if not self.is_gone:
                self.object = now

    def ended(self, name: str):
        """How a container ended."""
        status = self.object["status"]
        [found] = [
            c for c in (*status["initContainerStatuses"], *status["containerStatuses"]) if c["name"] == name
        ]
        return found["state"]["terminated"]


def num_running(pod) -> float:
    lines = pod.get(ENGINE_PORT, "/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def test_a_drained_node_loses_one_pod_at_a_time_and_no_request(tiny):
    node = tiny.node
    tiny.ready_pod()
    tiny.spec["spec"]["engine"]["replicas"] = 2
    tiny.apply()
    pods = [tiny.ready_pod(number) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(pod.complete, prompt(20 + i, 64), NUM_TOKENS) for i, pod in enumerate(pods)]
        node.wait(lambda: all(num_running(pod) for pod in pods), 120)
        seen = [LastSeen(node, pod) for pod in pods]
        with pytest.raises(subprocess.CalledProcessError) as refused:
            node.kubectl(
                "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=75s",
                "--pod-selector=lmcache.io/cluster=tiny",
            )  # fmt: skip
        assert "disruption budget" in refused.value.stderr
        answers = [stream.result() for stream in streams]
    try:
        assert [len(answer.tokens) for answer in answers] == [NUM_TOKENS] * 2
        node.wait(lambda: any(last.is_gone for last in seen), 180)
        [gone] = [number for number in range(2) if seen[number].is_gone]
        assert tiny.pod(1 - gone).uid == pods[1 - gone].uid
        assert tiny.pod(1 - gone).is_ready
        assert is_in_service(tiny)
        engine, sidecar = seen[gone].ended("engine"), seen[gone].ended("sidecar")
        assert (engine["exitCode"], sidecar["exitCode"]) == (0, 0)
        assert engine["finishedAt"] <= sidecar["finishedAt"]
        unschedulable = tiny.wait_condition("Degraded")
        assert unschedulable["reason"] == "Unschedulable"
    finally:
        node.kubectl("uncordon", NODE)
    tiny.ready_pod(gone)
    tiny.spec["spec"]["engine"]["replicas"] = 1
    tiny.apply()
    node.wait(lambda: len(tiny.pods()) == 1, 180)
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
        assert is_in_service(app)
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
