"""The objects that Helm renders from the chart, and the values that it refuses."""

import json

import pytest
import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.names import INJECT_LABEL, PAGES_LABEL, STOCK_IMAGES
from lmcache_operator.specs.stateful import SCRAPER_LABEL
from tests.harness import alert_rules
from tests.harness.kube import CHART, Helm, helm_error
from tests.harness.operator.model import cluster
from tools.kube import schemas


def rendered(helm: Helm, *settings: str) -> list[dict]:
    flags = [part for setting in settings for part in ("--set", setting)]
    return [obj for obj in yaml.safe_load_all(helm("template", "release", CHART, *flags)) if obj]


def test_definition_is_deleted_with_the_release_only_without_keep(helm):
    with_keep = {obj["kind"]: obj for obj in rendered(helm)}["CustomResourceDefinition"]
    assert with_keep["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    without = {obj["kind"]: obj for obj in rendered(helm, "crds.keep=false")}["CustomResourceDefinition"]
    assert "annotations" not in without["metadata"]
    assert "CustomResourceDefinition" not in {obj["kind"] for obj in rendered(helm, "crds.enabled=false")}


def test_monitoring_objects_are_rendered_only_if_enabled(helm):
    assert not [obj for obj in rendered(helm) if "monitoring" in obj["apiVersion"]]
    flags = ["monitoring.enabled=true", "monitoring.labels.team=search", "monitoring.dashboard.enabled=true"]
    objects = {(obj["kind"], obj["metadata"]["name"]): obj for obj in rendered(helm, *flags)}
    name = "release-lmcache-operator"
    operator, sidecars = objects["PodMonitor", name], objects["PodMonitor", f"{name}-sidecars"]
    injected = objects["PodMonitor", f"{name}-injected"]["spec"]
    assert {"key": INJECT_LABEL, "operator": "Exists"} in injected["selector"]["matchExpressions"]
    containers = profile(parse(cluster()), Context(STOCK_IMAGES))["spec"]["initContainers"]
    ports = [port["name"] for container in containers for port in container.get("ports") or ()]
    assert [endpoint["port"] for endpoint in injected["podMetricsEndpoints"]] == ports
    assert operator["metadata"]["labels"]["team"] == "search"
    labels = objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert sidecars["spec"]["namespaceSelector"] == {"any": True}
    rules = objects["PrometheusRule", name]["spec"]["groups"]
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules[-1]["rules"]}
    assert all(url.endswith(f"/docs/runbooks/{alert}.md") for alert, url in runbooks.items())
    boards = objects["ConfigMap", f"{name}-dashboards"]["data"]
    assert {json.loads(text)["uid"] for text in boards.values()} == {
        key.removesuffix(".json") for key in boards
    }
    listed = rendered(helm, *flags, "watchNamespaces={a,b}")
    for suffix in ("sidecars", "injected"):
        (monitor,) = [obj for obj in listed if obj["metadata"]["name"] == f"{name}-{suffix}"]
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_metrics_of_the_operator_are_for_prometheus_only_if_wanted(helm):
    assert "NetworkPolicy" not in {obj["kind"] for obj in rendered(helm)}
    objects = {obj["kind"]: obj for obj in rendered(helm, "metrics.networkPolicy.enabled=true")}
    policy, pod = objects["NetworkPolicy"]["spec"], objects["Deployment"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {SCRAPER_LABEL: "true"}}}]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [ports[port["port"]] for port in rule["ports"]] == [9465]


def test_monitors_skip_sidecars_whose_pages_need_a_token(helm):
    objects = rendered(helm, "monitoring.enabled=true")
    selectors = {
        obj["metadata"]["name"].rpartition("-")[2]: obj["spec"]["selector"].get("matchExpressions", [])
        for obj in objects
        if obj["kind"] == "PodMonitor"
    }
    skip = {"key": PAGES_LABEL, "operator": "DoesNotExist"}
    assert {name: skip in selector for name, selector in selectors.items()} == {
        "operator": False, "sidecars": True, "injected": True,
    }  # fmt: skip


