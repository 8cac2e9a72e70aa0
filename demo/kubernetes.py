"""Second half: a real control plane, our chart, one LMCacheCluster; it becomes Ready, scales and heals."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.show import command, note, step, title
from testing.kube.cluster import Cluster
from testing.kube.operator import SERVICE_ACCOUNT, SYSTEM_NAMESPACE, Operator
from tools.kube import binaries, machine

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE, RELEASE, NAME = "default", "lmcache", "qwen3-8b"
KIND = "lmcache.io/v1alpha1/lmcacheclusters"
CHILDREN = {
    "apps/v1/statefulsets": "StatefulSet",
    "v1/services": "Service",
    "v1/configmaps": "ConfigMap",
    "v1/serviceaccounts": "ServiceAccount",
    "policy/v1/poddisruptionbudgets": "PodDisruptionBudget",
    "networking.k8s.io/v1/networkpolicies": "NetworkPolicy",
}
REST_SECONDS = 10


def run(logs: Path) -> dict[str, object]:
    """Returns what goes into the report, times in seconds."""
    title("2. One object, a real control plane, our chart")
    with step("etcd, kube-apiserver, controller-manager, scheduler; nodes with GPUs are simulated by kwok"):
        cluster = Cluster(bin_dir=machine.directory(binaries.CLUSTER))
        cluster.__enter__()
    try:
        return _with(cluster, logs)
    finally:
        cluster.stop()


def _with(cluster: Cluster, logs: Path) -> dict[str, object]:
    command(f"helm install {RELEASE} charts/lmcache-operator -n lmcache-system --create-namespace")
    with step("installing the chart"):
        cluster.helm("install", RELEASE, str(ROOT / "charts" / "lmcache-operator"), "-n", "lmcache-system",
                     "--create-namespace")  # fmt: skip
    with Operator(cluster, logs, f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}") as operator:
        operator.start()
        note("No kubelet runs here, so the operator runs as a process, with the token of the chart's own")
        note("ServiceAccount: what the chart allows is all it can do.")
        return {**_becomes_ready(cluster), **_rests(cluster), **_scales(cluster), **_heals(cluster)}


def _becomes_ready(cluster: Cluster) -> dict[str, object]:
    example = ROOT / "examples" / "qwen3-8b.yaml"
    command("kubectl apply -f examples/qwen3-8b.yaml")
    start = time.monotonic()
    with step("waiting for the LMCacheCluster to become Ready"):
        cluster.kubectl("apply", "--server-side", "-f", example)
        cluster.wait(lambda: len(children(cluster)) >= len(CHILDREN))
        present = time.monotonic() - start
        cluster.wait(lambda: condition(cluster, "Ready") == "True", timeout=60)
        ready = time.monotonic() - start
    command("kubectl get lmcluster")
    note(cluster.kubectl("get", "lmcluster"))
    command("kubectl get all,cm,pdb,netpol -l lmcache.io/cluster=qwen3-8b")
    note("\n".join(f"{child['kind']:<22} {child['metadata']['name']}" for child in children(cluster)))
    note(cluster.kubectl("get", "pods", "-l", f"lmcache.io/cluster={NAME}"))
    return {
        "apply_to_all_children_present_seconds": round(present, 2),
        "apply_to_Ready_seconds": round(ready, 2),
    }


def _rests(cluster: Cluster) -> dict[str, object]:
    with step(f"watching it rest for {REST_SECONDS} s"):
        mark = cluster.mark()
        time.sleep(REST_SECONDS)  # the measurement itself: nothing may happen in this time
        writes = cluster.written_since(mark, by="lmcache-operator")
    note(f"writes by the operator: {len(writes)}")
    return {f"at_rest_for_{REST_SECONDS}_s_writes": len(writes)}


def _scales(cluster: Cluster) -> dict[str, object]:
    command("kubectl scale lmcluster/qwen3-8b --replicas=3")
    start = time.monotonic()
    with step("waiting for the third engine pod"):
        cluster.kubectl("scale", f"lmcluster/{NAME}", "--replicas=3")
        cluster.wait(lambda: resource(cluster)["status"].get("replicas") == 3 and len(pods(cluster)) == 3)
    return {"scale_to_3_seconds": round(time.monotonic() - start, 2)}


def _heals(cluster: Cluster) -> dict[str, object]:
    slowest = 0.0
    for child in children(cluster):
        kind, name, uid = child["path"], child["metadata"]["name"], child["metadata"]["uid"]
        cluster.api.delete(kind, name, NAMESPACE)
        took = _timed(cluster, lambda: _is_new(cluster, kind, name, uid))  # noqa: B023
        note(f"deleted {child['kind']} {name}: back after {took:.2f} s")
        slowest = max(slowest, took)
    return {"slowest_child_healed_after_deletion_seconds": round(slowest, 2)}


def _timed(cluster: Cluster, what: Callable[[], object]) -> float:
    start = time.monotonic()
    cluster.wait(what)
    return time.monotonic() - start


def _is_new(cluster: Cluster, kind: str, name: str, uid: str) -> bool:
    found = cluster.api.find(kind, name, NAMESPACE)
    return found is not None and found["metadata"]["uid"] != uid


def resource(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.get(KIND, NAME, NAMESPACE)
    return found


def condition(cluster: Cluster, kind: str) -> str:
    conditions = resource(cluster).get("status", {}).get("conditions", [])
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "Unknown")


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.api.objects("v1/pods", NAMESPACE, f"lmcache.io/cluster={NAME}")


def children(cluster: Cluster) -> list[dict[str, Any]]:
    """What the operator made for the object, each with the path of its kind."""
    return [
        {**child, "path": path, "kind": kind}
        for path, kind in CHILDREN.items()
        for child in cluster.api.objects(path, NAMESPACE, f"lmcache.io/cluster={NAME}")
    ]
