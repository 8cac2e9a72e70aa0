"""Two releases of the chart on a real API server: what Helm refuses, and operators that overlap."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import pytest

from testing.kube.api import ApiError
from testing.kube.cluster import CRDS, Cluster
from testing.kube.operator import chart_flags
from tests.harness.kube import (
    CHART,
    CLUSTERS,
    NAME,
    Operator,
    applied_chart,
    example,
    helm_error,
    new_namespace,
)
from tests.harness.operator.clusters import wait_ready

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_release")]

LEASES = "coordination.k8s.io/v1/leases"
CRD = "lmcacheclusters.lmcache.io"
PATIENCE = 240.0
"""Seconds to wait for an operator that takes over."""
FIRST, SECOND, TEAM_A, TEAM_B = "release-first", "release-second", "team-a", "team-b"


@pytest.fixture(scope="module")
def places(plane: Cluster) -> Iterator[None]:
    """Two namespaces for releases, and two for LMCacheClusters."""
    with ExitStack() as stack:
        for name in (FIRST, SECOND, TEAM_A, TEAM_B):
            stack.enter_context(new_namespace(plane, name))
        yield


def flags(namespace: str, served: Sequence[str], *values: str, crds: bool = False) -> list[str]:
    listed = f"watchNamespaces={{{','.join(served)}}}" if served else "replicas=1"
    settings = (f"crds.enabled={str(crds).lower()}", listed, *values)
    return ["--namespace", namespace, *(part for value in settings for part in ("--set", value))]


# -- what the chart refuses


def test_chart_refuses_a_second_release_for_the_same_namespaces(plane, places):
    """In each order, also with --take-ownership, until the former release is uninstalled."""
    turns: list[tuple[list[str], str]] = [
        ([], ""),
        ([], "all namespaces"),
        ([TEAM_A], "all namespaces"),
        ([], "namespace team-a"),
        ([TEAM_A, TEAM_B], "all namespaces"),
        ([TEAM_B, "default"], "namespace team-b"),
    ]
    place, former = FIRST, SECOND
    for served, common in turns:
        install = ["install", "lmcache", CHART, *flags(place, served)]
        if common:
            message = helm_error(plane.helm, *install, "--take-ownership")
            assert f"the operator of release lmcache in namespace {former} serves {common} already" in message
            remedy = f"Uninstall that release (helm uninstall lmcache -n {former}), or set watchNamespaces"
            assert remedy in message
            assert plane.helm("list", "--namespace", place, "--all", "--short") == ""
            plane.helm("uninstall", "lmcache", "--namespace", former)
        plane.helm(*install)
        place, former = former, place
    plane.helm("uninstall", "lmcache", "--namespace", former)


def test_releases_with_other_namespaces_are_upgraded_and_uninstalled_without_loss(plane, places):
    plane.helm("install", "lmcache", CHART, *flags(FIRST, [TEAM_A]))
    plane.helm("install", "lmcache", CHART, *flags(SECOND, [TEAM_B]))
    more = ["upgrade", "lmcache", CHART, *flags(SECOND, [TEAM_A, TEAM_B])]
    assert f"serves namespace {TEAM_A} already" in helm_error(plane.helm, *more)
    plane.helm("upgrade", "lmcache", CHART, *flags(FIRST, [TEAM_A]))
    plane.wait(lambda: has_rights(plane, FIRST, TEAM_A))
    assert has_rights(plane, SECOND, TEAM_B)
    plane.helm("uninstall", "lmcache", "--namespace", FIRST)
    plane.wait(lambda: not has_rights(plane, FIRST, TEAM_A))
    assert has_rights(plane, SECOND, TEAM_B)
    plane.helm(*more)
    plane.helm("uninstall", "lmcache", "--namespace", SECOND)


def has_rights(plane: Cluster, release_namespace: str, namespace: str) -> bool:
    """Whether the operator of a release may write StatefulSets in a namespace."""
    right = {"group": "apps", "resource": "statefulsets", "verb": "patch", "namespace": namespace}
    user = f"system:serviceaccount:{release_namespace}:lmcache-lmcache-operator"
    review = {"spec": {"user": user, "resourceAttributes": right}}
    reviews = "authorization.k8s.io/v1/subjectaccessreviews"
    return bool(plane.api.create(reviews, review)["status"]["allowed"])


def test_chart_refuses_crds_of_another_release_only_while_it_is_installed(plane, places):
    """The release that owns the CRDs is the one in their annotations. Helm then names --take-ownership."""
    owner = {"meta.helm.sh/release-name": "lmcache", "meta.helm.sh/release-namespace": FIRST}
    names = [
        crd["metadata"]["name"] for crd in plane.api.objects(CRDS) if crd["spec"]["group"] == "lmcache.io"
    ]
    try:
        for name in names:
            plane.api.patch(CRDS, name, {"metadata": {"annotations": owner}})
        plane.helm("install", "lmcache", CHART, *flags(FIRST, [TEAM_A]))
        install = ["install", "lmcache", CHART, *flags(SECOND, [TEAM_B], crds=True)]
        message = helm_error(plane.helm, *install, "--take-ownership")
        assert f"crds.enabled: the CRDs belong to release lmcache in namespace {FIRST}." in message
        assert "set crds.enabled=false in this release, and do not use --take-ownership" in message
        # Only its Deployment is an operator: a failed release may leave other objects.
        plane.api.delete("apps/v1/deployments", "lmcache-lmcache-operator", FIRST)
        assert "invalid ownership metadata" in helm_error(plane.helm, *install)
        plane.helm("uninstall", "lmcache", "--namespace", FIRST)
    finally:
        for name in names:
            plane.api.patch(CRDS, name, {"metadata": {"annotations": dict.fromkeys(owner)}})


# -- operators that overlap, because a user bypassed the chart


class Release:
    """A release without Helm, with its operator's process."""

    def __init__(self, plane: Cluster, namespace: str, directory: Path, *served: str) -> None:
        self._plane, self.namespace = plane, namespace
        self._stack = ExitStack()
        values = flags(namespace, served, "policies.restrictClusters.enabled=false")[3::2]
        self._stack.enter_context(applied_chart(plane, "lmcache", namespace, *values))
        name = "lmcache-lmcache-operator"
        # A released Lease: the operator need not wait for its expiry.
        plane.api.create(LEASES, {"metadata": {"name": name}, "spec": {"leaseDurationSeconds": 1}}, namespace)
        directory.mkdir()
        self.process = Operator(plane, directory, f"{namespace}/{name}", *chart_flags(plane, name, namespace))
        self.process.start()

    def uninstall(self) -> None:
        """Delete the objects first: the operator loses its rights before it ends."""
        self._stack.close()
        self.process.kill()


