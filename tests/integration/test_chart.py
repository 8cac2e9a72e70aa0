"""The chart, installed by Helm into a real API server: objects, rights, upgrades and uninstalls."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testing.kube.api import ApiError
from testing.kube.cluster import CRDS as CRD_KIND
from testing.kube.cluster import Cluster
from tests.harness.kube import (
    CHART,
    CLUSTERS,
    EXAMPLE,
    NAME,
    Operator,
    example,
    helm_error,
    new_namespace,
    since,
)
from tests.harness.operator.clusters import wait_ready
from tools.kube import binaries, schemas
from tools.provenance.statement import REPOSITORY
from tools.sources import ROOT

pytestmark = pytest.mark.kube

CRD = "lmcacheclusters.lmcache.io"


@pytest.fixture(scope="module")
def fresh() -> Iterator[Cluster]:
    """A cluster without the chart and its definitions."""
    with Cluster(num_nodes=1) as plane:
        yield plane


def earlier_chart(folder: Path) -> Path:
    """The chart of an earlier version, whose definition lacks a field."""
    chart = Path(shutil.copytree(CHART, folder / "chart"))
    definition = chart / "files" / "crds" / f"{CRD}.yaml"
    crd = yaml.safe_load(definition.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["images"]
    definition.write_text(yaml.safe_dump(crd))
    return chart


def test_install_upgrade_uninstall_keep_the_objects_of_users(fresh, tmp_path):
    earlier = earlier_chart(tmp_path)
    notes = fresh.helm("install", "cache", earlier, "--namespace", "system", "--create-namespace")
    assert "kubectl -n system rollout status deployment/cache-lmcache-operator" in notes
    assert "keeps the LMCacheCluster definition" in notes
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    raw = f"{REPOSITORY.replace('github', 'raw.githubusercontent')}/v{version}/"
    files = re.findall(rf"kubectl apply -f {re.escape(raw)}(\S+)\n", notes)
    assert files == ["examples/cpu.yaml", "examples/qwen3-0.6b.yaml"]
    assert all((ROOT / file).is_file() for file in files)
    assert f"pipx install 'lmcache-cluster[operator] @ git+{REPOSITORY}@v{version}'" in notes
    assert f"The tag v{version} exists only after the release." in notes
    assert "  kubectl apply -f examples/cpu.yaml\n  pipx install '.[operator]'\n" in notes
    commands = re.findall(r"kubectl lmcache (\w+)", notes)
    assert commands == ["status", "doctor"]

    def is_served() -> bool:  # `kubectl wait` fails at once while there are no conditions yet
        status = fresh.api.get(CRD_KIND, CRD).get("status", {})
        return ("Established", "True") in {(c["type"], c["status"]) for c in status.get("conditions") or []}

    fresh.wait(is_served)
    fresh.kubectl("apply", "--filename", EXAMPLE)
    uid = fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"]
    assert "images" not in fresh.kubectl("explain", "lmcacheclusters.spec")
    fresh.helm("upgrade", "cache", CHART, "--namespace", "system", "--set", "image.tag=0.1.1")
    fresh.wait(lambda: "images" in fresh.kubectl("explain", "lmcacheclusters.spec"))
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == uid
    fresh.helm("uninstall", "cache", "--namespace", "system", "--wait")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == uid
    assert fresh.api.find(CRD_KIND, CRD) is not None
    remaining = fresh.kubectl(
        "get", "deployments,services,serviceaccounts,clusterroles,clusterrolebindings", "--all-namespaces",
        "--selector=app.kubernetes.io/instance=cache", "--output=name",
    )  # fmt: skip
    assert remaining == ""
    # A second installation adopts the remaining definition, and the object is still served.
    fresh.helm("install", "cache", CHART, "--namespace", "system")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == uid
    # A release with another name or namespace adopts it only with --take-ownership.
    fresh.helm("uninstall", "cache", "--namespace", "system", "--wait")
    elsewhere = ["install", "other", CHART, "--namespace", "elsewhere", "--create-namespace"]
    assert "invalid ownership metadata" in helm_error(fresh.helm, *elsewhere)
    fresh.helm(*elsewhere, "--take-ownership")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == uid


def test_missing_namespace_stops_the_installation_before_it_begins(plane, no_release):
    with new_namespace(plane, "present") as namespace:
        flags = ["--namespace", namespace, "--set", "crds.enabled=false"]
        missing = ["--set", f"watchNamespaces={{{namespace},absent}}"]
        message = helm_error(plane.helm, "install", "some", CHART, *flags, *missing)
        assert 'there is no namespace "absent": create it first' in message
        assert plane.helm("list", "--namespace", namespace, "--all", "--short") == ""
        plane.helm("install", "some", CHART, *flags)
        assert "absent" in helm_error(plane.helm, "upgrade", "some", CHART, *flags, *missing)
        roles = plane.api.objects("rbac.authorization.k8s.io/v1/roles", namespace)
        assert [role["metadata"]["name"] for role in roles] == ["some-lmcache-operator-lease"]
        plane.helm("uninstall", "some", "--namespace", namespace)


def test_pod_is_admitted_in_a_namespace_for_restricted_pods(plane, no_release):
    with new_namespace(plane, "strict", **{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        plane.helm("install", "strict", CHART, "--namespace", namespace, "--set", "crds.enabled=false")
        deployment = "deployment/strict-lmcache-operator"
        plane.kubectl("rollout", "status", deployment, "--namespace", namespace, "--timeout=300s")

        # The Service finds the pod by its labels and its named port.
        def ports() -> set[int]:
            slices = plane.api.objects("discovery.k8s.io/v1/endpointslices", namespace)
            return {port["port"] for piece in slices if piece["endpoints"] for port in piece["ports"]}

        plane.wait(lambda: ports() == {9465})
        plane.helm("uninstall", "strict", "--namespace", namespace)


def test_only_the_listed_namespaces_are_served(plane, no_release, tmp_path):
    with new_namespace(plane, "served") as served, new_namespace(plane, "foreign") as foreign:
        flags = ["--set", "crds.enabled=false", "--set", f"watchNamespaces={{{served}}}"]
        plane.helm("install", "some", CHART, "--namespace", served, *flags, "--set", "nameOverride=op")
        deployment = plane.api.get("apps/v1/deployments", "some-op", served)
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert f"--namespace={served}" in container["args"]
        process = Operator(plane, tmp_path, f"{served}/some-op", f"--namespace={served}")
        process.start()
        try:
            for namespace in (served, foreign):
                plane.api.create(CLUSTERS, example(), namespace)

            wait_ready(plane, served)
            assert plane.written_since(0, by=process.user, namespace=foreign) == []
            assert process.refusals() == []
        finally:
            process.kill()
        plane.helm("uninstall", "some", "--namespace", served)


def create_policy_of_ids(plane: Cluster, namespace: str) -> None:
    """Admit pods as OpenShift's ``restricted-v2`` does: with ids of the namespace's range, or without ids."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    of_containers = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
    ids = f"{of_containers}.map(c, c.?securityContext.?runAsUser) + "
    ids += "[object.spec.?securityContext.?runAsUser, object.spec.?securityContext.?fsGroup]"
    in_range = "variables.ids.all(id, int(id.orValue(1000800000) / 10000) == 100080)"
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "variables": [{"name": "ids", "expression": ids}],
        "validations": [{"expression": in_range, "message": "an id is not in the range of the namespace"}],
    }
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": selector}
    group = "admissionregistration.k8s.io/v1/validatingadmissionpolic"
    for kind, spec in (("ies", policy), ("ybindings", binding)):
        plane.api.create(f"{group}{kind}", {"metadata": {"name": namespace}, "spec": spec})
    spec = {"containers": [{"name": "c", "image": "i"}], "securityContext": {"runAsUser": 2000}}
    usual = {"metadata": {"name": "usual"}, "spec": spec}

    def is_refused() -> bool:  # a moment later
        try:
            plane.api.create("v1/pods", usual, namespace)
        except ApiError as error:
            return "an id is not in the range" in str(error)
        plane.api.delete("v1/pods", "usual", namespace)
        return False

    plane.wait(is_refused)


