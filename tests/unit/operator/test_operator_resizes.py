"""Resizing memory tiers of running pods: each step, refusals, edited annotations, and a model of all."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_operator.pods.resize import RefusedResize, largest_in_place, sidecar_memory
from lmcache_operator.specs.names import MEMORY_SIZE, RESIZE_REFUSED
from tests.harness.operator.render import container, env_of
from tests.harness.operator.resizes import MI, NODE_BYTES, Node, annotated_sizes, limits, refused_by
from tests.harness.scope import examples

POD = "demo-engine-0"
SMALL, LARGE = 1024, 2048
SMALL_LIMIT, LARGE_LIMIT = (sidecar_memory(size * MI) // MI for size in (SMALL, LARGE))


def condition(status: dict[str, Any], kind: str) -> tuple[str, str, str]:
    matching = next(c for c in status["conditions"] if c["type"] == kind)
    return matching["status"], matching["reason"], matching["message"]


def sizes(node: Node) -> tuple[int, int]:
    """Requested limit and annotated size of the pod in MiB."""
    return limits(node)[POD], annotated_sizes(node)[POD]


def test_pod_grows_after_the_kubelet_granted_the_memory() -> None:
    node = Node()
    node.declare("2Gi")
    assert node.operate() == ["apply StatefulSet demo-engine", f"resize {POD}"]
    assert sizes(node) == (LARGE_LIMIT, SMALL)
    assert node.operate() == [], "the kubelet has not answered"
    message = f"Resizing memory tiers: pod {POD}: waiting for the kubelet to grant the memory"
    assert condition(node.status(), "Progressing") == ("True", "Resizing", message)
    assert condition(node.status(), "Ready")[:2] == ("True", "Ready")
    node.answer(POD)
    assert (node.operate(), annotated_sizes(node)[POD]) == ([f"annotate {POD}"], LARGE)
    assert (node.operate(), condition(node.status(), "Progressing")[1]) == ([], "Complete")


def test_limit_is_lowered_after_the_sidecar_released_memory() -> None:
    node = Node(size="2Gi")
    node.declare("1Gi")
    assert node.operate()[1:] == [f"annotate {POD}"]
    assert node.operate() == [], "the sidecar has not read the new size"
    node.sidecars[POD].sync_file()
    assert node.operate() == [], "the sidecar still holds as much memory as before"
    assert condition(node.status(), "Progressing")[:2] == ("True", "Resizing")
    node.sidecars[POD].restart()
    node.sidecars[POD].is_silent = True
    assert (node.operate(), limits(node)[POD]) == ([], LARGE_LIMIT)
    node.sidecars[POD].is_silent = False
    assert (node.operate(), limits(node)[POD]) == ([f"resize {POD}"], SMALL_LIMIT)
    assert "has not reclaimed" in condition(node.status(), "Progressing")[2]
    node.answer(POD)
    assert (node.operate(), condition(node.status(), "Progressing")[1]) == ([], "Complete")


def test_limit_is_not_lowered_while_the_sidecar_may_still_grow() -> None:
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
        ("Infeasible", 0, "its node cannot grant the memory: full"),
        ("Deferred", 11, "has not granted the memory for 10 minutes: full"),
        ("silence", 11, "has not granted the memory for 10 minutes"),
    ],
)
def test_ungranted_resize_is_reverted_and_reported(verdict: str, minutes: int, message: str) -> None:
    node = Node()
    node.declare("2Gi")
    node.operate()
    if verdict != "silence":
        node.answer(POD, verdict)
    if minutes:
        node.wait(9)
        assert node.operate() == []
    node.wait(minutes - 9 if minutes else 0)
    assert (node.operate(), node.operate()) == ([f"annotate {POD}"], [f"resize {POD}"])
    assert sizes(node) == (SMALL_LIMIT, SMALL)
    node.answer(POD)
    assert node.operate() == []
    status, reason, message_text = condition(node.status(), "Degraded")
    assert (status, reason) == ("True", "ResizeInfeasible")
    assert message_text.startswith("1 of 1 memory tiers cannot be resized to 2Gi. First: pod ")
    assert message_text.endswith(f"{message}.")
    assert condition(node.status(), "Ready")[0] == "True"
    assert condition(node.status(), "Progressing")[1] == "Complete"
    # The operator retries after an hour.
    node.wait(59)
    assert node.operate() == []
    node.wait(2)
    assert node.operate() == [f"resize {POD}"]
    node.answer(POD)
    assert (node.operate(), annotated_sizes(node)[POD]) == ([f"annotate {POD}"], LARGE)
    assert condition(node.status(), "Degraded")[0] == "False"


def test_earlier_sidecar_that_cannot_resize_gets_no_memory() -> None:
    node = Node()
    node.sidecars[POD].is_following = False
    node.declare("2Gi")
    assert (node.operate()[1:], sizes(node)) == ([f"annotate {POD}"], (SMALL_LIMIT, SMALL))
    assert "replace the pod with a later image" in condition(node.status(), "Degraded")[2]


def test_at_most_a_tenth_of_pods_grow_at_a_time_and_all_shrink() -> None:
    node = Node(replicas=12)
    node.declare("2Gi")
    assert LARGE_LIMIT not in limits(node).values()
    assert (len(node.operate()), node.operate()) == (1 + 2, [])
    node.converge()
    assert set(annotated_sizes(node).values()) == {LARGE}
    node.declare("1Gi")
    assert len(node.operate()) == 1 + 12
    node.converge()
    assert set(limits(node).values()) == {SMALL_LIMIT}


FIRST, SECOND = ("demo-engine-0-0", "demo-engine-0-1")


def over_two_nodes() -> Node:
    """An engine of two pods, whose tiers are to grow, and which have asked for the memory."""
    node = Node(nodes=2, parallelism={"data": 2})
    node.declare("2Gi")
    assert node.operate() == [
        "apply StatefulSet demo-engine-0", f"resize {FIRST}", f"resize {SECOND}",
    ]  # fmt: skip
    return node


def test_tiers_of_an_engine_over_several_nodes_grow_together() -> None:
    node = over_two_nodes()
    node.answer(FIRST)
    assert node.operate() == []
    assert "waiting until the other pods" in condition(node.status(), "Progressing")[2]
    node.answer(SECOND)
    assert node.operate() == [f"annotate {FIRST}", f"annotate {SECOND}"]
    assert set(annotated_sizes(node).values()) == {LARGE}


def test_engine_over_several_nodes_has_the_size_that_all_its_pods_can_have() -> None:
    node = over_two_nodes()
    node.answer(FIRST)
    node.answer(SECOND, "Infeasible")
    assert node.operate() == [f"annotate {SECOND}"], "its refusal"
    assert node.operate() == [f"resize {FIRST}", f"resize {SECOND}"]
    assert limits(node) == {FIRST: SMALL_LIMIT, SECOND: SMALL_LIMIT}
    assert set(annotated_sizes(node).values()) == {SMALL}
    assert "ResizeInfeasible" in condition(node.status(), "Degraded")


def test_pod_that_cannot_resize_does_not_block_the_others() -> None:
    node = Node(replicas=3)
    node.sidecars[POD].is_silent = True
    node.declare("2Gi")
    node.converge()
    assert list(annotated_sizes(node).values()) == [SMALL, LARGE, LARGE]
    assert f"pod {POD} will be resized to 2Gi" in condition(node.status(), "Progressing")[2]


def test_pod_does_not_grow_beyond_its_volume() -> None:
    """If all containers have limits, the volume is limited to their sum: 1.5 GiB and the sidecar's limit."""
    engine = {"name": "engine", "resources": {"limits": {"memory": "1536Mi"}}}
    node = Node(podTemplate={"spec": {"containers": [engine]}})
    volume = 1536 + SMALL_LIMIT
    assert largest_in_place(node.world.pods[POD]) == volume * MI < 4 * SMALL * MI
    node.declare("4Gi")
    node.converge()
    assert annotated_sizes(node)[POD] == volume
    assert condition(node.status(), "Progressing")[1] == "ResizePending"


