"""The setup of a chart user on a node: the operator as a pod, a Redis with a password, a tiny model, an
engine image, and LMCacheClusters that use them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testing.child_process import REPOSITORY
from testing.engine import upstream
from testing.engine.tiny_model import tiny_model
from testing.kube.api import Object
from testing.kube.operator import CHART, CLUSTERS, RELEASE, SERVICE_ACCOUNT, SYSTEM_NAMESPACE
from testing.node.cluster import NodeCluster
from testing.node.pods import Pod, is_ready

NAMESPACE, REDIS_NAMESPACE = "app", "cache"
REDIS_URL, REDIS_SECRET = "redis://kv.cache.svc:6379/0", "kv-auth"
PASSWORD = "correct-horse"
OPERATOR = SERVICE_ACCOUNT
"""The Deployment has the same name."""
READY_SECONDS = 420
"""An engine starts in a minute on an idle machine. Several engines next to other work need longer."""
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
# The engine's image is small: the 6 GB that a real image contains are in these directories of the machine.
HOST_DIRECTORIES = {"venv": (REPOSITORY / ".venv").resolve(), "python": Path(sys.base_prefix)}
_MODELS, _UPSTREAM = "models", "upstream"
UPSTREAM_FOLDER = Path("/opt/upstream")
"""Folder of LMCache's own package in engine containers."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request with logprobs compiles C++ for 15 s
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}
ENGINE_ARGS = (
    "--served-model-name=tiny", "--dtype=float32", "--enforce-eager", "--max-model-len=9000",
    "--block-size=32", "--max-num-seqs=8", "--max-num-batched-tokens=2048",
    "--kv-cache-memory-bytes=167772160", "--enable-prompt-tokens-details",
)  # fmt: skip


def prepare(node: NodeCluster, references: Mapping[str, str]) -> None:
    """Create namespaces that enforce ``restricted``, volumes, and Redis as a pod with a Service, without
    waiting. ``references`` are the names of the images.
    """
    for namespace in (SYSTEM_NAMESPACE, NAMESPACE, REDIS_NAMESPACE):
        node.api.apply("v1/namespaces", _namespace(namespace))
    for namespace in (NAMESPACE, REDIS_NAMESPACE):
        secret = {"metadata": {"name": REDIS_SECRET}, "stringData": {"password": PASSWORD}}
        node.api.create("v1/secrets", secret, namespace)
    for name, path in {**HOST_DIRECTORIES, _MODELS: tiny_model(), _UPSTREAM: upstream.package()}.items():
        create_claim(node, name, path)
    node.api.create("v1/pods", _redis(references["redis"]), REDIS_NAMESPACE)
    service = {"metadata": {"name": "kv"}, "spec": {"selector": {"app": "kv"}, "ports": [{"port": 6379}]}}
    node.api.create("v1/services", service, REDIS_NAMESPACE)


