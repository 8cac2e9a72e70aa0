"""``kubectl lmcache top`` on a real API server, with real sidecars as pods."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testing.processes import SidecarProcess
from tests.harness.commands.plugin import Commands, create_pod
from tests.harness.commands.traffic import traffic
from tests.harness.kube import CLUSTERS, NAME, example, new_namespace

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]


@pytest.fixture(scope="module")
def sidecars() -> Iterator[list[SidecarProcess]]:
    """Two sidecars that the API server can reach, each with traffic."""
    with ExitStack() as stack:
        processes = [stack.enter_context(SidecarProcess(http_host="0.0.0.0")) for _ in range(2)]
        for process in processes:
            stack.enter_context(traffic(process))
        yield processes


@pytest.fixture(scope="module")
def namespace(plane, sidecars) -> Iterator[str]:
    """A namespace with an LMCacheCluster, and a pod of it for each sidecar."""
    with new_namespace(plane, "top") as name:
        plane.api.create(CLUSTERS, example(), name)
        for number, sidecar in enumerate(sidecars):
            create_pod(plane, name, NAME, number, port=sidecar.http_port)
        yield name


def test_once_prints_the_rates_of_all_pods(plane, namespace):
    shown = Commands(plane, namespace)("top", NAME, "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("2 of 2 pods counted, ")
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith(f"{NAME}-engine-")]
    assert [(row[0], row[-1]) for row in rows] == [(f"{NAME}-engine-{number}", "ok") for number in range(2)]
    assert "50 %" in shown.stdout
    figures = json.loads(Commands(plane, namespace)("top", "-o", "json").stdout)
    assert (figures["version"], figures["total"]["pods"]) == (1, 2)
    for pod in figures["pods"]:
        assert pod["cluster"] == NAME
        assert pod["requestsPerSecond"] > 0
        tokens = pod["tokensPerSecond"]
        assert tokens["memory"] == pytest.approx(tokens["computed"], rel=0.01)
    total = sum(pod["requestsPerSecond"] for pod in figures["pods"])
    assert figures["total"]["requestsPerSecond"] == pytest.approx(total, abs=0.01)
