"""Memory tiers of running pods: which step is due, whoever answers what, and whenever the operator dies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_operator.components.resize import Refusal, reach, sidecar_memory
from lmcache_operator.specs.names import MEMORY_SIZE, RESIZE_REFUSED

from tests.harness.operator_resizes import MI, Node, limits, refused_by, told

POD = "demo-engine-0"
SMALL, LARGE = 1024, 2048
SMALL_LIMIT, LARGE_LIMIT = (sidecar_memory(size * MI) // MI for size in (SMALL, LARGE))


def condition(status: dict[str, Any], kind: str) -> tuple[str, str, str]:
    found = next(c for c in status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def test_a_pod_grows_when_its_node_has_given_the_memory() -> None:
    node = Node()
    node.declare("2Gi")
    assert node.operate() == ["apply StatefulSet demo-engine", f"resize {POD}"]
    assert (limits(node)[POD], told(node)[POD]) == (LARGE_LIMIT, SMALL)
    assert node.operate() == [], "the kubelet has not answered"
    assert condition(node.status(), "Progressing") == (
        "True", "Resizing", f"memory tiers get another size: pod {POD}: waits for its node",
    )  # fmt: skip
    assert condition(node.status(), "Ready")[:2] == ("True", "Ready")
    node.answer(POD)
    assert node.operate() == [f"annotate {POD}"]
    assert told(node)[POD] == LARGE
    assert node.operate() == []
    assert condition(node.status(), "Progressing")[1] == "Complete"


def test_a_pod_gives_memory_back_when_its_sidecar_holds_no_more() -> None:
    node = Node(size="2Gi")
    node.declare("1Gi")
    assert node.operate()[1:] == [f"annotate {POD}"]
    assert node.operate() == [], "the sidecar does not know yet"
    node.sidecars[POD].sync_file()
    assert node.operate() == [], "it knows, and holds as much as before"
    assert condition(node.status(), "Progressing")[:2] == ("True", "Resizing")
    assert limits(node)[POD] == LARGE_LIMIT
    node.sidecars[POD].restart()
    node.sidecars[POD].is_silent = True
    assert node.operate() == []
    node.sidecars[POD].is_silent = False
    assert node.operate() == [f"resize {POD}"]
    assert limits(node)[POD] == SMALL_LIMIT
    assert "has not taken back" in condition(node.status(), "Progressing")[2]
    node.answer(POD)
    assert node.operate() == []
    assert condition(node.status(), "Progressing")[1] == "Complete"


def test_a_limit_is_not_lowered_under_a_sidecar_that_is_about_to_grow() -> None:
    node = Node()
    node.declare("2Gi")
    node.operate()
    node.answer(POD)
    node.operate()
    node.sidecars[POD].sync_file()
    node.declare("1Gi")
    assert node.operate()[1:] == [f"annotate {POD}"]
    assert (node.sidecars[POD].size, node.sidecars[POD].file) == (SMALL * MI, LARGE * MI)
    assert node.operate() == []
    node.sidecars[POD].sync_file()
    assert node.operate() == [f"resize {POD}"]


@pytest.mark.parametrize(
    ("verdict", "minutes", "message"),
    [
        ("Infeasible", 0, "its node has no room: full"),
        ("Deferred", 11, "has not given the memory in 10 minutes: full"),
        ("silence", 11, "has not given the memory in 10 minutes"),
    ],
)
def test_what_its_node_does_not_give_is_taken_back_and_told(verdict: str, minutes: int, message: str) -> None:
    node = Node()
    node.declare("2Gi")
    node.operate()
    if verdict != "silence":
        node.answer(POD, verdict)
    if minutes:
        node.wait(9)
        assert node.operate() == []
    node.wait(minutes - 9 if minutes else 0)
    assert node.operate() == [f"annotate {POD}"]
    assert node.operate() == [f"resize {POD}"]
    assert (limits(node)[POD], told(node)[POD]) == (SMALL_LIMIT, SMALL)
    node.answer(POD)
    assert node.operate() == []
    status, reason, said = condition(node.status(), "Degraded")
    assert (status, reason) == ("True", "ResizeInfeasible")
    assert said.startswith("1 of 1 memory tiers can't have 2Gi: pod ")
    assert said.endswith(message)
    assert condition(node.status(), "Ready")[0] == "True"
    assert condition(node.status(), "Progressing")[1] == "Complete"
    # Not again at once, but after a while, and for another size.
    node.wait(59)
    assert node.operate() == []
    node.wait(2)
    assert node.operate() == [f"resize {POD}"]
    node.answer(POD)
    assert node.operate() == [f"annotate {POD}"]
    assert told(node)[POD] == LARGE
    assert condition(node.status(), "Degraded")[0] == "False"


def test_another_size_is_tried_at_once_after_a_refusal() -> None:
    node = Node()
    node.declare("4Gi")
    node.operate()
    node.answer(POD, "Infeasible")
    node.operate()
    node.operate()
    node.declare("2Gi")
    assert node.operate()[1:] == [f"resize {POD}"]
    assert node.operate() == [], "what the kubelet said was of another size"
    node.answer(POD)
    assert node.operate() == [f"annotate {POD}"]


def test_a_quota_or_an_older_kubernetes_is_told_and_not_asked_again() -> None:
    node = Node(replicas=2)
    node.declare("2Gi")
    node.world.failures["resize"] = refused_by("exceeded quota: q")
    node.operate()
    node.operate()
    assert [node.operate(), limits(node)] == [[], dict.fromkeys(limits(node), SMALL_LIMIT)]
    assert condition(node.status(), "Degraded") == (
        "True", "ResizeInfeasible",
        f"2 of 2 memory tiers can't have 2Gi: pod {POD}: exceeded quota: q",
    )  # fmt: skip


def test_a_sidecar_of_before_is_given_no_memory() -> None:
    node = Node()
    node.sidecars[POD].follows = False
    node.declare("2Gi")
    assert node.operate()[1:] == [f"annotate {POD}"]
    assert (limits(node)[POD], told(node)[POD]) == (SMALL_LIMIT, SMALL)
    assert "replace the pod with a later image" in condition(node.status(), "Degraded")[2]


def test_one_in_ten_begins_to_grow_and_all_shrink() -> None:
    node = Node(replicas=12)
    node.declare("2Gi")
    begun = [name for name, limit in limits(node).items() if limit == LARGE_LIMIT]
    assert not begun
    assert len(node.operate()) == 1 + 2
    assert node.operate() == []
    node.converge()
    assert set(told(node).values()) == {LARGE}
    node.declare("1Gi")
    assert len(node.operate()) == 1 + 12
    node.converge()
    assert set(limits(node).values()) == {SMALL_LIMIT}


def test_a_pod_that_can_not_begin_keeps_no_other_from_it() -> None:
    node = Node(replicas=3)
    node.sidecars[POD].is_silent = True
    node.declare("2Gi")
    node.converge()
    assert list(told(node).values()) == [SMALL, LARGE, LARGE]
    assert f"pod {POD} is to have 2Gi" in condition(node.status(), "Progressing")[2]


def test_beyond_its_bound_a_pod_has_to_be_replaced() -> None:
    node = Node()
    node.declare("5Gi")
    node.converge()
    assert told(node)[POD] == 4 * SMALL
    assert condition(node.status(), "Progressing")[1] == "ResizePending"
    node.replace(POD)
    node.converge()
    assert told(node)[POD] == 5 * SMALL
    assert condition(node.status(), "Progressing")[1] == "Complete"


def test_no_pod_grows_beyond_the_volume_that_its_kubelet_has_made() -> None:
    """Where all containers have limits, that is what they had together: 1.5 GiB, and the sidecar's."""
    engine = {"name": "engine", "resources": {"limits": {"memory": "1536Mi"}}}
    node = Node(podTemplate={"spec": {"containers": [engine]}})
    volume = 1536 + SMALL_LIMIT
    assert reach(node.world.pods[POD]) == volume * MI < 4 * SMALL * MI
    node.declare("4Gi")
    node.converge()
    assert told(node)[POD] == volume
    assert condition(node.status(), "Progressing")[1] == "ResizePending"


