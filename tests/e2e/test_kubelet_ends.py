"""Containers that a kubelet ends by itself because they hang. A sidecar that never listens must not be ended.

The engine is a program that only reports that it is healthy, because these tests are about probes
and restarts.
"""

from datetime import UTC, datetime, timedelta

import pytest

from testing.node.app import READY_SECONDS
from tests.harness.commands.programs import IDLE, offer_programs, use_program
from tests.harness.operator.pods import is_in_service

PROGRAMS = "idle"
PROBE_TIME = timedelta(seconds=130)
"""More than twice the time after which the sidecar's liveness probe fails."""
LIBRARIES = "broken-libraries"


@pytest.fixture(scope="module")
def idle(make_app, installed):
    offer_programs(installed, PROGRAMS, vllm=IDLE)
    app = make_app("idle")
    use_program(app, PROGRAMS, "vllm")
    app.apply()
    app.ready_pod()
    yield app
    app.delete()


@pytest.fixture(scope="module", autouse=True)
def mute(make_app, installed, idle):
    """A cluster whose sidecar dies before it listens, at every start. It runs during the other tests."""
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


def test_hanging_containers_are_restarted(idle):
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
    idle.node.wait(lambda: is_in_service(idle), 60)  # the endpoint slices follow the pod with a delay


def test_sidecar_that_never_listens_is_not_restarted_while_its_engine_serves(mute):
    def start_times(pod):
        running = pod.container("sidecar")["state"]["running"]["startedAt"]
        (ready,) = [c for c in pod.object["status"]["conditions"] if c["type"] == "Ready"]
        return datetime.fromisoformat(running), ready["lastTransitionTime"]

    before = mute.ready_pod()
    running, _ = times_before = start_times(before)
    mute.node.wait(lambda: datetime.now(UTC) - running > PROBE_TIME, 3 * PROBE_TIME.total_seconds())
    after = mute.ready_pod()
    assert (after.uid, start_times(after)) == (before.uid, times_before)
    assert after.container("sidecar")["restartCount"] == 0
    assert before.logs("sidecar").count("ended with exit status 1: restarting it") > 3
    assert is_in_service(mute)

    def is_reported():
        condition = mute.conditions()["SidecarAttached"]
        return (
            condition["status"] == "False" and "the sidecar ended with exit status 1" in condition["message"]
        )

    mute.node.wait(is_reported, READY_SECONDS)