class World:
    """Namespaces in which LMCacheClusters change all the time."""

    def __init__(self, plane: Cluster) -> None:
        self.plane, self.mark, self._is_over = plane, plane.mark(), threading.Event()
        for namespace in (TEAM_A, TEAM_B):
            plane.api.create(CLUSTERS, example(), namespace)
        self._changing = threading.Thread(target=self._change)
        self._changing.start()

    def _change(self) -> None:
        number = 0
        while not self._is_over.wait(2):
            number += 1
            for namespace in (TEAM_A, TEAM_B):
                with suppress(OSError, HTTPException, ApiError):
                    spec = {"spec": {"engine": {"replicas": number % 3}}}
                    self.plane.api.patch(CLUSTERS, NAME, spec, namespace)

    def close(self) -> None:
        self._is_over.set()
        self._changing.join()
        for namespace in (TEAM_A, TEAM_B):
            self.plane.api.delete(CLUSTERS, NAME, namespace)

    def writer(self, namespace: str) -> Callable[[Release], bool]:
        """Return whether a release writes to a namespace from now on."""
        mark = self.plane.mark()

        def writes(release: Release) -> bool:
            release.process.check()
            return bool(self.plane.written_since(mark, by=release.process.user, namespace=namespace))

        return writes

    def wait_writer(self, release: Release, *namespaces: str) -> None:
        """Wait until a release writes to each of the namespaces."""
        for namespace in namespaces:
            writes = self.writer(namespace)
            self.plane.wait(lambda writes=writes: writes(release), PATIENCE)

    def check_writes_do_not_overlap(self, releases: Sequence[Release]) -> None:
        """Check that all writes of a release were answered before the next release wrote to the namespace."""
        users = {release.process.user for release in releases}
        for namespace in (TEAM_A, TEAM_B):
            writes = [w for w in self.plane.written_since(self.mark, namespace=namespace) if w.code]
            turns = sorted((w.received, w.answered, w.user) for w in writes if w.user in users)
            for before, after in pairwise(turns):
                assert before[2] == after[2] or before[1] <= after[0], (before, after)


@pytest.fixture
def world(plane: Cluster, places: None) -> Iterator[World]:
    world = World(plane)
    yield world
    world.close()


def test_one_operator_serves_each_namespace_even_if_releases_overlap(plane, world, tmp_path):
    """All namespaces, then a list, then all namespaces again; and each of them is uninstalled."""
    first = Release(plane, FIRST, tmp_path / "first")
    world.wait_writer(first, TEAM_A, TEAM_B)
    listed = Release(plane, TEAM_A, tmp_path / "listed", TEAM_A)
    world.wait_writer(listed, TEAM_A)
    world.wait_writer(first, TEAM_B)
    second = Release(plane, SECOND, tmp_path / "second")
    held = f"Lease default/lmcache-operator-all-namespaces is held by {FIRST}/lmcache-lmcache-operator. Two"
    plane.wait(lambda: held in second.process.log)
    first.uninstall()
    world.wait_writer(second, TEAM_B)
    world.wait_writer(listed, TEAM_A)
    listed.uninstall()
    world.wait_writer(second, TEAM_A, TEAM_B)
    second.uninstall()
    world.check_writes_do_not_overlap([first, listed, second])


def test_upgrade_from_names_without_the_namespace_takes_no_right_away(plane, places, tmp_path):
    """Earlier charts named all objects after the release only. The operator works during the upgrade."""
    earlier = Path(shutil.copytree(CHART, tmp_path / "chart"))
    helpers = earlier / "templates" / "_helpers.tpl"
    helpers.write_text(helpers.read_text().replace('" . }}.{{ .Release.Namespace }}', '" . }}'))
    plane.helm("install", "lmcache", earlier, *flags(FIRST, []))
    name = "lmcache-lmcache-operator"
    roles = "rbac.authorization.k8s.io/v1/clusterroles"
    assert plane.api.get(roles, name)
    process = Operator(plane, tmp_path, f"{FIRST}/{name}")
    process.forgive()  # an account of this name lost its rights in another test
    process.start()
    try:
        plane.api.create(CLUSTERS, example(), TEAM_B)
        wait_ready(plane, TEAM_B)
        plane.helm("upgrade", "lmcache", CHART, *flags(FIRST, []))
        assert (plane.api.find(roles, name), plane.api.get(roles, f"{name}.{FIRST}") is not None) == (
            None,
            True,
        )
        plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": "e:2"}}}, TEAM_B)
        wait_ready(plane, TEAM_B)
        assert process.refusals() == []
    finally:
        process.kill()
        plane.helm("uninstall", "lmcache", "--namespace", FIRST)
    plane.api.delete(CLUSTERS, NAME, TEAM_B)