def test_a_request_of_the_users_own_stays_as_far_as_it_may() -> None:
    requests = {"name": "sidecar", "resources": {"requests": {"memory": "1200Mi"}}}
    node = Node(podTemplate={"spec": {"initContainers": [requests]}})
    node.declare("2Gi")
    node.converge()
    (sidecar, *_) = node.world.pods[POD]["spec"]["initContainers"]
    assert sidecar["resources"]["requests"]["memory"] == "1200Mi"
    node.declare("64Mi")
    node.converge()
    assert sidecar["resources"]["requests"]["memory"] == sidecar["resources"]["limits"]["memory"] == "578Mi"


@pytest.mark.parametrize(
    "edited",
    ["", "-1", "1e3", "9" * 40, "٣", "0"],
)
def test_an_edited_annotation_is_set_right(edited: str) -> None:
    node = Node()
    node.declare("2Gi")
    node.converge()
    node.world.pods[POD]["metadata"]["annotations"][MEMORY_SIZE] = edited
    node.operate()
    assert told(node)[POD] == LARGE


@pytest.mark.parametrize(
    "edited",
    ["", "[]", "{}", "[" * 9999, '{"bytes": 1, "at": "2026-01-01T00:00:00", "message": ""}',
     '{"bytes": 1e999, "at": "2026-01-01T00:00:00Z", "message": ""}', '{"bytes": 1, "at": 7, "message": ""}'],
)  # fmt: skip
def test_an_edited_refusal_is_none(edited: str) -> None:
    node = Node()
    node.world.pods[POD]["metadata"]["annotations"][RESIZE_REFUSED] = edited
    assert Refusal.of(node.world.pods[POD], node.world.now) is None
    node.declare("2Gi")
    assert node.operate()[1:] == [f"resize {POD}"]


