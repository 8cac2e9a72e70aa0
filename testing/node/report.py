"""Diagnostics of a node after a failure."""

from __future__ import annotations

import subprocess

from testing.kube.api import ApiError, Object
from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE
from testing.node.cluster import NodeCluster

_LINES = 40
_COMMANDS = (
    ("get", "pods", "--all-namespaces", "--output=wide"),
    ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    ("describe", "lmcacheclusters", "--namespace", NAMESPACE),
    ("describe", "pods", "--namespace", NAMESPACE),
)


def report(node: NodeCluster) -> str:
    """Pods, events, conditions, and the ends of all containers' logs. Never raises."""
    parts = [_kubectl(node, *command) for command in _COMMANDS]
    for namespace in (SYSTEM_NAMESPACE, NAMESPACE):
        for pod in _pods(node, namespace):
            spec, name = pod["spec"], pod["metadata"]["name"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                for previous in ("true", "false"):
                    where = ("--namespace", namespace, name, "--container", container["name"])
                    parts.append(_kubectl(node, "logs", *where, f"--previous={previous}"))
    parts += [f"$ {name}\n{component.log}" for name, component in node.components.items()]
    return "\n\n".join("\n".join(part.splitlines()[:1] + part.splitlines()[1:][-_LINES:]) for part in parts)


def _pods(node: NodeCluster, namespace: str) -> list[Object]:
    """Pods of a namespace. Empty without an API server; its log is in the report, too."""
    try:
        return node.api.objects("v1/pods", namespace)
    except (ApiError, OSError):
        return []


def _kubectl(node: NodeCluster, *argv: str) -> str:
    try:
        answer = node.kubectl(*argv)
    except (OSError, subprocess.CalledProcessError) as error:
        answer = getattr(error, "stderr", str(error))
    return f"$ kubectl {' '.join(argv)}\n{answer}"
