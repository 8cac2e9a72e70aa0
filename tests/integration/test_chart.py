"""The chart, installed by Helm into a real API server: what it makes, may do, and leaves behind."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.specs.names import INJECT_LABEL, STOCK_IMAGES

from testing.kube.api import Api, ApiError
from testing.kube.cluster import CRDS as CRD_KIND
from testing.kube.cluster import Cluster
from tests.harness.kube import (
    CHART,
    CLUSTERS,
    EXAMPLE,
    NAME,
    SERVICE_ACCOUNT,
    Operator,
    example,
    new_namespace,
    since,
)
from tests.harness.operator_model import cluster
from tools.kube import binaries, schemas

pytestmark = pytest.mark.kube

CRD = "lmcacheclusters.lmcache.io"


def helm_error(plane: Cluster, *argv: object) -> str:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        plane.helm(*map(str, argv))
    return str(refused.value.stderr)


def rendered(plane: Cluster, *settings: str) -> list[dict]:
    flags = [part for setting in settings for part in ("--set", setting)]
    return [obj for obj in yaml.safe_load_all(plane.helm("template", "release", CHART, *flags)) if obj]


@pytest.fixture(scope="module")
def fresh() -> Iterator[Cluster]:
    """A cluster that has never heard of us."""
    with Cluster(num_nodes=1) as plane:
        yield plane


def earlier_chart(folder: Path) -> Path:
    """The chart of a version whose definition lacks a field."""
    chart = Path(shutil.copytree(CHART, folder / "chart"))
    definition = chart / "files" / "crds" / f"{CRD}.yaml"
    crd = yaml.safe_load(definition.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["images"]
    definition.write_text(yaml.safe_dump(crd))
    return chart


def test_install_upgrade_uninstall_keeps_what_users_made(fresh, tmp_path):
    earlier = earlier_chart(tmp_path)
    notes = fresh.helm("install", "cache", earlier, "--namespace", "system", "--create-namespace")
    assert "kubectl -n system rollout status deployment/cache-lmcache-operator" in notes
    assert "keeps the LMCacheCluster definition" in notes

    def is_served() -> bool:  # `kubectl wait` fails at once while there are no conditions yet
        status = fresh.api.get(CRD_KIND, CRD).get("status", {})
        return ("Established", "True") in {(c["type"], c["status"]) for c in status.get("conditions") or []}

    fresh.wait(is_served)
    fresh.kubectl("apply", "--filename", EXAMPLE)
    made = fresh.api.get(CLUSTERS, NAME, "default")["metadata"]
    assert "images" not in fresh.kubectl("explain", "lmcacheclusters.spec")
    fresh.helm("upgrade", "cache", CHART, "--namespace", "system", "--set", "image.tag=0.1.1")
    fresh.wait(lambda: "images" in fresh.kubectl("explain", "lmcacheclusters.spec"))
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == made["uid"]
    fresh.helm("uninstall", "cache", "--namespace", "system", "--wait")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == made["uid"]
    assert fresh.api.find(CRD_KIND, CRD) is not None
    left = fresh.kubectl(
        "get", "deployments,services,serviceaccounts,clusterroles,clusterrolebindings", "--all-namespaces",
        "--selector=app.kubernetes.io/instance=cache", "--output=name",
    )  # fmt: skip
    assert left == ""
    # A second installation takes the definition that the first one left, and the object is still served.
    fresh.helm("install", "cache", CHART, "--namespace", "system")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == made["uid"]
    # One of another name, elsewhere, has to say that it takes it over.
    fresh.helm("uninstall", "cache", "--namespace", "system", "--wait")
    elsewhere = ["install", "other", CHART, "--namespace", "elsewhere", "--create-namespace"]
    assert "invalid ownership metadata" in helm_error(fresh, *elsewhere)
    fresh.helm(*elsewhere, "--take-ownership")
    assert fresh.api.get(CLUSTERS, NAME, "default")["metadata"]["uid"] == made["uid"]


def test_a_namespace_that_is_not_there_stops_the_installation_before_it_begins(plane):
    with new_namespace(plane, "present") as namespace:
        flags = ["--namespace", namespace, "--set", "crds.enabled=false"]
        missing = ["--set", f"watchNamespaces={{{namespace},absent}}"]
        message = helm_error(plane, "install", "some", CHART, *flags, *missing)
        assert 'there is no namespace "absent": create it first' in message
        assert plane.helm("list", "--namespace", namespace, "--all", "--short") == ""
        plane.helm("install", "some", CHART, *flags)
        assert "absent" in helm_error(plane, "upgrade", "some", CHART, *flags, *missing)
        roles = plane.api.objects("rbac.authorization.k8s.io/v1/roles", namespace)
        assert [role["metadata"]["name"] for role in roles] == ["some-lmcache-operator-lease"]
        plane.helm("uninstall", "some", "--namespace", namespace)


def test_definition_goes_with_the_release_if_it_is_not_kept(plane):
    kept = {obj["kind"]: obj for obj in rendered(plane)}["CustomResourceDefinition"]
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    dropped = {obj["kind"]: obj for obj in rendered(plane, "crds.keep=false")}["CustomResourceDefinition"]
    assert "annotations" not in dropped["metadata"]
    assert "CustomResourceDefinition" not in {obj["kind"] for obj in rendered(plane, "crds.enabled=false")}


def test_monitoring_is_made_where_it_is_asked_for(plane):
    assert not [obj for obj in rendered(plane) if "monitoring" in obj["apiVersion"]]
    flags = ["monitoring.enabled=true", "monitoring.labels.team=search", "monitoring.dashboard.enabled=true"]
    made = {(obj["kind"], obj["metadata"]["name"]): obj for obj in rendered(plane, *flags)}
    name = "release-lmcache-operator"
    operator, sidecars = made["PodMonitor", name], made["PodMonitor", f"{name}-sidecars"]
    injected = made["PodMonitor", f"{name}-injected"]["spec"]
    assert injected["selector"]["matchExpressions"] == [{"key": INJECT_LABEL, "operator": "Exists"}]
    given = profile(parse(cluster()), Context(STOCK_IMAGES))["spec"]["initContainers"]
    ports = [port["name"] for container in given for port in container.get("ports") or ()]
    assert [endpoint["port"] for endpoint in injected["podMetricsEndpoints"]] == ports
    assert operator["metadata"]["labels"]["team"] == "search"
    labels = made["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert sidecars["spec"]["namespaceSelector"] == {"any": True}
    (group,) = made["PrometheusRule", name]["spec"]["groups"]
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in group["rules"]}
    assert len(runbooks) == 8
    assert all(url.endswith(f"/docs/runbooks/{alert}.md") for alert, url in runbooks.items())
    assert any("{{ $labels.pod }}" in rule["annotations"]["summary"] for rule in group["rules"])
    json.loads(made["ConfigMap", f"{name}-dashboard"]["data"]["lmcache.json"])
    listed = rendered(plane, *flags, "watchNamespaces={a,b}")
    for found in ("sidecars", "injected"):
        (monitor,) = [obj for obj in listed if obj["metadata"]["name"] == f"{name}-{found}"]
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_pod_is_admitted_where_only_restricted_pods_are(plane):
    with new_namespace(plane, "strict", **{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        plane.helm("install", "strict", CHART, "--namespace", namespace, "--set", "crds.enabled=false")
        plane.kubectl(
            "rollout",
            "status",
            "deployment/strict-lmcache-operator",
            "--namespace",
            namespace,
            "--timeout=300s",
        )

        # The Service finds the pod by its labels and its named port.
        def ports() -> set[int]:
            slices = plane.api.objects("discovery.k8s.io/v1/endpointslices", namespace)
            return {port["port"] for found in slices if found["endpoints"] for port in found["ports"]}

        plane.wait(lambda: ports() == {9465})
        plane.helm("uninstall", "strict", "--namespace", namespace)


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("patch", "statefulsets.apps", True),
        ("patch", "lmcacheprofiles.lmcache.io", True),
        ("delete", "lmcacheprofiles.lmcache.io", False),
        ("create", "pods/eviction", True),
        ("patch", "pods", True),
        ("patch", "pods/resize", True),
        ("patch", "pods/status", False),
        ("update", "pods", False),
        ("delete", "resourceclaimtemplates.resource.k8s.io", True),
        ("create", "resourceclaims.resource.k8s.io", False),
        ("patch", "lmcacheclusters.lmcache.io/status", True),
        ("create", "events", True),
        ("list", "events", True),
        ("get", "namespaces", True),
        ("create", "secrets", True),
        ("get", "secrets", False),
        ("list", "secrets", False),
        ("patch", "secrets", False),
        ("patch", "lmcacheclusters.lmcache.io", False),
        ("delete", "lmcacheclusters.lmcache.io", False),
        ("create", "pods", False),
        ("delete", "pods", True),
        ("delete", "statefulsets.apps", True),
        ("create", "pods/exec", False),
        ("patch", "customresourcedefinitions.apiextensions.k8s.io", False),
        ("create", "clusterroles.rbac.authorization.k8s.io", False),
        ("get", "nodes", True),
        ("list", "nodes", False),
        ("patch", "nodes", False),
        ("update", "leases.coordination.k8s.io", False),
        ("delete", "namespaces", False),
    ],
)
def test_rights_are_the_least_that_do(plane, chart, verb, resource, allowed):
    group_resource, _, subresource = resource.partition("/")
    plural, _, group = group_resource.partition(".")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
        "namespace": "x",
    }
    review = {
        "spec": {
            "user": f"system:serviceaccount:{chart.replace('/', ':')}",
            "resourceAttributes": attributes,
        }
    }
    answer = plane.api.create("authorization.k8s.io/v1/subjectaccessreviews", review)
    assert answer["status"]["allowed"] is allowed


def test_with_a_list_of_namespaces_only_these_are_served(plane, tmp_path):
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

            def is_ready() -> bool:
                status = plane.api.get(CLUSTERS, NAME, served).get("status", {})
                return any(
                    c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])
                )

            plane.wait(is_ready)
            assert plane.written_since(0, by=process.user, namespace=foreign) == []
            assert process.refusals() == []
        finally:
            process.kill()
        plane.helm("uninstall", "some", "--namespace", served)


def test_a_hole_in_the_roles_is_noticed_and_refusals_of_others_are_none(plane, tmp_path):
    with new_namespace(plane, "powerless") as namespace:
        process = Operator(plane, tmp_path, f"{namespace}/default")
        process.start()
        try:
            plane.wait(process.refusals)  # it may read nothing
        finally:
            process.kill()
        process.forgive()
        assert process.refusals() == []

        def refused(account: str) -> str:
            """What the API server says when this account writes."""
            api = Api(plane.url, plane.ca, plane.service_account_token(namespace, account))
            with pytest.raises(ApiError, match="cannot create resource") as found:
                api.create("v1/configmaps", {"metadata": {"name": "any"}}, namespace)
            return str(found.value)

        plane.api.create("v1/serviceaccounts", {"metadata": {"name": "other"}}, namespace)
        with process.log_path.open("a") as log:  # as it tells of a StatefulSet that can make no pod
            log.write(f"FailedCreate: {refused('other')}\n")
        assert process.refusals() == []
        refused("default")
        assert len(process.refusals()) == 1, "by the audit log"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replicas=-1", "replicas"),
        ("image.digest=abc", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("metrics.service.port=0", "port"),
        ("metrics.service.port=8080", "port"),
        ("watchNamespaces={Bad_Name}", "watchNamespaces"),
        ("crds.enabled=perhaps", "enabled"),
        ("allowAllGpusSidecar=perhaps", "allowAllGpusSidecar"),
        ("injection.enabled=perhaps", "enabled"),
        ("injection.enabled=true", "injection.enabled: the API server has no MutatingAdmissionPolicy"),
        ("extraArgs={positional}", "extraArgs"),
    ],
)
def test_wrong_values_are_refused_by_name(plane, setting, message):
    assert message in helm_error(plane, "template", "release", CHART, "--set", setting)


def test_deployment_flags_are_understood_by_the_operator(plane):
    """The container's arguments, all optional ones included, parse with the operator's own command line."""
    from lmcache_operator.__main__ import _parser
    from lmcache_operator.specs.names import OPERATOR_LABELS

    settings = [
        "watchNamespaces={a,b}", "defaults.engineImage=e:1", "defaults.sidecarImage=s:1",
        "defaults.shardImage=v:1", "extraArgs={--log-format=json}", "allowAllGpusSidecar=true",
    ]  # fmt: skip
    deployment = {obj["kind"]: obj for obj in rendered(plane, *settings)}["Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    parsed = _parser().parse_args(container["args"])
    assert parsed.namespace == ["a", "b"]
    assert parsed.allow_all_gpus_sidecar is True
    # By these the sidecars' NetworkPolicies let it in.
    assert parsed.operator_namespace == deployment["metadata"]["namespace"]
    assert OPERATOR_LABELS.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    images = parsed.engine_image, parsed.sidecar_image, parsed.shard_image
    assert (images, parsed.log_format) == (("e:1", "s:1", "v:1"), "json")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (parsed.health_port, parsed.metrics_port) == (ports["health"], ports["metrics"])


def policies(plane: Cluster, *flags: str) -> list[dict]:
    text = plane.helm("template", "release", CHART, *flags)
    kinds = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
    return [obj for obj in yaml.safe_load_all(text) if obj and obj["kind"] in kinds]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_pods_of_others_are_given_a_cache_where_the_api_server_can_do_it(plane, version):
    group = f"admissionregistration.k8s.io/{version}"
    able = ["--api-versions", f"{group}/MutatingAdmissionPolicy"]
    found = policies(plane, *able, "--set", "watchNamespaces={a,b}")
    assert [obj["apiVersion"] for obj in found] == [group, group]
    (expression,) = found[0]["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["a", "b"]


def test_elsewhere_and_if_it_is_not_wanted_nobody_gives_pods_a_cache(plane):
    assert policies(plane) == []
    able = ["--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"]
    assert policies(plane, *able, "--set", "injection.enabled=false") == []


def test_replicas_take_turns_and_stay_apart(plane):
    for replicas, kinds in ((2, {"PodDisruptionBudget"}), (1, set())):
        objects = {obj["kind"]: obj for obj in rendered(plane, f"replicas={replicas}")}
        assert objects.keys() & {"PodDisruptionBudget"} == kinds
        spec = objects["Deployment"]["spec"]
        assert (spec["replicas"], spec["strategy"]["type"]) == (replicas, "RollingUpdate")
        container = spec["template"]["spec"]["containers"][0]
        (lease,) = [rule["resourceNames"] for rule in objects["Role"]["rules"] if "update" in rule["verbs"]]
        assert [f"--leader-elect={name}" for name in lease] == [a for a in container["args"] if "elect" in a]
    own = {obj["kind"]: obj for obj in rendered(plane, "affinity.nodeAffinity.a=b")}["Deployment"]
    assert own["spec"]["template"]["spec"]["affinity"] == {"nodeAffinity": {"a": "b"}}


def test_two_releases_do_not_collide(plane):
    one = {(o["kind"], o["metadata"]["name"]) for o in rendered(plane, "crds.enabled=false")}
    flags = ["--set", "crds.enabled=false"]
    two = yaml.safe_load_all(plane.helm("template", "other", CHART, *flags))
    assert one.isdisjoint({(o["kind"], o["metadata"]["name"]) for o in two if o})


def test_rendered_manifests_fit_the_schemas():
    assert list(schemas.chart_errors(CHART)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("replicas: 2", "replica: 2"), "replica"),
        (("apps/v1", "apps/v1beta1"), "Deployment"),
        (("containers:", "container:"), "container"),
    ],
)
def test_a_wrong_manifest_is_found(plane, change, message):
    text = plane.helm("template", "release", CHART, "--show-only", "templates/deployment.yaml")
    assert change[0] in text
    wrong = schemas.validate(text.replace(*change, 1))
    assert len(wrong) == 1
    assert message in wrong[0]


@since(binaries.NEWEST)
def test_schemas_are_those_of_the_control_plane(plane):
    current = schemas.convert(plane.api.request("GET", "/openapi/v2"))
    assert json.loads(schemas.SCHEMAS.read_text()) == current


def test_service_account_name_is_what_the_harness_uses(plane, chart):
    assert plane.api.find("v1/serviceaccounts", SERVICE_ACCOUNT, chart.partition("/")[0]) is not None
