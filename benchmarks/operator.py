"""The operator with many LMCacheClusters on a real control plane: writes, requests and memory at rest.

Etcd, API server, controllers, scheduler are real; kwok plays the kubelets. The operator runs as in its pod,
with the chart's flags and rights. Writes are counted in the API server's audit log, requests by the operator
itself.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Figure, Report, at_most
from testing.kube import operator as kube
from testing.kube.api import Object
from testing.kube.cluster import Cluster

NUM_CLUSTERS = int(os.environ.get("NUM_CLUSTERS", "1000"))
NUM_REPLICAS = int(os.environ.get("NUM_REPLICAS", "1"))
PODS_PER_NODE = 200
IDLE_SECONDS = 60.0
RESYNC_MINUTES = 10.0
REQUESTS = "lmcache_operator_api_requests_total"


def run() -> Report:
    num_nodes = max(1, -(-NUM_CLUSTERS * NUM_REPLICAS // PODS_PER_NODE))
    with tempfile.TemporaryDirectory() as directory, Cluster(crds=kube.CRDS, num_nodes=num_nodes) as plane:
        flags = ["--namespace", kube.SYSTEM_NAMESPACE, "--create-namespace", "--set", "crds.enabled=false"]
        plane.helm("install", kube.RELEASE, kube.CHART, *flags)
        operator = kube.Operator(plane, Path(directory), f"{kube.SYSTEM_NAMESPACE}/{kube.SERVICE_ACCOUNT}")
        operator.start()
        try:
            figures = measure(plane, operator)
        finally:
            operator.kill()
    conditions = f"{NUM_CLUSTERS} LMCacheClusters of {NUM_REPLICAS} pods, {num_nodes} simulated nodes"
    return Report("operator", conditions, figures)


def measure(plane: Cluster, operator: kube.Operator) -> list[Figure]:
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        made = (pool.submit(plane.api.create, kube.CLUSTERS, one, "default") for one in clusters())
        for creation in list(made):
            creation.result()
    wait(plane, lambda: num_ready(plane) == NUM_CLUSTERS)
    ready_seconds = time.monotonic() - start
    come_to_rest(operator)

    mark, requests = plane.mark(), operator.metric(REQUESTS)
    time.sleep(IDLE_SECONDS)  # what is measured is that nothing happens
    idle_writes, idle_requests = written(plane, operator, mark), operator.metric(REQUESTS) - requests
    first_peak = peak_mib(operator)

    mark = plane.mark()
    operator.terminate()
    operator.start()
    wait(plane, lambda: operator.num_reconciliations() >= NUM_CLUSTERS)
    come_to_rest(operator)
    per_run = operator.metric(REQUESTS) / operator.num_reconciliations()
    restart_writes = written(plane, operator, mark)
    per_minute = idle_requests / NUM_CLUSTERS / IDLE_SECONDS * 60
    return [
        Figure("until all are Ready", ready_seconds, "s"),
        at_most("writes at rest", idle_writes, "", 0),
        at_most("writes after a restart", restart_writes, "", 0),
        Figure("requests for one reconciliation", per_run, ""),
        at_most("requests at rest, per object and minute", max(per_minute, per_run / RESYNC_MINUTES), "", 1),
        at_most("memory, highest of the first run", first_peak, "MiB", 256),
        at_most("memory, highest after the restart", peak_mib(operator), "MiB", 256),
    ]


def clusters() -> Iterator[Object]:
    requests = {"requests": {"cpu": "10m", "memory": "1Mi"}}
    template = {"spec": {"containers": [{"name": "engine", "resources": requests}]}}
    engine = {"replicas": NUM_REPLICAS, "gpu": {"count": 0}, "podTemplate": template}
    spec = {"model": {"name": "org/model"}, "engine": engine, "tiers": {"memory": {"size": "1Gi"}}}
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    for number in range(NUM_CLUSTERS):
        yield {**header, "metadata": {"name": f"c{number:04}"}, "spec": spec}


def wait(plane: Cluster, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 1800
    while not what():
        plane.check()
        if time.monotonic() > deadline:
            raise TimeoutError("the operator does not get there")
        time.sleep(2)


def num_ready(plane: Cluster) -> int:
    found = plane.api.objects(kube.CLUSTERS, "default")
    conditions = (c for item in found for c in item.get("status", {}).get("conditions", []))
    return sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def come_to_rest(operator: kube.Operator) -> None:
    """Until it has asked for nothing for ten seconds."""
    before, since = -1.0, time.monotonic()
    while time.monotonic() - since < 10:
        now = operator.metric(REQUESTS)
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.5)


def written(plane: Cluster, operator: kube.Operator, mark: int) -> int:
    return len(plane.written_since(mark, by=operator.user, dry_runs=True))


def peak_mib(operator: kube.Operator) -> float:
    status = Path(f"/proc/{operator.pid}/status").read_text()
    kib = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kib is not None
    return int(kib[1]) / 1024
