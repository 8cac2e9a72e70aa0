"""Fixtures for the control plane, the installed chart and the operator's process.

There is one control plane for the whole run, and one namespace for each test. The operator runs next to the
control plane, with the rights of its pod.
"""

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from testing.kube import cluster
from testing.kube.api import ApiError, Object, close_idle_connections
from testing.kube.cluster import Cluster
from testing.kube.operator import (
    CHART,
    CLUSTERS,
    CRDS,
    RELEASE,
    ROOT,
    SERVICE_ACCOUNT,
    SYSTEM_NAMESPACE,
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
    "applied_chart",
    "create_account",
    "example",
    "helm_error",
    "install",
    "new_namespace",
    "stop_operator",
]

EXAMPLE = ROOT / "examples" / "qwen3-8b.yaml"
NAME = "qwen3-8b"  # name in the example


def since(version: str) -> pytest.MarkDecorator:
    """Skip on releases of Kubernetes older than ``version``."""
    reason = f"Kubernetes {binaries.VERSION}: needs {version}"
    return pytest.mark.skipif(not is_since(version), reason=reason)


def is_since(version: str) -> bool:
    """Whether this run's Kubernetes has this release or a newer one."""
    return _numbers_of(binaries.VERSION) >= _numbers_of(version)


def _numbers_of(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


Helm = Callable[..., str]
"""Runs a helm command. Returns its standard output."""


def helm_error(helm: Helm, *argv: object) -> str:
    """Run a helm command that fails. Returns its message."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        helm(*map(str, argv))
    return str(error.value.stderr)


@contextlib.contextmanager
def new_namespace(plane: Cluster, name: str, **labels: str) -> Iterator[str]:
    """A namespace with its default ServiceAccount. Its deletion takes five seconds and is not awaited."""
    plane.api.create("v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    plane.wait(lambda: plane.api.get("v1/serviceaccounts", "default", name))
    yield name
    try:
        plane.api.delete("v1/namespaces", name)
    except ApiError as error:  # the test has deleted the namespace itself
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def create_account(plane: Cluster, namespace: str, name: str, rules: Sequence[Object]) -> None:
    """Create a ServiceAccount that has these rights in its namespace, and no others."""
    rbac = "rbac.authorization.k8s.io"
    metadata = {"metadata": {"name": name}}
    binding = {
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    plane.api.create("v1/serviceaccounts", metadata, namespace)
    plane.api.create(f"{rbac}/v1/roles", metadata | {"rules": rules}, namespace)
    plane.api.create(f"{rbac}/v1/rolebindings", metadata | binding, namespace)
    if rules:  # the API server learns of them from a watch, a moment later, and of all at once
        resource, _, subresource = rules[0]["resources"][0].partition("/")
        right = {"resource": resource, "subresource": subresource, "namespace": namespace}
        right |= {"group": rules[0]["apiGroups"][0], "verb": rules[0]["verbs"][0]}
        review = {"spec": {"user": f"system:serviceaccount:{namespace}:{name}", "resourceAttributes": right}}
        reviews = "authorization.k8s.io/v1/subjectaccessreviews"
        plane.wait(lambda: plane.api.create(reviews, review)["status"]["allowed"])


def example(**spec: object) -> Object:
    """The example, with top-level parts of its spec replaced."""
    loaded: Object = yaml.safe_load(EXAMPLE.read_text())
    loaded["spec"] |= spec
    return loaded


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm for commands that need no control plane."""
    program, home = binaries.path("helm"), tmp_path_factory.mktemp("helm")
    environment = os.environ | {"HOME": str(home), "KUBECONFIG": os.devnull}

    def run(*argv: str | Path) -> str:
        command = [program, *argv]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    return run


class GangCluster(Cluster):
    """A control plane whose scheduler can place all pods of a group together."""

    api_server_flags = (*Cluster.api_server_flags, "--runtime-config=scheduling.k8s.io/v1alpha2=true")
    feature_gates = "GenericWorkload=true,GangScheduling=true"


@pytest.fixture(scope="session")
def plane() -> Iterator[Cluster]:
    """The control plane of this run."""
    if binaries.find(cluster.PROGRAMS) is None:
        pytest.fail("the Kubernetes programs are missing: run `make kube` (6-8 minutes, once)")
    kind = GangCluster if is_since("1.36") else Cluster
    with kind(crds=CRDS) as started:
        yield started
        started.check()


@pytest.fixture(scope="module", autouse=True)
def _no_idle_connections() -> Iterator[None]:
    """Leave no connection to the API server open after a module."""
    yield
    close_idle_connections()


@pytest.fixture(scope="session")
def chart(plane: Cluster) -> str:
    """Install the chart for all namespaces. Returns "namespace/name" of its ServiceAccount."""
    return install(plane)


@pytest.fixture(scope="module")
def no_release(plane: Cluster) -> Iterator[None]:
    """Uninstall the chart for all namespaces during a module, because it refuses a second release."""
    stop_operator()
    is_installed = bool(plane.helm("list", "--namespace", SYSTEM_NAMESPACE, "--short"))
    if is_installed:
        plane.helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait")
    yield
    if is_installed:
        install(plane)


@contextlib.contextmanager
def applied_chart(
    plane: Cluster, release: str, namespace: str, *values: str
) -> Iterator[Callable[[], object]]:
    """Create the objects of a release without Helm, which skips the checks against other releases.

    Yields a function that applies them again.
    """
    flags = [part for value in ("crds.enabled=false", *values) for part in ("--set", value)]
    objects = plane.helm("template", release, CHART, "--namespace", namespace, *flags)

    def apply() -> object:
        return plane.kubectl("apply", "--server-side", "--filename=-", stdin=objects)

    apply()
    yield apply
    plane.kubectl("delete", "--ignore-not-found", "--filename=-", stdin=objects)


_operators: list[Operator] = []
"""The operator that other tests of this session started, if any."""


@pytest.fixture
def no_operator() -> None:
    """No operator runs during the test. It would create pods of its own for the test's clusters."""
    stop_operator()


def stop_operator() -> None:
    """Stop the operator of former tests, if it runs. Fixtures of a module call this before `no_operator`."""
    for process in _operators:
        if process.is_running:
            process.kill()


@pytest.fixture(scope="session")
def operator_process(
    plane: Cluster, chart: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """The operator's process next to the control plane. It runs at first, and tests may stop it."""
    with alone(plane, chart, tmp_path_factory.mktemp("operator")) as process:
        process.start()
        _operators.append(process)
        yield process


@contextlib.contextmanager
def alone(plane: Cluster, account: str, directory: Path) -> Iterator[Operator]:
    """The only operator, with the chart's flags except leader election. It polls unsettled clusters often."""
    # Without election no successor waits until the lease of a killed operator expires.
    flags = [flag for flag in chart_flags(plane) if not flag.startswith("--leader-elect=")]
    program = ("-m", "testing.kube.impatient_operator")
    process = Operator(plane, directory, account, *flags, program=program)
    yield process
    if process.is_running:
        process.kill()


@pytest.fixture
def operator(operator_process: Operator) -> Iterator[Operator]:
    """The running operator. After the test, checks that no request of it was refused."""
    if not operator_process.is_running:
        operator_process.start()
    yield operator_process
    assert operator_process.refusals() == []


_numbers = itertools.count()


@pytest.fixture
def namespace(plane: Cluster) -> Iterator[str]:
    """A namespace for one test."""
    with new_namespace(plane, f"test-{next(_numbers)}") as name:
        yield name
