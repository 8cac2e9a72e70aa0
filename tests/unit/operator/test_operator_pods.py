"""What pods, and the Events about them, say of why they don't serve."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lmcache_operator.components.base import Problem
from lmcache_operator.components.pods import (
    has_no_node,
    kill_problems,
    next_eviction,
    pod_problems,
    why_unplaced,
)
from lmcache_operator.specs.kinds import ref_of
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import World
from tests.harness.operator_plans import EARLY, STATEFUL_SET, carry_out, observe, plan, settled_world

Object = dict[str, Any]
POD = "demo-engine-0"
NOW_ENDED = "2025-12-31T23:59:00Z"


def world_with(**status: Any) -> World:
    """One pod that is not ready, with this status."""
    world = settled_world()
    world.pods[POD]["status"] = status
    return world


def problems(world: World) -> list[Problem]:
    return list(pod_problems(observe(world)))


def ended(exit_code: int, reason: str = "Error", message: str = "") -> Object:
    return {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": NOW_ENDED}


def container(name: str, *, now: str = "running", restarts: int = 0, last: Object | None = None) -> Object:
    states = {
        "running": {"running": {}},
        "waiting": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "terminated": {"terminated": last},
    }
    found: Object = {"name": name, "state": states[now], "restartCount": restarts, "ready": False}
    return found | ({"lastState": {"terminated": last}} if last and now != "terminated" else {})


def test_a_crash_loop_is_told_with_the_last_lines_and_is_no_news_each_time_it_runs_again() -> None:
    lines = "\n".join(f"line {n}\x1b[0m" for n in range(9)) + "\nValueError: no such model\n\n"
    crash = ended(1, message=lines)
    phases = [("terminated", 1), ("waiting", 1), ("running", 2), ("waiting", 2), ("running", 3)]
    told = []
    for now, restarts in phases:
        world = world_with(containerStatuses=[container("engine", now=now, restarts=restarts, last=crash)])
        told.append([reason for reason, _ in problems(world)])
    assert told == [[], *[["CrashLoopBackOff"]] * 4]
    assert problems(world)[0].message == (
        "pod demo-engine-0, container engine: ended 3 times, the last time with Error, exit code 1: "
        "line 5 [0m | line 6 [0m | line 7 [0m | line 8 [0m | ValueError: no such model"
    )


def test_last_lines_are_short_whatever_was_written() -> None:
    crash = ended(1, message="x" * 5000 + "\n" + "y" * 700)
    world = world_with(containerStatuses=[container("engine", now="waiting", restarts=4, last=crash)])
    assert len(problems(world)[0].message) < 750


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("now", ["running", "waiting", "terminated"])
def test_a_container_killed_for_its_memory_is_told_while_it_is_not_ready(kind: str, now: str) -> None:
    one = container("sidecar", now=now, restarts=1, last=ended(137, "OOMKilled"))
    ((reason, message),) = problems(world_with(**{kind: [one]}))
    assert reason == "OOMKilled"
    assert "container sidecar: ended" in message


def test_a_kill_of_a_pod_that_serves_again_is_told_for_a_while() -> None:
    killed = container("sidecar", restarts=1, last=ended(137, "OOMKilled")) | {"ready": True}
    world = world_with(initContainerStatuses=[killed], conditions=[{"type": "Ready", "status": "True"}])
    assert problems(world) == []
    assert [reason for reason, _ in kill_problems(observe(world))] == ["OOMKilled"]
    killed["lastState"]["terminated"]["finishedAt"] = "2025-12-31T23:30:00Z"
    assert list(kill_problems(observe(world))) == []


@pytest.mark.parametrize("reason", ["Error", "OOMKilled"])
def test_what_ended_a_container_long_ago_is_not_why_it_is_not_ready_now(reason: str) -> None:
    crash = ended(137, reason) | {"finishedAt": "2025-12-01T00:00:00Z"}
    engine = container("engine", restarts=2, last=crash)
    assert problems(world_with(containerStatuses=[engine | {"started": True}])) == []
    ((told, _),) = problems(world_with(containerStatuses=[engine | {"started": False}]))  # it loads since
    assert told == ("CrashLoopBackOff" if reason == "Error" else reason)


@pytest.mark.parametrize("now", ["running", "waiting", "terminated"])
def test_an_engine_that_ends_with_0_again_and_again_is_told(now: str) -> None:
    """As one does that its liveness probe ends."""
    world = world_with(
        containerStatuses=[container("engine", now=now, restarts=4, last=ended(0, "Completed"))]
    )
    ((reason, message),) = problems(world)
    assert reason == "CrashLoopBackOff"
    assert message.endswith("times, the last time with Completed, exit code 0")


def test_a_back_off_of_which_nothing_else_is_known_is_told() -> None:
    ((_, message),) = problems(world_with(containerStatuses=[container("engine", now="waiting", restarts=4)]))
    assert message == f"pod {POD}, container engine: ended 5 times"


@pytest.mark.parametrize("now", ["running", "terminated"])
def test_containers_that_do_their_work_are_no_problem(now: str) -> None:
    done = {"name": "payload", "state": {"terminated": ended(0, "Completed")}, "ready": True}
    done |= {"restartCount": 3, "lastState": {"terminated": ended(1)}}
    first = container("engine", now=now, restarts=0, last=ended(1) if now == "terminated" else None)
    assert problems(world_with(initContainerStatuses=[done], containerStatuses=[first])) == []


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ErrImagePull", "ImagePullBackOff"), ("ImagePullBackOff", "ImagePullBackOff"),
        ("InvalidImageName", "ImagePullBackOff"), ("RunContainerError", "CreateContainerError"),
        ("PreCreateHookError", "CreateContainerError"),
        ("CreateContainerConfigError", "CreateContainerConfigError"),
    ],
)  # fmt: skip
def test_words_that_the_kubelet_takes_turns_with_are_one_reason(word: str, reason: str) -> None:
    waiting = {"waiting": {"reason": word, "message": "why"}}
    world = world_with(containerStatuses=[{"name": "engine", "state": waiting}])
    ((found, message),) = problems(world)
    assert found == reason
    assert message == f"pod {POD}, container engine: {'' if word == reason else f'{word}: '}why"


def test_a_pod_that_was_evicted_is_told() -> None:
    world = world_with(phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    message = f"pod {POD}: Evicted: The node was low on resource: memory."
    assert problems(world) == [Problem("PodFailed", message)]


@pytest.mark.parametrize(
    ("name", "reason"), [("models", "FailedBinding"), (f"{POD}-disk", "ProvisioningFailed")]
)
def test_what_a_claim_lacks_is_told_before_what_the_scheduler_makes_of_it(name: str, reason: str) -> None:
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "unbound"}
    world = world_with(conditions=[unbound])
    pod = world.pods[POD]
    pod["spec"]["volumes"] += [
        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "disk", "ephemeral": {}},
    ]  # fmt: skip
    about = {"kind": "PersistentVolumeClaim", "name": name, "uid": "claim"}
    event = {"involvedObject": about, "reason": reason, "message": "no storage class"}
    world.warnings = [event | {"lastTimestamp": NOW_ENDED}]
    told = Problem("FailedBinding", f"pod {POD}, claim {name}: no storage class")
    assert problems(world) == [told, Problem("Unschedulable", f"pod {POD}: unbound")]
    pod["spec"]["nodeName"] = "node-0"
    assert told not in problems(world)


@pytest.mark.parametrize("reason", ["SchedulingGated", "Unschedulable"])
def test_a_pod_that_is_not_scheduled_is_told(reason: str) -> None:
    placed = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "why"}
    assert problems(world_with(conditions=[placed])) == [Problem("Unschedulable", f"pod {POD}: why")]


def test_the_time_to_become_ready_is_that_of_the_startup_probe_and_begins_when_it_was_lost() -> None:
    world = world_with(conditions=[{"type": "Ready", "status": "False"}])
    pod = world.pods[POD]
    pod["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
    ready = pod["status"]["conditions"][0]
    ready["lastTransitionTime"] = "2025-12-31T23:00:00Z"
    assert problems(world) == []  # it served for months, and has an hour and a little to come back
    ready["lastTransitionTime"] = "2025-12-31T22:54:00Z"
    assert [reason for reason, _ in problems(world)] == ["ProgressDeadlineExceeded"]
    pod["spec"]["containers"][0]["startupProbe"]["failureThreshold"] = 1440
    assert problems(world) == []
    # As large as the API server takes it.
    pod["spec"]["containers"][0]["startupProbe"] |= {
        "failureThreshold": 2**31 - 1,
        "periodSeconds": 2**31 - 1,
    }
    assert problems(world) == []


NO_MEMORY = "0/2 nodes are available: 2 Insufficient memory."


def unplaced(message: str = NO_MEMORY, minutes: float = 10, placed: str = "False") -> Object:
    """A condition of the scheduler's."""
    since = (EARLY - timedelta(minutes=minutes)).isoformat()
    return {"type": "PodScheduled", "status": placed, "message": message, "lastTransitionTime": since}


