"""``kubectl lmcache`` as a user runs it, and sidecars as pods that the API server can reach."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_cli.__main__ import main
from testing.child_process import SOURCES, reachable_address, run_in_process
from testing.kube.cluster import Cluster
from tests.harness.kube import create_account

READ = {"apiGroups": ["lmcache.io"], "resources": ["lmcacheclusters"], "verbs": ["get", "list"]}
LIST_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
GET_PROXY = {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}
"""Rights of users of the plugin."""
_PROGRAMS = {"kubectl-lmcache": "lmcache_cli", "kubectl_complete-lmcache": "lmcache_cli.completion"}


class Plugin:
    """Runs ``kubectl lmcache``. The plugin is on the PATH, as after an installation by pip."""

    def __init__(self, plane: Cluster, folder: Path, namespace: str) -> None:
        for program, module in _PROGRAMS.items():
            plugin = folder / program
            plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            plugin.chmod(0o755)
        self.namespace = namespace
        self.environment = {
            **os.environ,
            "PATH": f"{plane.bin}:{folder}:{os.environ['PATH']}",
            "PYTHONPATH": SOURCES,
            "HOME": str(folder),
            "KUBECONFIG": str(plane.kubeconfig()),
        }

    def __call__(self, command: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace."""
        words = ["kubectl", "lmcache", command, "-n", self.namespace, *map(str, argv)]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=300)

    def run(self, *words: str) -> str:
        """Run kubectl. Returns its output."""
        return subprocess.run(
            ["kubectl", *words], env=self.environment, capture_output=True, text=True, timeout=300, check=True
        ).stdout


class Commands:
    """Runs commands of ``kubectl lmcache`` in this process: imports of another would take half a second."""

    def __init__(self, plane: Cluster, namespace: str, kubeconfig: Path | None = None) -> None:
        self._options = "-n", namespace, "--kubeconfig", str(kubeconfig or plane.kubeconfig())

    def __call__(self, command: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace."""
        return run_in_process(main, command, *self._options, *argv)


def create_pod(
    plane: Cluster, namespace: str, cluster: str, number: int, *, port: int, **engine: Any
) -> dict[str, Any]:
    """Create a running engine pod whose sidecar listens on this port. It gets no node and no kubelet.

    ``engine`` are fields of the engine's container.
    """
    name = f"{cluster}-engine-{number}"
    ports = [{"name": "metrics", "containerPort": port}]
    containers = {
        "initContainers": [{"name": "sidecar", "image": "i", "restartPolicy": "Always", "ports": ports}],
        "containers": [{"name": "engine", "image": "i"} | engine],
        "schedulerName": "none",  # a fake node would replace the pod's address
    }
    labels = {"lmcache.io/cluster": cluster, "lmcache.io/component": "engine"}
    plane.api.create("v1/pods", {"metadata": {"name": name, "labels": labels}, "spec": containers}, namespace)
    address, ready = reachable_address(), [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready}
    patched: dict[str, Any] = plane.api.patch("v1/pods", f"{name}/status", {"status": status}, namespace)
    return patched


def kubeconfig_with(plane: Cluster, namespace: str, name: str, rules: Sequence[dict[str, Any]]) -> Path:
    """Return a kubeconfig of a new ServiceAccount that has these rights in the namespace, and no others."""
    create_account(plane, namespace, name, rules)
    return plane.kubeconfig(f"{namespace}:{name}", token=plane.service_account_token(namespace, name))
