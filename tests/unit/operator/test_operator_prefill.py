"""Prefill pods: their LMCacheCluster, the router's two pools, and their part of the parent's status."""

import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_operator.api.documents import dump
from lmcache_operator.api.parse import parse, written
from lmcache_operator.components.engine.engine import Engine, spec_hash
from lmcache_operator.components.engine.kinds.vllm import DISCOVERY
from lmcache_operator.components.router.router import Routing
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import cluster
from tests.harness.operator.prefill import CHILD, CONTEXT, ROUTER, FullRig, Rig, child, with_prefill
from tests.harness.operator.render import ENGINES, child_of

GOLDEN = Path(__file__).parent / "golden" / "prefill.yaml"
FULL: dict[str, Any] = {
    "engine": {
        "replicas": 3, "args": ["--max-model-len=32768"], "resources": {"requests": {"cpu": 4}},
        "tolerations": [{"operator": "Exists"}],
        "prefill": {
            "replicas": 1, "gpu": {"deviceClassName": "gpu.nvidia.com"},
            "args": ["--max-num-batched-tokens=16384"], "resources": {"requests": {"cpu": 8}},
            "nodeSelector": {"gpu": "h200"},
        },
    },
    "sidecar": {"chunkTokens": 512, "httpAuthentication": "Token"},
    "tiers": {
        "peers": {"bytesPerSecond": "1Gi"},
        "disk": {"size": "500Gi", "encryption": {"secretRef": {"name": "d"}}},
        "remote": {
            "managed": {"shards": 2, "memoryPerShard": "4Gi"}, "encryption": {"secretRef": {"name": "r"}}
        },
    },
    "router": {},
    "autoscaling": {"mode": "Auto", "memory": {"maxSize": "4Gi"}, "remote": {"minShards": 1, "maxShards": 4}},
}  # fmt: skip


def test_rendered_cluster_equals_the_golden_file() -> None:
    """LMCACHE_UPDATE_GOLDEN=1 rewrites the file. Review the difference before you commit it."""
    text = dump([child(FULL)])
    if os.environ.get("LMCACHE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text
    parse(child(FULL))


def test_wrong_annotation_is_ignored() -> None:
    for value in ("a b", 5, None):
        assert parse(annotated(value, "a b")).events_reader == ""


def annotated(value: Any, controller: Any = "parent", **changes: Any) -> dict[str, Any]:
    """A cluster with the annotation of prefill pods, and a controller of this name."""
    resource = cluster(**changes)
    resource["metadata"]["annotations"] = {"lmcache.io/events-for": value}
    owner = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "name": controller, "uid": "1"}
    resource["metadata"]["ownerReferences"] = [owner | {"controller": True}]
    return resource


def test_annotation_counts_only_if_the_controller_is_the_named_cluster() -> None:
    assert parse(annotated("parent")).events_reader == "parent"
    assert parse(annotated("parent", "other")).events_reader == ""
    for owners in (None, [], "x", ["x"], [{"name": "parent"}]):
        resource = annotated("parent")
        resource["metadata"]["ownerReferences"] = owners
        assert parse(resource).events_reader == ""


@pytest.mark.parametrize("changes", [{"engine": {"kind": "SGLang"}}, {"tenants": {"header": True}}])
def test_annotation_of_prefill_pods_changes_no_pod_that_publishes_no_events(changes: dict[str, Any]) -> None:
    """Any user may copy the annotation and the owner. Events would contain the salts of tenants."""
    before, after = parse(cluster(**changes)), parse(annotated("parent", **changes))
    assert spec_hash(after, STOCK_IMAGES) == spec_hash(before, STOCK_IMAGES)
    assert Engine().render(after, CONTEXT) == Engine().render(before, CONTEXT)


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({"remote": {"external": {"url": "redis://h:1"}}}, {"external": {"url": "redis://h:1"}}),
        ({"remote": {"clusterRef": {"name": "shared"}}}, {"clusterRef": {"name": "shared"}}),
        ({"remote": {"managed": {"memoryPerShard": "1Gi"}}}, {"clusterRef": {"name": "demo"}}),
        ({}, None),
        ({"peers": {"clusterRef": {"name": "owner"}}}, None),
    ],
)
def test_tiers_are_those_of_the_parent(tiers: dict[str, Any], expected: Any) -> None:
    changes = with_prefill()
    changes["tiers"] |= tiers
    spec = child(changes)["spec"]
    assert spec["tiers"].get("remote") == expected
    owner = (tiers.get("peers") or {}).get("clusterRef", {}).get("name", "demo")
    assert spec["tiers"]["peers"] == {"clusterRef": {"name": owner}}


