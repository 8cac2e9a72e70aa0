"""Objects of other owners on a real API server, at names that an LMCacheCluster leads to.

The author may write LMCacheClusters, and neither create pods nor read Secrets. The author chooses the name.
"""

from collections.abc import Iterator

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.specs.kinds import BY_NAME, Ref, ref_of
from lmcache_operator.specs.names import COMPONENT_LABEL
from testing.kube.api import Api, ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, create_account
from tests.harness.operator import hostile_specs
from tests.harness.operator.hostile_specs import ANNOTATIONS, FULL, LABELS, OF_AN_ISSUER
from tests.harness.operator.render import CONTEXT, secrets_in

pytestmark = pytest.mark.kube

RULE = {"apiGroups": ["lmcache.io"], "resources": ["lmcacheclusters"], "verbs": ["create", "patch", "delete"]}
OWNERS_OF_PODS = ("apps/v1/statefulsets", "apps/v1/deployments", "lmcache.io/v1alpha1/lmcacheprofiles")
CLAIMS = FULL | {"engine": {"gpu": FULL["engine"]["gpu"], "replicas": 0}}
SMALL = FULL | {"engine": {"replicas": 0}}
"""Without claims, the operator creates all that it will create before it first reports a taken name."""
CHOSEN_UID = "0e7a4a2c-0000-4000-8000-000000000001"
"""A uid that the author asks for."""
PULL = {"imagePullSecrets": [{"name": "team-registry"}]}


def resource_of(kind: str) -> str:
    """The path of a kind's objects in the API."""
    return f"{BY_NAME[kind].api_version}/{BY_NAME[kind].plural}"


@pytest.fixture
def author(plane: Cluster, operator: object, namespace: str) -> Api:
    create_account(plane, namespace, "author", [RULE])
    return Api(plane.url, plane.ca, plane.service_account_token(namespace, "author"))


def create(author: Api, namespace: str, name: str, spec: Object) -> Object:
    """Create an LMCacheCluster with hostile metadata. The policy refuses one of the annotations."""
    annotations = {key: value for key, value in ANNOTATIONS.items() if key != "lmcache.io/events-for"}
    metadata = {"name": name, "labels": LABELS, "annotations": annotations, "uid": CHOSEN_UID}
    body = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": metadata}
    return author.create(CLUSTERS, body | {"spec": spec}, namespace)


def degraded(plane: Cluster, namespace: str, name: str) -> str:
    """The message about all problems of a cluster."""
    conditions = plane.api.get(CLUSTERS, name, namespace).get("status", {}).get("conditions", [])
    return "".join(each["message"] for each in conditions if each["type"] == "Degraded")


def owners_of_pods(plane: Cluster, namespace: str, name: str) -> list[Object]:
    """The objects of a cluster that create pods, or that add something to pods."""
    label = f"lmcache.io/cluster={name}"
    listings = (plane.api.objects(each, namespace, label) for each in OWNERS_OF_PODS)
    return [each for listing in listings for each in listing if each["metadata"].get("ownerReferences")]


def foreign(name: str, namespace: str) -> Iterator[tuple[Ref, str, Object]]:
    """Objects of somebody else, each with its component: as the operator writes them, without an owner.

    Kinds of cert-manager are not installed here. An LMCacheCluster would have pods of its own.
    """
    metadata = {"name": name, "namespace": namespace, "uid": "1"}
    cluster = parse({"metadata": metadata, "spec": CLAIMS})
    for component in COMPONENTS:
        for child in component.render(cluster, CONTEXT):
            del child["metadata"]["ownerReferences"]
            if child["kind"] not in ("Certificate", "LMCacheCluster"):
                yield ref_of(child), component.name, child