def install(node: NodeCluster, *flags: str) -> None:
    """Install the chart by helm, and wait until the operator's pod and Redis are ready."""
    node.helm("upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, *flags)
    node.reached("chart installed")
    node.wait(lambda: _is_available(node.api.get("apps/v1/deployments", OPERATOR, SYSTEM_NAMESPACE)), 180)
    node.reached("operator ready")
    node.wait(lambda: is_ready(node.api.get("v1/pods", "kv", REDIS_NAMESPACE)), 180)
    node.reached("Redis ready")


def tiny_cluster(name: str, image: str, **tiers: Any) -> Object:
    """An LMCacheCluster with one vLLM, the tiny model, 512 MiB of memory, and the Redis or ``tiers``."""
    pod = engine_pod({**HOST_DIRECTORIES, _UPSTREAM: UPSTREAM_FOLDER}, ENVIRONMENT)
    return cluster(name, {"image": image, "args": list(ENGINE_ARGS), "podTemplate": {"spec": pod}}, **tiers)


def engine_pod(folders: Mapping[str, Path], environment: Mapping[str, str]) -> Object:
    """The spec of a pod template whose engine has these variables, and these folders of the machine, by the
    names of their claims.
    """
    engine = {
        "name": "engine",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "volumeMounts": [
            {"name": claim, "mountPath": str(path), "readOnly": True} for claim, path in folders.items()
        ],
        # Two of them fit on a node with two CPUs. Tests exceed the limit on purpose.
        "resources": {"requests": {"cpu": "200m", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
    }
    return {"containers": [engine], "volumes": [_claimed(claim) for claim in folders]}


def cluster(name: str, engine: Object, **tiers: Any) -> Object:
    """An LMCacheCluster with this ``spec.engine``, the tiny model, 512 MiB of memory, and the Redis or
    ``tiers``.
    """
    redis = {"external": {"url": REDIS_URL, "authSecretRef": {"name": REDIS_SECRET}}}
    claim = {"persistentVolumeClaim": {"claimName": _MODELS, "readOnly": True}}
    return {
        "apiVersion": "lmcache.io/v1alpha1",
        "kind": "LMCacheCluster",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "/models", "volume": claim},
            "engine": {"gpu": {"count": 0}, **engine},
            "tiers": {"memory": {"size": "512Mi"}, "remote": redis, **tiers},
        },
    }


class App:
    """One LMCacheCluster on a node, and its pods."""

    def __init__(self, node: NodeCluster, spec: Object) -> None:
        self.node, self.spec = node, spec
        self.name: str = spec["metadata"]["name"]

    def apply(self) -> None:
        """Apply the current `spec`."""
        self.node.api.apply(CLUSTERS, self.spec, NAMESPACE)

    def declare_memory(self, size: str) -> None:
        """Set the size of the memory tier and apply it."""
        self.spec["spec"]["tiers"]["memory"]["size"] = size
        self.apply()

    def secret_name(self, purpose: str) -> str:
        """Name of a Secret that the operator creates for the cluster."""
        uid = self.node.api.get(CLUSTERS, self.name, NAMESPACE)["metadata"]["uid"]
        return f"{self.name}-{purpose}-{uid}"

    def delete(self) -> None:
        """Delete the cluster, and wait until its pods are deleted."""
        self.node.api.delete(CLUSTERS, self.name, NAMESPACE)
        self.node.wait(lambda: not self.pods(), 180)

    def pods(self) -> list[Pod]:
        selector = f"lmcache.io/cluster={self.name},lmcache.io/component=engine"
        return [Pod(self.node, obj) for obj in self.node.api.objects("v1/pods", NAMESPACE, selector)]

    def pod(self, number: int | str = 0) -> Pod:
        """The current pod with this ordinal, or with GROUP-RANK. Raises `ApiError` 404."""
        name = f"{self.name}-engine-{number}"
        return Pod(self.node, self.node.api.get("v1/pods", name, NAMESPACE))

    def ready_pod(self, number: int | str = 0, *, instead_of: Pod | None = None) -> Pod:
        """Wait until the pod is Ready, and not ``instead_of``. Returns the pod."""

        def look() -> Pod | None:
            pod = self.pod(number)
            is_other = instead_of is None or pod.uid != instead_of.uid
            return pod if pod.is_ready and is_other else None

        return self.node.wait(look, READY_SECONDS)

    def conditions(self) -> dict[str, Object]:
        status = self.node.api.get(CLUSTERS, self.name, NAMESPACE).get("status", {})
        return {condition["type"]: condition for condition in status.get("conditions", [])}

    def wait_condition(self, kind: str, status: str = "True", timeout: float = READY_SECONDS) -> Object:
        """Wait until the condition has this status for the latest spec. Returns the condition.

        A cluster that serves, but does not match its spec yet, does not count as Ready.
        """

        def look() -> Object | None:
            cluster = self.node.api.get(CLUSTERS, self.name, NAMESPACE)
            is_current = (
                cluster.get("status", {}).get("observedGeneration") == cluster["metadata"]["generation"]
            )
            condition = self.conditions().get(kind)
            if not is_current or condition is None or condition["reason"] == "Serving":
                return None
            return condition if condition["status"] == status else None

        return self.node.wait(look, timeout)


def _is_available(deployment: Object) -> bool:
    status = deployment.get("status", {})
    num_replicas = deployment["spec"]["replicas"]
    is_observed = status.get("observedGeneration") == deployment["metadata"]["generation"]
    are_available = status.get("availableReplicas") == status.get("updatedReplicas") == num_replicas
    return bool(is_observed and are_available)


def create_claim(node: NodeCluster, name: str, path: Path, namespace: str = NAMESPACE) -> None:
    """Create a claim for a directory of this machine. Restricted pods may not mount it directly."""
    size = {"storage": "1Gi"}
    volume = {
        "capacity": size, "accessModes": ["ReadOnlyMany"], "hostPath": {"path": str(path)},
        "claimRef": {"namespace": namespace, "name": name}, "persistentVolumeReclaimPolicy": "Retain",
    }  # fmt: skip
    node.api.create("v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
    claim = {
        "accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": name,
        "resources": {"requests": size},
    }  # fmt: skip
    node.api.create("v1/persistentvolumeclaims", {"metadata": {"name": name}, "spec": claim}, namespace)


def _claimed(name: str) -> Object:
    return {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}}


def _redis(image: str) -> Object:
    secret = {"secretKeyRef": {"name": REDIS_SECRET, "key": "password"}}
    container = {
        "name": "redis",
        "image": image,
        "args": [
            "--requirepass", "$(PASSWORD)", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru",
            "--save", "", "--dir", "/tmp",
        ],
        "env": [{"name": "PASSWORD", "valueFrom": secret}],
        "readinessProbe": {"tcpSocket": {"port": 6379}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    security = {"runAsNonRoot": True, "runAsUser": 999, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": security, "automountServiceAccountToken": False}
    return {"metadata": {"name": "kv", "labels": {"app": "kv"}}, "spec": spec}


def _namespace(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": _RESTRICTED}}
