"""A cluster with real sidecars, shards, traffic and a real operator, which a real Prometheus scrapes.

Debian builds Prometheus without the discovery of pods. The configuration therefore lists all ports of all
pods as targets, with the labels that discovery gives them. Prometheus itself selects and relabels.
The chart's PodMonitors become scrape configurations, as the Prometheus Operator writes them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.child_process import wait_until
from testing.kube.cluster import Cluster
from testing.kube.operator import CHART, RELEASE, SYSTEM_NAMESPACE, Operator, chart_flags
from testing.kube.shards import PodShards
from testing.kube.sidecars import PodSidecars
from testing.processes import SidecarProcess
from testing.prometheus import PrometheusProcess
from testing.workloads.replay import Engine
from tests.harness.kube import CLUSTERS, NAME, example

MODEL = "Qwen/Qwen3-8B"
NUM_PODS = 2
_POD = "__meta_kubernetes_pod"
_FACTOR = 240
"""Speed of the operator's clock: the half hour before its first decision takes 7.5 s."""
_ROW_BYTES = 256 << 10
_PREFIX, _NUM_PROMPTS, _ROWS_OF_PROMPT = tuple(range(4)), 30, 12
"""Rows of all prompts together do not fit into memory."""
_PAUSE_SECONDS = 0.1


class Traffic:
    """Serves prompts at all sidecars in a thread. Prompts share a prefix, repeat, and move between pods. New
    prompts replace old ones."""

    def __init__(self, engines: list[Engine]) -> None:
        self._engines, self._stop = engines, threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error of the thread."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for number in itertools.count():
                if self._stop.wait(_PAUSE_SECONDS):
                    return
                lap, prompt = divmod(number, _NUM_PROMPTS)
                engine = self._engines[number % len(self._engines)]  # the other engine in each lap
                first = 1000 * (1 + prompt + lap)
                keys = (*_PREFIX, *range(first, first + _ROWS_OF_PROMPT))
                engine.serve(f"request-{number}", keys, num_in_engine=int(number % 3 == 0))
        except BaseException as error:
            self._failure = error


@dataclass(frozen=True)
class Monitored:
    """The parts of the cluster."""

    namespace: str
    operator: Operator
    sidecars: dict[str, SidecarProcess]
    """Sidecars by the name of their pod."""
    prometheus: PrometheusProcess


@contextlib.contextmanager
def monitored(plane: Cluster, namespace: str, account: str, folder: Path) -> Iterator[Monitored]:
    """Run everything. The operator's clock is fast, so that it makes decisions."""
    addresses = (f"127.94.66.{number}" for number in range(1, 250))  # no other test uses this range
    flags = [flag for flag in chart_flags(plane) if not flag.startswith("--leader-elect=")]
    clock = ("-m", "testing.kube.fast_operator", f"{time.time()}", f"{_FACTOR}", "1")
    sidecars: dict[str, SidecarProcess] = {}
    tenants = folder / "tenants"
    tenants.write_text("default: {lowerTierBytes: 1Gi}\n")  # so that all figures of tenants exist
    disks = (folder / f"disk-{number}" for number in itertools.count())
    with contextlib.ExitStack() as stack:
        operator = stack.enter_context(Operator(plane, folder, account, *flags, program=clock))
        operator.start()
        shards = stack.enter_context(PodShards(plane.api, namespace, NAME, addresses, folder))

        def options() -> dict[str, Any] | None:
            remote = shards.options()
            more = {"remote_timeout_seconds": 60, "disk_path": next(disks), "tenants_file": tenants}
            return remote and {**remote, **more}

        pods = PodSidecars(plane.api, namespace, NAME, addresses, sidecars.__setitem__, options=options)
        stack.enter_context(pods)
        plane.api.create(CLUSTERS, _resource(), namespace)
        plane.wait(
            lambda: (
                pods.num_running == NUM_PODS and _addresses(plane, namespace) >= {*pods.addresses.values()}
            )
        )
        # The assumed prefill speed is so low that engines always load instead of computing.
        engines = [Engine(sidecars[name], bytes(32), _ROW_BYTES, 1.0, MODEL) for name in sorted(sidecars)]
        for engine in engines:
            stack.callback(engine.close)
        traffic = stack.enter_context(Traffic(engines))
        prometheus = stack.enter_context(PrometheusProcess(_jobs(plane, operator, namespace)))
        wait_until(lambda: prometheus.query("lmcache_operator_clusters"), what="the operator is scraped")
        # Only a reconciliation after the first scrape has a rate. A change of the spec causes one. In it, the
        # operator also reads the addresses of the sidecars again.
        prices = {"spec": {"autoscaling": {"prices": {"gpuHour": "3.00"}}}}
        plane.api.patch(CLUSTERS, NAME, prices, namespace)
        yield Monitored(namespace, operator, sidecars, prometheus)
        traffic.check()


def _addresses(plane: Cluster, namespace: str) -> set[str]:
    """Addresses of all pods, as the API server knows them."""
    return {pod["status"].get("podIP", "") for pod in plane.api.objects("v1/pods", namespace)}


