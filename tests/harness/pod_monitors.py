"""Scrape configurations of PodMonitors, as the Prometheus Operator writes them.

Debian builds Prometheus without the discovery of pods. The configuration therefore lists all ports of all
pods as targets, with the labels that discovery gives them. Prometheus itself selects and relabels.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = dict[str, Any]
_POD = "__meta_kubernetes_pod"


def jobs(monitor: Mapping[str, Any], pods: Sequence[Object]) -> Iterator[Object]:
    """Yield one job for each endpoint of a PodMonitor."""
    for number, _ in enumerate(monitor["spec"]["podMetricsEndpoints"]):
        targets = [target for pod in pods if _is_in_namespaces(monitor, pod) for target in _targets(pod)]
        yield _job(monitor, number) | {"static_configs": targets}


def _job(monitor: Mapping[str, Any], number: int) -> Object:
    """Return the job of one endpoint, without its targets."""
    spec, name = monitor["spec"], f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    endpoint = spec["podMetricsEndpoints"][number]
    relabelings = [
        {_snake(key): value for key, value in rule.items()} for rule in endpoint.get("relabelings", ())
    ]
    targets = {
        "namespace": "__meta_kubernetes_namespace",
        "pod": f"{_POD}_name",
        "container": f"{_POD}_container_name",
    }
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


def _targets(pod: Mapping[str, Any]) -> Iterator[Object]:
    """Yield a target for each port of a pod's containers, with the labels of Prometheus' discovery."""
    meta, spec = pod["metadata"], pod["spec"]
    labels = {f"{_POD}_label_{_label(key)}": value for key, value in meta["labels"].items()}
    labels |= {f"{_POD}_labelpresent_{_label(key)}": "true" for key in meta["labels"]}
    labels |= {"__meta_kubernetes_namespace": meta["namespace"], f"{_POD}_name": meta["name"]}
    labels |= {f"{_POD}_phase": pod["status"]["phase"]}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        for port in container.get("ports", ()):
            address = f"{pod['status']['podIP']}:{port['containerPort']}"
            its_labels = {
                f"{_POD}_container_name": container["name"],
                f"{_POD}_container_port_name": port["name"],
            }
            yield {"targets": [address], "labels": {**labels, **its_labels}}


def _selection(selector: Mapping[str, Any]) -> Iterator[Object]:
    for key, value in selector.get("matchLabels", {}).items():
        yield _rule("keep", f"{_POD}_label_{_label(key)}", regex=re.escape(value))
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "Exists", "add this operator to the harness"
        yield _rule("keep", f"{_POD}_labelpresent_{_label(expression['key'])}", regex="true")


def _rule(action: str, source: str, **fields: str) -> Object:
    return {"action": action, "source_labels": [source], **fields}


def _label(name: str) -> str:
    """Return the name that Prometheus gives a Kubernetes label."""
    return re.sub(r"\W", "_", name)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
