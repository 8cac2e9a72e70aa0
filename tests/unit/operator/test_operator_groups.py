"""Engines over several nodes: their objects, replacement, scaling and status, on an in-memory API server."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.errors import RefusedError
from lmcache_operator.pods.groups import Group, next_eviction
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import DEFAULT_IMAGES, SPEC_HASH, STOCK_IMAGES, annotations_of
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.render import env_of, pod_of

SINGLE = {"nodes": 1, "parallelism": {"data": 1}}


def over(nodes: int, **engine: Any) -> dict[str, Any]:
    """Changes of a spec whose engines spread over nodes with one GPU each."""
    return {"engine": {"nodes": nodes, "parallelism": {"data": nodes}, **engine}}


def sets(bench: ReconciledCluster) -> dict[str, int]:
    """Sizes of the StatefulSets."""
    return {
        ref.name: each["spec"]["replicas"]
        for ref, each in bench.world.objects.items()
        if ref.kind == "StatefulSet"
    }


def status(bench: ReconciledCluster) -> tuple[int, int, str]:
    """Numbers of engines and of ready engines, and the message about them."""
    fields = bench.world.resource["status"]
    return fields["replicas"], fields["readyReplicas"], bench.message("Ready")


def writes(bench: ReconciledCluster) -> list[str]:
    """Writes of the next reconciliation, without the status."""
    return [write for write in bench.run() if write != "status"]


def of_groups(bench: ReconciledCluster) -> set[str]:
    """Names of the objects of groups."""
    return {ref.name for ref in bench.world.objects if ref.name.removeprefix("demo-engine-").isdecimal()}


@pytest.fixture
def bench() -> ReconciledCluster:
    """Two engines of two pods each."""
    return ReconciledCluster.settled(**over(2, replicas=2))


def roll(bench: ReconciledCluster) -> list[list[str]]:
    """Replace the pods of an outdated cluster. Returns the writes of each reconciliation."""
    rounds = []
    for _ in range(20):
        bench.world.run_stateful_sets()
        rounds.append(writes(bench))
        if not rounds[-1]:
            return rounds[:-1]
    raise AssertionError(rounds)


def test_each_engine_has_a_stateful_set_and_a_network_policy(bench: ReconciledCluster) -> None:
    assert sets(bench) == {"demo-engine-0": 2, "demo-engine-1": 2}
    assert {Ref("NetworkPolicy", f"demo-engine-{n}") for n in range(2)} < bench.world.objects.keys()
    assert any(ref.name.startswith("demo-group-") for ref in bench.world.objects)
    assert status(bench) == (2, 2, "2 of 2 engines (of 2 pods each) are ready")
    selector = bench.world.resource["status"]["selector"]
    assert selector == "lmcache.io/cluster=demo,lmcache.io/component=engine,apps.kubernetes.io/pod-index=0"


def test_secret_is_created_again_only_for_a_pod_that_waits(bench: ReconciledCluster) -> None:
    bench.world.failures["create"] = AssertionError("the operator cannot see whether it exists")
    assert writes(bench) == []
    bench.world.failures.clear()
    (secret,) = (ref for ref in bench.world.objects if ref.name.startswith("demo-group-"))
    del bench.world.objects[secret]
    bench.world.set_ready("demo-engine-1-1", False)
    assert writes(bench) == [f"create {secret}"]


def test_engine_is_ready_with_all_its_pods(bench: ReconciledCluster) -> None:
    bench.world.set_ready("demo-engine-0-1", False)
    bench.run()
    assert status(bench) == (2, 1, "1 of 2 engines (of 2 pods each) are ready")
    assert bench.condition("Ready") == ("True", "Serving")
    bench.world.set_ready("demo-engine-1-0", False)
    bench.run()
    assert status(bench)[:2] == (2, 0)
    assert bench.condition("Ready")[0] == "False"


@pytest.mark.parametrize(("restarts", "kind"), [(1, "Progressing"), (3, "Degraded")])
def test_message_quotes_the_part_that_failed(bench: ReconciledCluster, restarts: int, kind: str) -> None:
    cause = "part 1 of 2 (demo-engine-0-1) ended: vLLM exited with 1"
    outputs = f"RuntimeError: cancelled\nerror: {cause}", f"ValueError: no such model\n{cause}"
    for number, output in enumerate(outputs):
        ended = {"exitCode": 1, "reason": "Error", "message": output, "finishedAt": "2025-12-31T23:59:00Z"}
        container = {"name": "engine", "ready": False, "restartCount": restarts, "state": {"running": {}}}
        bench.world.set_ready(f"demo-engine-0-{number}", False)
        status = bench.world.pods[f"demo-engine-0-{number}"]["status"]
        status["containerStatuses"] = [container | {"lastState": {"terminated": ended}}]
    bench.run()
    assert "pod demo-engine-0-1, container engine: ended" in bench.message(kind)
    assert "ValueError: no such model" in bench.message(kind)


def test_pod_whose_group_ends_does_not_serve_without_its_cache(bench: ReconciledCluster) -> None:
    """An engine leaves its sidecar before the kubelet finds that the pod is not ready."""
    for number, (name, pod) in enumerate(bench.world.pods.items()):
        pod["status"] |= {"phase": "Running", "podIP": f"10.0.0.{number}"}
        attached = int(name != "demo-engine-0-0")
        bench.world.stats[f"10.0.0.{number}"] = {"is_ready": True, "num_clients": {"attached": attached}}
    bench.run()
    assert bench.condition("SidecarAttached") == ("False", "EngineNotAttached")
    bench.world.set_ready("demo-engine-0-1", False)
    bench.run()
    assert bench.condition("SidecarAttached") == ("True", "Attached")


def test_launcher_gets_the_rank_and_the_group_from_the_pod() -> None:
    spec = pod_of(**over(2, gpu={"count": 0}))
    (engine,) = spec["containers"]
    assert engine["command"] == ["python3", "-m", "lmcache_client.group"]
    assert engine["args"][:4] == ["--", "vllm", "serve", "org/model"]
    assert "--data-parallel-size=2" in engine["args"]
    assert env_of(engine)["LMCACHE_GROUP_LEADER"] == (
        "demo-engine-$(LMCACHE_GROUP_NUMBER)-0.demo-engine.team.svc"
    )
    assert engine["resources"]["requests"] == {"cpu": "1", "memory": "4Gi"}, "one of the two ranks"
    mounting = [
        each["name"]
        for each in spec["containers"] + spec["initContainers"]
        if any(mount["name"] == "group" for mount in each["volumeMounts"])
    ]
    assert mounting == ["engine"]


def test_pods_of_one_engine_are_replaced_together_and_before_those_of_the_next(bench) -> None:
    bench.world.change(engine={"args": ["--new"]})
    sets_written = ["apply StatefulSet demo-engine-0", "apply StatefulSet demo-engine-1"]
    assert roll(bench) == [
        sets_written,
        ["evict demo-engine-0-0", "delete pod demo-engine-0-1"],
        ["evict demo-engine-1-0", "delete pod demo-engine-1-1"],
    ]
    assert bench.condition("Progressing") == ("False", "Complete")


def test_budget_that_refuses_the_first_pod_of_an_engine_keeps_the_others(bench, monkeypatch) -> None:
    """The budget would protect no unready pod among the others."""
    bench.world.change(engine={"args": ["--new"]})
    bench.run()
    bench.world.run_stateful_sets()
    asked: list[str] = []

    async def refuse(_namespace: str, pod: str, _uid: str) -> bool:
        asked.append(pod)
        return False

    monkeypatch.setattr(bench.world, "evict", refuse)
    assert (writes(bench), asked) == ([], ["demo-engine-0-0"])


def test_replacement_of_an_engine_continues_while_another_one_cannot_be_created(bench, monkeypatch) -> None:
    bench.world.change(engine={"args": ["--new"]})
    bench.run()
    bench.world.run_stateful_sets()
    del bench.world.pods["demo-engine-1-1"]
    apply = bench.world.apply

    async def refuse(wanted: dict[str, Any], uid: str | None) -> None:
        if wanted["metadata"]["name"] == "demo-engine-2" and wanted["kind"] == "StatefulSet":
            raise RefusedError("create", "exceeded quota")
        await apply(wanted, uid)

    monkeypatch.setattr(bench.world, "apply", refuse)
    bench.world.change(engine={"replicas": 3})
    assert writes(bench) == ["apply NetworkPolicy demo-engine-2", "evict demo-engine-1-0"]
    assert "exceeded quota" in bench.degraded()[1]


def test_engine_that_is_not_ready_is_replaced_first(bench: ReconciledCluster) -> None:
    bench.world.set_ready("demo-engine-1-0", False)
    bench.world.change(engine={"args": ["--new"]})
    bench.run()
    bench.world.run_stateful_sets()
    expected = ["evict demo-engine-1-0", "delete pod demo-engine-1-1"]
    assert writes(bench) == expected, "the budget never allows the eviction of the ready pod"


def test_lost_pod_leaves_the_other_pods_of_its_engine(bench: ReconciledCluster) -> None:
    lost = bench.world.pods["demo-engine-0-1"]
    bench.world.set_ready("demo-engine-0-1", False)
    long_ago = (bench.world.now - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    lost["metadata"]["deletionTimestamp"] = long_ago
    lost["spec"]["nodeName"] = "gone"
    lost["status"]["conditions"][0]["lastTransitionTime"] = long_ago
    assert writes(bench) == ["delete by force demo-engine-0-1"]
    bench.world.run_stateful_sets()
    assert (writes(bench), status(bench)[:2]) == ([], (2, 2))


def test_scaling_down_removes_the_objects_of_an_engine_after_its_pods(bench: ReconciledCluster) -> None:
    bench.world.change(engine={"replicas": 1})
    assert writes(bench) == ["apply StatefulSet demo-engine-1"]
    assert sets(bench) == {"demo-engine-0": 2, "demo-engine-1": 0}
    assert bench.condition("Progressing") == ("True", "Scaling")
    ending = bench.world.pods["demo-engine-1-0"]
    bench.world.run_stateful_sets()
    bench.world.pods["demo-engine-1-0"] = ending
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (writes(bench), status(bench)[:2]) == ([], (2, 1)), "a pod on a lost node is still observed"
    bench.world.run_stateful_sets()
    assert sorted(writes(bench)) == [
        "delete NetworkPolicy demo-engine-1",
        "delete StatefulSet demo-engine-1",
    ]
    bench.settle()
    assert status(bench) == (1, 1, "1 of 1 engines (of 2 pods each) are ready")
    bench.change(engine={"replicas": 3})
    assert sets(bench) == dict.fromkeys([f"demo-engine-{n}" for n in range(3)], 2)


def test_engines_scaled_to_zero_keep_their_images(bench: ReconciledCluster) -> None:
    bench.change(engine={"replicas": 0})
    assert (sets(bench), status(bench)[:2]) == ({"demo-engine-0": 0}, (0, 0))
    newer = {name: f"{image}-next" for name, image in STOCK_IMAGES.items()}
    bench.context = bench.context._replace(images=newer)
    bench.restart_operator()
    bench.change(engine={"replicas": 1})
    containers = bench.world.pods["demo-engine-0-0"]["spec"]["containers"]
    assert containers[0]["image"] == STOCK_IMAGES["engine"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("replicas", [0, 1])
def test_who_may_write_services_does_not_choose_images(nodes: int, replicas: int) -> None:
    bench = ReconciledCluster.settled(**over(nodes, replicas=replicas))
    foreign = json.dumps({name: f"evil/{name}:v1" for name in STOCK_IMAGES})
    service = bench.world.objects[Ref("Service", "demo-engine")]
    annotations_of(service)[DEFAULT_IMAGES] = foreign
    bench.change(engine={"replicas": 1})
    used = {each["image"] for pod in bench.world.pods.values() for each in pod["spec"]["containers"]}
    assert used == {STOCK_IMAGES["engine"]}


@pytest.mark.parametrize("nodes", [1, 3])
def test_other_number_of_nodes_leaves_no_former_object(bench: ReconciledCluster, nodes: int) -> None:
    service = Ref("Service", "demo-engine")
    bench.change(**over(nodes))
    groups = {"demo-engine-0", "demo-engine-1"} if nodes > 1 else set()
    assert of_groups(bench) == groups
    assert sets(bench) == dict.fromkeys(groups or {"demo-engine"}, nodes if nodes > 1 else 2)
    assert (DEFAULT_IMAGES in annotations_of(bench.world.objects[service])) == (nodes > 1)
    assert status(bench)[:2] == (2, 2)
    assert len(bench.world.pods) == 2 * nodes


def test_deleted_service_hides_no_former_engine(bench: ReconciledCluster) -> None:
    bench.world.change(**over(1))
    bench.run()
    del bench.world.objects[Ref("Service", "demo-engine")]
    bench.settle()
    assert (of_groups(bench), sets(bench)) == (set(), {"demo-engine": 2})


def test_ports_between_pods_stay_closed_until_the_last_group_has_ended(bench: ReconciledCluster) -> None:
    policy = Ref("NetworkPolicy", "demo-engine")
    bench.world.change(**over(1))
    for is_closed in (True, False):
        bench.run()
        spec = bench.world.objects[policy]["spec"]
        assert ({"ports": [{"port": 8000, "protocol": "TCP"}]} in spec["ingress"]) == is_closed
        bench.settle()


def test_number_of_nodes_changes_one_engine_at_a_time(bench: ReconciledCluster) -> None:
    bench.world.change(**over(3))
    sizes_written = [["apply StatefulSet demo-engine-0"], ["apply StatefulSet demo-engine-1"]]
    ended = [[f"evict demo-engine-{number}-0", f"delete pod demo-engine-{number}-1"] for number in range(2)]
    first, second = zip(ended, sizes_written, strict=True)
    assert roll(bench) == [[*sizes_written[0], *sizes_written[1]], *first, *second]
    bench.world.change(**over(2))
    for _ in ("templates", "pods", "size"):
        bench.run()
        bench.world.run_stateful_sets(is_ready=False)
    assert (writes(bench), sets(bench)) == ([], {"demo-engine-0": 2, "demo-engine-1": 3})
    assert status(bench) == (2, 1, "1 of 2 engines (of 2 pods each) are ready")


def test_engines_that_are_not_ready_change_one_after_the_other(bench: ReconciledCluster) -> None:
    bench.world.change(**over(3))
    bench.run()
    bench.world.run_stateful_sets()
    for number in range(2):
        bench.world.set_ready(f"demo-engine-{number}-0", False)
    bench.run()
    bench.world.run_stateful_sets(is_ready=False)
    bench.run()
    assert sets(bench) == {"demo-engine-0": 3, "demo-engine-1": 2}


def test_engines_of_one_pod_become_groups() -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2})
    bench.change(**over(2))
    assert sets(bench) == {"demo-engine-0": 2, "demo-engine-1": 2}
    assert sorted(bench.world.pods) == [f"demo-engine-{number}-{n}" for number in range(2) for n in range(2)]


def test_name_of_another_owner_is_reported(bench: ReconciledCluster) -> None:
    foreign = {"metadata": {"name": "demo-engine-2", "uid": "1", "labels": {}}}
    bench.world.objects[Ref("StatefulSet", "demo-engine-2")] = foreign
    bench.world.change(engine={"replicas": 3})
    assert writes(bench) == []
    assert "StatefulSet demo-engine-2 exists and does not belong" in bench.degraded()[1]


def test_object_without_labels_is_repaired(bench: ReconciledCluster) -> None:
    bench.world.edit(Ref("StatefulSet", "demo-engine-1"), "metadata", "labels", value={})
    assert writes(bench) == ["apply StatefulSet demo-engine-1"]


def test_copy_of_an_object_of_a_group_is_not_deleted(bench: ReconciledCluster) -> None:
    original = bench.world.objects[Ref("NetworkPolicy", "demo-engine-1")]
    copy = original | {"metadata": original["metadata"] | {"name": "demo-engine-copy", "uid": "1"}}
    bench.world.objects[Ref("NetworkPolicy", "demo-engine-copy")] = copy
    assert writes(bench) == []


POD = st.tuples(st.booleans(), st.booleans(), st.booleans())
"""Whether a pod is ready, terminating, and of a former spec."""
GROUPS = st.lists(st.lists(POD, max_size=3), max_size=4)


def template(spec_hash: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {SPEC_HASH: spec_hash}}}


def grouped(number: int, pods: list[tuple[bool, bool, bool]], size: int = 3) -> Group:
    """A group whose StatefulSet has the present spec."""
    owner = {
        "metadata": {"name": f"demo-engine-{number}"},
        "spec": {"replicas": size, "template": template("new")},
    }
    made = []
    for rank, (is_ready, is_terminating, is_former) in enumerate(pods):
        pod = template("old" if is_former else "new")
        pod["metadata"] |= {"uid": f"{number}-{rank}", "name": f"demo-engine-{number}-{rank}"}
        pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if is_terminating else {}
        pod["status"] = {"conditions": [{"type": "Ready", "status": str(is_ready)}]}
        made.append(pod)
    return Group(number, owner, size, tuple(made))


def is_still(pods: list[tuple[bool, bool, bool]]) -> bool:
    """Whether no pod of a group is missing, terminating, or starting with the present spec."""
    return len(pods) == 3 and all(not ends and (is_ready or former) for is_ready, ends, former in pods)


@given(GROUPS)
def test_at_most_one_engine_that_serves_is_interrupted(states: list[list[tuple[bool, bool, bool]]]) -> None:
    groups = [grouped(number, pods) for number, pods in enumerate(states)]
    evicted = next_eviction(groups, template("new"))
    numbers = {int(pod["metadata"]["uid"][0]) for pod in evicted}
    assert len(numbers) <= 1
    for pod in evicted:
        assert pod["metadata"]["annotations"][SPEC_HASH] == "old"
        assert "deletionTimestamp" not in pod["metadata"]
    unchosen = [pods for number, pods in enumerate(states) if {number} != numbers]
    is_quiet = all(map(is_still, unchosen))
    chosen = [pods for number, pods in enumerate(states) if {number} == numbers]
    assert is_quiet or not any(map(is_still, chosen)), "only a group that can't start does not wait"
    is_begun = any(
        not is_still(pods) and any(former and not ends for _, ends, former in pods) for pods in states
    )
    assert evicted or not is_begun, "two groups with pods of two specs must not wait for each other"
    if all(pods == [(True, False, True)] * 3 for pods in states):
        assert len(evicted) == (3 if states else 0)
