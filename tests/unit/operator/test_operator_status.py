"""What the user is told: why pods are not there or not ready, and the whole status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.components.base import Problem
from lmcache_operator.reconcile.status import derive_status, events, news
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import World, cluster
from tests.harness.operator_plans import (
    EARLY,
    LATE,
    STATEFUL_SET,
    carry_out,
    observe,
    outdated_world,
    plan,
    settled_world,
    specs,
    status_of,
)

# -- why pods are not there, or not ready


def waiting(reason: str, **more: Any) -> dict[str, Any]:
    return {"name": "engine", "state": {"waiting": {"reason": reason, **more}}}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPUs"}
CRASH = waiting("CrashLoopBackOff", message="back-off 5m0s") | {
    "lastState": {"terminated": {"reason": "Error", "exitCode": 2}}
}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"conditions": [UNSCHEDULABLE]}, "Unschedulable", "pod demo-engine-0: no GPUs"),
        (
            {"containerStatuses": [waiting("ImagePullBackOff", message="no such image")]},
            "ImagePullBackOff", "pod demo-engine-0, container engine: no such image",
        ),
        (
            {"initContainerStatuses": [CRASH]}, "CrashLoopBackOff",
            "pod demo-engine-0, container engine: ended 1 times, the last time with Error, exit code 2",
        ),
    ],
)  # fmt: skip
def test_what_keeps_a_pod_from_running_is_told(status: dict[str, Any], reason: str, message: str) -> None:
    world = settled_world()
    world.pods["demo-engine-0"]["status"] = status
    found = status_of(world)
    assert condition(found, "Ready") == ("False", reason)
    assert condition(found, "Degraded") == ("True", reason)
    assert next(c["message"] for c in found["conditions"] if c["type"] == "Degraded") == message


def test_a_pod_that_only_starts_is_no_problem() -> None:
    world = settled_world()
    world.pods["demo-engine-0"]["status"] = {"containerStatuses": [waiting("ContainerCreating")]}
    assert condition(status_of(world), "Degraded") == ("False", "AsDeclared")


def warning(about: dict[str, Any], reason: str, message: str, time: str) -> dict[str, Any]:
    involved = {"uid": about["metadata"]["uid"]}
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": time}


@pytest.mark.parametrize(
    ("time", "is_told"), [("2025-12-31T23:55:00Z", True), ("2025-12-31T23:30:00Z", False)]
)
def test_what_the_kubelet_says_of_a_pod_that_is_not_ready_is_told(time: str, is_told: bool) -> None:
    world = settled_world()
    pod = world.pods["demo-engine-0"]
    world.warnings = [warning(pod, "FailedMount", 'secret "hf" not found', time)]
    assert condition(status_of(world), "Ready") == ("True", "Ready")
    world.set_ready("demo-engine-0", False)
    found = status_of(world)
    assert (condition(found, "Degraded") == ("True", "FailedMount")) is is_told
    assert ('secret "hf" not found' in str(found)) is is_told


@pytest.mark.parametrize("odd", [{"lastTimestamp": "0000-01-01T00:00:00Z"}, {"reason": None}])
def test_odd_events_say_nothing_and_hide_nothing(odd: dict[str, Any]) -> None:
    world = settled_world()
    world.set_ready("demo-engine-0", False)
    pod, now = world.pods["demo-engine-0"], "2025-12-31T23:59:00Z"
    first = warning(pod, "FailedMount", "of the year 0", now) | odd
    told = {key: value for key, value in first.items() if value is not None}
    world.warnings = [told, warning(pod, "FailedMount", "no such claim", now)]
    message = next(c["message"] for c in status_of(world)["conditions"] if c["type"] == "Degraded")
    assert message == "pod demo-engine-0: no such claim"


def test_what_could_not_be_mounted_is_over_when_a_container_has_started() -> None:
    world = settled_world()
    pod = world.pods["demo-engine-0"]
    world.warnings = [warning(pod, "FailedMount", 'secret "hf" not found', "2025-12-31T23:59:00Z")]
    pod["status"] = {
        "initContainerStatuses": [{"name": "sidecar", "state": {"running": {}}}],
        "containerStatuses": [waiting("PodInitializing")],
    }
    assert condition(status_of(world), "Degraded") == ("False", "AsDeclared")


def test_why_pods_cannot_be_made_is_told_until_one_was_made() -> None:
    world = settled_world(engine={"replicas": 2})
    del world.pods["demo-engine-1"]
    world.pods["demo-engine-0"]["metadata"]["creationTimestamp"] = "2025-12-31T23:00:00Z"
    owner = world.objects[STATEFUL_SET]
    world.warnings = [warning(owner, "FailedCreate", "exceeded quota: gpus", "2025-12-31T23:59:00Z")]
    assert condition(status_of(world), "Degraded") == ("True", "FailedCreate")
    world.pods["demo-engine-0"]["metadata"]["creationTimestamp"] = "2025-12-31T23:59:01Z"
    assert condition(status_of(world), "Degraded") == ("False", "AsDeclared")


def test_a_pod_that_does_not_get_ready_in_time_is_told() -> None:
    world = settled_world()
    world.set_ready("demo-engine-0", False)
    world.pods["demo-engine-0"]["metadata"]["creationTimestamp"] = "2025-12-31T23:00:00Z"
    assert condition(status_of(world), "Progressing") == ("True", "Starting")
    world.pods["demo-engine-0"]["metadata"]["creationTimestamp"] = "2025-12-31T22:50:00Z"
    found = status_of(world)
    assert condition(found, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert condition(found, "Degraded") == ("True", "ProgressDeadlineExceeded")


# -- status


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    found = next(c for c in status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def test_status_of_a_cluster_at_rest() -> None:
    status = status_of(settled_world(engine={"replicas": 2}))
    assert {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]} == {
        "Degraded": ("False", "AsDeclared"),
        "EngineAvailable": ("True", "EnginesReady"),
        "Progressing": ("False", "Complete"),
        "Ready": ("True", "Ready"),
    }
    assert (status["replicas"], status["readyReplicas"]) == (2, 2)
    assert status["selector"] == "lmcache.io/cluster=demo,lmcache.io/component=engine"


def test_status_while_pods_start_scale_and_are_replaced() -> None:
    world = settled_world(engine={"replicas": 2})
    world.set_ready("demo-engine-0", False)
    assert condition(status_of(world), "Ready") == ("False", "Starting")
    assert condition(status_of(world), "EngineAvailable") == ("True", "EnginesReady")
    world.change(engine={"replicas": 3})
    assert condition(status_of(world), "Progressing") == ("True", "Scaling")
    assert condition(status_of(outdated_world()), "Ready") == ("False", "Replacing")
    assert condition(status_of(World(cluster())), "EngineAvailable") == ("False", "NoEngineReady")
    assert condition(status_of(settled_world(engine={"replicas": 0})), "EngineAvailable") == (
        "False",
        "ScaledToZero",
    )


def test_problems_are_named_and_make_it_unready() -> None:
    world = settled_world()
    taken = frozenset({Ref("Service", "demo")})
    status = status_of(world, (Problem("Refused", "no quota"),), taken=taken)
    assert condition(status, "Ready") == ("False", "NameTaken")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    assert degraded["message"].endswith("rename this cluster; no quota")


def test_an_invalid_spec_is_not_told_as_carried_out() -> None:
    world = settled_world()
    world.change(engine={"args": ["--port=1"]})
    assert condition(status_of(world), "Progressing") == ("False", "InvalidSpec")


def test_pods_with_a_former_size_are_counted_until_they_are_replaced() -> None:
    world = settled_world(engine={"replicas": 2})
    for pod in world.pods.values():  # made by an operator of before
        sidecar = pod["spec"]["initContainers"][0]
        sidecar["env"] = [item for item in sidecar["env"] if item["name"] != "LMCACHE_MEMORY_MAX_SIZE"]
        del pod["metadata"]["annotations"]["lmcache.io/memory-size"]
    world.change(tiers={"memory": {"size": "2Gi"}})
    carry_out(world, plan(observe(world), IMAGES))
    found = status_of(world)
    assert condition(found, "Ready") == ("True", "Ready")
    assert condition(found, "Progressing") == ("False", "ResizePending")
    assert "2 still have the former size" in str(found)
    # What the message says to do.
    world.change(engine={"podTemplate": {"metadata": {"annotations": {"rolled": "1"}}}})
    for _ in range(5):
        carry_out(world, plan(observe(world), IMAGES))
    assert condition(status_of(world), "Progressing") == ("False", "Complete")


def test_what_could_not_be_looked_at_is_unknown_and_the_rest_stays() -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    status = derive_status(world.resource, EARLY, [], {}, [Problem("Refused", "no right to get services")])
    assert condition(status, "Ready") == ("Unknown", "Refused")
    assert condition(status, "Degraded") == ("True", "Refused")
    assert condition(status, "EngineAvailable") == ("True", "EnginesReady")
    assert status["readyReplicas"] == 1


def test_events_tell_what_changed_and_nothing_else() -> None:
    world = settled_world()
    good = status_of(world)
    bad = status_of(world, (Problem("Refused", "no quota"),))
    complete = ("Normal", "Complete", "all 1 engine pods are as declared")
    ready = ("Normal", "Ready", "1 of 1 engine pods are ready")
    assert list(events({}, news({}, good))) == [complete, ready]
    assert news(good, good) == news(bad, bad) == []
    assert list(events(good, news(good, bad))) == [("Warning", "Refused", "no quota")]
    healed = ("Normal", "AsDeclared", "nothing stands in the way of the declared state")
    assert list(events(bad, news(bad, good))) == [healed, ready]


def test_a_part_that_fails_or_works_again_is_told_whatever_else_is_wrong() -> None:
    def said(remote: tuple[str, str]) -> dict[str, Any]:
        told = {"Degraded": ("True", "Unschedulable"), "RemoteTierReachable": remote}
        return {
            "conditions": [
                {"type": k, "status": v[0], "reason": v[1], "message": ""} for k, v in told.items()
            ]
        }

    good, bad, unknown = (
        said(found)
        for found in (("True", "Reachable"), ("False", "RemoteTierUnreachable"), ("Unknown", "NoAnswer"))
    )
    assert list(events(good, news(good, bad))) == [("Warning", "RemoteTierUnreachable", "")]
    assert list(events(bad, news(bad, good))) == [("Normal", "Reachable", "")]
    assert list(events(good, news(good, unknown))) == list(events(unknown, news(unknown, good))) == []


def test_events_tell_each_step_of_a_cluster_once() -> None:
    world, told = settled_world(engine={"replicas": 2}), []
    pods, world.pods = dict(world.pods), {}
    for num_ready in (0, 1, 2, 2):
        status, before = status_of(world), world.resource.get("status") or {}
        told.append([reason for _, reason, _ in events(before, news(before, status))])
        world.resource["status"] = status
        world.pods = pods
        for number in range(2):
            world.set_ready(f"demo-engine-{number}", number < num_ready)
    assert told == [["Scaling"], ["Starting"], [], ["Complete", "Ready"]]


def test_a_condition_that_was_not_looked_at_keeps_its_generation() -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    world.change(engine={"replicas": 2})
    found = derive_status(world.resource, EARLY, [], {}, [Problem("Refused", "no right to get services")])
    generations = {c["type"]: c["observedGeneration"] for c in found["conditions"]}
    before = world.resource["status"]["observedGeneration"]
    assert generations["Ready"] == generations["Degraded"] == before + 1
    assert generations["EngineAvailable"] == generations["Progressing"] == before


def test_the_transition_time_changes_only_when_the_status_flips() -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    assert status_of(world, now=LATE) == world.resource["status"]
    world.set_ready("demo-engine-0", False)
    times = {c["type"]: c["lastTransitionTime"] for c in status_of(world, now=LATE)["conditions"]}
    assert times["Degraded"] == "2026-01-01T00:00:00Z"
    assert times["Ready"] == times["EngineAvailable"] == "2026-01-02T00:00:00Z"


@given(specs, st.integers(0, 5))
def test_an_unknown_field_makes_it_unready_whatever_the_spec(changes: dict[str, Any], replicas: int) -> None:
    world = World(cluster(**changes))
    world.resource["spec"]["engine"] = {"replicas": replicas, "unknown": 1}
    status = status_of(world)
    assert condition(status, "Ready") == ("False", "InvalidSpec")
