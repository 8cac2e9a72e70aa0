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
from lmcache_operator.reconcile.plan import Plan, Problem, plan
from lmcache_operator.reconcile.status import derive_status
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import World, cluster

STATEFUL_SET = Ref("StatefulSet", "demo-engine")


def observe(world: World, **more: Any) -> Observed:
    return Observed(
        resource=world.resource, children=dict(world.objects), pods=tuple(world.pods.values()), **more
    )


def carry_out(world: World, due: Plan) -> None:
    async def run() -> None:
        for wanted in due.apply:
            await world.apply(wanted)
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
        world.objects[ref]["metadata"]["labels"]["app.kubernetes.io/name"] = "edited"
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
    world.objects[STATEFUL_SET]["metadata"]["annotations"]["lmcache.io/default-images"] = "edited"
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


@pytest.mark.parametrize("obstacle", ["missing pod", "ending pod", "unseen template", "missing Secret"])
def test_nothing_is_evicted_meanwhile(obstacle: str) -> None:
    world = outdated_world()
    if obstacle == "missing pod":
        del world.pods["demo-engine-1"]
    elif obstacle == "ending pod":
        world.pods["demo-engine-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elif obstacle == "unseen template":
        world.objects[STATEFUL_SET]["status"]["observedGeneration"] -= 1
    missing = ("hf",) if obstacle == "missing Secret" else ()
    due = plan(observe(world, missing_secrets=missing), IMAGES)
    assert due.evict is None
    assert due.num_outdated == len(world.pods)


def test_nothing_is_evicted_while_the_template_is_contested() -> None:
    """Else the old pod would be made again, and evicted again, for ever."""
    world = settled_world(engine={"replicas": 1})
    world.change(engine={"args": ["--new"]})
    due = plan(observe(world, contested={STATEFUL_SET: "spec.replicas"}), IMAGES)
    assert (due.apply, due.evict, due.num_outdated) == ((), None, 1)


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
    due = plan(observe(world, taken=frozenset({service}), contested={budget: "spec.maxUnavailable"}), IMAGES)
    assert not {service, budget} & {Ref(o["kind"], o["metadata"]["name"]) for o in due.apply}
    assert [problem.reason for problem in due.problems] == ["NameTaken", "FieldContested"]
    assert "spec.maxUnavailable of PodDisruptionBudget demo-engine" in due.problems[1].message


# -- status

EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def status_of(
    world: World, *, now: datetime = EARLY, refusals: tuple[Problem, ...] = (), **more: Any
) -> dict[str, Any]:
    observed = observe(world, **more)
    return derive_status(observed, plan(observed, IMAGES), refusals, now)


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
    status = status_of(settled_world(), missing_secrets=("hf",), refusals=(Problem("Refused", "no quota"),))
    assert condition(status, "Ready") == ("False", "MissingSecret")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    assert degraded["message"] == 'Secret "hf" does not exist in this namespace; no quota'


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
