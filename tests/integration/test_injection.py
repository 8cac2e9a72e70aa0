"""Pods of others get their cache inside a real API server, the same as by `lmcache-operator inject`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL, STOCK_IMAGES

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import CLUSTERS, CRDS, RELEASE, SYSTEM_NAMESPACE, Operator
from tests.harness.kube import alone, install, new_namespace, since
from tests.harness.operator_injection import NAME, deployment, pod, pod_with, pods, refused_pods
from tests.harness.operator_model import MINIMAL_SPEC

pytestmark = [pytest.mark.kube, since("1.36")]

CLAIMS = {"gpu": {"count": 1, "deviceClassName": "gpu.nvidia.com"}}
RESTRICTED = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def profile_only(**engine: Any) -> Object:
    """An LMCacheCluster without engines of its own."""
    spec = MINIMAL_SPEC | {"engine": {"replicas": 0, **engine}}
    return {
        "apiVersion": "lmcache.io/v1alpha1",
        "kind": "LMCacheCluster",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def try_out(plane: Cluster, namespace: str, found: Object) -> Object:
    """The pod as the API server would make it."""
    path = plane.api.path("v1/pods", namespace)
    made: Object = plane.api.request("POST", f"{path}?dryRun=All", found)
    return made


def outcome(made: Object) -> str | None:
    annotations = made["metadata"].get("annotations") or {}
    return annotations.get(OUTCOME)


def wait_until_it_acts(plane: Cluster, namespace: str) -> None:
    """The API server reads policies and their parameters by watches."""
    found = pod_with({"name": "another"})
    plane.wait(lambda: has_cache(try_out(plane, namespace, found)))


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """One of its own: the chart is taken off it, and installed again."""
    with Cluster(crds=CRDS) as started:
        yield started


@pytest.fixture(scope="module")
def operator_process(plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with alone(plane, install(plane), tmp_path_factory.mktemp("operator")) as process:
        yield process


@pytest.fixture(scope="module")
def home(plane: Cluster, operator_process: Operator) -> Iterator[str]:
    """A namespace in which pods get a cache, where even only restricted pods are let in."""
    operator_process.start()
    with new_namespace(plane, "home", **{"pod-security.kubernetes.io/warn": "restricted"}) as namespace:
        plane.api.create(CLUSTERS, profile_only(**CLAIMS), namespace)
        wait_until_it_acts(plane, namespace)
        yield namespace


def by_command(found: Object) -> Object | str:
    """What the command makes of a pod, or why it makes nothing."""
    try:
        clusters = clusters_in([profile_only(**CLAIMS)])
        (made,) = inject_objects([found], clusters, None, Context(STOCK_IMAGES)).objects
    except InvalidSpecError as error:
        return f"refused: {str(error).removeprefix('Pod llm: ')}"
    return dict(made)


def check_same(plane: Cluster, namespace: str, found: Object) -> None:
    try:
        made = try_out(plane, namespace, found)
    except ApiError:
        bare = found | {"metadata": {"name": "llm"}}
        with pytest.raises(ApiError):  # it is the pod itself that is wrong
            try_out(plane, namespace, bare)
        assume(False)
    expected = by_command(found)
    event("refused" if isinstance(expected, str) else "injected")
    if isinstance(expected, str):
        assert outcome(made) == expected
        assert not has_cache(made)
        return
    assert outcome(made) == "injected"
    # What it prints is not touched any more, and has the same defaults.
    same = try_out(plane, namespace, expected)
    for each in (made, same):
        del each["metadata"]["creationTimestamp"], each["metadata"]["uid"], each["metadata"]["managedFields"]
    assert made == same


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=pods())
@example(found=pod_with(automountServiceAccountToken=False))
def test_the_command_and_the_api_server_do_the_same(plane, home, found):
    check_same(plane, home, found)


@pytest.mark.parametrize("number", range(len(refused_pods())))
def test_what_the_command_refuses_is_made_as_it_was_written_and_says_why(plane, home, number):
    found, path, sentence = refused_pods()[number]
    found = found | {"spec": found["spec"] | {"automountServiceAccountToken": False}}
    made = try_out(plane, home, found)
    assert outcome(made) == by_command(found)
    assert str(outcome(made)).startswith(f"refused: {path}: ")
    assert sentence in str(outcome(made))
    bare = try_out(plane, home, found | {"metadata": {"name": "llm"}})
    assert made["spec"] == bare["spec"]


def test_pods_of_a_deployment_get_it_and_run(plane, home):
    plane.api.create("apps/v1/deployments", deployment(), home)

    def made() -> list[Object]:
        found = plane.api.objects("v1/pods", home, "app=llm")
        return [each for each in found if each["status"].get("phase") == "Running"]

    (found,) = plane.wait(made)
    assert [each["name"] for each in found["spec"]["initContainers"]] == [
        "lmcache-sidecar",
        "lmcache-payload",
    ]
    tokens = {volume["name"] for volume in found["spec"]["volumes"] if "projected" in volume}
    containers = [*found["spec"]["containers"], *found["spec"]["initContainers"]]
    having = [c["name"] for c in containers if tokens & {mount["name"] for mount in c["volumeMounts"]}]
    assert having == ["vllm"], "the pod's token is none of the sidecar's business"


@pytest.mark.parametrize("label", [None, "nothing", "x" * 63])
def test_pods_that_name_no_cluster_are_left_alone(plane, home, label):
    labels = {INJECT_LABEL: label} if label else {"app": "llm"}
    made = try_out(plane, home, pod_with({"labels": labels}))
    assert "initContainers" not in made["spec"]
    assert "annotations" not in made["metadata"]


def test_where_no_cluster_is_pods_are_made(plane, home, namespace):
    made = try_out(plane, namespace, pod())
    assert "initContainers" not in made["spec"]


def test_a_pod_that_has_its_cache_is_not_given_another(plane, home):
    once = try_out(plane, home, pod())
    again = try_out(plane, home, {key: once[key] for key in ("apiVersion", "kind", "spec")} | {
        "metadata": {"name": "again", "labels": once["metadata"]["labels"]}
    })  # fmt: skip
    assert again["spec"] == once["spec"]


def test_a_restricted_pod_stays_restricted(plane, home):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with new_namespace(plane, "strict-pods", **labels) as namespace:
        plane.api.create(CLUSTERS, profile_only(), namespace)
        with pytest.raises(ApiError, match="restricted"):
            try_out(plane, namespace, pod())
        found = pod(securityContext=RESTRICTED)
        plane.wait(lambda: has_cache(try_out(plane, namespace, found)))
        whole = pod_with(
            securityContext={"runAsNonRoot": True, "runAsUser": 7}, containers=found["spec"]["containers"]
        )
        assert has_cache(try_out(plane, namespace, whole))


def test_a_changed_cluster_changes_what_new_pods_get(plane, home, namespace):
    plane.api.create(CLUSTERS, profile_only(), namespace)
    wait_until_it_acts(plane, namespace)

    def size() -> str:
        (volume,) = (
            v for v in try_out(plane, namespace, pod())["spec"]["volumes"] if v["name"] == "lmcache-arena"
        )
        return str(volume["emptyDir"]["sizeLimit"])

    assert size() == "1Gi"
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"memory": {"size": "2Gi"}}}}, namespace)
    plane.wait(lambda: size() == "2Gi")
    plane.api.delete(CLUSTERS, NAME, namespace)
    plane.wait(lambda: not has_cache(try_out(plane, namespace, pod())))


def test_pods_without_their_cache_are_told_of_in_the_status(plane, home, operator, namespace):
    plane.api.create("v1/pods", pod(), namespace)  # before there is a cluster
    plane.api.create(CLUSTERS, profile_only(), namespace)

    def degraded() -> Object:
        status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
        conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
        found: Object = conditions.get("Degraded", {})
        return found

    plane.wait(lambda: degraded().get("reason") == "PodsWithoutCache")
    message = degraded()["message"]
    assert message.startswith(
        f"1 of 1 pods labelled {INJECT_LABEL}={NAME} have no cache: pod llm: it is older"
    )
    wait_until_it_acts(plane, namespace)
    plane.api.delete("v1/pods", "llm", namespace)
    plane.wait(lambda: plane.api.find("v1/pods", "llm", namespace) is None)
    plane.api.create("v1/pods", pod(), namespace)
    plane.api.patch(CLUSTERS, NAME, {"metadata": {"annotations": {"look": "again"}}}, namespace)
    plane.wait(lambda: degraded().get("status") == "False")


def test_a_chart_that_is_installed_again_injects_again(plane, home, operator_process):
    """The API server stopped reading parameters when the last policy with their kind went."""
    if operator_process.is_running:
        operator_process.terminate()
    plane.helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait")
    plane.wait(lambda: not has_cache(try_out(plane, home, pod())))
    install(plane)
    operator_process.start()
    with new_namespace(plane, "again") as namespace:
        plane.api.create(CLUSTERS, profile_only(), namespace)
        wait_until_it_acts(plane, namespace)
        plane.api.delete(CLUSTERS, NAME, namespace)
        plane.wait(lambda: not has_cache(try_out(plane, namespace, pod())))