def test_rendered_rules_are_those_that_promtool_tests(helm):
    flags = ["monitoring.enabled=true", f"monitoring.runbookUrl={alert_rules.RUNBOOKS}"]
    (rule,) = [obj for obj in rendered(helm, *flags) if obj["kind"] == "PrometheusRule"]
    assert rule["spec"]["groups"] == alert_rules.groups()


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
        ("assignedIds=perhaps", "assignedIds"),
        ("injection.enabled=perhaps", "enabled"),
        ("policies.restrictClusters.enabled=perhaps", "enabled"),
        ("policies.restrictClusters.secrets={Bad_Name}", "secrets"),
        ("policies.restrictClusters.claims={Bad_Name}", "claims"),
        ("injection.enabled=true", "injection.enabled: the API server has no MutatingAdmissionPolicy"),
        ("extraArgs={positional}", "extraArgs"),
    ],
)
def test_error_names_the_wrong_value(helm, setting, message):
    assert message in helm_error(helm, "template", "release", CHART, "--set", setting)


def test_operator_parses_the_flags_of_the_deployment(helm):
    """The operator's command line accepts all arguments of the container, with all optional ones."""
    from lmcache_operator.__main__ import _parser
    from lmcache_operator.specs.names import OPERATOR_LABELS

    settings = [
        "watchNamespaces={a,b}", "defaults.engineImage=e:1", "defaults.sidecarImage=s:1",
        "defaults.shardImage=v:1", "defaults.sglangImage=g:1", "defaults.routerImage=r:1",
        "extraArgs={--log-format=json}", "allowAllGpusSidecar=true", "assignedIds=true",
    ]  # fmt: skip
    deployment = {obj["kind"]: obj for obj in rendered(helm, *settings)}["Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    parsed = _parser().parse_args(container["args"])
    assert parsed.namespace == ["a", "b"]
    assert parsed.allow_all_gpus_sidecar is parsed.assigned_ids is True
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert fields[parsed.pod_ips.strip("$()")] == "status.podIPs"
    # The NetworkPolicies of the sidecars admit the operator by these.
    assert parsed.operator_namespace == deployment["metadata"]["namespace"]
    assert OPERATOR_LABELS.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    names = "engine", "sidecar", "shard", "sglang", "router"
    images = [getattr(parsed, f"{name}_image") for name in names]
    assert (images, parsed.log_format) == (["e:1", "s:1", "v:1", "g:1", "r:1"], "json")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (parsed.health_port, parsed.metrics_port) == (ports["health"], ports["metrics"])


MUTATING = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


def policies(helm: Helm, *flags: str) -> list[dict]:
    text = helm("template", "release", CHART, *flags)
    kinds = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
    return [obj for obj in yaml.safe_load_all(text) if obj and obj["kind"] in kinds]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_injection_policies_are_rendered_for_an_api_server_that_has_the_kind(helm, version):
    group = f"admissionregistration.k8s.io/{version}"
    has_kind = ["--api-versions", f"{group}/MutatingAdmissionPolicy"]
    rendered_policies = policies(helm, *has_kind, "--set", "watchNamespaces={a,b}")
    assert [obj["apiVersion"] for obj in rendered_policies] == [group, group]
    (expression,) = rendered_policies[0]["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["a", "b"]


def test_no_injection_policies_without_the_kind_or_if_disabled(helm):
    assert policies(helm) == []
    has_kind = ["--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"]
    assert policies(helm, *has_kind, "--set", "injection.enabled=false") == []


def test_policy_for_authors_names_the_allowed_objects_and_policies_can_be_off(helm):
    def policies(*settings: str) -> dict[str, dict]:
        """The specs of the validating policies by topic, each with the actions of its binding."""
        objects = [o for o in rendered(helm, *settings) if o["kind"].startswith("ValidatingAdmissionPolicy")]
        named = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"].endswith("Policy")}
        bindings = {o["spec"]["policyName"]: o["spec"] for o in objects if o["kind"].endswith("Binding")}
        assert named.keys() == bindings.keys()
        abouts = {
            name: next((each for each in ("discarded-kv", "leases") if each in name), "authors")
            for name in named
        }
        actions = {name: bindings[name]["validationActions"] for name in named}
        return {abouts[name]: spec | {"actions": actions[name]} for name, spec in named.items()}

    settings = ["policies.restrictClusters.secrets={hf,redis}", "policies.restrictClusters.claims={models}"]
    of_all = policies(*settings)
    assert {about: (*each["actions"], each["failurePolicy"]) for about, each in of_all.items()} == {
        "authors": ("Deny", "Fail"),
        "discarded-kv": ("Warn", "Ignore"),
        "leases": ("Deny", "Fail"),
    }
    assert '["hf","redis"]' in str(of_all["authors"]["variables"])
    assert '["models"]' in str(of_all["authors"]["validations"])
    assert all("namespaceSelector" not in each["matchConstraints"] for each in of_all.values())
    for each in policies("watchNamespaces={a,b}").values():
        (expression,) = each["matchConstraints"]["namespaceSelector"]["matchExpressions"]
        assert expression == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    assert [*policies("policies.restrictClusters.enabled=false")] == ["discarded-kv"]
    assert "discarded-kv" not in policies("policies.warnOfDiscardedKV.enabled=false")


def test_replicas_elect_a_leader_and_run_on_different_nodes(helm):
    for replicas, kinds in ((2, {"PodDisruptionBudget"}), (1, set())):
        objects = {obj["kind"]: obj for obj in rendered(helm, f"replicas={replicas}")}
        assert objects.keys() & {"PodDisruptionBudget"} == kinds
        spec = objects["Deployment"]["spec"]
        assert (spec["replicas"], spec["strategy"]["type"]) == (replicas, "RollingUpdate")
        container = spec["template"]["spec"]["containers"][0]
        (lease,) = [rule["resourceNames"] for rule in objects["Role"]["rules"] if "update" in rule["verbs"]]
        assert [f"--leader-elect={name}" for name in lease] == [a for a in container["args"] if "elect" in a]
    custom = {obj["kind"]: obj for obj in rendered(helm, "affinity.nodeAffinity.a=b")}["Deployment"]
    assert custom["spec"]["template"]["spec"]["affinity"] == {"nodeAffinity": {"a": "b"}}


@pytest.mark.parametrize(
    ("release", "namespace"), [("other", "default"), ("release", "other"), ("release.default", "x")]
)
def test_two_releases_do_not_collide(helm, release, namespace):
    def objects(release: str, namespace: str) -> set[tuple[str, str, str]]:
        flags = ["--set", "crds.enabled=false,watchNamespaces={a,b}", "--api-versions", MUTATING]
        text = helm("template", release, CHART, "--namespace", namespace, *flags)
        rendered = [(obj["kind"], obj["metadata"]) for obj in yaml.safe_load_all(text) if obj]
        return {(kind, metadata.get("namespace", ""), metadata["name"]) for kind, metadata in rendered}

    assert objects("release", "default").isdisjoint(objects(release, namespace))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("replicas: 2", "replica: 2"), "replica"),
        (("apps/v1", "apps/v1beta1"), "Deployment"),
        (("containers:", "container:"), "container"),
    ],
)
def test_schema_check_finds_a_wrong_manifest(helm, change, message):
    text = helm("template", "release", CHART, "--show-only", "templates/deployment.yaml")
    assert change[0] in text
    wrong = schemas.validate(text.replace(*change, 1))
    assert len(wrong) == 1
    assert message in wrong[0]