def test_prefill_pods_get_the_images_of_the_other_pods() -> None:
    former = {"engine": "vllm:former", "sidecar": "sidecar:former"}
    rig = Rig(**with_prefill())
    rig.context = Context(former)
    rig.restart_operator()
    rig.world.resource["status"] = {"images": {"engine": "attacker/x:1", "sidecar": "attacker/x:1"}}
    rig.settle()
    rig.context = CONTEXT
    rig.restart_operator()
    rig.settle()
    assert {name: rig.child["spec"][name]["image"] for name in former} == former
    rig.change(images={"policy": "Follow"})
    assert "image" not in rig.child["spec"]["engine"]


def test_status_of_prefill_pods_is_part_of_the_parents() -> None:
    rig = Rig.settled(**with_prefill(replicas=2))
    assert rig.conditions() | {"PrefillAvailable": "False", "Progressing": "True"} == rig.conditions()
    rig.report(2)
    assert rig.world.resource["status"]["prefill"] == {"replicas": 2, "readyReplicas": 2}
    assert "2 of 2 prefill pods are ready" in rig.message("Ready")
    assert rig.conditions() | {"PrefillAvailable": "True", "Degraded": "False"} == rig.conditions()
    rig.report(2, Progressing=("True", "Replacing"))
    assert rig.message("Progressing") == "Prefill pods: it is Replacing"
    rig.report(0, Degraded=("True", "Unschedulable"))
    assert rig.conditions() | {"PrefillAvailable": "False", "Degraded": "True"} == rig.conditions()
    assert "LMCacheCluster demo-prefill: it is Unschedulable" in rig.message("Degraded")
    assert "0 of 2 prefill pods are ready; the router uses only the other" in rig.message("PrefillAvailable")


def test_status_of_a_former_spec_counts_as_progress() -> None:
    rig = Rig.settled(**with_prefill(replicas=2))
    rig.report(2)
    rig.world.change(engine={"prefill": {"args": ["--a=1"]}})
    rig.run()
    rig.report(2, is_observed=False)
    assert rig.conditions()["Progressing"] == "True"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": None}, "engine.prefill needs router and tiers.peers"),
        ({"tiers": {"peers": None}}, "engine.prefill needs router and tiers.peers"),
        ({"engine": {"prefill": {"gpu": {"count": 2}}}}, "gpu.count must equal engine.gpu.count"),
        ({"engine": {"prefill": {"args": ["--tp=2"]}}}, "engine.parallelism"),
        ({"engine": {"prefill": {"image": "a:1"}}}, "engine.prefill.image"),
        ({"engine": {"kind": "SGLang"}, "router": {"policy": "CacheAware"}}, "needs engine.kind vLLM"),
    ],
)
def test_specs_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    resource = cluster(**with_prefill())
    with pytest.raises(InvalidSpecError, match=message):
        parse(cluster(resource["spec"], **changes))


@pytest.mark.parametrize("name", ["demo-prefill", "a" * 38])
def test_cluster_of_prefill_pods_has_none_itself(name: str) -> None:
    resource = cluster(**with_prefill())
    resource["metadata"]["name"] = name
    with pytest.raises(InvalidSpecError, match="must not end with -prefill"):
        parse(resource)


def test_written_spec_is_parsed_to_the_same_spec() -> None:
    for changes in (FULL, with_prefill(), {}, {"engine": {"gpu": {"count": 0}, "env": [{"name": "A"}]}}):
        spec = parse(cluster(**changes)).spec
        assert parse({"metadata": {"name": "demo"}, "spec": written(spec)}).spec == spec


# -- when a router starts and stops to use prefill pods


def test_router_uses_prefill_pods_when_the_first_one_is_ready() -> None:
    rig = FullRig.settled(**with_prefill())
    assert not rig.uses_prefill_pods
    assert "the router uses only the other engine pods" in rig.message("PrefillAvailable")
    rig.report(0)
    assert not rig.uses_prefill_pods
    rig.report(1)
    assert rig.uses_prefill_pods
    rig.roll_out()
    rig.run()
    assert rig.conditions()["Ready"] == "True"
    rig.report(0)
    assert rig.uses_prefill_pods, "a router keeps its pools"
    assert "requests to the router fail" in rig.message("PrefillAvailable")
    assert rig.conditions()["Ready"] == "False"


