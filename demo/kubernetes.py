"""Second part: one LMCacheCluster on a real control plane. It becomes Ready, scales and is repaired."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.show import command, note, part, step
from testing.child_process import reachable_address
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
IDLE_SECONDS = 10


def run(logs: Path, *, with_engine: bool) -> dict[str, object]:
    """Run this part. Returns the figures for the report, times in seconds.

    ``with_engine``: an engine of the first part still runs, so commands can show its cache.
    """
    part("One LMCacheCluster on a real Kubernetes control plane")
    with step(
        "starting etcd, kube-apiserver, controller-manager and scheduler; kwok simulates nodes with GPUs"
    ):
        cluster = Cluster(bin_dir=machine.directory(binaries.CLUSTER))
        cluster.__enter__()
    try:
        return _with(cluster, logs, with_engine=with_engine)
    finally:
        cluster.stop()


def _with(cluster: Cluster, logs: Path, *, with_engine: bool) -> dict[str, object]:
    command(f"helm install {RELEASE} charts/lmcache-operator -n lmcache-system --create-namespace")
    with step("installing the chart"):
        cluster.helm("install", RELEASE, str(ROOT / "charts" / "lmcache-operator"), "-n", "lmcache-system",
                     "--create-namespace")  # fmt: skip
    with Operator(cluster, logs, f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}") as operator:
        operator.start()
        note("No kubelet runs here, so the operator runs as a process. It uses the token of the chart's")
        note("ServiceAccount, so it has exactly the permissions that the chart grants.")
        figures = {**_becomes_ready(cluster), **_is_idle(cluster), **_scales(cluster), **_repairs(cluster)}
        if with_engine:
            _show_commands(cluster)
        return figures


def _becomes_ready(cluster: Cluster) -> dict[str, object]:
    example = ROOT / "examples" / "qwen3-8b.yaml"
    command("kubectl apply -f examples/qwen3-8b.yaml")
    start = time.monotonic()
    with step("waiting for the LMCacheCluster to become Ready"):
        cluster.kubectl("apply", "--server-side", "-f", example)
        cluster.wait(lambda: len(children(cluster)) >= len(CHILDREN))
        present = time.monotonic() - start
        cluster.wait(lambda: condition(cluster, "Ready") == "True", timeout=60)
        cluster.wait(lambda: condition(cluster, "Progressing") == "False", timeout=60)
        ready = time.monotonic() - start
    command("kubectl get lmcluster")
    note(cluster.kubectl("get", "lmcluster"))
    command("kubectl get all,cm,pdb,netpol -l lmcache.io/cluster=qwen3-8b")
    note("\n".join(f"{child['kind']:<22} {child['metadata']['name']}" for child in children(cluster)))
    note(cluster.kubectl("get", "pods", "-l", f"lmcache.io/cluster={NAME}"))
    return {
        "from_apply_until_all_children_exist_seconds": round(present, 2),
        "from_apply_until_Ready_seconds": round(ready, 2),
    }


def _is_idle(cluster: Cluster) -> dict[str, object]:
    with step(f"counting the operator's writes for {IDLE_SECONDS} s without a change"):
        mark = cluster.mark()
        time.sleep(IDLE_SECONDS)  # the duration of the measurement: no write may happen in it
        writes = cluster.written_since(mark, by="lmcache-operator")
    note(f"writes by the operator: {len(writes)}")
    return {f"operator_without_a_change_for_{IDLE_SECONDS}_s_writes": len(writes)}


def _scales(cluster: Cluster) -> dict[str, object]:
    command("kubectl scale lmcluster/qwen3-8b --replicas=3")
    start = time.monotonic()
    with step("waiting for the third engine pod"):
        cluster.kubectl("scale", f"lmcluster/{NAME}", "--replicas=3")
        cluster.wait(lambda: resource(cluster)["status"].get("replicas") == 3 and len(pods(cluster)) == 3)
    return {"scale_to_3_seconds": round(time.monotonic() - start, 2)}


def _repairs(cluster: Cluster) -> dict[str, object]:
    slowest = 0.0
    for child in children(cluster):
        kind, name, uid = child["path"], child["metadata"]["name"], child["metadata"]["uid"]
        cluster.api.delete(kind, name, NAMESPACE)
        took = _timed(cluster, lambda: _is_new(cluster, kind, name, uid))  # noqa: B023
        note(f"deleted {child['kind']} {name}: the operator created it again after {took:.2f} s")
        slowest = max(slowest, took)
    return {"slowest_repair_of_a_deleted_child_seconds": round(slowest, 2)}


def _show_commands(cluster: Cluster) -> None:
    """Print what a user sees of the third engine of the first part, as if it ran in a pod."""
    part("What the cache did: the third engine as a pod")
    path = ROOT / "demo" / "tiny.yaml"
    command("kubectl apply -f demo/tiny.yaml")
    with step("waiting for its pod, which gets the address of the third engine's sidecar"):
        cluster.kubectl("apply", "--server-side", "-f", path)
        address = reachable_address()
        pod = "tiny-engine-0"
        cluster.wait(lambda: is_running(cluster.api.find("v1/pods", pod, NAMESPACE)))
        status = {"podIP": address, "podIPs": [{"ip": address}]}
        cluster.api.patch("v1/pods", f"{pod}/status", {"status": status}, NAMESPACE)
        cluster.wait(lambda: condition(cluster, "SidecarAttached", "tiny") == "True")
    for words in ("status tiny", "explain tiny"):
        command(f"kubectl lmcache {words}")
        note(_plugin(cluster, *words.split()))


def is_running(pod: dict[str, Any] | None) -> bool:
    """Whether a pod exists and runs."""
    return pod is not None and pod["status"].get("phase") == "Running"


def _plugin(cluster: Cluster, *words: str) -> str:
    """Run ``kubectl lmcache``. pip installed the plugin beside Python."""
    environment = os.environ | {
        "PATH": f"{cluster.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.kubeconfig()),
    }
    done = subprocess.run(["kubectl", "lmcache", *words], env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def _timed(cluster: Cluster, is_done: Callable[[], object]) -> float:
    start = time.monotonic()
    cluster.wait(is_done)
    return time.monotonic() - start


def _is_new(cluster: Cluster, kind: str, name: str, uid: str) -> bool:
    child = cluster.api.find(kind, name, NAMESPACE)
    return child is not None and child["metadata"]["uid"] != uid


def resource(cluster: Cluster, name: str = NAME) -> dict[str, Any]:
    cluster_object: dict[str, Any] = cluster.api.get(KIND, name, NAMESPACE)
    return cluster_object


def condition(cluster: Cluster, kind: str, name: str = NAME) -> str:
    conditions = resource(cluster, name).get("status", {}).get("conditions", [])
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "Unknown")


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.api.objects("v1/pods", NAMESPACE, f"lmcache.io/cluster={NAME}")


def children(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the objects that the operator created, each with the path of its kind."""
    return [
        {**child, "path": path, "kind": kind}
        for path, kind in CHILDREN.items()
        for child in cluster.api.objects(path, NAMESPACE, f"lmcache.io/cluster={NAME}")
    ]
