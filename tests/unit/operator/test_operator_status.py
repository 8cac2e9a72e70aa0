"""The status of a cluster, its conditions and Events, and reasons for missing or unready pods."""

import json
import re
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kv_fields import OPTIONS, kv_fields
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.reconcile.status import changed_conditions, derive_status, events
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from testing.kube.operator import CHART, CRDS
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import (
    EARLY,
    LATE,
    STATEFUL_SET,
    carry_out,
    observe,
    outdated_world,
    plan,
    settled_world,
    status_of,
)
from tools.resource_docs import COMPLETE

# -- reasons for missing or unready pods


POD, QUOTA = "demo-engine-0", "exceeded quota: gpus"
NO_SECRET = 'secret "hf" not found'


def waiting(reason: str, **details: Any) -> dict[str, Any]:
    return {"name": "engine", "state": {"waiting": {"reason": reason, **details}}}


def warning(regarding: dict[str, Any], reason: str, message: str, time: str) -> dict[str, Any]:
    involved = {"uid": regarding["metadata"]["uid"]}
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": time}


def test_reason_why_a_pod_does_not_run_is_reported():
    world = settled_world()
    for waits, reason in (
        (waiting("ImagePullBackOff", message="no such image"), "ImagePullBackOff"),
        (waiting("ContainerCreating"), "Starting"),
    ):
        world.pods[POD]["status"] = {"containerStatuses": [waits]}
        actual, is_problem = status_of(world), reason != "Starting"
        assert condition(actual, "Ready") == ("False", reason)
        assert condition(actual, "Degraded") == (str(is_problem), reason if is_problem else "AsDeclared")
        assert (
            "pod demo-engine-0, container engine (spec.engine.image): no such image" in str(actual)
        ) is is_problem


@pytest.mark.parametrize(
    ("time", "is_reported"), [("2025-12-31T23:55:00Z", True), ("2025-12-31T23:30:00Z", False)]
)
def test_recent_event_of_an_unready_pod_is_reported(time: str, is_reported: bool) -> None:
    world = settled_world()
    world.warnings = [warning(world.pods[POD], "FailedMount", NO_SECRET, time)]
    assert condition(status_of(world), "Ready") == ("True", "Ready")
    world.set_ready(POD, False)
    actual = status_of(world)
    assert (condition(actual, "Degraded") == ("True", "FailedMount")) is is_reported
    assert (NO_SECRET in str(actual)) is is_reported


@pytest.mark.parametrize("invalid_fields", [{"lastTimestamp": "0000-01-01T00:00:00Z"}, {"reason": None}])
def test_invalid_event_is_ignored_and_hides_no_other(invalid_fields: dict[str, Any]) -> None:
    world = settled_world()
    world.set_ready(POD, False)
    valid = warning(world.pods[POD], "FailedMount", "no such claim", "2025-12-31T23:59:00Z")
    first = {key: value for key, value in (valid | invalid_fields).items() if value is not None}
    world.warnings = [first | {"message": "of the year 0"}, valid]
    message = next(c["message"] for c in status_of(world)["conditions"] if c["type"] == "Degraded")
    assert message == "pod demo-engine-0: no such claim"


def test_mount_failure_ends_when_a_container_starts() -> None:
    world = settled_world()
    world.warnings = [warning(world.pods[POD], "FailedMount", NO_SECRET, "2025-12-31T23:59:00Z")]
    world.pods[POD]["status"] = {
        "initContainerStatuses": [{"name": "sidecar", "state": {"running": {}}}],
        "containerStatuses": [waiting("PodInitializing")],
    }
    assert condition(status_of(world), "Degraded") == ("False", "AsDeclared")


def test_failed_pod_creation_is_reported_until_a_pod_is_created() -> None:
    world = settled_world(engine={"replicas": 2})
    del world.pods["demo-engine-1"]
    world.warnings = [warning(world.objects[STATEFUL_SET], "FailedCreate", QUOTA, "2025-12-31T23:59:00Z")]
    for created, expected in (("23:00:00", ("True", "FailedCreate")), ("23:59:01", ("False", "AsDeclared"))):
        world.pods[POD]["metadata"]["creationTimestamp"] = f"2025-12-31T{created}Z"
        assert condition(status_of(world), "Degraded") == expected