@pytest.mark.parametrize("edited", ["", "-1", "1e3", "9" * 40, "٣", "0"])
def test_edited_size_annotation_is_corrected(edited: str) -> None:
    node = Node()
    node.declare("2Gi")
    node.converge()
    node.world.pods[POD]["metadata"]["annotations"][MEMORY_SIZE] = edited
    node.operate()
    assert annotated_sizes(node)[POD] == LARGE


@pytest.mark.parametrize(
    "edited",
    ["", "[]", "{}", "[" * 9999, '{"bytes": 1, "at": "2026-01-01T00:00:00", "message": ""}',
     '{"bytes": 1e999, "at": "2026-01-01T00:00:00Z", "message": ""}', '{"bytes": 1, "at": 7, "message": ""}'],
)  # fmt: skip
def test_invalid_refusal_annotation_is_ignored(edited: str) -> None:
    node = Node()
    node.world.pods[POD]["metadata"]["annotations"][RESIZE_REFUSED] = edited
    assert RefusedResize.of(node.world.pods[POD], node.world.now) is None
    node.declare("2Gi")
    assert node.operate()[1:] == [f"resize {POD}"]


@pytest.mark.parametrize(("before", "after"), [("2Gi", "1Gi"), ("1Gi", "2Gi")])
def test_pod_deleted_during_a_resize_is_no_error(monkeypatch: pytest.MonkeyPatch, before, after):
    """An autoscaler can delete pods at any time. A refusal for an existing pod is an error."""
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