def test_pods_are_admitted_where_the_platform_assigns_their_ids(plane, no_release, tmp_path):
    with new_namespace(plane, "assigned") as namespace:
        create_policy_of_ids(plane, namespace)
        flags = ["--set", "crds.enabled=false", "--set", f"watchNamespaces={{{namespace}}}"]
        more = ["--set", "fullnameOverride=op", "--set", "assignedIds=true"]
        plane.helm("install", "assigned", CHART, "--namespace", namespace, *flags, *more)
        deployment = plane.api.get("apps/v1/deployments", "op", namespace)
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"][1:]
        of_pod = ("--health-port=", "--metrics-port=", "--leader-elect=")
        flags = [each for each in arguments if not each.startswith(of_pod)]
        process = Operator(plane, tmp_path, f"{namespace}/op", *flags)
        process.start()
        try:
            resource = example(router={"replicas": 1})
            resource["spec"]["tiers"]["remote"] = {"managed": {"memoryPerShard": "1Gi", "shards": 2}}
            plane.api.create(CLUSTERS, resource, namespace)
            wait_ready(plane, namespace)
        finally:
            process.kill()
        prefixes = (pod["metadata"]["generateName"] for pod in plane.api.objects("v1/pods", namespace))
        components = Counter(prefix.removeprefix(f"{NAME}-").partition("-")[0] for prefix in prefixes)
        assert components == {"op": 2, "engine": 2, "remote": 2, "router": 1}
        plane.helm("uninstall", "assigned", "--namespace", namespace)


def test_refusals_of_the_operator_are_found(plane, tmp_path):
    """A proof that the tests notice an operator without a right."""
    with new_namespace(plane, "powerless") as namespace:
        process = Operator(plane, tmp_path, f"{namespace}/default")
        process.start()
        try:
            plane.wait(process.refusals)  # it has no rights at all
        finally:
            process.kill()
        process.forgive()
        assert process.refusals() == []


@since(binaries.NEWEST)
def test_stored_schemas_equal_those_of_the_control_plane(plane):
    current = schemas.convert(plane.api.request("GET", "/openapi/v2"))
    assert json.loads(schemas.SCHEMAS.read_text()) == current