def test_prefill_pods_stay_until_no_router_uses_them() -> None:
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.roll_out()
    rig.settle()
    assert f"delete {CHILD}" not in rig.change(engine={"prefill": None})
    assert not rig.uses_prefill_pods
    assert rig.conditions()["Progressing"] == "True", "so that the operator looks again"
    assert rig.conditions()["PrefillAvailable"] == "True"
    rig.roll_out()
    assert f"delete {CHILD}" in rig.settle()
    assert "PrefillAvailable" not in rig.conditions()


def test_prefill_pods_are_deleted_with_their_router() -> None:
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    assert f"delete {CHILD}" in rig.change(engine={"prefill": None}, router=None)


def test_prompts_are_not_sent_to_a_cluster_of_another_owner() -> None:
    users = cluster() | {"metadata": {"name": "demo-prefill", "uid": "1", "namespace": "team"}}
    users["status"] = {"readyReplicas": 3}
    rig = FullRig(**with_prefill())
    rig.world.objects[CHILD] = users
    rig.settle()
    assert (rig.uses_prefill_pods, rig.child) == (False, users)
    assert "exists and does not belong to this LMCacheCluster" in rig.message("Degraded")
    assert "delete it or rename this cluster" in rig.message("Degraded")

    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.world.objects[CHILD] = users
    rig.settle()
    assert not rig.uses_prefill_pods, "the user replaced the prefill pods"


def pod(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def cpus(number: int) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": number}}}


INVALID_CHILDREN = [
    ({"prefill": {"args": ["--a=8", "--port=1"]}}, r"^spec\.engine\.prefill\.args\[1\]: --port can't be set"),
    (
        {"prefill": {"nodeSelector": {"gpu": "h200"}}} | pod(nodeSelector={"gpu": "l40s"}),
        r"contradicts spec\.engine\.prefill\.nodeSelector at",
    ),
    (
        {"prefill": cpus(8)} | pod(containers=[{"name": "engine", **cpus(4)}]),
        r"contradicts spec\.engine\.prefill\.resources at",
    ),
]


@pytest.mark.parametrize(("engine", "message"), INVALID_CHILDREN)
def test_settings_that_no_prefill_pod_can_have_are_refused(engine: dict[str, Any], message: str) -> None:
    changes = with_prefill()
    changes["engine"] |= engine | {"args": ["--max-model-len=32768"]}
    with pytest.raises(InvalidSpecError, match=message):
        child(changes)
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    before = [rig.world.objects[ref]["spec"] for ref in (CHILD, ENGINES, ROUTER)]
    rig.change(engine=engine)
    assert rig.conditions()["Degraded"] == "True"
    assert [rig.world.objects[ref]["spec"] for ref in (CHILD, ENGINES, ROUTER)] == before


def test_replicas_belong_to_autoscalers_unless_they_are_set() -> None:
    assert "replicas" not in child(with_prefill())["spec"]["engine"]
    assert child(with_prefill(replicas=0))["spec"]["engine"]["replicas"] == 0
    rig = Rig.settled(**with_prefill())
    rig.child["spec"]["engine"]["replicas"] = 7
    assert f"apply {CHILD}" not in rig.settle()
    assert rig.child["spec"]["engine"]["replicas"] == 7
    rig.change(engine={"prefill": {"replicas": 2}})
    rig.world.edit(CHILD, "spec", "engine", "replicas", value=7)
    assert f"apply {CHILD}" in rig.settle()
    assert rig.child["spec"]["engine"]["replicas"] == 2


def test_prefill_pods_tokenize_prompts_for_a_router_that_remembers_them() -> None:
    """The router asks pods of both pools."""
    for policy in ("CacheAware", "PowerOfTwo"):
        args = child(with_prefill(args=["--a=1"]) | {"router": {"policy": policy}})["spec"]["engine"]["args"]
        assert args == ["--a=1", *([DISCOVERY] if policy == "CacheAware" else [])]


def test_router_sends_prompts_to_the_prefill_pods_and_answers_to_the_others() -> None:
    changes = with_prefill() | {"router": {"args": ["--decode-policy=round_robin"]}}
    (container,) = child_of("Deployment", Routing(), **changes)["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    for option, name in (("--prefill-selector", "demo-prefill"), ("--decode-selector", "demo")):
        place = args.index(option)
        assert args[place + 1 : place + 3] == [f"lmcache.io/cluster={name}", "lmcache.io/component=engine"]
    assert "--vllm-pd-disaggregation" in args
    assert "--selector" not in args
    assert args[-1] == "--decode-policy=round_robin"