def test_secrets_of_others_are_neither_mounted_nor_overwritten(plane, operator, namespace, author):
    """The author cannot name them in the spec, and gets them by no name of an LMCacheCluster either."""
    taken = [pattern.format(name="billing") for pattern in hostile_specs.SECRETS]
    for name in taken:
        secret = {"metadata": {"name": name}, "stringData": {"password": "theirs", "tls.key": "theirs"}}
        plane.api.create("v1/secrets", secret, namespace)
    plane.api.patch("v1/serviceaccounts", "default", PULL, namespace)
    named = {"model": {"name": "m", "tokenSecretRef": {"name": taken[0]}}}
    with pytest.raises(ApiError, match=r"^403: .*you can name only the"):
        create(author, namespace, "refused", FULL | named)

    tiers = FULL["tiers"]
    managed = {"managed": tiers["remote"]["managed"] | OF_AN_ISSUER}
    spec = FULL | {"tiers": tiers | {"peers": OF_AN_ISSUER, "remote": managed}}
    uid = create(author, namespace, "billing", spec)["metadata"]["uid"]
    assert uid != CHOSEN_UID
    server = plane.wait(lambda: plane.api.find("v1/pods", "billing-remote-0", namespace))["spec"]
    engine = plane.wait(lambda: plane.api.find("v1/pods", "billing-engine-0", namespace))["spec"]
    plane.wait(lambda: plane.api.find("v1/secrets", f"billing-remote-{uid}", namespace))
    assert server["containers"][0]["image"] == "attacker.example/shard:1"
    for spec in (server, engine):
        mounted = {source.get("secretName") or source["name"] for source in secrets_in(spec)}
        assert f"billing-remote-{uid}" in mounted
        assert mounted.isdisjoint(taken)
        assert "imagePullSecrets" not in spec, "those of the namespace's default account"
    for name in taken:
        assert plane.api.get("v1/secrets", name, namespace)["data"].keys() == {"password", "tls.key"}


def test_reference_mounts_at_most_the_list_of_another_owner(plane, operator, namespace, author):
    """``clusterRef`` names any LMCacheCluster, and so the ConfigMaps with its lists."""
    lists = {"theirs-peers": ["peers.yaml"], "theirs-remote": ["shards.yaml"]}
    for name in lists:
        theirs = {"metadata": {"name": name}, "data": {"settings": "theirs"}}
        plane.api.create("v1/configmaps", theirs, namespace)
    reference = {"clusterRef": {"name": "theirs"}}
    tiers = {"memory": {"size": "64Mi"}, "peers": reference, "remote": reference}
    create(author, namespace, "reader", {"model": {"name": "m"}, "engine": {}, "tiers": tiers})
    plane.wait(lambda: plane.api.find("v1/pods", "reader-engine-0", namespace))

    def mounted() -> dict[str, list[str]]:
        """Keys of the foreign ConfigMaps that the pods mount."""
        engines = plane.api.get("apps/v1/statefulsets", "reader-engine", namespace)
        volumes = engines["spec"]["template"]["spec"]["volumes"]
        sources = [each["configMap"] for each in volumes if "configMap" in each]
        return {
            each["name"]: [item["key"] for item in each.get("items", ())]
            for each in sources
            if each["name"] in lists
        }

    assert mounted() == {}, "there is no such LMCacheCluster"
    create(author, namespace, "theirs", SMALL)
    plane.wait(lambda: mounted() == lists)


def test_pods_use_no_object_of_another_owner(plane, operator, namespace, author):
    """Each LMCacheCluster meets one foreign object. A name that its pods do not use stops nothing."""
    objects = [
        [*foreign(f"c{number}", namespace)][number] for number, _ in enumerate(foreign("x", namespace))
    ]
    assert len(objects) > 18

    def made(name: str) -> set[str]:
        return {
            each["metadata"]["labels"][COMPONENT_LABEL] for each in owners_of_pods(plane, namespace, name)
        }

    for number, (ref, _, child) in enumerate(objects):
        more = PULL if ref.kind == "ServiceAccount" else {}
        plane.api.create(resource_of(ref.kind), child | more, namespace)
        create(author, namespace, f"c{number}", CLAIMS if ref.kind == "ResourceClaimTemplate" else SMALL)
    stopped: list[tuple[str, str, Ref]] = []
    for number, (ref, component, _) in enumerate(objects):
        name = f"c{number}"

        def is_reported(name: str = name, ref: Ref = ref) -> bool:
            return f"{ref} exists and does not belong to" in degraded(plane, namespace, name)

        plane.wait(is_reported)
        if ref.kind == "PodDisruptionBudget" or ref == Ref("Service", name):
            plane.wait(lambda: component in made(name))  # noqa: B023
        else:
            stopped.append((name, component, ref))
    for name, component, ref in stopped:  # the operator has tried again meanwhile
        assert component not in made(name), ref
    assert "team-registry" not in str([pod["spec"] for pod in plane.api.objects("v1/pods", namespace)])


