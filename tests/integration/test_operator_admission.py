"""Admission of LMCacheClusters by a real API server: refused with a sentence, or stored as written."""

from collections.abc import Iterator

import pytest
import yaml

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, example, new_namespace
from tests.harness.operator_model import cluster
from tools.resource_docs import COMPLETE

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def admission(plane: Cluster) -> Iterator[str]:
    """A namespace for objects that no operator needs to handle."""
    with new_namespace(plane, "admission") as namespace:
        yield namespace


def create(plane: Cluster, namespace: str, query: str = "?dryRun=All", **spec: Object) -> Object:
    resource = cluster(**spec)
    resource["metadata"] = {"name": "demo"}
    created: Object = plane.api.request("POST", plane.api.path(CLUSTERS, namespace) + query, resource)
    return created


def remote(url: str) -> Object:
    return {"tiers": {"remote": {"external": {"url": url}}}}


def pod(**spec: object) -> Object:
    return {"engine": {"podTemplate": {"spec": spec}}}


def keys(secret: str) -> Object:
    return {"secretRef": {"name": secret}}


def is_in(part: object, whole: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and is_in(v, whole[k]) for k, v in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_in, part, whole))
    return part == whole


SGLANG: Object = {"kind": "SGLang"}
SPLIT: Object = {"router": {}, "tiers": {"peers": {}}, "engine": {"prefill": {}}}
REFUSED = [
    (remote("redis://h:99999"), "must be redis://host:port/db"),
    (remote("redis://:6379,,,"), "must be redis://host:port/db"),
    (remote("redis://h?verify=none"), "must be redis://host:port/db"),
    (remote("rediss://h?verify=banana"), "must be redis://host:port/db"),
    (remote("redis://user:word@h"), "credentials belong in authSecretRef"),
    ({"tiers": {"memory": {"size": "4GB"}}}, "an amount of bytes such as 64Gi or 0.5Ti"),
    ({"tiers": {"memory": {"size": "17Ti"}}}, "between 64Mi and 16Ti"),
    ({"tiers": {"disk": {"size": "512Mi"}}}, "tiers.disk.size must be between 1Gi and 1024Ti"),
    (
        {"tiers": {"disk": {"size": "1Gi", "storageClassName": "Fast_One"}}},
        "spec.tiers.disk.storageClassName",
    ),
    ({"tiers": {"disk": {"size": "1Gi", "encryption": keys("Kv_Keys")}}}, "must be the name of a Secret"),
    ({"tiers": {"disk": {"size": "1Gi", "encryption": {}}}}, "spec.tiers.disk.encryption.secretRef"),
    ({"tiers": {"remote": {"encryption": keys("kv-keys")}}}, "exactly one of managed, external"),
    ({"tiers": {"peers": {"bytesPerSecond": "1Ki"}}}, "bytesPerSecond must be between 16Mi and 1Ti"),
    ({"tiers": {"peers": {"clusterRef": {"name": "demo"}}}}, "must name another LMCacheCluster"),
    ({"tiers": {"peers": {"clusterRef": {"name": "Other"}}}}, "spec.tiers.peers.clusterRef.name"),
    ({"tiers": {"peers": {"bytesPerSecond": "fast"}}}, "an amount of bytes such as 64Gi or 0.5Ti"),
    ({"engine": {"prefill": {}}}, "engine.prefill needs router and tiers.peers"),
    (SPLIT | {"tiers": {}}, "engine.prefill needs router and tiers.peers"),
    (SPLIT | {"engine": SGLANG | {"prefill": {}}}, "engine.prefill needs engine.kind vLLM"),
    (SPLIT | {"engine": {"prefill": {"gpu": {"count": 2}}}}, "gpu.count must equal engine.gpu.count"),
    (SPLIT | {"engine": {"prefill": {"args": ["--tp=2"]}}}, "engine.replicas for more engines"),
    (SPLIT | {"engine": {"prefill": {"resources": {"limits": 5}}}}, "spec.engine.prefill.resources.limits"),
    ({"tiers": {"admit": "Some"}}, 'supported values: "All", "OnReuse"'),
    ({"engine": {"image": "UPPER/::bad@@"}}, "must be an image such as"),
    ({"sidecar": {"image": "a b"}}, "must be an image such as"),
    ({"engine": {"args": ["--data-parallel-size=2"]}}, "engine.replicas for more engines"),
    ({"engine": {"args": ["--nnodes", "2"]}}, "engine.replicas for more engines"),
    ({"engine": {"args": ["--tp=2"]}}, "engine.replicas for more engines"),
    ({"engine": {"args": ["--dp-size", "2"]}}, "engine.replicas for more engines"),
    ({"engine": {"kind": "TensorRT-LLM"}}, 'supported values: "vLLM", "SGLang"'),
    ({"engine": SGLANG, "sidecar": {"transfer": "CudaIPC"}}, "set sidecar.transfer to Auto or SharedMemory"),
    ({"engine": SGLANG, "sidecar": {"chunkTokens": 512}}, "set --page-size in engine.args"),
    ({"engine": {"args": ["--x=\0"]}}, r"spec.engine.args\[0\]"),
    ({"model": {"name": "org/mo\0del"}}, "spec.model.name"),
    ({"sidecar": {"transfer": "cuda"}}, 'supported values: "Auto", "CudaIPC", "SharedMemory"'),
    ({"engine": {"gpu": {"deviceClassName": "a", "resourceName": "b/c"}}}, "exclude each other"),
    ({"engine": {"gpu": {"deviceClassName": "No_Class"}}}, "spec.engine.gpu.deviceClassName"),
    ({"engine": {"env": [{"name": "A", "value": 5}]}}, r"spec.engine.env\[0\].value"),
    ({"engine": {"env": [{"value": "x"}]}}, r"spec.engine.env\[0\].name"),
    ({"engine": {"resources": {"limits": 5}}}, "spec.engine.resources.limits"),
    ({"engine": {"sharedMemorySize": "1Mi"}}, "engine.sharedMemorySize must be between 64Mi and 16Ti"),
    ({"engine": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "topologyKey"),
    (pod(priorityClassName=5), "spec.engine.podTemplate.spec.priorityClassName"),
    (pod(containers=[{"name": "engine", "env": [{"name": "A", "value": 5}]}]), r"env\[0\].value"),
    (pod(tolerations={}), "spec.engine.podTemplate.spec.tolerations"),
    ({"model": {"volume": {"persistentVolumeClaim": {"claimName": 5}}}}, "persistentVolumeClaim.claimName"),
    ({"model": {"volume": {"persistentVolumeClaim": {}}}}, "persistentVolumeClaim.claimName"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_specs_that_cannot_run_are_refused(plane, admission, spec, message):
    with pytest.raises(ApiError, match=message) as refused:
        create(plane, admission, **spec)
    assert refused.value.code == 422


@pytest.mark.parametrize(
    "spec",
    [
        remote("rediss-sentinel://a:1,[fd00::1]/master/3?prefix=x&verify=ca"),
        {"tiers": {"memory": {"size": "0.5Ti"}}},
        {"tiers": {"disk": {"size": "0.5Ti", "storageClassName": "local-nvme"}, "admit": "OnReuse"}},
        {"tiers": {"disk": {"size": "1Gi", "encryption": keys("kv-keys")}}},
        {"tiers": {"remote": {"clusterRef": {"name": "kv"}, "encryption": keys("kv.keys-2")}}},
        {"tiers": {"peers": {}}},
        {"tiers": {"peers": {"clusterRef": {"name": "other"}}}},
        SPLIT,
        SPLIT | {"engine": {"prefill": {"replicas": 0, "gpu": {"deviceClassName": "gpu.nvidia.com"}}}},
        SPLIT
        | {"engine": {"prefill": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}}},
        {"engine": SGLANG | {"replicas": 2}, "tiers": {"peers": {"bytesPerSecond": "1.5G"}}},
        {"engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}}, "sidecar": {"transfer": "CudaIPC"}},
        {"engine": {"gpu": {"resourceName": "amd.com/gpu"}}, "sidecar": {"transfer": "SharedMemory"}},
        {"engine": SGLANG | {"gpu": {"deviceClassName": "gpu.nvidia.com"}}, "sidecar": {"transfer": "Auto"}},
        {"engine": SGLANG | {"args": ["--page-size=32"]}, "sidecar": {"transfer": "SharedMemory"}},
        {"engine": {"kind": "vLLM"}, "sidecar": {"transfer": "CudaIPC", "chunkTokens": 512}},
        {"engine": {"resources": {"limits": {"memory": "64Gi", "cpu": 8}}, "sharedMemorySize": "1.5G"}},
        {"engine": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}},
        {"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}},
        {"engine": {"image": "ghcr.io/a/b:c@sha256:" + "0" * 64}},
        {"engine": {"args": ["--max-model-len", "8192", "--chat-template=\U0001f999\n{}"]}},
        {"model": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}},
        # Partial pods that only become complete by the operator's rendering. null removes a field.
        pod(containers=[{"name": "engine", "resources": {"limits": {"cpu": 8, "memory": "64Gi"}}}]),
        pod(containers=[{"name": "engine", "livenessProbe": {"httpGet": None, "exec": {"command": ["x"]}}}]),
        pod(volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}], nodeSelector={"gpu": "h200"}),
        {"engine": {"podTemplate": {"metadata": {"labels": {"a": "b"}, "creationTimestamp": None}}}},
    ],
)
def test_valid_specs_are_stored_as_written(plane, admission, spec):
    written, admitted = (
        cluster(**spec)["spec"],
        create(plane, admission, "?dryRun=All&fieldValidation=Strict", **spec),
    )
    assert is_in(written, admitted["spec"])


