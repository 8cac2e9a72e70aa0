"""The API server injects the cache into users' pods, with the same result as `lmcache-operator inject`."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings

from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.components.injection.workloads import inject_objects
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL, STOCK_IMAGES
from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import CLUSTERS, RELEASE, SYSTEM_NAMESPACE, Operator
from tests.harness.kube import install, new_namespace, since
from tests.harness.operator.injection import NAME, deployment, pod, pod_with, pods, refused_pods, sglang_pod
from tests.harness.operator.model import MINIMAL_SPEC
from tests.harness.scope import examples

pytestmark = [pytest.mark.kube, since("1.36")]

CLAIMS = {"gpu": {"count": 1, "deviceClassName": "gpu.nvidia.com"}}
RESTRICTED = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def profile_only(**engine: Any) -> Object:
    """An LMCacheCluster without engines of its own."""
    keys = {"secretRef": {"name": "kv-keys"}}
    remote = {"external": {"url": "redis://kv:6379"}, "encryption": keys}
    tiers = MINIMAL_SPEC["tiers"] | {"remote": remote}
    spec = MINIMAL_SPEC | {"engine": {"replicas": 0, **engine}, "tiers": tiers}
    return {
        "apiVersion": "lmcache.io/v1alpha1",
        "kind": "LMCacheCluster",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def dry_run(plane: Cluster, namespace: str, manifest: Object) -> Object:
    """The pod that the API server would create."""
    path = plane.api.path("v1/pods", namespace)
    created: Object = plane.api.request("POST", f"{path}?dryRun=All", manifest)
    return created


def outcome(created: Object) -> str | None:
    annotations = created["metadata"].get("annotations") or {}
    return annotations.get(OUTCOME)


def wait_for_policy(plane: Cluster, namespace: str) -> None:
    """Wait until injection is active: the API server reads policies and their parameters by watches."""
    manifest = pod_with({"name": "another"})
    plane.wait(lambda: has_cache(dry_run(plane, namespace, manifest)))


@pytest.fixture(scope="module")
def home(plane: Cluster, operator_process: Operator) -> Iterator[str]:
    """A namespace whose pods get a cache, with a warning for pods that are not restricted."""
    if not operator_process.is_running:
        operator_process.start()
    with new_namespace(plane, "home", **{"pod-security.kubernetes.io/warn": "restricted"}) as namespace:
        plane.api.create(CLUSTERS, profile_only(**CLAIMS), namespace)
        wait_for_policy(plane, namespace)
        yield namespace


def injected_by_command(manifest: Object) -> Object | str:
    """The pod that the command prints, or the reason of its refusal."""
    try:
        (injected,) = inject_objects(
            [manifest], [profile_only(**CLAIMS)], None, Context(STOCK_IMAGES)
        ).objects
    except InvalidSpecError as error:
        return f"refused: {str(error).removeprefix('Pod llm: ')}"
    return dict(injected)


def unprivileged(manifest: Object) -> Object:
    """The pod without a token of its ServiceAccount."""
    return manifest | {"spec": manifest["spec"] | {"automountServiceAccountToken": False}}


def check_same(plane: Cluster, namespace: str, manifest: Object) -> None:
    try:
        created = dry_run(plane, namespace, manifest)
    except ApiError:
        unlabelled = manifest | {"metadata": {"name": "llm"}}
        with pytest.raises(ApiError):  # the pod itself is invalid, even without injection
            dry_run(plane, namespace, unlabelled)
        assume(False)
    expected = injected_by_command(manifest)
    event("refused" if isinstance(expected, str) else "injected")
    if isinstance(expected, str):
        assert outcome(created) == expected
        assert not has_cache(created)
        return
    assert outcome(created) == "injected"
    # The API server does not inject the command's output again, and sets the same defaults.
    same = dry_run(plane, namespace, expected)
    for pod_object in (created, same):
        metadata = pod_object["metadata"]
        del metadata["creationTimestamp"], metadata["uid"], metadata["managedFields"]
    assert created == same


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifest=pods())
@example(manifest=pod_with(automountServiceAccountToken=False))
@example(manifest=unprivileged(sglang_pod()))
@example(manifest=unprivileged(sglang_pod("--page", "32", "--hicache-ratio=2", "--dp-size=2")))
@example(manifest=unprivileged(pod(args=["m", "--data-parallel-size", "2"])))
@example(manifest=unprivileged(sglang_pod(command=["tini", "--", "sglang", "serve"])))
@example(manifest=unprivileged(sglang_pod(command=[], args=["tini", "--", "sglang", "serve"])))
@example(manifest=unprivileged(pod(image="team/sglang:1", args=["--served-model-name", "vllm"])))
@example(manifest=unprivileged(pod(image="mine", args=["/opt/bin/sglang", "serve", "--page-size=1"])))
def test_command_and_api_server_inject_the_same(plane, home, manifest):
    check_same(plane, home, manifest)


@pytest.mark.parametrize("number", range(len(refused_pods())))
def test_pods_that_the_command_refuses_are_created_unchanged_with_the_reason(plane, home, number):
    manifest, path, sentence = refused_pods()[number]
    manifest = unprivileged(manifest)
    created = dry_run(plane, home, manifest)
    assert outcome(created) == injected_by_command(manifest)
    assert str(outcome(created)).startswith(f"refused: {path}: ")
    assert sentence in str(outcome(created))
    unlabelled = dry_run(plane, home, manifest | {"metadata": {"name": "llm"}})
    assert created["spec"] == unlabelled["spec"]


def test_deployment_pods_are_injected_and_run(plane, home):
    plane.api.create("apps/v1/deployments", deployment(), home)

    def running_pods() -> list[Object]:
        listed = plane.api.objects("v1/pods", home, "app=llm")
        return [item for item in listed if item["status"].get("phase") == "Running"]

    (running,) = plane.wait(running_pods)
    assert [container["name"] for container in running["spec"]["initContainers"]] == [
        "lmcache-sidecar",
        "lmcache-payload",
    ]
    tokens = {volume["name"] for volume in running["spec"]["volumes"] if "projected" in volume}
    containers = [*running["spec"]["containers"], *running["spec"]["initContainers"]]
    with_token = [c["name"] for c in containers if tokens & {mount["name"] for mount in c["volumeMounts"]}]
    assert with_token == ["vllm"], "the sidecar must not mount the pod's token"


@pytest.mark.parametrize("label", [None, "nothing", "x" * 63])
def test_pods_that_name_no_cluster_are_unchanged(plane, home, label):
    labels = {INJECT_LABEL: label} if label else {"app": "llm"}
    created = dry_run(plane, home, pod_with({"labels": labels}))
    assert "initContainers" not in created["spec"]
    assert "annotations" not in created["metadata"]


def test_pods_are_created_in_namespaces_without_cluster(plane, home, namespace):
    created = dry_run(plane, namespace, pod())
    assert "initContainers" not in created["spec"]


def test_restricted_pods_stay_restricted(plane, home):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with new_namespace(plane, "strict-pods", **labels) as namespace:
        plane.api.create(CLUSTERS, profile_only(), namespace)
        with pytest.raises(ApiError, match="restricted"):
            dry_run(plane, namespace, pod())
        restricted = pod(securityContext=RESTRICTED)
        plane.wait(lambda: has_cache(dry_run(plane, namespace, restricted)))
        restricted_as_a_whole = pod_with(
            securityContext={"runAsNonRoot": True, "runAsUser": 7},
            containers=restricted["spec"]["containers"],
        )
        assert has_cache(dry_run(plane, namespace, restricted_as_a_whole))


def test_changed_cluster_changes_injection_of_new_pods(plane, home, namespace):
    plane.api.create(CLUSTERS, profile_only(), namespace)
    wait_for_policy(plane, namespace)

    def size() -> str:
        (volume,) = (
            v for v in dry_run(plane, namespace, pod())["spec"]["volumes"] if v["name"] == "lmcache-arena"
        )
        return str(volume["emptyDir"]["sizeLimit"])

    assert size() == "1Gi"
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"memory": {"size": "2Gi"}}}}, namespace)
    plane.wait(lambda: size() == "2Gi")
    plane.api.delete(CLUSTERS, NAME, namespace)
    plane.wait(lambda: not has_cache(dry_run(plane, namespace, pod())))


def test_reinstalled_chart_injects_again(plane, home, operator_process):
    """The API server stops reading parameters when the last policy with their kind is deleted."""
    if operator_process.is_running:
        operator_process.terminate()
    plane.helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait")
    plane.wait(lambda: not has_cache(dry_run(plane, home, pod())))
    install(plane)
    operator_process.start()
    with new_namespace(plane, "again") as namespace:
        plane.api.create(CLUSTERS, profile_only(), namespace)
        wait_for_policy(plane, namespace)
        plane.api.delete(CLUSTERS, NAME, namespace)
        plane.wait(lambda: not has_cache(dry_run(plane, namespace, pod())))
    operator_process.forgive()