def test_engines_start_when_the_name_of_their_account_is_free(plane, operator, namespace, author):
    account = {"metadata": {"name": "search-engine"}, **PULL}
    plane.api.create("v1/serviceaccounts", account, namespace)
    create(author, namespace, "search", FULL | {"engine": {}})
    plane.wait(lambda: "ServiceAccount search-engine" in degraded(plane, namespace, "search"))
    assert not plane.api.find("apps/v1/statefulsets", "search-engine", namespace)
    plane.api.delete("v1/serviceaccounts", "search-engine", namespace)
    pod = plane.wait(lambda: plane.api.find("v1/pods", "search-engine-0", namespace))["spec"]
    assert pod["serviceAccountName"] == "search-engine"
    assert "imagePullSecrets" not in pod


@pytest.mark.parametrize("kind", ["ServiceAccount", "NetworkPolicy"])
def test_pods_use_no_object_that_was_created_while_another_name_was_taken(
    plane, operator, namespace, author, kind
):
    """The author takes the first name with a second LMCacheCluster, and frees it with a deletion."""
    create(author, namespace, "search-engine", SMALL)
    plane.wait(lambda: plane.api.find("v1/services", "search-engine", namespace))
    create(author, namespace, "search", FULL | {"engine": {}})
    plane.wait(lambda: "Service search-engine" in degraded(plane, namespace, "search"))
    ref, _, child = next(
        each for each in foreign("search", namespace) if each[0] == Ref(kind, "search-engine")
    )
    plane.api.create(resource_of(kind), child, namespace)
    author.delete(CLUSTERS, "search-engine", namespace)
    plane.wait(lambda: f"{ref} exists and does not belong to" in degraded(plane, namespace, "search"))
    assert not plane.api.find("apps/v1/statefulsets", "search-engine", namespace)


def test_no_pods_are_created_without_their_network_policy(plane, operator, namespace, author):
    """Users of the namespace can use up a quota."""
    quota = {"metadata": {"name": "full"}, "spec": {"hard": {"count/networkpolicies.networking.k8s.io": "0"}}}
    plane.api.create("v1/resourcequotas", quota, namespace)
    create(author, namespace, "search", FULL | {"engine": {}})
    plane.wait(lambda: "NetworkPolicy search-engine" in degraded(plane, namespace, "search"))
    assert plane.api.find("v1/serviceaccounts", "search-engine", namespace)
    assert not plane.api.find("apps/v1/statefulsets", "search-engine", namespace)


def test_author_cannot_slip_in_the_cluster_of_prefill_pods(plane, operator, namespace, author):
    """The operator would merge an administrator's Secrets into it, next to the author's image."""
    body: Object = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    tiers = {"memory": {"size": "64Mi"}, "peers": {}}
    spec = {"model": {"name": "m"}, "engine": {"image": "attacker.example/x:1"}, "tiers": tiers}
    named = {"model": {"name": "m", "tokenSecretRef": {"name": "theirs"}}, "images": {"policy": "Follow"}}
    admins = spec | named | {"engine": {"replicas": 0}, "router": {}}
    parent = plane.api.create(CLUSTERS, body | {"metadata": {"name": "chat"}, "spec": admins}, namespace)
    owner = {"name": "chat", "uid": parent["metadata"]["uid"], "controller": True}
    owner |= {"apiVersion": body["apiVersion"], "kind": body["kind"]}
    refusal = r"^403: .*metadata\.ownerReferences: you may not create pods"
    metadata = {"name": "chat-prefill", "ownerReferences": [owner]}
    with pytest.raises(ApiError, match=refusal):
        author.create(CLUSTERS, body | {"metadata": metadata, "spec": spec}, namespace)
    author.create(CLUSTERS, body | {"metadata": {"name": "chat-prefill"}, "spec": spec}, namespace)
    with pytest.raises(ApiError, match=refusal):
        author.patch(CLUSTERS, "chat-prefill", {"metadata": {"ownerReferences": [owner]}}, namespace)
    # The garbage collector does not know this kind, so it leaves the object alone.
    unknown = owner | {"apiVersion": "attacker.example/v1", "kind": "Unknown"}
    author.patch(CLUSTERS, "chat-prefill", {"metadata": {"ownerReferences": [unknown]}}, namespace)
    with pytest.raises(ApiError, match=refusal):
        author.patch(CLUSTERS, "chat-prefill", {"metadata": {"ownerReferences": [owner]}}, namespace)

    plane.api.patch(CLUSTERS, "chat", {"spec": {"engine": {"prefill": {}}}}, namespace)
    plane.wait(lambda: "LMCacheCluster chat-prefill exists" in degraded(plane, namespace, "chat"))
    engines = plane.wait(lambda: plane.api.find("apps/v1/statefulsets", "chat-prefill-engine", namespace))
    assert "theirs" not in str(engines)
