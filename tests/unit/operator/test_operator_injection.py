"""Injection of the cache into users' pods: injected fields, refusals and conditions."""

import copy
import json
import re
from typing import Any

import pytest
import yaml

from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.injection.pods import OUTCOME
from lmcache_operator.contract.base import ComponentStatus, Plan
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL
from tests.harness.operator.injection import SGLANG, injected, pod, pod_with, refused_pods, sglang_pod
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import observe
from tests.harness.operator.render import child_of, container, env_of, pod_of
from tools.kube import schemas

NO_TOKEN = {"name": "lmcache-no-token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
KINDS = {
    "Deployment": "spec.template", "StatefulSet": "spec.template", "DaemonSet": "spec.template",
    "ReplicaSet": "spec.template", "Job": "spec.template", "CronJob": "spec.jobTemplate.spec.template",
    "Pod": "",
}  # fmt: skip


def pod_spec(**changes: Any) -> dict[str, Any]:
    """Spec of an injected pod whose engine has these changes."""
    return injected(pod(**changes))[0]["spec"]


def status_of(*pods: dict[str, Any]) -> ComponentStatus:
    """The status of a cluster with these labelled pods, as the API server returns them."""
    live = tuple(each | {"metadata": each["metadata"] | {"uid": "1"}} for each in pods)
    return Injection().status(observe(World(cluster()), foreign_pods=live), Plan())


def init_containers(spec: dict[str, Any]) -> list[str]:
    return [container["name"] for container in spec["initContainers"]]


@pytest.mark.parametrize("kind", KINDS)
def test_inject_handles_pods_of_every_kind(kind: str) -> None:
    keys, workload = KINDS[kind].split("."), pod()
    for key in reversed(keys):
        workload = {key: workload, "metadata": {"name": "llm"}} if key else workload
    workload |= {"kind": kind}
    untouched = copy.deepcopy(workload)
    (node,) = injected(workload)
    assert workload == untouched
    for key in keys:
        node = node[key] if key else node
    assert init_containers(node["spec"]) == ["lmcache-sidecar", "lmcache-payload"]
    assert node["metadata"]["annotations"] == {OUTCOME: "injected"}


def with_fixed_size(engine_pod: dict[str, Any]) -> dict[str, Any]:
    sidecar, arena = engine_pod["initContainers"][0], engine_pod["volumes"][0]
    followed = ("LMCACHE_MEMORY_MAX_SIZE", "LMCACHE_MEMORY_SIZE_FILE")
    assert [v["name"] for v in sidecar["env"] if v["name"].startswith("LMCACHE_MEMORY")] == [*followed]
    sidecar["env"] = [v for v in sidecar["env"] if v["name"] not in followed]
    sidecar["volumeMounts"] = [m for m in sidecar["volumeMounts"] if m["name"] != "memory-size"]
    assert arena["emptyDir"].pop("sizeLimit") == "4096Mi"
    arena["emptyDir"]["sizeLimit"] = "1024Mi"
    return engine_pod


def test_injected_pod_has_the_same_cache_as_an_engine_pod() -> None:
    """The pods differ only in names, in ownership, and in the fixed memory size of the injected pod."""
    engine_pod, spec = with_fixed_size(pod_of()), pod_spec()
    for expected, actual in zip(engine_pod["initContainers"], spec["initContainers"], strict=True):
        for key in ("image", "args", "command", "livenessProbe", "resources", "restartPolicy"):
            assert actual.get(key) == expected.get(key), key
        # The user's pod has Service links, which would set this variable.
        port = [{"name": "LMCACHE_HTTP_PORT", "value": "9464"}] if "ports" in expected else []
        assert actual["env"] == [*expected["env"], *port]
        assert expected["securityContext"].items() <= actual["securityContext"].items()
        renamed = [mount | {"name": f"lmcache-{mount['name']}"} for mount in expected["volumeMounts"]]
        assert actual["volumeMounts"] == [*renamed, NO_TOKEN]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for volume in engine_pod["volumes"]:
        if (name := f"lmcache-{volume['name']}") in volumes:
            assert volume["name"] in ("arena", "config", "payload", "socket")
            config = {"configMap": volume["configMap"] | {"optional": True}} if "configMap" in volume else {}
            assert volumes[name] == {**volume, **config, "name": name}
    (actual,), expected = spec["containers"], engine_pod["containers"][0]
    assert {"name": "LMCACHE_SOCKET", "value": "/run/lmcache/kvcache.sock"} in actual["env"]
    assert [arg for arg in actual["args"][2:] if arg not in expected["args"]] == []
    assert "--prefix-caching-hash-algo=sha256_cbor" in actual["args"]
    assert any(arg.startswith("--kv-transfer-config=") for arg in actual["args"])


HICACHE = [
    "--enable-hierarchical-cache", "--hicache-host-memory-mode=buffer_only", "--hicache-io-backend=direct",
    "--hicache-mem-layout=page_first_direct", "--hicache-ratio=1.05", "--hicache-storage-backend=dynamic",
    "--hicache-storage-prefetch-policy=wait_complete", "--hicache-write-policy=write_through",
    "--page-size=64",
]  # fmt: skip


def added_args(manifest: dict[str, Any], **changes: Any) -> list[str]:
    """Arguments that injection adds to the engine, without the configuration of the backend."""
    (before,), (injected_pod,) = manifest["spec"]["containers"], injected(manifest, **changes)
    after = injected_pod["spec"]["containers"][0]["args"]
    num_before = len(before.get("args") or [])
    assert after[:num_before] == (before.get("args") or [])
    assert "--kv-transfer-config" not in "".join(after)
    (extra,) = [arg for arg in after[num_before:] if "extra-config" in arg]
    config = json.loads(extra.partition("=")[2])
    assert (config["class_name"], config["interface_v1"]) == ("LMCacheBackend", 1)
    return sorted(arg for arg in after[num_before:] if arg != extra)


@pytest.mark.parametrize(
    "manifest",
    [
        pod(args=["m", "--data_parallel_size=2"]),
        pod(args=["m", "-dp", "2", "-dc={}"]),
        sglang_pod("--dp=2"),
        sglang_pod("--data-parallel-size=2"),
    ],
)
def test_data_parallel_ranks_of_one_pod_share_its_cache(manifest: dict[str, Any]) -> None:
    assert init_containers(injected(manifest)[0]["spec"]) == ["lmcache-sidecar", "lmcache-payload"]


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
@pytest.mark.parametrize(
    "manifest",
    [
        sglang_pod(),
        sglang_pod(command=["sglang", "serve"]),
        sglang_pod(image="mine", command=["tini", "-s", "--", *SGLANG]),
        sglang_pod(command=[], args=[*SGLANG, "--served-model-name", "vllm"]),
        sglang_pod(command=[], args=["tini", "--", *SGLANG]),
        pod(image="team/sglang:1", args=["--model-path=m"]),
    ],
)
def test_sglang_pods_get_the_arguments_of_sglang(kind: str, manifest: dict[str, Any]) -> None:
    assert added_args(manifest, engine={"kind": kind}) == HICACHE
    (engine,) = injected(manifest)[0]["spec"]["containers"]
    assert [*env_of(engine)] == ["LMCACHE_SOCKET", "PYTHONPATH"]


@pytest.mark.parametrize(
    ("args", "option"),
    [(["--page", "32"], "--page-size"), (["--hicache-ratio=0.5"], "--hicache-ratio")],
)
def test_options_of_an_sglang_pod_are_not_added_again(args: list[str], option: str) -> None:
    assert added_args(sglang_pod(*args)) == [arg for arg in HICACHE if not arg.startswith(option)]


@pytest.mark.parametrize(
    "manifest",
    [
        pod(args=["m", "--served-model-name", "sglang"]),
        pod(image="lmsysorg/sglang", args=["vllm", "serve", "m"]),
        pod(image="mine", args=["m"]),
        pod(image="lmsysorg/sglang", command=["vllm", "serve"]),
    ],
)
def test_vllm_pods_get_the_arguments_of_vllm(manifest: dict[str, Any]) -> None:
    (engine,) = injected(manifest, engine={"kind": "SGLang"})[0]["spec"]["containers"]
    added = engine["args"][len(manifest["spec"]["containers"][0]["args"]) :]
    assert [arg.partition("=")[0] for arg in added] == ["--kv-transfer-config", "--prefix-caching-hash-algo"]


def test_sidecar_of_an_sglang_cluster_gets_no_gpus() -> None:
    gpu = {"count": 1, "deviceClassName": "gpu.nvidia.com"}
    manifest = sglang_pod(resources={"claims": [{"name": "gpu"}]})
    spec = injected(manifest, engine={"kind": "SGLang", "gpu": gpu})[0]["spec"]
    assert "claims" not in container(spec, "lmcache-sidecar")["resources"]


def test_injection_keeps_the_fields_of_the_pod() -> None:
    fetch = {"name": "fetch", "image": "fetch:1"}
    volume = {"name": "config", "emptyDir": {}}
    before = pod(env=[{"name": "A", "value": "b"}], volumeMounts=[{"name": "config", "mountPath": "/c"}])
    before["spec"] |= {
        "initContainers": [fetch], "volumes": [volume], "serviceAccountName": "llm",
        "securityContext": {"runAsUser": 7, "supplementalGroups": [5]},
    }  # fmt: skip
    spec = injected(before)[0]["spec"]
    assert (spec["initContainers"][2], spec["volumes"][0]) == (fetch, volume)
    assert spec["securityContext"] == {"runAsUser": 7, "supplementalGroups": [5, 2000]}
    assert spec["serviceAccountName"] == "llm"
    engine, original_engine = spec["containers"][0], before["spec"]["containers"][0]
    for kind in ("args", "env", "volumeMounts"):
        assert engine[kind][: len(original_engine[kind])] == original_engine[kind]


def test_annotation_names_the_engine_among_several_containers() -> None:
    before = pod_with({"annotations": {"lmcache.io/container": "vllm"}})
    before["spec"]["containers"].insert(0, {"name": "proxy", "image": "p"})
    proxy, engine = injected(before)[0]["spec"]["containers"]
    assert proxy == {"name": "proxy", "image": "p"}
    assert "LMCACHE_SOCKET" in env_of(engine)


def test_injected_sidecar_runs_as_the_engines_user() -> None:
    spec = pod_spec(securityContext={"runAsUser": 7, "runAsNonRoot": True, "privileged": True})
    for each in spec["initContainers"]:
        assert each["securityContext"].items() >= {"runAsUser": 7, "runAsNonRoot": True}.items()
        assert "privileged" not in each["securityContext"]
    assert "runAsUser" not in pod_spec()["initContainers"][0]["securityContext"]


@pytest.mark.parametrize("gpu", [{"count": 1}, {"count": 1, "deviceClassName": "gpu.nvidia.com"}])
def test_injected_sidecar_shares_the_claim_if_the_cluster_uses_claims(gpu: dict[str, Any]) -> None:
    claims = [{"name": "mine"}]
    for before in (pod(resources={"claims": claims}), pod()):
        has_both = "deviceClassName" in gpu and "resources" in before["spec"]["containers"][0]
        sidecar, payload = injected(before, engine={"gpu": gpu})[0]["spec"]["initContainers"]
        assert sidecar["resources"].get("claims") == (claims if has_both else None)
        assert "claims" not in payload["resources"]


@pytest.mark.parametrize(("pod_object", "path", "sentence"), refused_pods())
def test_injection_refuses_unsupported_pods_and_names_the_field(pod_object, path, sentence):
    with pytest.raises(InvalidSpecError, match=re.escape(sentence)) as refused:
        injected({**pod_object, "kind": "Pod"})
    assert refused.value.path == f"Pod llm: {path}"


def test_applied_profile_template_is_valid_by_the_schema() -> None:
    for changes in ({}, {"engine": {"gpu": {"count": 1, "deviceClassName": "gpu.nvidia.com"}}}):
        profile = child_of("LMCacheProfile", Injection(), **changes)
        assert schemas.validate(yaml.safe_dump(profile | {"apiVersion": "v1", "kind": "PodTemplate"})) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "pod llm: it is older than this LMCacheCluster, or the API server has no Mutating"),
        ({"annotations": {OUTCOME: "refused: spec.hostNetwork: x"}}, "pod llm: refused: spec.hostNetwork: x"),
    ],
)
def test_labelled_pods_without_cache_degrade_the_cluster(change: dict[str, Any], message: str) -> None:
    status = status_of(*injected(pod()), pod_with(change))
    assert status.summary == "1 of 2 labelled pods have the cache"
    (problem,) = status.degraded
    assert problem.reason == "PodsWithoutCache"
    count = f"1 of 2 pods labelled {INJECT_LABEL}=demo have no cache"
    assert problem.message.startswith(f"{count}. First: {message}")