def test_pod_that_misses_the_ready_deadline_is_reported() -> None:
    world = settled_world()
    world.set_ready(POD, False)
    world.pods[POD]["metadata"]["creationTimestamp"] = "2025-12-31T23:00:00Z"
    assert condition(status_of(world), "Progressing") == ("True", "Starting")
    world.pods[POD]["metadata"]["creationTimestamp"] = "2025-12-31T22:50:00Z"
    actual = status_of(world)
    assert condition(actual, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert condition(actual, "Degraded") == ("True", "ProgressDeadlineExceeded")


# -- status


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    matching = next(c for c in status["conditions"] if c["type"] == kind)
    return matching["status"], matching["reason"]


def test_status_of_a_settled_cluster() -> None:
    status = status_of(settled_world(engine={"replicas": 2}))
    assert {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]} == {
        "Degraded": ("False", "AsDeclared"), "EngineAvailable": ("True", "EnginesReady"),
        "Progressing": ("False", "Complete"), "Ready": ("True", "Ready"),
    }  # fmt: skip
    assert (status["replicas"], status["readyReplicas"]) == (2, 2)
    assert status["selector"] == "lmcache.io/cluster=demo,lmcache.io/component=engine"


def test_status_while_pods_start_scale_and_are_replaced() -> None:
    world = settled_world(engine={"replicas": 2})
    world.set_ready("demo-engine-0", False)
    assert condition(status_of(world), "Progressing") == ("True", "Starting")
    assert condition(status_of(world), "Ready") == ("True", "Serving")
    assert "1 of 2 engine pods are ready" in str(status_of(world))
    assert condition(status_of(world), "EngineAvailable") == ("True", "EnginesReady")
    world.change(engine={"replicas": 3})
    assert condition(status_of(world), "Progressing") == ("True", "Scaling")
    assert condition(status_of(world), "Ready") == ("True", "Serving")
    outdated = status_of(outdated_world())
    assert condition(outdated, "Progressing") == ("True", "Replacing")
    assert condition(outdated, "Ready") == ("True", "Serving")
    world.set_ready("demo-engine-1", False)
    assert condition(status_of(world), "Ready") == ("False", "Scaling")
    assert condition(status_of(World(cluster())), "EngineAvailable") == ("False", "NoEngineReady")
    empty = status_of(settled_world(engine={"replicas": 0}))
    assert condition(empty, "EngineAvailable") == ("False", "ScaledToZero")


@pytest.mark.parametrize(
    ("changes", "former"),
    [
        ({"sidecar": {"chunkTokens": 512}}, "sidecar.chunkTokens 256"),
        (
            {"model": {"name": "other/model", "revision": "v2"}},
            "model.name org/model, model.revision unset",
        ),
        ({"engine": {"args": ["--kv-cache-dtype=fp8"]}}, "engine.args --kv-cache-dtype unset"),
        ({"engine": {"args": ["--max-num-seqs=8"]}}, ""),
    ],
)
def test_change_that_discards_cached_kv_says_so_until_all_pods_are_replaced(
    changes: dict[str, Any], former: str
) -> None:
    world = settled_world(engine={"replicas": 2})
    world.change(**changes)
    carry_out(world, plan(observe(world), IMAGES))
    (message,) = (c["message"] for c in status_of(world)["conditions"] if c["type"] == "Progressing")
    end = f"; rows with the former {former} are not found any more" if former else ""
    assert message == f"Replacing engine pods: 2 of 2 do not match the spec yet{end}"
    for pod in world.pods.values():
        pod["metadata"]["annotations"]["lmcache.io/kv-fields"] = "[" * 5000
    assert "not found any more" not in str(status_of(world))


