"""The control plane, the installed chart and the operator process, as fixtures.

One control plane for the whole run and one namespace per test. The operator runs beside it as in its pod.
"""

import contextlib
import itertools
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from testing.kube import cluster
from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import (
    CHART,
    CLUSTERS,
    CRDS,
    ROOT,
    SERVICE_ACCOUNT,
    Operator,
    chart_flags,
    install,
)
from tools.kube import binaries

__all__ = [
    "CHART",
    "CLUSTERS",
    "EXAMPLE",
    "NAME",
    "SERVICE_ACCOUNT",
    "Operator",
    "example",
    "install",
    "new_namespace",
]

EXAMPLE = ROOT / "examples" / "qwen3-8b.yaml"
NAME = "qwen3-8b"  # as the example has it


def since(version: str) -> pytest.MarkDecorator:
    """For what older releases of Kubernetes don't have."""
    reason = f"Kubernetes {binaries.VERSION}: there since {version}"
    return pytest.mark.skipif(not is_since(version), reason=reason)


def is_since(version: str) -> bool:
    """Whether this run's Kubernetes is that release, or a newer one."""
    return _numbers_of(binaries.VERSION) >= _numbers_of(version)


def _numbers_of(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


@contextlib.contextmanager
def new_namespace(plane: Cluster, name: str, **labels: str) -> Iterator[str]:
    """A namespace whose ServiceAccount is there. Its end is not waited for: that takes five seconds."""
    plane.api.create("v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    plane.wait(lambda: plane.api.get("v1/serviceaccounts", "default", name))
    yield name
    try:
        plane.api.delete("v1/namespaces", name)
    except ApiError as error:  # the test has deleted it itself
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def example(**spec: object) -> Object:
    """The example that users start from, with top-level parts of its spec replaced."""
    loaded: Object = yaml.safe_load(EXAMPLE.read_text())
    loaded["spec"] |= spec
    return loaded


@pytest.fixture(scope="session")
def plane() -> Iterator[Cluster]:
    """The control plane of this run."""
    if binaries.find(cluster.PROGRAMS) is None:
        pytest.fail("the Kubernetes programs are not there yet: run `make kube` (6-8 minutes, once)")
    with Cluster(crds=CRDS) as started:
        yield started
        started.check()


@pytest.fixture(scope="session")
def chart(plane: Cluster) -> str:
    """The chart, installed for all namespaces; the "namespace/name" of its ServiceAccount."""
    return install(plane)


@pytest.fixture(scope="session")
def operator_process(
    plane: Cluster, chart: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """The operator beside the control plane, running at first; tests may stop it."""
    with alone(plane, chart, tmp_path_factory.mktemp("operator")) as process:
        process.start()
        yield process


@contextlib.contextmanager
def alone(plane: Cluster, account: str, directory: Path) -> Iterator[Operator]:
    """The operator with the chart's flags; the only one, so that nobody waits for a lease."""
    # Alone: one that was killed would be missed until its lease runs out.
    flags = [flag for flag in chart_flags(plane) if not flag.startswith("--leader-elect=")]
    process = Operator(plane, directory, account, *flags)
    yield process
    if process.is_running:
        process.kill()


@pytest.fixture
def operator(operator_process: Operator) -> Iterator[Operator]:
    """The operator, running; whatever a test did to it, it had all the rights it needed."""
    if not operator_process.is_running:
        operator_process.start()
    yield operator_process
    assert operator_process.refusals() == []


_numbers = itertools.count()


@pytest.fixture
def namespace(plane: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with new_namespace(plane, f"test-{next(_numbers)}") as name:
        yield name
