"""Plans from observed and wanted objects: convergence, replacement of pods, and problems for users."""

import copy
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.contract.base import Plan
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import (
    STATEFUL_SET,
    carry_out,
    observe,
    outdated_world,
    plan,
    settled_world,
    specs,
    status_of,
)

NEWER = {"engine": "vllm:next", "sidecar": "sidecar:next"}


def names(pods: Iterable[dict[str, Any]]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def is_empty(due: Plan) -> bool:
    return not (due.apply or due.delete or due.evict or due.problems)


@given(specs, specs)
def test_plans_converge(first: dict[str, Any], second: dict[str, Any]) -> None:
    world = World(cluster(**first))
    for changed in (False, True):
        if changed:
            world.change(**second)
        for _ in range(12):
            due = plan(observe(world), IMAGES)
            assert due == plan(copy.deepcopy(observe(world)), IMAGES)
            if is_empty(due):
                break
            carry_out(world, due)
        assert is_empty(plan(observe(world), IMAGES))


@given(st.data())
def test_deleted_or_edited_child_is_repaired_and_no_other_changes(data: st.DataObject) -> None:
    world = settled_world(engine={"replicas": 1})
    ref = data.draw(st.sampled_from(sorted(world.objects)))
    if data.draw(st.booleans()):
        del world.objects[ref]
    else:
        world.edit(ref, "metadata", "labels", "app.kubernetes.io/name", value="edited")
    assert [Ref(o["kind"], o["metadata"]["name"]) for o in plan(observe(world), IMAGES).apply] == [ref]


def test_annotation_of_another_program_is_not_changed() -> None:
    world = settled_world()
    world.objects[STATEFUL_SET]["metadata"]["annotations"]["backup"] = "yes"
    assert is_empty(plan(observe(world), IMAGES))


def test_field_that_is_no_longer_rendered_is_removed() -> None:
    world = settled_world(engine={"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}})
    world.change(engine={"podTemplate": {"spec": {"nodeSelector": None}}})
    assert [o["kind"] for o in plan(observe(world), IMAGES).apply] == ["StatefulSet"]


def test_policy_follow_rolls_out_new_images_one_pod_at_a_time() -> None:
    world = settled_world(engine={"replicas": 2})
    reported = plan(observe(world), NEWER).fields["images"]
    assert {name: reported[name] for name in IMAGES} == IMAGES
    assert reported["message"].startswith(
        "the operator's defaults are engine vllm:next, sidecar sidecar:next"
    )
    world.change(images={"policy": "Follow"})
    assert is_empty(plan(observe(world), IMAGES)), "the policy alone must replace no pod"
    carry_out(world, plan(observe(world), NEWER))
    assert names(plan(observe(world), NEWER).evict) == ["demo-engine-0"]
    for _ in range(3):
        carry_out(world, plan(observe(world), NEWER))
    world.change(images={"policy": "Keep"})
    for images in (NEWER, IMAGES):  # also when the operator is downgraded
        due = plan(observe(world), images)
        assert is_empty(due)
        assert {name: due.fields["images"][name] for name in NEWER} == NEWER
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()} == {"vllm:next"}


def test_image_in_the_spec_is_not_recorded_as_default() -> None:
    world = settled_world(engine={"image": "vllm:own"})
    world.resource["status"] = status_of(world)
    del world.objects[STATEFUL_SET]
    ((written),) = plan(observe(world), IMAGES).apply
    assert json.loads(written["metadata"]["annotations"]["lmcache.io/default-images"]) == IMAGES


@pytest.mark.parametrize(
    "record",
    [None, "edited", "[1]", '{"engine": 1}', "no StatefulSet"],
)
def test_lost_record_of_images_is_replaced_by_the_defaults(record: str | None) -> None:
    world = settled_world()
    world.resource["status"] = status_of(world)
    if record == "no StatefulSet":  # it was deleted without its pods
        del world.objects[STATEFUL_SET]
    else:
        world.edit(STATEFUL_SET, "metadata", "annotations", "lmcache.io/default-images", value=record)
    ((written),) = plan(observe(world), NEWER).apply
    assert json.loads(written["metadata"]["annotations"]["lmcache.io/default-images"]) == NEWER
    assert written["spec"]["template"]["spec"]["containers"][0]["image"] == NEWER["engine"]


@pytest.mark.parametrize("is_new", [True, False])
def test_status_decides_no_image(is_new: bool) -> None:
    """Other users than the operator may be allowed to write the status."""
    world = World(cluster()) if is_new else settled_world()
    world.resource["status"] = {"images": {"engine": "attacker/engine:1", "sidecar": "attacker/sidecar:1"}}
    assert "attacker" not in str(plan(observe(world), NEWER))


# -- replacing pods


def test_unready_pod_is_replaced_first() -> None:
    world = outdated_world()
    world.set_ready("demo-engine-2", False)
    assert names(plan(observe(world), IMAGES).evict) == ["demo-engine-2"]


def test_unready_new_pod_stops_the_rollout() -> None:
    world = outdated_world()
    carry_out(world, plan(observe(world), IMAGES))
    world.set_ready("demo-engine-0", False)
    due = plan(observe(world), IMAGES)
    assert (due.evict, due.num_outdated) == ((), 2)


@pytest.mark.parametrize("obstacle", ["missing pod", "ending pod", "unseen template"])
def test_no_pod_is_evicted_during_an_obstacle(obstacle: str) -> None:
    world = outdated_world()
    if obstacle == "missing pod":
        del world.pods["demo-engine-1"]
    elif obstacle == "ending pod":
        world.pods["demo-engine-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elif obstacle == "unseen template":
        world.objects[STATEFUL_SET]["status"]["observedGeneration"] -= 1
    due = plan(observe(world), IMAGES)
    assert (due.evict, due.num_outdated) == ((), len(world.pods))


def test_no_pod_is_evicted_while_the_spec_hash_is_contested() -> None:
    """Otherwise the old pod would be created and evicted again forever."""
    world = settled_world(engine={"replicas": 1})
    world.change(engine={"args": ["--new"]})
    spec_hash = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:lmcache.io/spec-hash")
    contested = {STATEFUL_SET: frozenset({spec_hash})}
    for _ in range(3):
        due = plan(observe(world, contested=contested), IMAGES)
        assert (due.evict, due.num_outdated) == ((), 1)
        carry_out(world, due)
