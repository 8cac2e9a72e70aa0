"""All rights of the operator's ServiceAccount, on a real API server: what a thief of its token could do.

``kubectl auth can-i --list`` makes the same request.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_operator import app
from testing.kube.api import Api, ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, applied_chart, example, new_namespace
from tests.harness.operator.clusters import wait_ready

pytestmark = pytest.mark.kube

REVIEWS = "authorization.k8s.io/v1/selfsubjectrulesreviews"
ROLES = "rbac.authorization.k8s.io/v1/roles"
BINDINGS = "rbac.authorization.k8s.io/v1/rolebindings"
WRITE = "get list watch create patch delete"
NAMESPACED = {
    "/configmaps": WRITE,
    "coordination.k8s.io/leases": "create",
    "coordination.k8s.io/leases[lmcache-operator-namespace]": "get update",
    "/events": "get list create patch",
    "/namespaces": "get",
    "/pods": "list watch patch delete",
    "/pods/eviction": "create",
    "/pods/resize": "patch",
    "/secrets": "create",
    "/serviceaccounts": WRITE,
    "/services": WRITE,
    "apps/deployments": WRITE,
    "apps/statefulsets": WRITE,
    "cert-manager.io/certificates": WRITE,
    "lmcache.io/lmcacheclusters": WRITE,
    "lmcache.io/lmcacheclusters/finalizers": "update",
    "lmcache.io/lmcacheclusters/status": "patch",
    "lmcache.io/lmcacheprofiles": "get list watch create patch",
    "networking.k8s.io/networkpolicies": WRITE,
    "policy/poddisruptionbudgets": WRITE,
    "rbac.authorization.k8s.io/rolebindings": WRITE,
    "rbac.authorization.k8s.io/roles": WRITE,
    "resource.k8s.io/resourceclaimtemplates": WRITE,
    "scheduling.k8s.io/podgroups": WRITE,
}
"""Verbs by group and resource, in all namespaces, or only in those of ``watchNamespaces``."""
LISTED = {"/nodes": "get list"}
"""Verbs in any namespace with ``watchNamespaces``."""
CLUSTER = LISTED | {
    "apiextensions.k8s.io/customresourcedefinitions": "list watch",
    "coordination.k8s.io/leases[lmcache-operator-namespace]": "delete",
    "coordination.k8s.io/leases[lmcache-operator-all-namespaces]": "get update",
}
"""Verbs in any namespace without ``watchNamespaces``."""


def lease(name: str) -> dict[str, str]:
    """Verbs in the operator's own namespace."""
    return {
        f"coordination.k8s.io/leases[{name}]": "get update",
        "coordination.k8s.io/leases": "create",
        f"/secrets[{name}-pages-key]": "get",
    }


def merged(*parts: dict[str, str]) -> dict[str, set[str]]:
    verbs = defaultdict(set)
    for part in parts:
        for resource, words in part.items():
            verbs[resource] |= {*words.split()}
    return dict(verbs)


def api_of(plane: Cluster, account: str) -> Api:
    namespace, _, name = account.partition("/")
    return Api(plane.url, plane.ca, plane.service_account_token(namespace, name))


def rules(api: Api, namespace: str) -> Object:
    """All rules of this user in a namespace. Only the authorizer of nodes may leave its rules out."""
    status: Object = api.create(REVIEWS, {"spec": {"namespace": namespace}})["status"]
    assert status.get("evaluationError", "") in ("", "node authorizer does not support user rule resolution")
    return status


def rights(plane: Cluster, account: str, namespace: str) -> dict[str, set[str]]:
    """Verbs by resource that the account has in the namespace and an account without any Role has not."""
    verbs = defaultdict(set)
    for rule in rules(api_of(plane, account), namespace)["resourceRules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames") or [""]:
                    verbs[f"{group}/{resource}" + (f"[{name}]" if name else "")] |= {*rule["verbs"]}
    for resource in everyone(plane):
        del verbs[resource]
    return dict(verbs)


def everyone(plane: Cluster) -> list[str]:
    """Resources on which every ServiceAccount has a right, such as reviews of its rights."""
    listed_rules = rules(api_of(plane, "default/default"), "default")["resourceRules"]
    return [
        f"{group}/{name}"
        for rule in listed_rules
        for group in rule["apiGroups"]
        for name in rule["resources"]
    ]


@pytest.fixture(scope="module")
def listed(plane: Cluster, chart: str) -> Iterator[tuple[str, str]]:
    """An operator with ``watchNamespaces``: its ServiceAccount, and a namespace that it does not serve."""
    with new_namespace(plane, "rights-served") as served, new_namespace(plane, "rights-foreign") as foreign:
        values = (f"watchNamespaces={{{served}}}", "fullnameOverride=rights")
        with applied_chart(plane, "rights", served, *values, "policies.restrictClusters.enabled=false"):
            yield f"{served}/rights", foreign