@pytest.mark.parametrize(("before", "after"), [("vLLM", "SGLang"), ("SGLang", "vLLM"), (None, "SGLang")])
def test_kind_of_the_engine_cannot_be_changed(plane, namespace, before, after):
    engine = {"replicas": 0} | ({"kind": before} if before else {})
    plane.api.create(CLUSTERS, example(engine=engine), namespace)
    same = plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"kind": before or "vLLM"}}}, namespace)
    assert same["spec"]["engine"]["kind"] == (before or "vLLM")
    with pytest.raises(ApiError, match=r"spec.engine.kind.*cannot be changed: create another LMCacheCluster"):
        plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"kind": after}}}, namespace)


@pytest.mark.parametrize("name", ["demo-prefill", "a" * 38])
def test_prefill_needs_a_name_that_can_be_extended(plane, admission, name):
    resource = cluster(**SPLIT)
    resource["metadata"] = {"name": name}
    with pytest.raises(ApiError, match="at most 37 characters and must not end with -prefill") as refused:
        plane.api.request("POST", plane.api.path(CLUSTERS, admission) + "?dryRun=All", resource)
    assert refused.value.code == 422


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"peers": {}}, "none of memory, disk and peers"),
        ({"remote": {"encryption": keys("kv-keys")}}, "remote.encryption needs an engine: set it at the"),
    ],
)
def test_peers_and_encryption_need_an_engine(plane, admission, tiers, message):
    resource = cluster({"tiers": {"remote": {"managed": {"memoryPerShard": "1Gi"}}}}, tiers=tiers)
    resource["metadata"] = {"name": "demo"}
    with pytest.raises(ApiError, match=message) as refused:
        plane.api.request("POST", plane.api.path(CLUSTERS, admission) + "?dryRun=All", resource)
    assert refused.value.code == 422


