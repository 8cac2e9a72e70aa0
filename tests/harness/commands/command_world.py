"""Clusters, pods and reports of sidecars for the tests of commands."""

from datetime import UTC, datetime
from typing import Any

from lmcache_cli.commands.gather import Gathered, PodFigures
from lmcache_operator.pods.pods import is_ready
from tests.harness.operator.model import cluster

NOW = 1_767_225_600.0
GiB = 1 << 30


def pod(number: int = 0, *, is_ready: bool = True, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    """Return an engine pod."""
    name = f"demo-engine-{number}"
    status = {"phase": phase, "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": str(is_ready)}]}
    sidecar = {"name": "sidecar", "ports": [{"name": "metrics", "containerPort": 9464}]}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "spec": {"initContainers": [sidecar], "containers": [{"name": "engine"}]} | spec,
        "status": status,
    }


def stats(**changes: Any) -> dict[str, Any]:
    """Return /stats of a healthy sidecar: half of 1,000 tokens came from memory."""
    return {
        "version": "0.1.0",
        "is_ready": True,
        "uptime_seconds": 7300.0,
        "num_clients": {"attached": 2},
        "memory": {"size_bytes": 4 * GiB, "used_bytes": GiB},
        "remote": {"is_reachable": True, "used_bytes": 10 * GiB},
        "lookups": {"engine_kv_bytes": 8 * GiB},
        "causes": {
            "prompt_tokens": 1000,
            "cause_tokens": {"engine": 100, "memory": 500, "new": 300, "evicted": 90, "tail": 10},
            "diverged_requests": {},
            "diverged_tokens": {},
            "branches": [],
        },
    } | changes


def figures(number: int = 0, **changes: Any) -> PodFigures:
    """Return a healthy pod with the report of its sidecar."""
    return PodFigures(pod(number), stats(**changes))


def condition(kind: str, status: str, reason: str = "Because", message: str = "a message") -> dict[str, str]:
    """Return a condition of an LMCacheCluster."""
    return {"type": kind, "status": status, "reason": reason, "message": message}


def gathered(
    *pods: PodFigures, problems: tuple[str, ...] = (), conditions: Any = (), **spec: Any
) -> Gathered:
    """Return what a command gathered of a cluster ``team/demo``, whose operator works."""
    resource = cluster(**spec)
    if "engine" in resource["spec"]:
        resource["spec"]["engine"].setdefault("replicas", max(1, len(pods)))
    resource["status"] = {
        "conditions": list(conditions or [condition("Ready", "True")]),
        "readyReplicas": sum(is_ready(each.pod) for each in pods),
        "observedGeneration": resource["metadata"]["generation"],
        "lastHeartbeatTime": time_before_now(20),
    }
    return Gathered(resource, pods, problems, NOW)


def time_before_now(seconds: float) -> str:
    """Return the time ``seconds`` before `NOW`, as the API server writes it."""
    return datetime.fromtimestamp(NOW - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
