"""Reasons why pods do not serve, from pod status and Events."""

import re
import time
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.groups import next_eviction, singles
from lmcache_operator.pods.output import last_error
from lmcache_operator.pods.placement import unplaced_message
from lmcache_operator.pods.pods import has_no_node, kill_problems, pod_problems, why_unplaced
from lmcache_operator.reconcile.needed import of_pod
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from tests.harness.operator.model import World
from tests.harness.operator.plans import (
    EARLY,
    STATEFUL_SET,
    carry_out,
    observe,
    plan,
    settled_world,
    status_of,
)

Object = dict[str, Any]
POD = "demo-engine-0"
END_TIME = "2025-12-31T23:59:00Z"


def world_with(**status: Any) -> World:
    """A world with an unready pod that has this status."""
    world = settled_world()
    world.pods[POD]["status"] = status
    return world


def problems(world: World) -> list[Problem]:
    return list(pod_problems(observe(world)))


def ended(exit_code: int, reason: str = "Error", message: str = "") -> Object:
    return {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": END_TIME}


def container(name: str, *, now: str = "running", restarts: int = 0, last: Object | None = None) -> Object:
    states = {
        "running": {"running": {}},
        "waiting": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "terminated": {"terminated": last},
    }
    status: Object = {"name": name, "state": states[now], "restartCount": restarts, "ready": False}
    return status | ({"lastState": {"terminated": last}} if last and now != "terminated" else {})


def test_crash_loop_is_reported_with_last_log_lines_also_while_it_runs() -> None:
    lines = "\n".join(f"line {n}\x1b[0m" for n in range(9)) + "\nValueError: no such model\n\n"
    crash = ended(1, message=lines)
    phases = [("terminated", 1), ("waiting", 1), ("running", 2), ("waiting", 2), ("running", 3)]
    reasons = []
    for now, restarts in phases:
        world = world_with(containerStatuses=[container("engine", now=now, restarts=restarts, last=crash)])
        reasons.append([reason for reason, _ in problems(world)])
    assert reasons == [[], *[["CrashLoopBackOff"]] * 4]
    assert problems(world)[0].message == (
        "pod demo-engine-0, container engine: ended 3 times, the last time with Error, exit code 1: "
        "ValueError: no such model"
    )


MISSPELT = """\
ory_bytes': 167772160, 'prefix_caching_hash_algo': 'sha256'}
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "/opt/vllm/entrypoints/cli/main.py", line 73, in main
(APIServer pid=1)     args.dispatch_function(args)
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=1)   Value error, Invalid repository ID or local directory specified: '/modles'.
(APIServer pid=1) For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
NO_MEMORY_LEFT = """\
(EngineCore pid=7) ERROR 11-29 10:01:02 [core.py:842]     raise ValueError(
(EngineCore pid=7) ERROR 11-29 10:01:02 [core.py:842] ValueError: No available memory for the cache blocks.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: 1 leaked"""


@pytest.mark.parametrize(
    ("output", "quoted"),
    [
        (
            "vllm serve: error: unrecognized arguments: --foo",
            "vllm serve: error: unrecognized arguments: --foo",
        ),
        ("a\nFound ulimit of 20000 and failed to automatically increase", "a"),
        ("Found ulimit of 20000", "Found ulimit of 20000"),
        (NO_MEMORY_LEFT, NO_MEMORY_LEFT.splitlines()[1]),
        (MISSPELT, re.sub(" +", " ", " | ".join(MISSPELT.splitlines()[4:6]))),
        ("", ""),
        (f"Error: redis://:S3cr3t@h:1, hf_{'S' * 20}", "Error: redis://:<removed>@h:1, <removed>"),
        ("Error: https://S3cr3t@h/m: password=S3cr3t", "Error: https://<removed>@h/m: password=<removed>"),
    ],
)
def test_error_is_quoted_instead_of_the_lines_after_it(output: str, quoted: str) -> None:
    assert last_error(output) == quoted


def test_output_that_resembles_errors_takes_little_time():
    """Pods choose their output, and the operator reads that of each pod in one event loop."""
    began = time.process_time()
    for output in ("error" * 10_000, "a" * 50_000, "leaked " * 600):
        assert last_error(output)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("now", ["running", "terminated"])
def test_first_crash_is_reported_while_the_container_starts_again(now: str) -> None:
    crash = ended(1, message=MISSPELT) | {"startedAt": "2025-12-31T23:58:29Z"}
    restarted = container("engine", now=now, restarts=int(now == "running"), last=crash)
    world = world_with(containerStatuses=[restarted])
    status = status_of(world)
    progressing, degraded = (
        next(each for each in status["conditions"] if each["type"] == kind)
        for kind in ("Progressing", "Degraded")
    )
    assert (progressing["status"], progressing["reason"], degraded["status"]) == ("True", "Starting", "False")
    assert progressing["message"].startswith(
        f"0 of 1 engine pods are ready; pod {POD}, container engine (spec.model.name is org/model): "
        "ended once with exit code 1 after 31 s, and starts again: "
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error"
    )
    crash["startedAt"] = "1970-01-01T00:00:00Z"
    assert "ended once with exit code 1, and starts again: " in str(status_of(world))
    crash["exitCode"] = 0
    assert "ended" not in str(status_of(world))


def test_last_log_lines_are_shortened() -> None:
    crash = ended(1, message="x" * 5000 + "\n" + "y" * 700)
    world = world_with(containerStatuses=[container("engine", now="waiting", restarts=4, last=crash)])
    assert len(problems(world)[0].message) < 750


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("now", ["running", "waiting", "terminated"])
def test_oom_killed_container_is_reported_while_it_is_not_ready(kind: str, now: str) -> None:
    killed = container("sidecar", now=now, restarts=1, last=ended(137, "OOMKilled"))
    ((reason, message),) = problems(world_with(**{kind: [killed]}))
    assert (reason, "container sidecar: ended" in message) == ("OOMKilled", True)


def test_oom_kill_of_a_recovered_pod_is_reported_for_a_limited_time() -> None:
    killed = container("sidecar", restarts=1, last=ended(137, "OOMKilled")) | {"ready": True}
    world = world_with(initContainerStatuses=[killed], conditions=[{"type": "Ready", "status": "True"}])
    assert problems(world) == []
    assert [reason for reason, _ in kill_problems(observe(world))] == ["OOMKilled"]
    killed["lastState"]["terminated"]["finishedAt"] = "2025-12-31T23:30:00Z"
    assert list(kill_problems(observe(world))) == []


@pytest.mark.parametrize("reason", ["Error", "OOMKilled"])
def test_old_termination_is_no_reason_why_a_started_container_is_not_ready(reason: str) -> None:
    crash = ended(137, reason) | {"finishedAt": "2025-12-01T00:00:00Z"}
    engine = container("engine", restarts=2, last=crash)
    assert problems(world_with(containerStatuses=[engine | {"started": True}])) == []
    loading = world_with(containerStatuses=[engine | {"started": False}])  # since the restart
    assert [each.reason for each in problems(loading)] == [
        "CrashLoopBackOff" if reason == "Error" else reason
    ]


@pytest.mark.parametrize("now", ["running", "waiting", "terminated"])
def test_engine_that_repeatedly_exits_with_0_is_reported(now: str) -> None:
    """An engine that its liveness probe stops ends like this."""
    engine = container("engine", now=now, restarts=4, last=ended(0, "Completed"))
    ((reason, message),) = problems(world_with(containerStatuses=[engine]))
    assert reason == "CrashLoopBackOff"
    assert message.endswith("times, the last time with Completed, exit code 0")


def test_back_off_without_last_state_is_reported() -> None:
    ((_, message),) = problems(world_with(containerStatuses=[container("engine", now="waiting", restarts=4)]))
    assert message == f"pod {POD}, container engine: ended 5 times"


@pytest.mark.parametrize("now", ["running", "terminated"])
def test_working_containers_are_no_problem(now: str) -> None:
    completed = {"name": "payload", "state": {"terminated": ended(0, "Completed")}, "ready": True}
    completed |= {"restartCount": 3, "lastState": {"terminated": ended(1)}}
    engine = container("engine", now=now, restarts=0, last=ended(1) if now == "terminated" else None)
    assert problems(world_with(initContainerStatuses=[completed], containerStatuses=[engine])) == []


@pytest.mark.parametrize(
    ("kubelet_reason", "reason"),
    [
        ("ErrImagePull", "ImagePullBackOff"), ("ImagePullBackOff", "ImagePullBackOff"),
        ("InvalidImageName", "ImagePullBackOff"), ("RunContainerError", "CreateContainerError"),
        ("PreCreateHookError", "CreateContainerError"),
        ("CreateContainerConfigError", "CreateContainerConfigError"),
    ],
)  # fmt: skip
def test_alternating_kubelet_reasons_map_to_one_reason(kubelet_reason: str, reason: str) -> None:
    waiting = {"waiting": {"reason": kubelet_reason, "message": "why"}}
    world = world_with(containerStatuses=[{"name": "engine", "state": waiting}])
    why = "why" if kubelet_reason == reason else f"{kubelet_reason}: why"
    field = " (spec.engine.image)" if reason == "ImagePullBackOff" else ""
    assert problems(world) == [Problem(reason, f"pod {POD}, container engine{field}: {why}")]


def test_evicted_pod_is_reported() -> None:
    world = world_with(phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    message = f"pod {POD}: Evicted: The node was low on resource: memory."
    assert problems(world) == [Problem("PodFailed", message)]


@pytest.mark.parametrize(
    ("name", "reason"), [("models", "FailedBinding"), (f"{POD}-disk", "ProvisioningFailed")]
)
def test_claim_problem_is_reported_before_the_scheduler_message(name: str, reason: str) -> None:
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "unbound"}
    world = world_with(conditions=[unbound])
    pod = world.pods[POD]
    pod["spec"]["volumes"] += [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    pod["spec"]["volumes"] += [{"name": "disk", "ephemeral": {}}]
    claim_ref = {"kind": "PersistentVolumeClaim", "name": name, "uid": "claim"}
    event = {"involvedObject": claim_ref, "reason": reason, "message": "no storage class"}
    world.warnings = [event | {"lastTimestamp": END_TIME}]
    claim_problem = Problem("FailedBinding", f"pod {POD}, claim {name}: no storage class")
    assert problems(world) == [claim_problem, Problem("Unschedulable", f"pod {POD}: unbound")]
    pod["spec"]["nodeName"] = "node-0"
    assert claim_problem not in problems(world)


@pytest.mark.parametrize("reason", ["SchedulingGated", "Unschedulable"])
def test_unscheduled_pod_is_reported(reason: str) -> None:
    placed = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "why"}
    assert problems(world_with(conditions=[placed])) == [Problem("Unschedulable", f"pod {POD}: why")]


TAIL = " no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful."
GPU, GIB = "nvidia.com/gpu", 1 << 30
NO_GPUS = "Without GPUs, set spec.engine.gpu.count to 0, and an image for CPUs (examples/cpu.yaml)"
ONE_GPU = f"requests 1 of {GPU} for spec.engine.gpu.count"
SIZES = "928.62Gi for a memory tier of 900Gi (spec.tiers.memory.size), 4Gi for spec.engine.resources"
CPUS = "requests 1.1 of cpu: 0.1 for container sidecar, 1 for spec.engine.resources"
CLASS = "requests 1 of the device class gpu.nvidia.com (spec.engine.gpu)"


@pytest.mark.parametrize(
    ("reason", "largest", "why"),
    [
        (f"1 Insufficient {GPU}.", {"cpu": 1}, f"{ONE_GPU}. No node has any. {NO_GPUS}"),
        (f"1 Insufficient {GPU}.", {GPU: 8},
         f"{ONE_GPU}. The largest node has 8, but other pods use a part of it"),
        (f"1 Insufficient {GPU}.", None, f"{ONE_GPU}. {NO_GPUS}"),
        ("1 Insufficient memory.", {"memory": 23 * GIB},
         f"requests 932.62Gi of memory: {SIZES}. The largest node has 23Gi"),
        ("1 Insufficient cpu, 1 Insufficient memory.", None,
         f"{CPUS}. It requests 932.62Gi of memory: {SIZES}"),
        ("1 Insufficient cpu, 1 Insufficient example.com/unknown.", {"cpu": Decimal("0.5")},
         f"{CPUS}. The largest node has 0.5"),
        ("1 node(s) had untolerated taint {a: b}.", None,
         "may not run on some nodes: check spec.engine.tolerations"),
        ("1 cannot allocate all claims.", None, f"{CLASS}. {NO_GPUS}"),
    ],
)  # fmt: skip
def test_pod_without_a_node_names_amounts_and_fields(reason: str, largest: Object | None, why: str) -> None:
    world = settled_world(engine={"gpu": {"count": 1}}, tiers={"memory": {"size": "900Gi"}})
    if "claims" in reason:
        world.resource["spec"]["engine"]["gpu"]["deviceClassName"] = "gpu.nvidia.com"
    scheduler = f"0/1 nodes are available: {reason}"
    placed = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.pods[POD]["status"] = {"conditions": [placed | {"message": scheduler + TAIL}]}
    amounts = largest and {name: Decimal(amount) for name, amount in largest.items()}
    (problem,) = pod_problems(replace(observe(world), largest=amounts))
    assert problem == Problem("Unschedulable", f"pod {POD} {why}. Scheduler: {scheduler}")


@pytest.mark.parametrize("part", [lambda spec: spec, lambda spec: spec["initContainers"][-1]])
def test_amounts_that_do_not_add_up_are_left_to_the_scheduler(part: Any) -> None:
    """The pod template may set the request of the pod, or have a container that runs before the others."""
    world = settled_world()
    part(world.pods[POD]["spec"])["resources"] = {"requests": {"memory": "500Gi"}}
    assert unplaced_message(of_pod(world.pods[POD]), NO_MEMORY, observe(world)) == f"pod {POD}: {NO_MEMORY}"


def test_foreign_pod_without_a_node_names_its_containers() -> None:
    world = settled_world()
    foreign = world.pods[POD]
    foreign["metadata"]["labels"] = {}
    foreign["spec"]["initContainers"][0]["args"] = ["--memory-size=many"]
    message = unplaced_message(foreign, NO_MEMORY, observe(world))
    assert "for container sidecar, 4Gi for container engine" in message


def test_ready_deadline_is_the_startup_probe_after_readiness_was_lost() -> None:
    world = world_with(conditions=[{"type": "Ready", "status": "False"}])
    pod = world.pods[POD]
    pod["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
    ready_condition = pod["status"]["conditions"][0]
    ready_condition["lastTransitionTime"] = "2025-12-31T23:00:00Z"
    # The pod served for months, and has an hour and five minutes to become ready again.
    assert problems(world) == []
    ready_condition["lastTransitionTime"] = "2025-12-31T22:54:00Z"
    assert [reason for reason, _ in problems(world)] == ["ProgressDeadlineExceeded"]
    probe = pod["spec"]["containers"][0]["startupProbe"]
    probe["failureThreshold"] = 1440
    assert problems(world) == []
    probe |= dict.fromkeys(("failureThreshold", "periodSeconds"), 2**31 - 1)  # what the API server accepts
    assert problems(world) == []


NO_MEMORY = "0/2 nodes are available: 2 Insufficient memory."


def unplaced(message: str = NO_MEMORY, minutes: float = 10, placed: str = "False") -> Object:
    """The scheduler's condition of a pod."""
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
def test_pod_whose_memory_fits_no_node_is_reported_after_10_minutes(condition, has_node, why):
    world = world_with(conditions=[condition])
    pod = world.pods[POD]
    assert (has_no_node(pod), why_unplaced(pod, observe(world))) == (not has_node, why)
    pod["metadata"]["deletionTimestamp"] = EARLY.isoformat()
    assert not has_no_node(pod), "a terminating pod needs no replacement"


def test_eviction_of_an_unplaced_pod_waits_only_for_the_template() -> None:
    world = settled_world(engine={"replicas": 3})
    owner, pods = world.objects[STATEFUL_SET], [*world.pods.values()]
    template = owner["spec"]["template"]
    pods[0]["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}  # this pod loads its model
    assert next_eviction(singles(owner, pods), template, pods[1:]) == (pods[1],)
    assert next_eviction(singles(owner, pods[:2]), template, [pods[1]]) == (pods[1],), (
        "a missing pod blocks nothing"
    )
    owner["metadata"]["generation"] += 1
    assert next_eviction(singles(owner, pods), template, pods[1:]) == (), "a new pod would have the old size"


def test_unplaced_pod_is_recreated_with_a_smaller_size() -> None:
    """The StatefulSet does not replace the pod, and no kubelet resizes a pod without a node."""
    world = settled_world(engine={"replicas": 2}, tiers={"memory": {"size": "128Gi"}})
    world.pods[POD]["status"] = {"phase": "Pending", "conditions": [unplaced()]}
    assert not plan(observe(world), IMAGES).evict, "a new pod would have the same size"
    world.change(tiers={"memory": {"size": "64Gi"}})
    for applied, evicted in ((["StatefulSet"], []), ([], [POD]), ([], [])):  # the template is written first
        due = plan(observe(world), IMAGES)
        assert [child["kind"] for child in due.apply] == applied
        assert [pod["metadata"]["name"] for pod in due.evict] == evicted
        carry_out(world, due)
    assert f"--memory-size={64 << 30}" in world.pods[POD]["spec"]["initContainers"][0]["args"]