def _resource() -> dict[str, Any]:
    tiers = {"memory": {"size": "64Mi"}, "remote": {"managed": {"shards": 1, "memoryPerShard": "512Mi"}}}
    bounds = {"memory": {"minSize": "64Mi", "maxSize": "1Gi"}, "remote": {"minShards": 1, "maxShards": 4}}
    resource = example(tiers=tiers, autoscaling={"mode": "Recommend", **bounds})
    resource["spec"]["engine"]["replicas"] = NUM_PODS
    return resource


def _jobs(plane: Cluster, operator: Operator, namespace: str) -> list[dict[str, Any]]:
    """The chart's PodMonitors as Prometheus' jobs."""
    text = plane.helm("template", RELEASE, CHART, "-n", SYSTEM_NAMESPACE, "--set", "monitoring.enabled=true")
    monitors = [obj for obj in yaml.safe_load_all(text) if obj and obj["kind"] == "PodMonitor"]
    pods = plane.api.objects("v1/pods", namespace)
    return [job for monitor in monitors for job in _jobs_of(monitor, [*pods, _pod_of(plane, operator)])]


def _pod_of(plane: Cluster, operator: Operator) -> dict[str, Any]:
    """The pod that the operator's process stands for, at the address of the process."""
    pod: dict[str, Any] = plane.api.objects("v1/pods", SYSTEM_NAMESPACE)[0]
    (port,) = (port for port in pod["spec"]["containers"][0]["ports"] if port["name"] == "metrics")
    port["containerPort"] = operator.metrics_port
    pod["status"]["podIP"] = "127.0.0.1"
    return pod


def _jobs_of(monitor: Mapping[str, Any], pods: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one job for each endpoint of a PodMonitor."""
    for number, _ in enumerate(monitor["spec"]["podMetricsEndpoints"]):
        targets = [target for pod in pods if _is_in_namespaces(monitor, pod) for target in _targets(pod)]
        yield _job(monitor, number) | {"static_configs": targets}


def _job(monitor: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the job of one endpoint, without its targets."""
    spec, name = monitor["spec"], f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    endpoint = spec["podMetricsEndpoints"][number]
    relabelings = [
        {_snake(key): value for key, value in rule.items()} for rule in endpoint.get("relabelings", ())
    ]
    pod, container = f"{_POD}_name", f"{_POD}_container_name"
    targets = {"namespace": "__meta_kubernetes_namespace", "pod": pod, "container": container}
    rules = [
        _rule("drop", f"{_POD}_phase", regex="(Failed|Succeeded)"),
        *_selection(spec["selector"]),
        _rule("keep", f"{_POD}_container_port_name", regex=endpoint["port"]),
        *(_rule("replace", source, target_label=label) for label, source in targets.items()),
        *(
            _rule("replace", f"{_POD}_label_{_label(label)}", target_label=_label(label), regex="(.+)")
            for label in spec.get("podTargetLabels", ())
        ),
        {"action": "replace", "target_label": "job", "replacement": name},
        *relabelings,
    ]
    return {
        "job_name": f"podMonitor/{name}/{number}",
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": rules,
    }


def _is_in_namespaces(monitor: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    selector = monitor["spec"].get("namespaceSelector", {})
    names = selector.get("matchNames", [monitor["metadata"]["namespace"]])
    return selector.get("any", False) or pod["metadata"]["namespace"] in names


def _targets(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a target for each port of a pod's containers, with the labels of Prometheus' discovery."""
    meta, spec = pod["metadata"], pod["spec"]
    labels = {f"{_POD}_label_{_label(key)}": value for key, value in meta["labels"].items()}
    labels |= {f"{_POD}_labelpresent_{_label(key)}": "true" for key in meta["labels"]}
    labels |= {"__meta_kubernetes_namespace": meta["namespace"], f"{_POD}_name": meta["name"]}
    labels |= {f"{_POD}_phase": pod["status"]["phase"]}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        for port in container.get("ports", ()):
            address = f"{pod['status']['podIP']}:{port['containerPort']}"
            names = {f"{_POD}_container_name": container["name"], f"{_POD}_container_port_name": port["name"]}
            yield {"targets": [address], "labels": labels | names}


def _selection(selector: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in selector.get("matchLabels", {}).items():
        yield _rule("keep", f"{_POD}_label_{_label(key)}", regex=re.escape(value))
    for expression in selector.get("matchExpressions", ()):
        action = {"Exists": "keep", "DoesNotExist": "drop"}[expression["operator"]]
        yield _rule(action, f"{_POD}_labelpresent_{_label(expression['key'])}", regex="true")


def _rule(action: str, source: str, **fields: str) -> dict[str, Any]:
    return {"action": action, "source_labels": [source], **fields}


def _label(name: str) -> str:
    """Return the name that Prometheus gives a Kubernetes label."""
    return re.sub(r"\W", "_", name)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
