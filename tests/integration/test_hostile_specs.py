"""Authors of LMCacheClusters on a real API server: no field lets them reach what their rights do not allow.

An author without the right to create pods meets the chart's admission policy. An author with that right
reaches what a StatefulSet reaches: the operator and the namespace's Pod Security level limit the pods.
"""

from collections.abc import Callable, Iterator

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.contract.base import Context
from lmcache_operator.specs import names
from testing.kube.api import Api, ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import RELEASE, SERVICE_ACCOUNT, SYSTEM_NAMESPACE
from tests.harness.kube import CHART, CLUSTERS, create_account, new_namespace
from tests.harness.operator import hostile_specs
from tests.harness.operator import model as operator_model
from tests.harness.operator.hostile_specs import (
    ALLOWED_CLAIM,
    ALLOWED_PULL_SECRET,
    ALLOWED_SECRET,
    HOSTILE_PODS,
    OPERATOR,
    POD_SECURITY,
)

pytestmark = pytest.mark.kube

POLICY = f"{RELEASE}-lmcache-operator.{SYSTEM_NAMESPACE}"
POLICIES = "admissionregistration.k8s.io/v1/validatingadmissionpolicies"
DENIED = "ValidatingAdmissionPolicy"
RESOURCES = ["lmcacheclusters", "lmcacheclusters/scale", "lmcacheclusters/status"]
CLUSTER_RULE = {"apiGroups": ["lmcache.io"], "resources": RESOURCES, "verbs": ["create", "patch"]}
RULES = {
    "author": [CLUSTER_RULE],
    "of-pods": [CLUSTER_RULE, {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}],
    "of-leases": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]}],
    "of-sets": [CLUSTER_RULE, {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["create"]}],
}
"""Rights of ServiceAccounts, by name."""
EVENTS = {"metadata": {"annotations": {"lmcache.io/events-for": "demo"}}}
Submit = Callable[..., str]