def test_injected_or_finished_pods_do_not_degrade_the_cluster() -> None:
    finished = pod() | {"status": {"phase": "Failed"}}
    terminating = pod_with({"deletionTimestamp": "2026-01-01T00:00:00Z"})
    for pods, summary in (
        (injected(pod()), "1 of 1 labelled pods have the cache"),
        ([finished, terminating], ""),
    ):
        status = status_of(*pods)
        assert (status.summary, status.degraded) == (summary, ())


def test_names_in_the_users_sidecar_template_keep_the_profile_valid() -> None:
    volume = "a-volume-" + "x" * 54
    sidecar = {
        "name": "sidecar", "ports": [{"containerPort": 6060, "name": "profiling"}, {"containerPort": 6061}],
        "volumeMounts": [{"name": volume, "mountPath": "/x"}],
        "volumeDevices": [{"name": volume, "devicePath": "/dev/x"}],
    }  # fmt: skip
    template = {"spec": {"initContainers": [sidecar], "volumes": [{"name": volume, "emptyDir": {}}]}}
    spec = injected(pod(), engine={"podTemplate": template})[0]["spec"]
    rendered, volume_names = spec["initContainers"][0], [volume["name"] for volume in spec["volumes"]]
    assert rendered["ports"] == [{"containerPort": 9464, "name": "lmcache-metrics", "protocol": "TCP"}]
    assert "volumeDevices" not in rendered
    assert {mount["name"] for mount in rendered["volumeMounts"]} <= set(volume_names)
    assert max(map(len, volume_names)) <= 63
    assert len(set(volume_names)) == len(volume_names)


