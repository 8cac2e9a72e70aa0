"""``kubectl lmcache curve`` on a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

ROOT = Path(__file__).resolve().parents[2]
POINT = {"hit": "0.30", "low": "0.29", "high": "0.31", "netPerHour": "0.00"}
STATUS = {
    "observedAt": "2026-11-22T18:00:00Z", "window": "24h", "samples": 1000,
    "memory": {
        "current": "64Gi", "recommended": "128Gi", "next": "64Gi", "reason": "for a test",
        "curve": [{"size": size, **POINT} for size in ("64Gi", "128Gi")],
    },
}  # fmt: skip


@pytest.fixture
def kubectl(plane, tmp_path):
    """Runs ``kubectl lmcache``. The plugin is on the PATH, as after an installation by pip."""
    plugin = tmp_path / "kubectl-lmcache"
    plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmcache_operator "$@"\n')
    plugin.chmod(0o755)
    path = f"{plane.bin}:{tmp_path}:{os.environ['PATH']}"
    paths = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}", "HOME": str(tmp_path)}
    env = {**os.environ, **paths, "KUBECONFIG": str(plane.kubeconfig())}

    def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "lmcache", "curve", *map(str, argv)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    return run


def test_curve_prints_and_draws_the_curve_of_a_cluster(plane, namespace, kubectl, tmp_path):
    resource = example()
    resource["spec"]["autoscaling"] = {"mode": "Off"}  # so that no operator fills the status
    plane.api.create(CLUSTERS, resource, namespace)
    early = kubectl(NAME, "-n", namespace)
    assert early.returncode == 2
    assert "status.autoscaling is empty" in early.stderr

    plane.api.patch(CLUSTERS, f"{NAME}/status", {"status": {"autoscaling": STATUS}}, namespace)
    picture = tmp_path / "curve.svg"
    completed = kubectl(NAME, "-n", namespace, "-o", picture)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert f"{namespace}/{NAME}: the memory tier" in completed.stdout
    assert "128Gi    30.0 %   29.0-31.0" in completed.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_missing_cluster_is_an_error(kubectl):
    completed = kubectl("nobody")
    assert completed.returncode == 2
    message = (
        "there is no LMCacheCluster nobody in namespace default: `kubectl get lmcacheclusters -A` lists all"
    )
    assert completed.stderr == f"{message}\n"


def test_unreachable_api_server_is_an_error(kubectl, tmp_path):
    config = tmp_path / "config"
    unreachable = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "x",
    }
    config.write_text(json.dumps(unreachable))
    completed = kubectl("nobody", "--kubeconfig", config)
    assert completed.returncode == 2
    assert "no answer" in completed.stderr