def test_operator_of_all_namespaces_has_exactly_the_listed_rights(plane, chart):
    namespace, _, name = chart.partition("/")
    assert rights(plane, chart, "default") == merged(NAMESPACED, CLUSTER)
    assert rights(plane, chart, namespace) == merged(NAMESPACED, CLUSTER, lease(name))


def test_operator_of_some_namespaces_has_no_rights_in_others(plane, listed):
    account, foreign = listed
    served, _, name = account.partition("/")
    assert rights(plane, account, foreign) == merged(LISTED)
    assert rights(plane, account, served) == merged(NAMESPACED, LISTED, lease(name))


def test_operator_has_no_right_that_leads_to_all_others(plane, chart):
    held = rights(plane, chart, chart.partition("/")[0])
    verbs = set().union(*held.values())
    assert verbs.isdisjoint({"*", "escalate", "bind", "impersonate", "deletecollection", "approve", "sign"})
    assert not [resource for resource in held if "*" in resource]
    assert held["/secrets"] == {"create"}
    paths = rules(api_of(plane, chart), "default")["nonResourceRules"]
    assert {verb for rule in paths for verb in rule["verbs"]} == {"get"}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (ROLES, {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}),
        (ROLES, {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}),
        (BINDINGS, {"roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}}),
        (BINDINGS, {"roleRef": {"kind": "ClusterRole", "name": "view"}}),
    ],
)
def test_operator_cannot_grant_rights_that_it_does_not_have(plane, chart, kind, content):
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": "default"}
    body: Object = {"metadata": {"name": "more"}, **content}
    if kind == BINDINGS:
        body |= {"subjects": [subject]}
        body["roleRef"] |= {"apiGroup": "rbac.authorization.k8s.io"}
    with pytest.raises(ApiError, match="attempting to grant RBAC permissions not currently held") as refused:
        api_of(plane, chart).create(kind, body, "default")
    assert refused.value.code == 403


# -- a namespace that the API server refuses


@pytest.fixture
def pair(plane: Cluster, tmp_path: Path) -> Iterator[tuple[Operator, str, str, Callable[[], object]]]:
    """An operator that serves two namespaces and renews its watches every two seconds."""
    with (
        new_namespace(plane, "pair-served") as served,
        new_namespace(plane, "pair-lost") as lost,
        applied_chart(plane, "pair", served, *PAIR) as apply,
    ):
        flags = [f"--namespace={name}" for name in (served, lost)]
        program = ("-m", "testing.kube.impatient_operator", "--watch-seconds=2")
        process = Operator(plane, tmp_path, f"{served}/pair", *flags, program=program)
        process.start()
        try:
            yield process, served, lost, apply
        finally:
            process.kill()


PAIR = (
    "watchNamespaces={pair-served,pair-lost}", "fullnameOverride=pair",
    "policies.restrictClusters.enabled=false",
)  # fmt: skip


def test_lost_namespace_stops_no_other_one_and_is_served_again(plane, pair):
    operator, served, lost, apply = pair
    name = f"pair.{served}"
    images = map("e:{}".format, itertools.count())
    num_reads = len(app._watched()) + 1  # lists of children and of LMCacheClusters

    def num_refused() -> float:
        operator.check()
        return operator.metric("lmcache_operator_refused_reads")

    def change(namespace: str) -> None:
        plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": next(images)}}}, namespace)

    def wait_lost() -> None:
        """Wait until all reads of the namespace are refused. The other one is served."""
        plane.wait(lambda: num_refused() >= num_reads)
        change(served)
        wait_ready(plane, served)

    for namespace in (served, lost):
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)

    binding = plane.api.get(BINDINGS, name, lost)
    plane.api.delete(BINDINGS, name, lost)
    change(lost)
    wait_lost()
    binding["metadata"] = {"name": name, "namespace": lost}
    plane.api.create(BINDINGS, binding, lost)
    wait_ready(plane, lost)
    plane.wait(lambda: num_refused() == 0)

    plane.api.patch(CLUSTERS, NAME, {"metadata": {"finalizers": ["example.com/other"]}}, lost)
    plane.api.delete("v1/namespaces", lost)  # it terminates until another program removes the finalizer
    wait_lost()
    plane.api.patch(CLUSTERS, NAME, {"metadata": {"finalizers": None}}, lost)
    plane.wait(lambda: not plane.api.find("v1/namespaces", lost))
    plane.api.create("v1/namespaces", {"metadata": {"name": lost}})
    plane.wait(lambda: plane.api.get("v1/serviceaccounts", "default", lost))
    plane.api.create(CLUSTERS, example(), lost)
    wait_lost()
    apply()
    wait_ready(plane, lost)
    plane.wait(lambda: num_refused() == 0)
    assert operator.log.count(f"namespace {lost} is not served") == 2
    assert operator.log.count(f"namespace {lost} is served again") == 2