@pytest.mark.parametrize(
    ("condition", "has_node", "why"),
    [
        (unplaced(), False, NO_MEMORY),
        (unplaced(minutes=9.9), False, ""),
        (unplaced("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."), False, ""),
        (unplaced(placed="True"), True, ""),
    ],
)
def test_a_pod_whose_memory_fits_on_no_node_is_told_after_10_minutes(
    condition: Object, has_node: bool, why: str
) -> None:
    world = world_with(conditions=[condition])
    pod = world.pods[POD]
    assert (has_no_node(pod), why_unplaced(pod, observe(world))) == (not has_node, why)
    pod["metadata"]["deletionTimestamp"] = EARLY.isoformat()
    assert not has_no_node(pod), "it is replaced already"


def test_a_pod_without_a_node_waits_for_no_other_pod_but_for_the_template() -> None:
    world = settled_world(engine={"replicas": 3})
    owner, pods = world.objects[STATEFUL_SET], [*world.pods.values()]
    template = owner["spec"]["template"]
    pods[0]["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}  # loads its model
    assert next_eviction(owner, pods, template, pods[1:]) == (pods[1],)
    assert next_eviction(owner, pods[:2], template, [pods[1]]) == (pods[1],), "another pod is missing"
    owner["metadata"]["generation"] += 1
    assert next_eviction(owner, pods, template, pods[1:]) == (), "it would get the former size again"


def test_a_pod_that_finds_no_node_is_made_again_with_a_smaller_size() -> None:
    """The StatefulSet replaces no pod by itself, and the kubelet resizes none that has no node."""
    world = settled_world(engine={"replicas": 2}, tiers={"memory": {"size": "128Gi"}})
    world.pods[POD]["status"] = {"phase": "Pending", "conditions": [unplaced()]}
    assert not plan(observe(world), IMAGES).evict, "another one would be no smaller"
    world.change(tiers={"memory": {"size": "64Gi"}})
    due = plan(observe(world), IMAGES)
    assert [ref.kind for ref in map(ref_of, due.apply)] == ["StatefulSet"]
    assert not due.evict, "the template is written first"
    carry_out(world, due)
    assert [pod["metadata"]["name"] for pod in plan(observe(world), IMAGES).evict] == [POD]
    carry_out(world, plan(observe(world), IMAGES))
    arguments = world.pods[POD]["spec"]["initContainers"][0]["args"]
    assert f"--memory-size={64 << 30}" in arguments
    assert not plan(observe(world), IMAGES).evict