@pytest.mark.parametrize(("before", "after"), [("2Gi", "1Gi"), ("1Gi", "2Gi")])
def test_a_pod_that_is_deleted_meanwhile_is_no_problem(monkeypatch: pytest.MonkeyPatch, before, after):
    """An autoscaler takes pods away at any time; one that is there and may not be changed is one."""
    node = Node(size=before)
    apply = node.world.apply

    async def apply_late(wanted: Any, uid: str | None) -> None:
        await apply(wanted, uid)
        node.replace(POD)

    monkeypatch.setattr(node.world, "apply", apply_late)
    node.declare(after)
    assert node.operate() == ["apply StatefulSet demo-engine"]
    monkeypatch.undo()
    node.declare(before)
    node.world.failures["annotate"] = refused_by("no")
    node.world.failures["resize"] = refused_by("no")
    with pytest.raises(AssertionError, match="no"):
        node.operate()


def test_an_upgrade_of_the_operator_resizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rule for what a sidecar needs reaches pods that get another size, and no others."""
    node = Node()
    monkeypatch.setattr("lmcache_operator.components.resize._BASE_BYTES", 600 * MI)
    assert node.operate() == ["apply StatefulSet demo-engine"]
    assert node.operate() == []


def test_what_the_sidecars_of_seen_gpus_need_is_theirs() -> None:
    node = Node()
    (sidecar, *_) = node.world.pods[POD]["spec"]["initContainers"]
    for variable in sidecar["env"]:
        if variable["name"] == "NVIDIA_VISIBLE_DEVICES":
            variable["value"] = "all"
    node.declare("2Gi")
    node.operate()
    assert limits(node)[POD] == LARGE_LIMIT + 256


@settings(max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
class Resizes(RuleBasedStateMachine):
    """No sidecar ever holds more than its cgroup allows, no pod goes, and in the end all is as declared."""

    @initialize(replicas=st.integers(1, 3))
    def start(self, replicas: int) -> None:
        self.node = Node(replicas)
        self.declared = SMALL

    def pods(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(self.node.sidecars))

    @rule(size=st.sampled_from([256, 512, 1024, 1536, 2048, 4096, 5632]))
    def declare(self, size: int) -> None:
        self.node.declare(f"{size}Mi")
        self.declared = size

    @rule(dies_after=st.none() | st.integers(1, 4))
    def operate(self, dies_after: int | None) -> None:
        for write in self.node.operate(dies_after):
            assert write.startswith(("apply", "annotate", "resize")), write

    @rule(data=st.data(), verdict=st.sampled_from(["granted", "granted", "Deferred", "Infeasible"]))
    def kubelet_answers(self, data: st.DataObject, verdict: str) -> None:
        self.node.answer(data.draw(self.pods()), verdict)

    @rule(data=st.data())
    def file_is_written(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].sync_file()

    @rule(data=st.data())
    def sidecar_gets_there_or_starts_again(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].restart()

    @rule(data=st.data(), is_silent=st.booleans())
    def sidecar_answers_or_not(self, data: st.DataObject, is_silent: bool) -> None:
        self.node.sidecars[data.draw(self.pods())].is_silent = is_silent

    @rule(minutes=st.sampled_from([1, 15, 70]))
    def time_passes(self, minutes: int) -> None:
        self.node.wait(minutes)

    @rule(data=st.data())
    def pod_is_replaced(self, data: st.DataObject) -> None:
        self.node.replace(data.draw(self.pods()))

    @invariant()
    def nobody_is_killed_for_memory(self) -> None:
        for sidecar in self.node.sidecars.values():
            assert sidecar_memory(max(sidecar.size, sidecar.file)) <= sidecar.granted

    def teardown(self) -> None:
        node = self.node
        for sidecar in node.sidecars.values():
            sidecar.is_silent = False
        node.converge()
        node.wait(120)
        node.converge()
        for name, pod in node.world.pods.items():
            most = int(
                next(v["value"] for v in pod["spec"]["initContainers"][0]["env"] if "MAX" in v["name"])
            )
            fits = [size for size in (self.declared,) if sidecar_memory(min(size * MI, most)) <= 6 << 30]
            if fits:
                assert told(node)[name] == min(fits[0], most // MI)
                assert node.sidecars[name].size == told(node)[name] * MI
            limit = -(-sidecar_memory(told(node)[name] * MI) // MI)
            assert limits(node)[name] == node.sidecars[name].granted // MI == limit


TestResizes = Resizes.TestCase


def test_a_refusal_is_written_for_people_and_read_again() -> None:
    node = Node()
    node.declare("2Gi")
    node.operate()
    node.answer(POD, "Infeasible")
    node.operate()
    text = node.world.pods[POD]["metadata"]["annotations"][RESIZE_REFUSED]
    assert json.loads(text) == {
        "bytes": LARGE * MI, "at": "2026-01-01T00:00:00+00:00", "message": "its node has no room: full",
    }  # fmt: skip
