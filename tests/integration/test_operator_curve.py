"""``kubectl lmcache curve`` on a real API server."""

from __future__ import annotations

import json
from functools import partial
from xml.etree import ElementTree

import pytest

from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.plugin import Plugin

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]

POINT = {"hit": "0.30", "low": "0.29", "high": "0.31", "netPerHour": "0.00"}
STATUS = {
    "observedAt": "2026-11-22T18:00:00Z", "window": "24h", "samples": 1000,
    "memory": {
        "current": "64Gi", "recommended": "128Gi", "next": "64Gi", "reason": "for a test",
        "curve": [{"size": size, **POINT} for size in ("64Gi", "128Gi")],
    },
}  # fmt: skip


@pytest.fixture
def kubectl(plane, namespace, tmp_path):
    return partial(Plugin(plane, tmp_path, namespace), "curve")


def test_curve_prints_and_draws_the_curve_of_a_cluster(plane, namespace, kubectl, tmp_path):
    resource = example()
    resource["spec"]["autoscaling"] = {"mode": "Off"}  # so that no operator fills the status
    plane.api.create(CLUSTERS, resource, namespace)
    early = kubectl(NAME)
    assert early.returncode == 2
    assert "status.autoscaling is empty" in early.stderr

    plane.api.patch(CLUSTERS, f"{NAME}/status", {"status": {"autoscaling": STATUS}}, namespace)
    picture = tmp_path / "curve.svg"
    completed = kubectl(NAME, "-o", picture)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert f"{namespace}/{NAME}: the memory tier" in completed.stdout
    assert "128Gi    30.0 %   29.0-31.0" in completed.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_missing_cluster_is_an_error(kubectl, namespace):
    completed = kubectl("nobody")
    assert completed.returncode == 2
    message = f"there is no LMCacheCluster nobody in namespace {namespace}"
    assert completed.stderr == f"error: {message}: `kubectl get lmcacheclusters -A` lists all\n"


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
