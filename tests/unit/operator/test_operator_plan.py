"""From observed and wanted to due: convergence, replacing pods one at a time, what only users can mend."""

from __future__ import annotations

import asyncio
import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_operator.reconcile.observed import Observed
from lmcache_operator.reconcile.plan import Plan, plan
from lmcache_operator.reconcile.problems import Problem
from lmcache_operator.reconcile.status import derive_status, news, unobserved_status
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import World, cluster

STATEFUL_SET = Ref("StatefulSet", "demo-engine")


EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def observe(world: World, **more: Any) -> Observed:
    return Observed(**{
        "resource": world.resource, "children": dict(world.objects), "pods": tuple(world.pods.values()),
        "warnings": tuple(world.warnings), "now": EARLY,
    } | more)  # fmt: skip


def carry_out(world: World, due: Plan) -> None:
    async def run() -> None:
        for wanted in due.apply:
            live = world.objects.get(ref_of(wanted))
            await world.apply(wanted, live and live["metadata"]["uid"])
        if due.evict:
            await world.evict("", due.evict, world.pods[due.evict]["metadata"]["uid"])

    asyncio.run(run())
    world.run_stateful_sets()


def settled_world(**changes: Any) -> World:
    world = World(cluster(**changes))
    carry_out(world, plan(observe(world), IMAGES))
    return world


def is_empty(due: Plan) -> bool:
    return not (due.apply or due.evict or due.problems)


specs = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.fixed_dictionaries(
            {"replicas": st.integers(0, 3)},
            optional={
                "args": st.lists(st.sampled_from(["--a=1", "--b"]), max_size=2),
                "image": st.sampled_from(["e:1", "e:2"]),
                "gpu": st.sampled_from([{"count": 0}, {"runtimeClassName": "nvidia"}]),
            },
        ),
        "sidecar": st.fixed_dictionaries({"chunkTokens": st.sampled_from([64, 256])}),
        "tiers": st.fixed_dictionaries(
            {"memory": st.fixed_dictionaries({"size": st.sampled_from(["1Gi", "1024Mi", "3Gi"])})},
            optional={"remote": st.just({"external": {"url": "redis://h:1"}})},
        ),
    },
)


@settings(deadline=None)
@given(specs, specs)
def test_carrying_out_plans_ends_with_nothing_to_do(first: dict[str, Any], second: dict[str, Any]) -> None:
    world = World(cluster(**first))
    for changed in (False, True):
        if changed:
            world.change(**second)
        for _ in range(6):
            due = plan(observe(world), IMAGES)
            assert due == plan(copy.deepcopy(observe(world)), IMAGES)
            if is_empty(due):
                break
            carry_out(world, due)
        assert is_empty(plan(observe(world), IMAGES))


@settings(deadline=None)
@given(st.data())
def test_whatever_is_deleted_or_edited_is_healed_and_nothing_else_is_touched(data: st.DataObject) -> None:
    world = settled_world(engine={"replicas": 1})
    ref = data.draw(st.sampled_from(sorted(world.objects)))
    if data.draw(st.booleans()):
        del world.objects[ref]
    else:
        world.edit(ref, "metadata", "labels", "app.kubernetes.io/name", value="edited")
    assert [Ref(o["kind"], o["metadata"]["name"]) for o in plan(observe(world), IMAGES).apply] == [ref]


def test_what_others_add_is_left_alone() -> None:
    world = settled_world()
    world.objects[STATEFUL_SET]["metadata"]["annotations"]["backup"] = "yes"
    assert is_empty(plan(observe(world), IMAGES))