def test_operator_upgrade_resizes_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed memory formula applies only to pods whose size changes."""
    node = Node()
    monkeypatch.setattr("lmcache_operator.pods.resize._BASE_BYTES", 600 * MI)
    assert (node.operate(), node.operate()) == (["apply StatefulSet demo-engine"], [])


def test_sidecar_that_sees_all_gpus_gets_more_memory() -> None:
    node = Node()
    (sidecar, *_) = node.world.pods[POD]["spec"]["initContainers"]
    for variable in sidecar["env"]:
        if variable["name"] == "NVIDIA_VISIBLE_DEVICES":
            variable["value"] = "all"
    node.declare("2Gi")
    node.operate()
    assert limits(node)[POD] == LARGE_LIMIT + 256


@settings(max_examples=examples(60), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
class Resizes(RuleBasedStateMachine):
    """No sidecar exceeds its cgroup, no pod is deleted, and finally all sizes match the spec."""

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

    @rule(num_writes_before_kill=st.none() | st.integers(1, 4))
    def operate(self, num_writes_before_kill: int | None) -> None:
        for write in self.node.operate(num_writes_before_kill):
            assert write.startswith(("apply", "annotate", "resize")), write

    @rule(data=st.data(), verdict=st.sampled_from(["granted", "granted", "Deferred", "Infeasible"]))
    def answer_as_kubelet(self, data: st.DataObject, verdict: str) -> None:
        self.node.answer(data.draw(self.pods()), verdict)

    @rule(data=st.data())
    def sync_size_file(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].sync_file()

    @rule(data=st.data())
    def resize_or_restart_sidecar(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].restart()

    @rule(data=st.data(), is_silent=st.booleans())
    def set_sidecar_silence(self, data: st.DataObject, is_silent: bool) -> None:
        self.node.sidecars[data.draw(self.pods())].is_silent = is_silent

    @rule(minutes=st.sampled_from([1, 15, 70]))
    def wait(self, minutes: int) -> None:
        self.node.wait(minutes)

    @rule(data=st.data())
    def replace_pod(self, data: st.DataObject) -> None:
        self.node.replace(data.draw(self.pods()))

    @invariant()
    def check_cgroup_limits(self) -> None:
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
            max_bytes = int(env_of(container(pod["spec"], "sidecar"))["LMCACHE_MEMORY_MAX_SIZE"])
            if sidecar_memory(min(self.declared * MI, max_bytes)) <= NODE_BYTES:
                assert annotated_sizes(node)[name] == min(self.declared, max_bytes // MI)
                assert node.sidecars[name].size == annotated_sizes(node)[name] * MI
            limit = -(-sidecar_memory(annotated_sizes(node)[name] * MI) // MI)
            assert limits(node)[name] == node.sidecars[name].granted // MI == limit


TestResizes = Resizes.TestCase