@pytest.fixture(scope="module")
def namespace_of_authors(plane: Cluster) -> Iterator[str]:
    """A namespace with four authors. It admits only restricted pods."""
    with new_namespace(plane, "authors", **{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        for name, rules in RULES.items():
            create_account(plane, namespace, name, rules)
        yield namespace


@pytest.fixture(scope="module")
def submit(plane: Cluster, chart: str, namespace_of_authors: str) -> Iterator[Submit]:
    """A function that returns the API server's reason to refuse an author's spec, or an empty string.

    The policy allows one Secret, one Secret that pulls images, and one claim.
    """
    namespace = namespace_of_authors
    apis = {name: Api(plane.url, plane.ca, plane.service_account_token(namespace, name)) for name in RULES}

    def submitted(spec: Object, author: str = "author") -> str:
        body = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": {"name": "demo"}}
        try:
            path = plane.api.path(CLUSTERS, namespace)
            apis[author].request("POST", f"{path}?dryRun=All", body | {"spec": spec})
        except ApiError as error:
            return str(error)
        return ""

    lists = {"secrets": ALLOWED_SECRET, "pullSecrets": ALLOWED_PULL_SECRET, "claims": ALLOWED_CLAIM}
    values = ",".join(f"policies.restrictClusters.{name}={{{allowed}}}" for name, allowed in lists.items())
    flags = ["--namespace", SYSTEM_NAMESPACE, "--reuse-values", "--set", values]
    plane.helm("upgrade", RELEASE, CHART, *flags)
    plane.wait(lambda: DENIED in submitted(with_model(tokenSecretRef={"name": "other"})))
    plane.wait(lambda: not submitted(with_model(tokenSecretRef={"name": ALLOWED_SECRET})))
    yield submitted
    plane.helm("rollback", RELEASE, "--namespace", SYSTEM_NAMESPACE)


def with_model(**model: object) -> Object:
    return {**operator_model.MINIMAL_SPEC, "model": {"name": "m", **model}}


def with_template(template: Object) -> Object:
    return {**operator_model.MINIMAL_SPEC, "engine": {"podTemplate": template}}


@pytest.mark.parametrize("name", [POLICY, f"discarded-kv.{POLICY}", f"{POLICY}.leases"])
def test_policy_has_no_type_errors(plane, submit, name):
    status = plane.wait(lambda: plane.api.get(POLICIES, name).get("status"))
    assert status.get("typeChecking", {}) == {}


@pytest.mark.parametrize("name", ["lmcache-operator-namespace", "lmcache-operator-all-namespaces"])
def test_only_operators_write_the_leases_that_they_share(plane, submit, namespace_of_authors, name):
    """The role `edit` of Kubernetes allows writes of all Leases, also in the namespace `default`."""
    path = plane.api.path("coordination.k8s.io/v1/leases", namespace_of_authors)

    def create(name: str, namespace: str, account: str) -> None:
        api = Api(plane.url, plane.ca, plane.service_account_token(namespace, account))
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        api.request("POST", f"{path}?dryRun=All", lease)

    create("other", namespace_of_authors, "of-leases")
    create(name, SYSTEM_NAMESPACE, SERVICE_ACCOUNT)
    with pytest.raises(ApiError, match="only operators of LMCacheClusters write this Lease"):
        create(name, namespace_of_authors, "of-leases")


def test_policy_refuses_each_field_that_reaches_more_than_its_author(submit):
    wrong = {}
    for path in hostile_specs.fields():
        entry = hostile_specs.entry_of(path)
        if entry in hostile_specs.REFUSED:
            message = submit(hostile_specs.spec_with(path))
            if not (message.startswith("403") and hostile_specs.REFUSED[entry] in message):
                wrong[path] = message
    assert wrong == {}


def test_policy_admits_all_other_fields(submit):
    paths = [
        path for path in hostile_specs.fields() if hostile_specs.entry_of(path) in hostile_specs.ADMITTED
    ]
    messages = {path: submit(hostile_specs.spec_with(path)) for path in paths}
    assert {path: message for path, message in messages.items() if DENIED in message} == {}
    num_admitted = [*messages.values()].count("")
    assert num_admitted > len(paths) / 2, "the CRD's own rules between fields refuse the rest"


@pytest.mark.parametrize("author", ["of-pods", "of-sets"])
def test_author_who_may_create_pods_is_not_limited(submit, author):
    for pod in HOSTILE_PODS:
        assert submit(with_template(pod.template), author) == "", pod.field
    assert submit(with_model(tokenSecretRef={"name": "other"}), author) == ""


def test_author_may_name_allowed_secrets_and_claims(submit):
    variable = {"name": "A", "valueFrom": {"secretKeyRef": {"name": ALLOWED_SECRET, "key": "k"}}}
    claim = {"persistentVolumeClaim": {"claimName": ALLOWED_CLAIM}}
    spec = with_model(volume=claim, tokenSecretRef={"name": ALLOWED_SECRET}) | {"engine": {"env": [variable]}}
    assert submit(spec) == ""


def test_secrets_of_one_list_are_not_allowed_by_the_other(submit):
    """An engine could read a Secret of `secrets`, so those that pull images have a list of their own."""

    def pulled(name: str) -> str:
        return submit({**operator_model.MINIMAL_SPEC, "images": {"pullSecrets": [name]}})

    assert pulled(ALLOWED_PULL_SECRET) == ""
    refusal = pulled(ALLOWED_SECRET)
    assert "spec.images.pullSecrets: you may not" in refusal
    assert f"to add {ALLOWED_SECRET}" in refusal
    assert DENIED in submit(with_model(tokenSecretRef={"name": ALLOWED_PULL_SECRET}))


def test_null_fields_are_no_references(submit):
    empty = {"configMapKeyRef": None, "secretKeyRef": None}
    variables = [{"name": "A", "valueFrom": None}, {"name": "B", "valueFrom": empty}]
    volume = {"hostPath": None, "persistentVolumeClaim": None}
    assert submit(with_model(volume=volume) | {"engine": {"env": variables}}) == ""


def test_author_changes_only_the_metadata_of_a_cluster_with_a_pod_template(
    plane, submit, namespace_of_authors, no_operator
):
    namespace = namespace_of_authors
    body = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": {"name": "admins"}}
    template: Object = {"metadata": {"annotations": {"a": "b"}}}
    plane.api.create(CLUSTERS, body | {"spec": with_template(template)}, namespace)
    author = Api(plane.url, plane.ca, plane.service_account_token(namespace, "author"))
    author.patch(CLUSTERS, "admins", {"metadata": {"annotations": {"team": "search"}}}, namespace)
    with pytest.raises(ApiError, match=r"spec\.engine\.podTemplate: you may not create pods"):
        author.patch(CLUSTERS, "admins", {"spec": {"engine": {"image": "other:1"}}}, namespace)
    with pytest.raises(ApiError, match=r"metadata\.annotations\[lmcache\.io/events-for\]: you may not"):
        author.patch(CLUSTERS, "admins", EVENTS, namespace)


def test_author_cannot_add_the_annotation_that_turns_events_on(
    plane, submit, namespace_of_authors, no_operator
):
    """Labels and other annotations mean nothing to the operator, so the policy admits them."""
    namespace = namespace_of_authors
    body = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": {"name": "annotated"}}
    body |= {"spec": operator_model.MINIMAL_SPEC}
    author = Api(plane.url, plane.ca, plane.service_account_token(namespace, "author"))
    author.create(CLUSTERS, body, namespace)
    author.patch(
        CLUSTERS, "annotated", {"metadata": {"labels": EVENTS["metadata"]["annotations"]}}, namespace
    )
    refusal = r"metadata\.annotations\[lmcache\.io/events-for\]: you may not create pods"
    with pytest.raises(ApiError, match=refusal):
        author.patch(CLUSTERS, "annotated", EVENTS, namespace)
    body["metadata"] = {"name": "other", **EVENTS["metadata"]}
    with pytest.raises(ApiError, match=refusal):
        author.create(CLUSTERS, body, namespace)


def test_subresources_change_replicas_alone(plane, submit, namespace_of_authors, no_operator):
    """The operator acts on the status, such as the number of pods in the list of another cluster's peers."""
    namespace = namespace_of_authors
    body = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": {"name": "scaled"}}
    created = plane.api.create(CLUSTERS, body | {"spec": operator_model.MINIMAL_SPEC}, namespace)
    author = Api(plane.url, plane.ca, plane.service_account_token(namespace, "author"))
    path = author.path(CLUSTERS, namespace, "scaled")

    def patch(subresource: str, change: Object) -> None:
        author.request("PATCH", f"{path}/{subresource}", change, "application/merge-patch+json")

    with pytest.raises(ApiError, match="status: you may not create pods"):
        patch("status", {"status": {"replicas": 1000}})
    with pytest.raises(ApiError, match=r"replicas.*should be less than or equal to 1000"):
        patch("scale", {"spec": {"replicas": 1001}})
    engine = {"replicas": 2, "image": "other:1"}
    patch("scale", EVENTS | {"spec": {"engine": engine, **engine}, "status": {"replicas": 1000}})
    scaled = plane.api.get(CLUSTERS, "scaled", namespace)
    created["spec"]["engine"]["replicas"] = 2
    assert scaled["spec"] == created["spec"]
    assert "annotations" not in scaled["metadata"]
    assert "status" not in scaled


def test_routers_of_authors_are_tuned_and_load_no_code(submit):
    """Another option may load code, write files or open the router to other programs."""

    def submitted(*args: str) -> str:
        return submit({**operator_model.MINIMAL_SPEC, "router": {"args": [*args]}})

    tuned = (
        "--kv-penalty-host=1.0",
        "--log-level=error",
        "--decode-policy=round_robin",
        "--retry_max_retries=2",
    )
    assert submitted(*tuned) == ""
    for option in ("--wasm-middleware=/models/x", "--wa=/models/x", "--log-dir=/tmp", "--enable-igw",
                   "--api_key=x", "--cors-allowed-origins=*", "--request-id-headers=x"):  # fmt: skip
        assert "spec.router.args: you may not" in submitted(*tuned, option), option


def test_engines_of_authors_choose_no_devices_of_their_node(submit):
    """The container runtime obeys the variable, whatever the device plugin assigned."""

    def submitted(name: str) -> str:
        return submit({**operator_model.MINIMAL_SPEC, "engine": {"env": [{"name": name, "value": "all"}]}})

    for name in ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_IMEX_CHANNELS",
                 "AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES"):  # fmt: skip
        assert "spec.engine.env: you may not" in submitted(name), name
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"):
        assert submitted(name) == "", name


@pytest.mark.parametrize(
    "pod", [pod for pod in HOSTILE_PODS if pod.refused_by != OPERATOR], ids=lambda pod: pod.field
)
def test_restricted_namespace_refuses_pods_that_reach_the_node(plane, namespace_of_authors, pod):
    """Admitted pods are hostile only for an author without the right to create pods."""
    resource = operator_model.cluster(engine={"podTemplate": pod.template})
    template = Engine().render(parse(resource), Context(names.STOCK_IMAGES))[-1]["spec"]["template"]
    account = {"metadata": {"name": template["spec"]["serviceAccountName"]}}
    plane.api.apply("v1/serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", **account},
                    namespace_of_authors)  # fmt: skip
    path = plane.api.path("v1/pods", namespace_of_authors) + "?dryRun=All"
    body = {"metadata": {"name": "hostile"}, "spec": template["spec"]}
    if pod.refused_by == POD_SECURITY:
        with pytest.raises(ApiError, match='violates PodSecurity "restricted') as refused:
            plane.api.request("POST", path, body)
        assert refused.value.code == 403
    else:
        plane.api.request("POST", path, body)
