"""Measure how fast the operator acts on a real control plane, and the cost of many LMCacheClusters.

etcd, API server, controllers and scheduler are real. kwok simulates the kubelets. The operator runs with the
chart's permissions, as in its pod, but as a single operator. The figures therefore lack the Lease, which
costs one request every two seconds. The API server's audit log counts writes, and the operator counts its
requests. `NUM_CLUSTERS=100` makes the run short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp

from benchmarks.report import Figure, Report, at_least, at_most
from lmcache_operator.api.parse import parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context
from lmcache_operator.kube.patches import apply_patch
from lmcache_operator.specs.kinds import BY_NAME
from lmcache_operator.specs.names import HEARTBEAT_MANAGER, STOCK_IMAGES
from testing.kube import operator as kube
from testing.kube.api import APPLY, FIELD_MANAGER, Object, wait_for
from testing.kube.cluster import Cluster

NUM_CLUSTERS = int(os.environ.get("NUM_CLUSTERS", "1000"))
NUM_EDITED, NUM_ROLLED, NUM_TOUCHED = 10, 20, 100
"""Clusters to edit while the operator creates the others; pods of the cluster whose image changes; clusters
that get an annotation, so that the operator reconciles them again."""
PODS_PER_NODE = 200
IDLE_SECONDS = 60.0
RESYNC_MINUTES = 15.0
READY_SECONDS = 5
"""Time in which a replaced pod becomes ready."""
NUM_LANES = 8
"""Clusters in work at the same time, as in the operator."""
REQUESTS = "lmcache_operator_api_requests_total"
APPLIED = 'lmcache_operator_writes_total{what="apply"}'
SETS = "apps/v1/statefulsets"


def run() -> Report:
    apply_seconds = seconds_of_bare_applies()
    with control_plane() as plane, operator_of(plane) as operator:
        operator.start()
        figures = [*alone(plane), *rolling(plane)]
        operator.terminate()
        figures += many(plane, operator, apply_seconds)
    return Report("operator", f"{NUM_CLUSTERS} LMCacheClusters, each of one pod, simulated nodes", figures)


@contextlib.contextmanager
def control_plane() -> Iterator[Cluster]:
    num_nodes = -(-(NUM_CLUSTERS + 2 * NUM_EDITED + NUM_ROLLED) // PODS_PER_NODE)
    with Cluster(crds=kube.CRDS, num_nodes=num_nodes) as plane:
        yield plane


@contextlib.contextmanager
def operator_of(plane: Cluster) -> Iterator[kube.Operator]:
    """Install the chart. Yields an operator that does not run yet."""
    account = kube.install(plane)
    with tempfile.TemporaryDirectory() as directory:
        operator = kube.Operator(plane, Path(directory), account)
        try:
            yield operator
        finally:
            if operator.is_running:
                operator.kill()


def cluster(name: str, **engine: object) -> Object:
    requests = {"requests": {"cpu": "10m", "memory": "1Mi"}}
    template = {
        "metadata": {"annotations": {"test/ready-delay": f"{READY_SECONDS if engine else 0}s"}},
        "spec": {"containers": [{"name": "engine", "resources": requests}]},
    }
    declared = {"gpu": {"count": 0}, "podTemplate": template} | engine
    spec = {"model": {"name": "org/model"}, "engine": declared, "tiers": {"memory": {"size": "1Gi"}}}
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    return {**header, "metadata": {"name": name}, "spec": spec}


def many_clusters() -> list[Object]:
    return [cluster(f"c{number:04}") for number in range(NUM_CLUSTERS)]


def children(resource: Object) -> list[Object]:
    rendered = [
        child
        for component in COMPONENTS
        for child in component.render(parse(resource), Context(STOCK_IMAGES))
    ]
    for child in rendered:
        del child["metadata"][
            "ownerReferences"
        ]  # Kubernetes would delete children whose owner does not exist
    return rendered


# -- baseline: a client that only creates these objects


def seconds_of_bare_applies() -> float:
    """Return the time in which a bare client applies the children of all clusters."""
    with control_plane() as plane:
        plane.wait(lambda: plane.api.get("v1/serviceaccounts", "default", "default"))
        made = [children(resource) for resource in many_clusters()]
        start = time.monotonic()
        asyncio.run(_apply_all(plane, made))
        return time.monotonic() - start


async def _apply_all(plane: Cluster, made: list[list[Object]]) -> None:
    connector = aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context(cafile=str(plane.ca)))
    headers = {"Authorization": f"Bearer {plane.api.token}", "Content-Type": APPLY}

    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def lane() -> None:
            while made:
                for child in made.pop():
                    kind = BY_NAME[child["kind"]]
                    collection = f"{kind.api_version}/{kind.plural}"
                    path = plane.api.path(collection, "default", child["metadata"]["name"])
                    url = f"{plane.url}{path}?fieldManager={FIELD_MANAGER}&force=true"
                    async with session.patch(url, data=apply_patch(child)) as answer:
                        answer.raise_for_status()
                        await answer.read()

        await asyncio.gather(*(lane() for _ in range(NUM_LANES)))


# -- one cluster, on an idle control plane


def alone(plane: Cluster) -> list[Figure]:
    resource = cluster("one")
    wanted = [(_collection(child), child["metadata"]["name"]) for child in children(resource)]
    start = time.monotonic()
    plane.kubectl("apply", "--filename", "-", stdin=apply_patch(resource))
    wait_for(lambda: all(plane.api.find(kind, name, "default") for kind, name in wanted), 60)
    made = time.monotonic() - start
    wait_for(lambda: num_ready(plane) == 1, 60)
    healed = []
    for kind, name in wanted:
        start = time.monotonic()
        plane.api.patch(kind, name, {"metadata": {"labels": {"app.kubernetes.io/name": "other"}}}, "default")
        wait_for(lambda child=(kind, name): _label(plane, *child) == "lmcache-cluster", 60)  # type: ignore[misc]
        healed.append(time.monotonic() - start)
    return [
        at_most("kubectl apply until all children exist", made, "s", 5),
        at_most("repair of an edited child, slowest kind", max(healed), "s", 2),
    ]


def _collection(child: Object) -> str:
    kind = BY_NAME[child["kind"]]
    return f"{kind.api_version}/{kind.plural}"


def _label(plane: Cluster, kind: str, name: str) -> str:
    return str(plane.api.get(kind, name, "default")["metadata"]["labels"]["app.kubernetes.io/name"])


def rolling(plane: Cluster) -> list[Figure]:
    """Change the image of one cluster, and watch its pods until all are replaced."""
    plane.api.create(kube.CLUSTERS, cluster("rolled", replicas=NUM_ROLLED), "default")
    wait_for(lambda: sum(ready_since(plane).values()) == NUM_ROLLED, 120)
    old, created, ready, least = set(ready_since(plane)), dict[str, float](), dict[str, float](), NUM_ROLLED
    start = time.monotonic()
    plane.api.patch(kube.CLUSTERS, "rolled", {"spec": {"engine": {"image": "engine:2"}}}, "default")
    while len(ready) < NUM_ROLLED:
        now, states = time.monotonic(), ready_since(plane)
        for uid, is_ready in states.items():
            if uid not in old:
                created.setdefault(uid, now)
                if is_ready:
                    ready.setdefault(uid, now)
        least = min(least, sum(states.values()))
        if now - start > 10 * NUM_ROLLED * READY_SECONDS:
            raise TimeoutError(f"only {len(ready)} of {NUM_ROLLED} pods were replaced in time")
        time.sleep(0.05)
    starts = sum(ready[uid] - created[uid] for uid in ready)
    return [
        at_least(f"fewest pods ready while {NUM_ROLLED} are replaced", least, "", NUM_ROLLED - 1),
        at_most(
            "time of the replacement, of the sum of pod starts", (time.monotonic() - start) / starts, "", 1.2
        ),
    ]


def ready_since(plane: Cluster) -> dict[str, bool]:
    """Return whether each pod that is not terminating is ready, by UID."""
    pods = plane.api.objects("v1/pods", "default", "lmcache.io/cluster=rolled")
    return {
        pod["metadata"]["uid"]: _is_ready(pod) for pod in pods if "deletionTimestamp" not in pod["metadata"]
    }


def _is_ready(obj: Object) -> bool:
    conditions = obj.get("status", {}).get("conditions") or []
    return any(
        c["type"] == "Ready" and c["status"] == "True" and c.get("reason") != "Serving" for c in conditions
    )


# -- many


def many(plane: Cluster, operator: kube.Operator, apply_seconds: float) -> list[Figure]:
    edited = [cluster(f"edited-{number}") for number in range(NUM_EDITED)]
    all_of_them = [*edited, *many_clusters()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda resource: plane.api.create(kube.CLUSTERS, resource, "default"), all_of_them))
    num_children = len(children(all_of_them[0])) * len(all_of_them)
    start = time.monotonic()
    operator.start()
    with Editor(plane) as while_made:
        wait(operator, lambda: operator.metric(APPLIED) >= num_children, 0.5)
        made_seconds = time.monotonic() - start
    # plus the two earlier clusters
    wait(operator, lambda: num_ready(plane) == 2 + len(all_of_them), 5)
    ready_seconds = time.monotonic() - start
    wait_idle(operator)
    mark, requests = plane.mark(), operator.metric(REQUESTS)
    time.sleep(IDLE_SECONDS)  # duration of the measurement: no write may happen in it
    idle_writes, idle_requests = written(plane, operator, mark), operator.metric(REQUESTS) - requests
    idle_heartbeats = heartbeats(plane, operator, mark)
    idle_requests -= idle_heartbeats
    first_peak, mark = peak_mib(operator), plane.mark()
    operator.terminate()
    operator.start()
    with Editor(plane) as while_restarted:
        wait(operator, lambda: operator.num_reconciliations() >= len(all_of_them), 0.5)
    wait_idle(operator)
    first = operator.metric(REQUESTS) / operator.num_reconciliations()
    later = requests_of_later_reconciliations(plane, operator)
    # The operator reads all children once an hour.
    per_resync = (first + (60 / RESYNC_MINUTES - 1) * later) / (60 / RESYNC_MINUTES)
    per_minute = max(idle_requests / len(all_of_them) / IDLE_SECONDS * 60, per_resync / RESYNC_MINUTES)
    return [
        Figure("bare applies of all children", apply_seconds, "s"),
        at_most("all children exist, of the bare applies' time", made_seconds / apply_seconds, "", 1.5),
        Figure("all are Ready", ready_seconds, "s"),
        at_most("delay of a change during the creation", max(while_made.seconds), "s", 2),
        at_most("delay of a change after a restart", max(while_restarted.seconds), "s", 2),
        at_most("writes while idle", idle_writes, "", 0),
        at_most("writes after a restart", written(plane, operator, mark), "", 0),
        Figure("requests for the first reconciliation of a cluster", first, ""),
        Figure("requests for a later reconciliation", later, ""),
        Figure(
            "heartbeats while idle, per cluster and minute",
            idle_heartbeats / len(all_of_them) / IDLE_SECONDS * 60,
            "",
        ),
        at_most("requests while idle besides heartbeats, per cluster and minute", per_minute, "", 1),
        at_most("memory, highest of the first run", first_peak, "MiB", 256),
        at_most("memory, highest after the restart", peak_mib(operator), "MiB", 256),
    ]


def requests_of_later_reconciliations(plane: Cluster, operator: kube.Operator) -> float:
    """Return the requests of a reconciliation that changes nothing, after the first one."""
    touched = many_clusters()[:NUM_TOUCHED]
    requests, reconciliations = operator.metric(REQUESTS), operator.num_reconciliations()
    for resource in touched:
        annotations = {"metadata": {"annotations": {"test/touched": "yes"}}}
        plane.api.patch(kube.CLUSTERS, resource["metadata"]["name"], annotations, "default")
    wait(operator, lambda: operator.num_reconciliations() >= reconciliations + len(touched), 0.5)
    wait_idle(operator)
    num_reconciliations = operator.num_reconciliations() - reconciliations
    return (operator.metric(REQUESTS) - requests) / num_reconciliations


class Editor:
    """Scales one cluster after another, and measures the delay of its StatefulSet."""

    def __init__(self, plane: Cluster) -> None:
        self.seconds: list[float] = []
        self._plane, self._stop = plane, threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Editor:
        self._work = self._pool.submit(self._edit)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._work.result()

    def _edit(self) -> None:
        number = 0
        while not self._stop.wait(0.5):
            name = f"edited-{number % NUM_EDITED}"
            live = self._plane.api.get(kube.CLUSTERS, name, "default")
            # Skip a cluster that the operator has not created yet.
            if live.get("status", {}).get("observedGeneration") is None:
                continue
            replicas = 3 - live["spec"]["engine"].get("replicas", 1)
            start = time.monotonic()
            self._plane.api.patch(
                kube.CLUSTERS, name, {"spec": {"engine": {"replicas": replicas}}}, "default"
            )
            wait_for(lambda n=name, r=replicas: self._replicas(n) == r, 300, 0.1)  # type: ignore[misc]
            self.seconds.append(time.monotonic() - start)
            number += 1

    def _replicas(self, name: str) -> int:
        return int(self._plane.api.get(SETS, f"{name}-engine", "default")["spec"]["replicas"])


def wait(operator: kube.Operator, what: Callable[[], bool], interval: float) -> None:
    def checked() -> bool:
        operator.check()
        return what()

    wait_for(checked, 1800, interval)


def num_ready(plane: Cluster) -> int:
    return sum(map(_is_ready, plane.api.objects(kube.CLUSTERS, "default")))


def wait_idle(operator: kube.Operator) -> None:
    """Wait until the operator has reconciled nothing for ten seconds. Heartbeats never pause."""
    before, since = -1.0, time.monotonic()
    while time.monotonic() - since < 10:
        now = operator.num_reconciliations()
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.5)


def written(plane: Cluster, operator: kube.Operator, mark: int) -> int:
    """Return the number of writes to clusters that did not change, without heartbeats."""
    writes = plane.written_since(mark, by=operator.user, dry_runs=True)
    return sum(not (write.name.startswith("edited") or HEARTBEAT_MANAGER in write.uri) for write in writes)


def heartbeats(plane: Cluster, operator: kube.Operator, mark: int) -> int:
    """Return the number of heartbeats."""
    return sum(HEARTBEAT_MANAGER in write.uri for write in plane.written_since(mark, by=operator.user))


def peak_mib(operator: kube.Operator) -> float:
    status = Path(f"/proc/{operator.pid}/status").read_text()
    kib = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kib is not None
    return int(kib[1]) / 1024
