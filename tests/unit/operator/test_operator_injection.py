"""The cache for pods of others: what `lmcache-operator inject` makes of them, and what it refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Plan
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.injection.pods import OUTCOME
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL

from tests.harness.operator_injection import CONTEXT, injected, pod, pod_with, refused_pods
from tests.harness.operator_model import World, cluster
from tests.harness.operator_plans import observe
from tools.kube import schemas

NO_TOKEN = {"name": "lmcache-no-token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
KINDS = {
    "Deployment": "spec.template", "StatefulSet": "spec.template", "DaemonSet": "spec.template",
    "ReplicaSet": "spec.template", "Job": "spec.template", "CronJob": "spec.jobTemplate.spec.template",
    "Pod": "",
}  # fmt: skip


def pod_spec(**changes: Any) -> dict[str, Any]:
    """Of the pod with the cache, with its engine changed so before."""
    (found,) = injected(pod(**changes))
    spec: dict[str, Any] = found["spec"]
    return spec


def live(found: dict[str, Any]) -> dict[str, Any]:
    """As the API server has it."""
    return found | {"metadata": found["metadata"] | {"uid": "1"}}


def init_containers(spec: dict[str, Any]) -> list[str]:
    return [container["name"] for container in spec["initContainers"]]


def of_kind(kind: str) -> dict[str, Any]:
    """An object whose pods are `pod()`."""
    value = pod()
    for key in reversed(KINDS[kind].split(".") if KINDS[kind] else ()):
        value = {key: value, "metadata": {"name": "llm"}}
    return {**value, "kind": kind}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_every_kind_get_the_cache(kind: str) -> None:
    before = of_kind(kind)
    untouched = copy.deepcopy(before)
    (found,) = injected(before)
    assert before == untouched
    for key in KINDS[kind].split(".") if KINDS[kind] else ():
        found = found[key]
    assert init_containers(found["spec"]) == ["lmcache-sidecar", "lmcache-payload"]
    assert found["metadata"]["annotations"] == {OUTCOME: "injected"}


def without_a_size_to_follow(own: dict[str, Any]) -> dict[str, Any]:
    sidecar, arena = own["initContainers"][0], own["volumes"][0]
    followed = ("LMCACHE_MEMORY_MAX_SIZE", "LMCACHE_MEMORY_SIZE_FILE")
    assert [v["name"] for v in sidecar["env"] if v["name"].startswith("LMCACHE_MEMORY")] == [*followed]
    sidecar["env"] = [v for v in sidecar["env"] if v["name"] not in followed]
    sidecar["volumeMounts"] = [m for m in sidecar["volumeMounts"] if m["name"] != "memory-size"]
    assert arena["emptyDir"].pop("sizeLimit") == "4096Mi"
    arena["emptyDir"]["sizeLimit"] = "1024Mi"
    return own


def test_a_pod_has_the_same_cache_as_the_clusters_own() -> None:
    """Names apart, what says whose the pod is, and that its size is the one that it was made with."""
    own = without_a_size_to_follow(Engine().render(parse(cluster()), CONTEXT)[-1]["spec"]["template"]["spec"])
    spec = pod_spec()
    for ours, theirs in zip(own["initContainers"], spec["initContainers"], strict=True):
        same = ("image", "args", "command", "livenessProbe", "resources", "restartPolicy")
        assert {key: theirs.get(key) for key in same} == {key: ours.get(key) for key in same}
        # Links to a Service would set it, and there they are on.
        port = [{"name": "LMCACHE_HTTP_PORT", "value": "9464"}] if "ports" in ours else []
        assert theirs["env"] == [*ours["env"], *port]
        assert ours["securityContext"].items() <= theirs["securityContext"].items()
        renamed = [mount | {"name": f"lmcache-{mount['name']}"} for mount in ours["volumeMounts"]]
        assert theirs["volumeMounts"] == [*renamed, NO_TOKEN]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for volume in own["volumes"]:
        if (name := f"lmcache-{volume['name']}") in volumes:
            assert volume["name"] in ("arena", "config", "payload", "socket")
            config = {"configMap": volume["configMap"] | {"optional": True}} if "configMap" in volume else {}
            assert volumes[name] == {**volume, **config, "name": name}
    (theirs,), ours = spec["containers"], own["containers"][0]
    assert {"name": "LMCACHE_SOCKET", "value": "/run/lmcache/kvcache.sock"} in theirs["env"]
    assert [arg for arg in theirs["args"][2:] if arg not in ours["args"]] == []
    assert "--prefix-caching-hash-algo=sha256_cbor" in theirs["args"]
    assert any(arg.startswith("--kv-transfer-config=") for arg in theirs["args"])


def test_what_is_the_pods_own_stays_as_it_is() -> None:
    first = {"name": "fetch", "image": "fetch:1"}
    own = {"name": "config", "emptyDir": {}}
    before = pod(env=[{"name": "A", "value": "b"}], volumeMounts=[{"name": "config", "mountPath": "/c"}])
    before["spec"] |= {
        "initContainers": [first], "volumes": [own], "serviceAccountName": "llm",
        "securityContext": {"runAsUser": 7, "supplementalGroups": [5]},
    }  # fmt: skip
    (found,) = injected(before)
    spec = found["spec"]
    assert spec["initContainers"][2] == first
    assert spec["volumes"][0] == own
    assert spec["securityContext"] == {"runAsUser": 7, "supplementalGroups": [5, 2000]}
    engine, was = spec["containers"][0], before["spec"]["containers"][0]
    for kind in ("args", "env", "volumeMounts"):
        assert engine[kind][: len(was[kind])] == was[kind]
    assert spec["serviceAccountName"] == "llm"


def test_of_several_containers_an_annotation_names_the_engine() -> None:
    before = pod()
    before["spec"]["containers"].insert(0, {"name": "proxy", "image": "p"})
    with pytest.raises(InvalidSpecError, match=r"spec.containers: the annotation lmcache.io/container must"):
        injected(before)
    before["metadata"]["annotations"] = {"lmcache.io/container": "vllm"}
    proxy, engine = injected(before)[0]["spec"]["containers"]
    assert proxy == {"name": "proxy", "image": "p"}
    assert "LMCACHE_SOCKET" in [variable["name"] for variable in engine["env"]]


def test_the_sidecar_has_the_engines_user() -> None:
    spec = pod_spec(securityContext={"runAsUser": 7, "runAsNonRoot": True, "privileged": True})
    for container in spec["initContainers"]:
        assert container["securityContext"].items() >= {"runAsUser": 7, "runAsNonRoot": True}.items()
        assert "privileged" not in container["securityContext"]
    assert "runAsUser" not in pod_spec()["initContainers"][0]["securityContext"]


@pytest.mark.parametrize("gpu", [{"count": 1}, {"count": 1, "deviceClassName": "gpu.nvidia.com"}])
def test_the_sidecar_shares_the_pods_claim_where_it_is_made_for_that(gpu: dict[str, Any]) -> None:
    claims = [{"name": "mine"}]
    resource = cluster(engine={"gpu": gpu})
    for before in (pod(resources={"claims": claims}), pod()):
        (found,) = inject_objects([before], clusters_in([resource]), None, CONTEXT).objects
        has_both = "deviceClassName" in gpu and "resources" in before["spec"]["containers"][0]
        sidecar, payload = found["spec"]["initContainers"]
        assert sidecar["resources"].get("claims") == (claims if has_both else None)
        assert "claims" not in payload["resources"]


@pytest.mark.parametrize(("found", "path", "sentence"), refused_pods())
def test_what_cannot_work_is_refused_where_it_is(found: Any, path: str, sentence: str) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(sentence)) as refused:
        injected({**found, "kind": "Pod"})
    assert refused.value.path == f"Pod llm: {path}"


def test_the_connector_may_come_by_a_mounted_image() -> None:
    (found,) = injected(pod(), sidecar={"payload": "ImageVolume"})
    assert init_containers(found["spec"]) == ["lmcache-sidecar"]
    volumes = {volume["name"]: volume for volume in found["spec"]["volumes"]}
    assert "image" in volumes["lmcache-payload"]
    mounts = [mount["name"] for mount in found["spec"]["containers"][0]["volumeMounts"]]
    assert sorted(mounts) == ["lmcache-arena", "lmcache-payload", "lmcache-socket"]


def test_the_template_that_is_applied_fits_the_schema() -> None:
    for changes in ({}, {"engine": {"gpu": {"count": 1, "deviceClassName": "gpu.nvidia.com"}}}):
        (child,) = Injection().render(parse(cluster(**changes)), CONTEXT)
        as_pods = child | {"apiVersion": "v1", "kind": "PodTemplate"}
        assert schemas.validate(yaml.safe_dump(as_pods)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "pod llm: it is older than this object, or the API server has no MutatingAdmissionPolicy"),
        ({"annotations": {OUTCOME: "refused: spec.hostNetwork: x"}}, "pod llm: refused: spec.hostNetwork: x"),
    ],
)
def test_pods_that_ask_for_a_cache_and_have_none_degrade_their_cluster(
    change: dict[str, Any], message: str
) -> None:
    (given,), bare = injected(pod()), pod_with(change)
    observed = observe(World(cluster()), foreign_pods=(live(given), bare))
    status = Injection().status(observed, Plan())
    assert status.summary == "other pods with its cache: 1"
    (problem,) = status.degraded
    assert problem.reason == "PodsWithoutCache"
    assert problem.message.startswith(f"1 of 2 pods labelled {INJECT_LABEL}=demo have no cache: {message}")


def test_pods_that_have_it_or_go_are_no_trouble() -> None:
    over = pod() | {"status": {"phase": "Failed"}}
    going = pod_with({"deletionTimestamp": "2026-01-01T00:00:00Z"})
    for pods, summary in ((injected(pod()), "other pods with its cache: 1"), ([over, going], "")):
        observed = observe(World(cluster()), foreign_pods=tuple(map(live, pods)))
        status = Injection().status(observed, Plan())
        assert (status.summary, status.degraded) == (summary, ())


def test_names_of_the_users_own_on_the_sidecar_make_no_invalid_profile() -> None:
    volume = "a-volume-" + "x" * 54
    sidecar = {
        "name": "sidecar", "ports": [{"containerPort": 6060, "name": "profiling"}, {"containerPort": 6061}],
        "volumeMounts": [{"name": volume, "mountPath": "/x"}],
        "volumeDevices": [{"name": volume, "devicePath": "/dev/x"}],
    }  # fmt: skip
    template = {"spec": {"initContainers": [sidecar], "volumes": [{"name": volume, "emptyDir": {}}]}}
    (found,) = injected(pod(), engine={"podTemplate": template})
    container, volumes = found["spec"]["initContainers"][0], found["spec"]["volumes"]
    assert container["ports"] == [{"containerPort": 9464, "name": "lmcache-metrics", "protocol": "TCP"}]
    assert "volumeDevices" not in container
    named = [volume["name"] for volume in volumes]
    assert {mount["name"] for mount in container["volumeMounts"]} <= set(named)
    assert max(map(len, named)) <= 63
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    "command", [["tini", "--", "vllm", "serve"], ["nice", "-n", "5", "/usr/bin/vllm", "serve"]]
)
def test_options_of_what_starts_the_engine_are_not_the_engines(command: list[str]) -> None:
    assert init_containers(pod_spec(command=command)) == ["lmcache-sidecar", "lmcache-payload"]
    with pytest.raises(InvalidSpecError, match="second model"):
        pod_spec(command=[*command, "--"])


def test_an_annotation_that_names_no_container_is_no_name() -> None:
    with pytest.raises(InvalidSpecError, match="must name the engine's"):
        injected(pod_with({"annotations": {"lmcache.io/container": ""}}))


def waiting(container: str, reason: str) -> dict[str, Any]:
    return {"name": container, "state": {"waiting": {"reason": reason, "message": "x: not found"}}}


def test_a_pod_that_its_cache_keeps_from_starting_degrades_the_cluster() -> None:
    (given,) = injected(pod())
    placing = {"type": "PodScheduled", "status": "False"}
    unplaced = placing | {"reason": "Unschedulable", "message": "1 Insufficient memory"}
    queued = placing | {"reason": "SchedulingGated", "message": "blocked"}
    own = [waiting("fetch", "ImagePullBackOff")]
    theirs = [waiting("vllm", "ImagePullBackOff")]
    for status, expected in (
        ({"initContainerStatuses": [waiting("lmcache-sidecar", "ImagePullBackOff")]},
         [("ImagePullBackOff", "pod llm, container lmcache-sidecar: x: not found")]),
        ({"conditions": [unplaced]}, [("Unschedulable", "pod llm: 1 Insufficient memory")]),
        ({"conditions": [unplaced | {"message": "1 Insufficient nvidia.com/gpu"}]}, []),
        ({"conditions": [queued]}, []),
        ({"initContainerStatuses": own, "containerStatuses": theirs}, []),
        ({}, []),
    ):  # fmt: skip
        observed = observe(World(cluster()), foreign_pods=(live(given) | {"status": status},))
        assert [tuple(problem) for problem in Injection().status(observed, Plan()).degraded] == expected