@pytest.mark.parametrize(
    "command", [["tini", "--", "vllm", "serve"], ["nice", "-n", "5", "/usr/bin/vllm", "serve"]]
)
def test_options_of_a_wrapper_command_are_not_engine_options(command: list[str]) -> None:
    assert init_containers(pod_spec(command=command)) == ["lmcache-sidecar", "lmcache-payload"]
    with pytest.raises(InvalidSpecError, match="second model"):
        pod_spec(command=[*command, "--"])


def waiting(container: str, reason: str) -> dict[str, Any]:
    return {"name": container, "state": {"waiting": {"reason": reason, "message": "x: not found"}}}


def test_pod_that_cannot_start_because_of_its_cache_degrades_the_cluster() -> None:
    (injected_pod,) = injected(pod())
    placing = {"type": "PodScheduled", "status": "False"}
    unplaced = placing | {"reason": "Unschedulable", "message": "1 Insufficient memory"}
    queued = placing | {"reason": "SchedulingGated", "message": "blocked"}
    other_containers = [waiting("fetch", "ImagePullBackOff")]
    engine_statuses = [waiting("vllm", "ImagePullBackOff")]
    for status, expected in (
        ({"initContainerStatuses": [waiting("lmcache-sidecar", "ImagePullBackOff")]},
         [("ImagePullBackOff", "pod llm, container lmcache-sidecar: x: not found")]),
        ({"conditions": [unplaced]},
         [("Unschedulable", "pod llm requests 1.53Gi of memory for a memory tier of 1Gi "
           "(spec.tiers.memory.size). Scheduler: 1 Insufficient memory")]),
        ({"conditions": [unplaced | {"message": "1 Insufficient nvidia.com/gpu"}]}, []),
        ({"conditions": [queued]}, []),
        ({"initContainerStatuses": other_containers, "containerStatuses": engine_statuses}, []),
        ({}, []),
    ):  # fmt: skip
        assert [*map(tuple, status_of(injected_pod | {"status": status}).degraded)] == expected
