"""What a kubelet ends of its own accord: containers that hang, and pods that outgrow their part of its disk;
and a sidecar that it leaves alone, though nothing in it works.

The engine is one that only says that it is healthy: these are about probes, limits and who comes back.
"""

from __future__ import annotations

import contextlib
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from testing.node.app import READY_SECONDS
from tests.harness.pods import is_in_service, kept
from tests.harness.programs import IDLE, offer_programs, use_program

PROGRAMS = "idle"
DISK, TOO_MUCH = "256Mi", 400
"""Of the engine's container; mebibytes."""
PROBED = timedelta(seconds=130)
"""Twice what the sidecar's liveness probe allows, and more."""
LIBRARIES = "broken-libraries"


@pytest.fixture(scope="module")
def idle(make_app, installed):
    offer_programs(installed, PROGRAMS, vllm=IDLE)
    app = make_app("idle")
    use_program(app, PROGRAMS, "vllm")
    template = app.spec["spec"]["engine"]["podTemplate"]["spec"]
    template["containers"][0]["resources"]["limits"]["ephemeral-storage"] = DISK
    app.apply()
    app.ready_pod()
    yield app
    app.delete()


@pytest.fixture(scope="module", autouse=True)
def mute(make_app, installed, idle):
    """Its sidecar dies before it listens, however often it is started; its time passes beside other tests."""
    offer_programs(installed, LIBRARIES, **{"grpc.py": "raise ImportError('no such library')"})
    app = make_app("mute")
    use_program(app, PROGRAMS, "vllm")
    template = app.spec["spec"]["engine"]["podTemplate"]["spec"]
    template["volumes"].append({"name": LIBRARIES, "configMap": {"name": LIBRARIES}})
    sidecar = {
        "name": "sidecar",
        "env": [{"name": "PYTHONPATH", "value": "/opt/broken:/opt/lmcache/project"}],
        "volumeMounts": [{"name": LIBRARIES, "mountPath": "/opt/broken"}],
    }
    template["initContainers"] = [sidecar]
    app.apply()
    yield app
    app.delete()


def test_containers_that_hang_are_started_again(idle):
    before = idle.ready_pod()
    restarts = {name: before.container(name)["restartCount"] for name in ("engine", "sidecar")}
    with before.stopped("engine"), before.stopped("sidecar"):
        for name, number in restarts.items():
            idle.node.wait(
                lambda name=name, number=number: idle.pod().container(name)["restartCount"] > number,
                READY_SECONDS,
            )
    after = idle.ready_pod()
    assert after.uid == before.uid
    idle.wait_condition("Ready")
    idle.node.wait(lambda: is_in_service(idle), 60)  # the controller of slices follows the pod


def test_a_pod_that_is_evicted_for_its_disk_comes_back(idle):
    before = idle.ready_pod()
    with kept(before):  # its events may be too many for the kubelet to tell of this one, too
        with contextlib.suppress(subprocess.CalledProcessError):  # it may be evicted before all is written
            before.exec("engine", "dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", f"count={TOO_MUCH}")
        idle.node.wait(lambda: idle.pod().object["status"]["phase"] == "Failed")
        failed = idle.pod()
    assert failed.uid == before.uid
    assert failed.object["status"]["reason"] == "Evicted"
    assert DISK in failed.object["status"]["message"]
    idle.ready_pod(instead_of=before)
    idle.wait_condition("Ready")


def test_a_sidecar_that_never_listens_is_not_ended_and_its_engine_serves(mute):
    def since(pod):
        running = pod.container("sidecar")["state"]["running"]["startedAt"]
        (ready,) = [c for c in pod.object["status"]["conditions"] if c["type"] == "Ready"]
        return datetime.fromisoformat(running), ready["lastTransitionTime"]

    before = mute.ready_pod()
    running, _ = began = since(before)
    mute.node.wait(lambda: datetime.now(UTC) - running > PROBED, 3 * PROBED.total_seconds())
    after = mute.ready_pod()
    assert (after.uid, since(after), after.container("sidecar")["restartCount"]) == (before.uid, began, 0)
    assert before.logs("sidecar").count("ended with exit status 1: starting it again") > 3
    assert is_in_service(mute)

    def is_told():
        found = mute.conditions()["SidecarAttached"]
        return found["status"] == "False" and "the sidecar ended with exit status 1" in found["message"]

    mute.node.wait(is_told, READY_SECONDS)