def test_chart_warns_of_all_fields_that_discard_cached_kv_and_can_be_changed() -> None:
    spec = yaml.safe_load(COMPLETE)["spec"]
    spec["engine"]["args"] = [f"{option}=1" for option in OPTIONS]
    spec["engine"] |= {"nodes": 2, "parallelism": {"tensor": 16}}
    del spec["engine"]["prefill"]
    schema = yaml.safe_load(CRDS[0].read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def can_be_changed(path: str) -> bool:
        field = schema["properties"]["spec"]
        for name in path.split(" ")[0].split("."):
            field = field["properties"][name]
        return "self == oldSelf" not in str(field.get("x-kubernetes-validations"))

    policy = (CHART / "templates" / "policies.yaml").read_text()
    paths = re.findall(r"\['([\w.]+)'\] \+", policy)
    options = re.findall(r"'(--[\w-]+)'", policy.partition("name: fields")[2])
    assert Counter([*paths, *(f"engine.args {option}" for option in options)]) == Counter(
        filter(can_be_changed, json.loads(kv_fields(parse(cluster(spec)))))
    )


def test_problems_are_listed_and_make_a_cluster_unready_that_does_not_serve() -> None:
    world = settled_world()
    taken_names = frozenset({Ref("Service", "demo")})
    status = status_of(world, (Problem("Refused", "no quota"),), taken=taken_names)
    assert condition(status, "Ready") == ("True", "Serving")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    assert degraded["message"].endswith("rename this cluster; no quota")
    world.set_ready(POD, False)
    status = status_of(world, (Problem("Refused", "no quota"),), taken=taken_names)
    assert condition(status, "Ready") == ("False", "NameTaken")
    assert str(status).count("rename this cluster") == 1, "the text stands in one condition"


def test_pods_with_the_previous_size_are_counted_until_replaced() -> None:
    world = settled_world(engine={"replicas": 2})
    for pod in world.pods.values():  # an earlier operator created the pods
        sidecar = pod["spec"]["initContainers"][0]
        sidecar["env"] = [item for item in sidecar["env"] if item["name"] != "LMCACHE_MEMORY_MAX_SIZE"]
        del pod["metadata"]["annotations"]["lmcache.io/memory-size"]
    world.change(tiers={"memory": {"size": "2Gi"}})
    carry_out(world, plan(observe(world), IMAGES))
    actual = status_of(world)
    assert condition(actual, "Ready") == ("True", "Ready")
    assert condition(actual, "Progressing") == ("False", "ResizePending")
    has = "2 engine pods can have up to 1Gi while running: 2Gi (spec.tiers.memory.size) needs new pods."
    ask = "To replace serving pods, one at a time, change an annotation in spec.engine.podTemplate"
    assert f"{has} {ask}" in str(actual)
    roomy = status_of(world, largest={"memory": Decimal(3 << 30)})
    assert f"{has} {ask}" in str(roomy)
    small = str(status_of(world, largest={"memory": Decimal(1 << 30)}))
    assert f"{has} The largest node has 1Gi, so a new pod would not start" in small
    assert ask not in small
    # The user follows the advice of the message.
    world.change(engine={"podTemplate": {"metadata": {"annotations": {"rolled": "1"}}}})
    for _ in range(5):
        carry_out(world, plan(observe(world), IMAGES))
    assert condition(status_of(world), "Progressing") == ("False", "Complete")


def test_failed_read_sets_ready_unknown_and_keeps_the_other_conditions_of_the_former_spec() -> None:
    world = settled_world()
    former = world.resource["status"] = status_of(world)
    world.change(engine={"replicas": 2})
    status = derive_status(world.resource, EARLY, [], {}, [Problem("Refused", "no right to get services")])
    assert condition(status, "Ready") == ("Unknown", "Refused")
    assert condition(status, "Degraded") == ("True", "Refused")
    assert condition(status, "EngineAvailable") == ("True", "EnginesReady")
    assert status["readyReplicas"] == 1
    generations = {c["type"]: c["observedGeneration"] for c in status["conditions"]}
    assert generations["Ready"] == generations["Degraded"] == former["observedGeneration"] + 1
    assert generations["EngineAvailable"] == generations["Progressing"] == former["observedGeneration"]


def test_events_report_only_changed_conditions() -> None:
    world = settled_world()
    good = status_of(world)
    bad = status_of(world, (Problem("Refused", "no quota"),))
    complete = ("Normal", "Complete", "All 1 engine pods match the spec.")
    ready = ("Normal", "Ready", "1 of 1 engine pods are ready")
    recovered = ("Normal", "AsDeclared", "nothing prevents the declared state")
    refused = ("Warning", "Refused", "no quota")
    steps = [({}, good, [complete, ready]), (good, good, []), (good, bad, [refused]), (bad, bad, [])]
    for before, after, expected in (*steps, (bad, good, [recovered, ready])):
        assert list(events(before, changed_conditions(before, after))) == expected


def test_events_report_part_failures_of_a_degraded_cluster() -> None:
    def status_with(status: str, reason: str) -> dict[str, Any]:
        degraded = {"type": "Degraded", "status": "True", "reason": "Unschedulable", "message": ""}
        remote = {"type": "RemoteTierReachable", "status": status, "reason": reason}
        return {"conditions": [degraded, degraded | remote]}

    good, unknown = status_with("True", "Reachable"), status_with("Unknown", "NoAnswer")
    bad = status_with("False", "RemoteTierUnreachable")
    for before, after, expected in (
        (good, bad, [("Warning", "RemoteTierUnreachable", "")]),
        (bad, good, [("Normal", "Reachable", "")]),
        (good, unknown, []),
        (unknown, good, []),
    ):
        assert list(events(before, changed_conditions(before, after))) == expected


def test_transition_time_changes_only_with_the_status() -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    assert status_of(world, now=LATE) == world.resource["status"]
    world.set_ready("demo-engine-0", False)
    times = {c["type"]: c["lastTransitionTime"] for c in status_of(world, now=LATE)["conditions"]}
    assert times["Degraded"] == "2026-01-01T00:00:00Z"
    assert times["Ready"] == times["EngineAvailable"] == "2026-01-02T00:00:00Z"