def test_complete_example_of_the_reference_is_admitted(plane, admission):
    complete = yaml.safe_load(COMPLETE)
    query = "?dryRun=All&fieldValidation=Strict"
    admitted = plane.api.request("POST", plane.api.path(CLUSTERS, admission) + query, complete)
    assert is_in(complete["spec"], admitted["spec"])


def test_misspelt_pod_field_is_refused_by_strict_validation(plane, admission):
    with pytest.raises(ApiError, match=r'unknown field "spec.engine.podTemplate.spec.nodeSelectr"'):
        create(plane, admission, "?dryRun=All&fieldValidation=Strict", **pod(nodeSelectr={}))


def test_deeply_nested_fields_are_pruned_at_admission(plane, admission):
    deep: Object = {}
    for _ in range(600):
        deep = {"spec": deep}
    created = create(plane, admission, engine={"podTemplate": deep}, model={"volume": deep})
    assert created["spec"]["engine"]["podTemplate"] == {"spec": {}}
    assert created["spec"]["model"]["volume"] == {}


def test_argument_with_any_unicode_text_reaches_the_engine(plane, operator: Operator, namespace):
    """An apply patch is YAML. YAML has no surrogate pairs and breaks lines where JSON does not."""
    text = "--chat-template=a\U0001f999b\u2028c\x85d\x7f\ufeffe"
    plane.api.create(CLUSTERS, example(engine={"args": [text]}), namespace)
    plane.wait(lambda: plane.api.find("apps/v1/statefulsets", f"{NAME}-engine", namespace))
    live = plane.api.get("apps/v1/statefulsets", f"{NAME}-engine", namespace)
    assert live["spec"]["template"]["spec"]["containers"][0]["args"][-1] == text
