"""Admission of LMCacheClusters by a real API server: refused with a sentence, or stored as written.

No operator takes part. Unit tests of the parser have more cases. Each rule of the definition has a case here,
because only the API server evaluates the rules.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from lmcache_operator.policy.report import tier_status
from lmcache_operator.policy.state import Decision, Point
from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import CRDS
from tests.harness.kube import CLUSTERS, new_namespace
from tests.harness.operator.autoscaling import ACCEPTED, GIB
from tests.harness.operator.model import cluster
from tools.resource_docs import COMPLETE

pytestmark = pytest.mark.kube

MANAGED = {"managed": {"memoryPerShard": "1Gi"}}
ALONE: Object = {"model": None, "engine": None, "tiers": {"memory": None, "remote": MANAGED}}
GATEWAY = {"podSelector": {"matchLabels": {"app": "gateway"}}}
BLOCK = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
SGLANG: Object = {"kind": "SGLang"}
CACHE_AWARE: Object = {"router": {"policy": "CacheAware"}}
BY_LOAD: Object = {"router": {"policy": "PowerOfTwo", "args": ["--max-concurrent-requests=9"]}}
ONE_POOL: Object = {"router": {"policy": "RoundRobin", "args": ["--decode-policy=kv_aware"]}}


def engine(**fields: Any) -> Object:
    return {"engine": fields}


def tiers(**fields: Any) -> Object:
    return {"tiers": fields}


def external(url: str) -> Object:
    return tiers(remote={"external": {"url": url}})


def pod(**spec: Any) -> Object:
    return engine(podTemplate={"spec": spec})


def keys(secret: str) -> Object:
    return {"secretRef": {"name": secret}}


def alone(**changes: Any) -> Object:
    """A remote tier without engines."""
    return ALONE | changes


def over(nodes: int, gpus: int = 1, tensor: int = 1, data: int | None = None, **fields: Any) -> Object:
    """An engine over several nodes, by default with one data-parallel rank in each pod."""
    parallelism = {"tensor": tensor, "data": nodes if data is None else data}
    return engine(nodes=nodes, gpu={"count": gpus}, parallelism=parallelism, **fields)


def blending(**fields: Any) -> Object:
    return engine(blend={"mode": "Request"}, **fields)


def split(**prefill: Any) -> Object:
    return {"router": {}, "tiers": {"peers": {}}, "engine": {"prefill": prefill}}


def scaling(*, remote: Any = None, **fields: Any) -> Object:
    managed = {"managed": {"shards": 2, "memoryPerShard": "1Gi"}}
    return {
        "autoscaling": fields | ({"remote": remote} if remote else {}),
        "tiers": {"memory": {"size": "64Gi"}} | ({"remote": managed} if remote else {}),
    }


def named(*tenants: Object, **more: Any) -> Object:
    return {"tenants": {"named": list(tenants), **more}}


def salted(digit: str, **more: Any) -> Object:
    return {"name": f"t{digit}", "saltHash": digit * 64, **more}


def of_secret(name: str = "s", **more: Any) -> Object:
    return {"name": f"of-{name}", "saltSecretRef": {"name": name}, **more}


REFUSED = [
    (engine(kind="TensorRT-LLM"), 'supported values: "vLLM", "SGLang"'),
    (engine(replicas=-1), "spec.engine.replicas"),
    (engine(image="UPPER/::bad@@"), "must be an image such as"),
    (engine(args=["--x=\0"]), "spec.engine.args[0]"),
    (engine(args=["--nnodes", "2"]), "set engine.parallelism and engine.nodes, and engine.replicas for more"),
    (
        engine(args=["--tp=2"]),
        "set engine.parallelism and engine.nodes, and engine.replicas for more engines",
    ),
    (engine(gpu={"count": 3}, parallelism={"data": 2}), "x pipeline x data must equal nodes x gpu.count"),
    (engine(parallelism={"data": 257}), "spec.engine.parallelism.data"),
    (over(33), "spec.engine.nodes"),
    (over(2, data=4), "x pipeline x data must equal nodes x gpu.count"),
    (over(2, gpus=0, data=3), "set parallelism.data to a multiple of nodes, or to 1"),
    (over(2, gpus=0, tensor=3, data=1), "With 1, tensor x pipeline must be a multiple of nodes"),
    (over(2, gpus=6, tensor=4, data=3), "a data-parallel rank must fill whole pods, or a pod whole ranks"),
    (over(4, tensor=2, data=2), "set parallelism.data to a multiple of nodes, or to 1"),
    (over(2, replicas=501), "replicas x nodes must be at most 1000"),
    (over(2, **SGLANG), "engine.nodes needs engine.kind vLLM for now"),
    (over(2, prefill={}) | {"router": {}}, "prefill pods span one node for now"),
    (over(2, topologyKey="a/b/c"), "spec.engine.topologyKey"),
    (engine(topologyKey="rack"), "topologyKey needs nodes > 1"),
    (engine(**SGLANG, parallelism={"expert": True}), "engine.parallelism.expert needs engine.kind vLLM"),
    (engine(gpu={"deviceClassName": "a", "resourceName": "b/c"}), "exclude each other"),
    (blending(**SGLANG), "engine.blend needs engine.kind vLLM for now: leave it out"),
    (engine(**SGLANG, hintsRoute=True), "engine.hintsRoute needs engine.kind vLLM: leave it out"),
    (blending(nodes=2, parallelism={"data": 2}), "engine.blend needs engines of one pod for now"),
    (blending(gpu={"count": 2}, parallelism={"pipeline": 2}), "blend, or set parallelism.tensor"),
    (blending(gpu={"count": 2}, parallelism={"data": 2, "expert": True}), "these ranks step together"),
    (split() | blending(prefill={}), "engine.blend does not work with engine.prefill"),
    (blending(args=["--enable_lora"]), "leave out blend, or --enable-lora in args"),
    (engine(blend={"mode": "Auto"}, args=["--enable_lor"]), "leave out blend, or --enable-lora in args"),
    (engine(blend={"mode": False}), "spec.engine.blend.mode"),
    (engine(blend={"ratioPercent": 0.15}), "spec.engine.blend.ratioPercent"),
    (engine(env=[{"name": "A", "value": 5}]), "spec.engine.env[0].value"),
    (engine(env=[{"value": "x"}]), "spec.engine.env[0].name"),
    (engine(resources={"limits": 5}), "spec.engine.resources.limits"),
    (engine(sharedMemorySize="1Mi"), "engine.sharedMemorySize must be between 64Mi and 16Ti"),
    (engine(topologySpreadConstraints=[{"maxSkew": 1}]), "topologyKey"),
    (engine(replica=3), 'unknown field "spec.engine.replica"'),
    (pod(priorityClassName=5), "spec.engine.podTemplate.spec.priorityClassName"),
    (pod(containers=[{"name": "engine", "env": [{"name": "A", "value": 5}]}]), "env[0].value"),
    (pod(tolerations={}), "spec.engine.podTemplate.spec.tolerations"),
    (pod(nodeSelectr={}), 'unknown field "spec.engine.podTemplate.spec.nodeSelectr"'),
    ({"model": None}, "model and engine belong together"),
    ({"model": {"volume": {"persistentVolumeClaim": {"claimName": 5}}}}, "persistentVolumeClaim.claimName"),
    ({"model": {"volume": {"persistentVolumeClaim": {}}}}, "persistentVolumeClaim.claimName"),
    ({"sidecar": {"chunkTokens": 17}}, "spec.sidecar.chunkTokens"),
    (engine(**SGLANG) | {"sidecar": {"transfer": "CudaIPC"}}, "set sidecar.transfer to Auto or SharedMemory"),
    (engine(**SGLANG) | {"sidecar": {"chunkTokens": 512}}, "set --page-size in engine.args"),
    # tiers
    (tiers(memory=None), "tiers.memory is required"),
    (tiers(memory={"size": "4GB"}), "must be an amount of bytes such as 64Gi or 0.5Ti"),
    (tiers(memory={"size": "17Ti"}), "tiers.memory.size must be between 64Mi and 16Ti"),
    (tiers(disk={"size": "512Mi"}), "tiers.disk.size must be between 1Gi and 1024Ti"),
    (tiers(disk={"size": "1Gi", "encryption": keys("Kv_Keys")}), "must be the name of a Secret"),
    (tiers(disk={"size": "1Gi", "encryption": {}}), "spec.tiers.disk.encryption.secretRef"),
    (tiers(peers={"bytesPerSecond": "1Ki"}), "tiers.peers.bytesPerSecond must be between 16Mi and 1Ti"),
    (tiers(peers={"clusterRef": {"name": "demo"}}), "must name another LMCacheCluster"),
    (tiers(peers={"tls": {}}), "exactly one of secretRef and issuerRef must be set"),
    (tiers(remote={}), "exactly one of managed, external and clusterRef must be set"),
    (tiers(remote={"managed": {"memoryPerShard": "1Ki"}}), "memoryPerShard must be between 512Mi and 16Ti"),
    (external("redis://h:99999"), "must be redis://host:port/db"),
    (external("rediss://h?verify=banana"), "must be redis://host:port/db"),
    (external("redis://user:word@h"), "credentials belong in authSecretRef"),
    # remote tiers without engines
    (alone(tiers=ALONE["tiers"] | {"peers": {}}), "none of memory, disk and peers"),
    (
        alone(tiers={"memory": None, "remote": MANAGED | {"encryption": keys("kv-keys")}}),
        "remote.encryption needs an engine: set it at the",
    ),
    (alone(router={}), "router needs an engine"),
    (alone(clients=[]), "clients needs an engine"),
    (alone(tenants={}), "tenants needs an engine"),
    (alone(autoscaling={"remote": {"maxShards": 2}}), "autoscaling needs an engine"),
    # prefill and router
    (engine(prefill={}), "engine.prefill needs router and tiers.peers"),
    (split() | engine(prefill={}, **SGLANG) | CACHE_AWARE, "engine.prefill needs engine.kind vLLM"),
    (split(gpu={"count": 2}), "engine.prefill.gpu.count must equal engine.gpu.count"),
    (split(resources={"limits": 5}), "spec.engine.prefill.resources.limits"),
    ({"router": {"args": ["--request-timeout-secs", "1"]}}, "write each argument as --name=value"),
    (engine(**SGLANG) | {"router": {}}, "set router.policy to CacheAware"),
    # clients and pull secrets
    ({"clients": [{}]}, "each client needs podSelector, namespaceSelector or both, or ipBlock alone"),
    ({"clients": [{"podSelector": None}]}, "each client needs podSelector, namespaceSelector or both"),
    ({"clients": [BLOCK | GATEWAY]}, "each client needs podSelector, namespaceSelector or both"),
    ({"clients": [{"podSelector": {"matchLabels": {"a": 1}}}]}, "clients[0].podSelector.matchLabels.a"),
    ({"clients": [{"ipBlock": {"except": []}}]}, "spec.clients[0].ipBlock.cidr"),
    ({"clients": {"podSelector": {}}}, "spec.clients"),
    ({"clients": [GATEWAY] * 65}, "must have at most 64 items"),
    (split() | {"clients": [GATEWAY] * 64}, "clients may have at most 63 items with engine.prefill"),
    ({"images": {"pullSecrets": ["a", "a"]}}, "Duplicate value"),
    # tenants
    (named(salted("a"), salted("b", name="ta")), "Duplicate value"),
    (named(salted("a"), salted("a", name="b")), "two tenants have the same saltHash"),
    (named(of_secret(), of_secret() | {"name": "b"}), "two tenants have the same saltSecretRef"),
    (named(salted("a", minMemoryPercent=60), salted("b", minMemoryPercent=41)), "must be at most 100"),
    (named(salted("a", memoryPercent=20, minMemoryPercent=30)), "must be at most memoryPercent"),
    (named({"name": "bare"}), "exactly one of saltHash and saltSecretRef"),
    (named(salted("a", name="default")), "use tenants.default"),
    (named(salted("a", lowerTierBytes="0")), "tenants.named[].lowerTierBytes must be between 1 and 1024Ti"),
    (named(default={"lowerTierBytes": "0.5"}), "tenants.default.lowerTierBytes must be between 1 and 1024Ti"),
    (named(header=True) | engine(**SGLANG), "tenants.header needs engine.kind vLLM"),
    (named() | {"router": {}}, "router.policy must be PowerOfTwo or RoundRobin, or CacheAware without"),
    (named() | {"router": {"policy": "ConsistentHash"}}, "depend on other tenants' prompts"),
    (named(header=True) | CACHE_AWARE, "or CacheAware without tenants.header"),
    (split() | named() | ONE_POOL, "use router.policy for both pools"),
    (split() | BY_LOAD | named(header=True), "vLLM's router drops the header with engine.prefill"),
    # autoscaling
    (scaling(mode="Auto"), "mode Auto changes only tiers with bounds"),
    (scaling(memory={"maxSize": "1Ki"}), "autoscaling.memory.maxSize must be between 64Mi and 16Ti"),
    (
        scaling(memory={"minSize": "1Ki", "maxSize": "64Gi"}),
        "autoscaling.memory.minSize must be between 64Mi and 16Ti",
    ),
    (scaling(memory={"minSize": "128Gi", "maxSize": "64Gi"}), "minSize must not be more than maxSize"),
    (scaling(memory={"maxSize": "32Gi"}), "tiers.memory.size must be within autoscaling.memory.minSize"),
    ({"autoscaling": {"remote": {"maxShards": 2}}}, "autoscaling.remote needs tiers.remote.managed"),
    (scaling(remote={"minShards": 3, "maxShards": 2}), "minShards must not be more than maxShards"),
    (scaling(remote={"maxShards": 1}), "shards must be within autoscaling.remote.minShards and maxShards"),
    (scaling(prices={"gpuHour": "cheap"}), "must be an amount in USD"),
]
"""Changes of a minimal spec, and a part of the refusal."""
NAMES = [
    (over(2), "a" * 42, "with spec.engine.nodes > 1, metadata.name must have at most 41 characters"),
    ({}, "8b", "metadata.name must start with a letter"),
    (split(), "demo-prefill", "at most 37 characters and must not end with -prefill"),
    (split(), "a" * 38, "at most 37 characters and must not end with -prefill"),
]
CHANGES = [
    ({"model": {"name": "another/model"}}, "spec.model.name", "cannot be changed: create another"),
    ({"engine": {"kind": "SGLang"}}, "spec.engine.kind", "cannot be changed: create another"),
    ({"engine": None, "model": None}, "spec", "engine cannot be added or removed: create another"),
]
STORED = [
    over(2, gpus=8, tensor=4, data=4, topologyKey="topology.kubernetes.io/rack"),
    over(32, gpus=0, data=64),
    over(4, gpus=8, tensor=32, data=1),
    over(2, gpus=0, tensor=4, data=1),
    external("rediss-sentinel://a:1,[fd00::1]/master/3?prefix=x&verify=ca"),
    tiers(memory={"size": "0.5Ti"}),
    tiers(disk={"size": "0.5Ti", "storageClassName": "local-nvme"}, admit="OnReuse"),
    tiers(disk={"size": "1Gi", "encryption": keys("kv-keys")}),
    tiers(remote={"clusterRef": {"name": "kv"}, "encryption": keys("kv.keys-2")}),
    tiers(peers={"clusterRef": {"name": "other"}}),
    split(replicas=0, gpu={"deviceClassName": "gpu.nvidia.com"}),
    split(nodeSelector={"a": "b"}, tolerations=[{"operator": "Exists"}]),
    engine(replicas=2, **SGLANG) | tiers(peers={"bytesPerSecond": "1.5G"}),
    engine(gpu={"deviceClassName": "gpu.nvidia.com"}) | {"sidecar": {"transfer": "CudaIPC"}},
    engine(gpu={"resourceName": "amd.com/gpu"}) | {"sidecar": {"transfer": "SharedMemory"}},
    engine(args=["--page-size=32"], **SGLANG) | {"sidecar": {"transfer": "SharedMemory"}},
    engine(kind="vLLM") | {"sidecar": {"transfer": "CudaIPC", "chunkTokens": 512}},
    engine(resources={"limits": {"memory": "64Gi", "cpu": 8}}, sharedMemorySize="1.5G"),
    blending(gpu={"count": 4}, parallelism={"tensor": 2, "data": 2}, args=["--no-enable-lora"]),
    engine(blend={"selection": "First", "ratioPercent": 0, "minTokens": 1}, **SGLANG),
    engine(blend={"mode": "Request", "separator": " ###\n"}),
    engine(blend={"mode": "Auto"}, args=["--enable-log-requests"]),
    over(2, blend={"mode": "Off"}),
    engine(nodeSelector={"a": "b"}, tolerations=[{"operator": "Exists"}]),
    engine(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]),
    engine(image="ghcr.io/a/b:c@sha256:" + "0" * 64),
    engine(args=["--max-model-len", "8192", "--chat-template=\U0001f999\n{}"]),
    {"model": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}},
    # Partial pods that only become complete by the operator's rendering. null removes a field.
    pod(containers=[{"name": "engine", "resources": {"limits": {"cpu": 8, "memory": "64Gi"}}}]),
    pod(containers=[{"name": "engine", "livenessProbe": {"httpGet": None, "exec": {"command": ["x"]}}}]),
    pod(volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}], nodeSelector={"gpu": "h200"}),
    engine(podTemplate={"metadata": {"labels": {"a": "b"}, "creationTimestamp": None}}),
    named(),
    named(of_secret(minMemoryPercent=50), salted("b", minMemoryPercent=50, lowerTierBytes="1")),
    named(header=True, default={"priority": -100}) | BY_LOAD,
    split() | CACHE_AWARE | named(),
    named(default={"memoryPercent": 30}),
    named(salted("a")) | engine(**SGLANG),
    # The most expensive object for the rules that compare all tenants with each other.
    named(*[of_secret(f"{number:0250}") | {"name": f"{number:063}"} for number in range(64)]),
    *(
        {"autoscaling": sizes, "tiers": {"memory": {"size": "64Gi"}} | more}
        for sizes, more in ACCEPTED
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def admission(plane: Cluster) -> Iterator[str]:
    """A namespace for objects that no operator needs to handle."""
    with new_namespace(plane, "admission") as namespace:
        yield namespace


def create(
    plane: Cluster, namespace: str, spec: Object, name: str = "demo", *, strict: bool = True
) -> Object:
    """Ask the API server whether it admits an object."""
    resource = cluster(**spec) | {"metadata": {"name": name}}
    validation = "Strict" if strict else "Warn"
    query = f"?dryRun=All&fieldValidation={validation}"
    created: Object = plane.api.request("POST", plane.api.path(CLUSTERS, namespace) + query, resource)
    return created


def is_in(part: object, whole: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and is_in(v, whole[k]) for k, v in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_in, part, whole))
    return part == whole


CASES = [(spec, "demo", sentence) for spec, sentence in REFUSED] + NAMES


@pytest.mark.parametrize(("spec", "name", "sentence"), CASES)
def test_specs_that_cannot_work_are_refused(plane, admission, spec, name, sentence):
    with pytest.raises(ApiError, match=re.escape(sentence)) as refused:
        create(plane, admission, spec, name)
    assert refused.value.code == (400 if "unknown field" in str(refused.value) else 422)


def rules(schema: Any) -> Iterator[str]:
    """Messages of all rules in a schema."""
    if isinstance(schema, dict):
        yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
        for part in schema.values():
            yield from rules(part)


def test_each_rule_of_the_definition_has_a_case():
    (definition,) = [path for path in CRDS if "lmcacheclusters" in path.name]
    schema = yaml.safe_load(definition.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sentences = [case[-1] for case in (*CASES, *CHANGES)]
    messages = set(rules(schema))
    assert len(messages) > 50
    assert [m for m in messages if not any(sentence in m for sentence in sentences)] == []


@pytest.mark.parametrize("spec", STORED)
def test_valid_specs_are_stored_as_written(plane, admission, spec):
    assert is_in(cluster(**spec)["spec"], create(plane, admission, spec)["spec"])


def test_complete_example_of_the_reference_is_admitted(plane, admission):
    complete = yaml.safe_load(COMPLETE)
    query = "?dryRun=All&fieldValidation=Strict"
    admitted = plane.api.request("POST", plane.api.path(CLUSTERS, admission) + query, complete)
    assert is_in(complete["spec"], admitted["spec"])


@pytest.mark.parametrize("kind", [None, "vLLM", "SGLang"])
def test_model_and_kind_of_an_engine_cannot_be_changed(plane, admission, kind):
    name = f"engine-{kind}".lower()
    spec = cluster(engine={"replicas": 0} | ({"kind": kind} if kind else {}))
    plane.api.create(CLUSTERS, spec | {"metadata": {"name": name}}, admission)
    same = plane.api.patch(CLUSTERS, name, {"spec": {"engine": {"kind": kind or "vLLM"}}}, admission)
    assert same["spec"]["engine"]["kind"] == (kind or "vLLM")
    for change, path, sentence in CHANGES:
        if kind == "SGLang" and "kind" in path:
            change = {"engine": {"kind": "vLLM"}}
        with pytest.raises(ApiError, match=f"{path}: .*{sentence}"):
            plane.api.patch(CLUSTERS, name, {"spec": change}, admission)


def test_definition_has_every_field_of_the_status_of_autoscaling(plane, admission):
    growth = Decision(64 * GIB, 108 * GIB, 108 * GIB, 108 * GIB, "it pays", "Cooldown", 0.16, 0.04)
    points = [Point(size * GIB, 0.4, 0.38, 0.42, -0.01) for size in (16, 512)]
    status = {
        "observedAt": "2026-01-01T00:00:00Z", "window": "24h", "samples": 412334,
        "memory": tier_status(growth, points) | {"keysInSize": 2048},
        "remote": tier_status(growth, points, shard_bytes=4 * GIB),
        "engineHit": "0.01", "localityLoss": {"points": "0.3", "usdPerHour": "0.01"}, "breakEvenAge": "512s",
    }  # fmt: skip
    plane.api.create(CLUSTERS, cluster() | {"metadata": {"name": "sized"}}, admission)
    plane.api.patch(CLUSTERS, "sized/status", {"status": {"autoscaling": status}}, admission)
    assert plane.api.get(CLUSTERS, "sized", admission)["status"]["autoscaling"] == status


def test_deeply_nested_fields_are_pruned_at_admission(plane, admission):
    deep: Object = {}
    for _ in range(600):
        deep = {"spec": deep}
    spec = {"engine": {"podTemplate": deep}, "model": {"volume": deep}}
    created = create(plane, admission, spec, strict=False)
    assert created["spec"]["engine"]["podTemplate"] == {"spec": {}}
    assert created["spec"]["model"]["volume"] == {}