def test_a_field_we_no_longer_render_is_taken_back() -> None:
    world = settled_world(engine={"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}})
    world.change(engine={"podTemplate": {"spec": {"nodeSelector": None}}})
    assert [o["kind"] for o in plan(observe(world), IMAGES).apply] == ["StatefulSet"]


def test_an_upgrade_of_the_operator_changes_no_image_of_a_cluster_that_exists() -> None:
    world = settled_world()
    newer = {"engine": "vllm:next", "sidecar": "sidecar:next"}
    assert is_empty(plan(observe(world), newer))
    world.edit(STATEFUL_SET, "metadata", "annotations", "lmcache.io/default-images", value="edited")
    assert plan(observe(world), newer).apply  # unreadable: resolved anew


# -- replacing pods


def test_a_resize_replaces_no_pod_but_reaches_the_template() -> None:
    world = settled_world()
    world.change(tiers={"memory": {"size": "2Gi"}})
    due = plan(observe(world), IMAGES)
    assert ([o["kind"] for o in due.apply], due.num_outdated) == (["StatefulSet"], 0)


def outdated_world(**changes: Any) -> World:
    """Three ready pods of an earlier declaration, under a template of the present one."""
    world = settled_world(engine={"replicas": 3})
    world.change(engine={"args": ["--new"]}, **changes)
    due = plan(observe(world), IMAGES)
    assert due.evict is None, "the template has to be written first"
    carry_out(world, due)
    return world


def test_pods_are_replaced_one_after_the_other() -> None:
    world = outdated_world()
    evicted = []
    while (due := plan(observe(world), IMAGES)).evict:
        evicted.append(due.evict)
        carry_out(world, due)
    assert evicted == ["demo-engine-0", "demo-engine-1", "demo-engine-2"]
    assert is_empty(due)


def test_a_pod_that_serves_nothing_goes_first() -> None:
    world = outdated_world()
    world.set_ready("demo-engine-2", False)
    assert plan(observe(world), IMAGES).evict == "demo-engine-2"


def test_a_new_pod_that_does_not_get_ready_stops_the_replacement() -> None:
    world = outdated_world()
    carry_out(world, plan(observe(world), IMAGES))
    world.set_ready("demo-engine-0", False)
    due = plan(observe(world), IMAGES)
    assert (due.evict, due.num_outdated) == (None, 2)


@pytest.mark.parametrize("obstacle", ["missing pod", "ending pod", "unseen template"])
def test_nothing_is_evicted_meanwhile(obstacle: str) -> None:
    world = outdated_world()
    if obstacle == "missing pod":
        del world.pods["demo-engine-1"]
    elif obstacle == "ending pod":
        world.pods["demo-engine-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elif obstacle == "unseen template":
        world.objects[STATEFUL_SET]["status"]["observedGeneration"] -= 1
    due = plan(observe(world), IMAGES)
    assert due.evict is None
    assert due.num_outdated == len(world.pods)


SPEC_HASH_FIELD = (
    "f:spec", "f:template", "f:metadata", "f:annotations", "f:lmcache.io/spec-hash",
)  # fmt: skip


def test_nothing_is_evicted_while_the_templates_hash_is_contested() -> None:
    """Else the old pod would be made again, and evicted again, for ever."""
    world = settled_world(engine={"replicas": 1})
    world.change(engine={"args": ["--new"]})
    contested = {STATEFUL_SET: frozenset({SPEC_HASH_FIELD})}
    for _ in range(3):
        due = plan(observe(world, contested=contested), IMAGES)
        assert (due.evict, due.num_outdated) == (None, 1)
        carry_out(world, due)


def test_what_is_not_contested_is_applied_and_rolled_out() -> None:
    world = settled_world(engine={"replicas": 1})
    world.edit(STATEFUL_SET, "spec", "replicas", value=2)
    world.run_stateful_sets()
    world.change(engine={"image": "e:2"})
    contested = {STATEFUL_SET: frozenset({("f:spec", "f:replicas")})}
    evicted = []
    for _ in range(5):
        due = plan(observe(world, contested=contested), IMAGES)
        evicted.append(due.evict)
        carry_out(world, due)
    assert evicted == [None, "demo-engine-0", "demo-engine-1", None, None]
    assert world.objects[STATEFUL_SET]["spec"]["replicas"] == 2
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()} == {"e:2"}
    assert plan(observe(world, contested=contested), IMAGES).apply == ()


# -- problems


def test_an_invalid_spec_leaves_everything_as_it_is() -> None:
    world = settled_world()
    world.change(engine={"args": ["--port=1"]})
    due = plan(observe(world), IMAGES)
    assert (due.apply, due.evict) == ((), None)
    assert [problem.reason for problem in due.problems] == ["InvalidSpec"]


def test_names_that_are_taken_and_fields_that_are_contested_are_left_alone() -> None:
    world = World(cluster())
    service, budget = Ref("Service", "demo"), Ref("PodDisruptionBudget", "demo-engine")
    contested = {budget: frozenset({("f:spec", "f:maxUnavailable")}), STATEFUL_SET: frozenset({()})}
    due = plan(observe(world, taken=frozenset({service}), contested=contested), IMAGES)
    applied = {ref_of(child): child for child in due.apply}
    assert not {service, STATEFUL_SET} & applied.keys()
    assert applied[budget]["spec"].keys() == {"selector", "unhealthyPodEvictionPolicy"}
    assert [problem.reason for problem in due.problems] == ["NameTaken", "FieldContested", "FieldContested"]
    assert "changing spec.maxUnavailable of PodDisruptionBudget demo-engine" in due.problems[1].message
    assert "deleting or taking over StatefulSet demo-engine" in due.problems[2].message


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
            "pod demo-engine-0, container engine: back-off 5m0s; it ended with Error, exit code 2",
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


def status_of(world: World, failures: tuple[Problem, ...] = (), **more: Any) -> dict[str, Any]:
    observed = observe(world, **more)
    return derive_status(observed, plan(observed, IMAGES), failures)


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
    observed = observe(world, children={}, pods=())
    status = unobserved_status(observed, [Problem("Refused", "no right to get services")])
    assert condition(status, "Ready") == ("Unknown", "Refused")
    assert condition(status, "Degraded") == ("True", "Refused")
    assert condition(status, "EngineAvailable") == ("True", "EnginesReady")
    assert status["readyReplicas"] == 1


def test_events_tell_what_changed_and_nothing_else() -> None:
    world = settled_world()
    good = status_of(world)
    bad = status_of(world, (Problem("Refused", "no quota"),))
    assert list(news({}, good)) == [("Normal", "Ready", "1 of 1 engine pods are ready")]
    assert list(news(good, good)) == list(news(bad, bad)) == []
    assert list(news(good, bad)) == [("Warning", "Refused", "no quota")]


def test_the_transition_time_changes_only_when_the_status_flips() -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    assert status_of(world, now=LATE) == world.resource["status"]
    world.set_ready("demo-engine-0", False)
    times = {c["type"]: c["lastTransitionTime"] for c in status_of(world, now=LATE)["conditions"]}
    assert times["Degraded"] == "2026-01-01T00:00:00Z"
    assert times["Ready"] == times["EngineAvailable"] == "2026-01-02T00:00:00Z"


@settings(deadline=None)
@given(specs, st.integers(0, 5))
def test_an_unknown_field_makes_it_unready_whatever_the_spec(changes: dict[str, Any], replicas: int) -> None:
    world = World(cluster(**changes))
    world.resource["spec"]["engine"] = {"replicas": replicas, "unknown": 1}
    status = status_of(world)
    assert condition(status, "Ready") == ("False", "InvalidSpec")
