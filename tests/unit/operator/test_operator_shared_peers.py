"""Clusters that share peers: the list has the pods of all, and a missing list changes no running pod."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.reconcile.references import References
from lmcache_operator.specs.kinds import CLUSTER, ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES
from lmcache_sidecar.files.peers import PeersFile
from lmcache_store.tiers.peers.tier import PeersTier
from tests.harness.operator.components import KEY, ReconciledCluster
from tests.harness.operator.model import cluster, secret_of
from tests.harness.operator.render import ENGINES, container, env_of, part, render

LIST, OTHER = Ref("ConfigMap", "demo-peers"), Ref(CLUSTER.kind, "other")
REFERRING: dict[str, Any] = {"tiers": {"peers": {"clusterRef": {"name": "other"}}}}


def another(name: str = "other", *, num_removed: int = 0, **changes: Any) -> dict[str, Any]:
    """Another LMCacheCluster of the namespace, with two pods."""
    resource = cluster(**({"engine": {"replicas": 2}} | changes))
    resource["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    resource["status"] = {"replicas": resource["spec"]["engine"]["replicas"] + num_removed}
    return resource


class ListedPeers:
    """The tier of a sidecar, without connections."""

    def set_peers(self, peers: list[Any]) -> None:
        self.peers = peers


class Rig(ReconciledCluster):
    def __init__(self, other: dict[str, Any] | None, **changes: Any) -> None:
        super().__init__(**changes)
        self.other = other

    @property
    def other(self) -> dict[str, Any] | None:
        return self.world.objects.get(OTHER)

    @other.setter
    def other(self, other: dict[str, Any] | None) -> None:
        self.world.objects.pop(OTHER, None)
        if other:
            self.world.objects[OTHER] = other

    def engines(self) -> Any:
        return self.world.objects[ENGINES]["spec"]

    def num_listed(self) -> dict[str, int]:
        """Number of listed pods, by the name of their StatefulSet."""
        listed = yaml.safe_load(self.world.objects[LIST]["data"]["peers.yaml"])["peers"]
        names = [peer.partition(".")[0].rpartition("-") for peer in listed]
        assert len(set(listed)) == len(listed)
        return {name: sum(each == name for each, _, _ in names) for name, _, _ in names}


def test_list_has_the_pods_of_all_clusters_that_refer_to_it() -> None:
    joined = {"tiers": {"peers": {"clusterRef": {"name": "demo"}}}}
    rig = Rig.settled(another(**joined), engine={"replicas": 3}, tiers={"peers": {}})
    assert rig.num_listed() == {"demo-engine": 3, "other-engine": 2}
    data = rig.world.objects[LIST]["data"]["peers.yaml"]
    assert "other-engine-1.other-engine.team.svc:9465" in data

    rig.other = another(engine={"replicas": 1}, num_removed=3, **joined)
    assert {w for w in rig.settle() if w != "status"} == {f"apply {LIST}"}, "no pod is replaced"
    assert rig.num_listed() == {"demo-engine": 3, "other-engine": 4}, "pods that are being removed stay"
    rig.other = another(tiers={"peers": {}})
    rig.settle()
    assert rig.num_listed() == {"demo-engine": 3}
    rig.other = None
    assert rig.settle() == []


def test_list_has_no_pods_of_a_cluster_that_has_none_yet() -> None:
    """The name of its Service may belong to another owner, who would get the password of the peers."""
    joined = {"tiers": {"peers": {"clusterRef": {"name": "demo"}}}}
    for status in ({}, {"replicas": 0}):
        rig = Rig.settled(another(**joined) | {"status": status}, engine={"replicas": 3}, tiers={"peers": {}})
        assert rig.num_listed() == {"demo-engine": 3}
        rig.other = another(**joined)
        rig.settle()
        assert rig.num_listed() == {"demo-engine": 3, "other-engine": 2}


def test_cluster_whose_service_has_another_owner_reports_no_pods() -> None:
    rig = Rig(None, engine={"replicas": 3}, tiers={"peers": {}})
    service = Ref("Service", "demo-engine")
    rig.world.objects[service] = {"metadata": {"name": service.name, "uid": "1"}}
    rig.settle()
    assert rig.world.resource["status"]["replicas"] == 0


def test_invalid_clusters_of_other_users_do_not_break_the_list() -> None:
    odd = another(tiers={"peers": {"clusterRef": {"name": "demo"}}}, engine={"replicas": 10**9})
    rig = Rig.settled(odd, engine={"replicas": 1}, tiers={"peers": {}})
    assert rig.num_listed() == {"demo-engine": 1, "other-engine": 999}
    odd["spec"]["engine"] = {"nodes": 10**9}
    rig.settle()
    assert rig.num_listed() == {"demo-engine": 1, "other-engine-0": 999}
    rig.other = odd | {"spec": {"tiers": {"peers": {"clusterRef": "demo"}}}}
    rig.settle()
    assert rig.num_listed() == {"demo-engine": 1}


def test_other_clusters_do_not_make_the_list_too_long_for_sidecars(tmp_path: Path) -> None:
    joined = {"tiers": {"peers": {"clusterRef": {"name": "demo"}}}, "engine": {"replicas": 1000}}
    rig = Rig(another(**joined), engine={"replicas": 30}, tiers={"peers": {}})
    rig.world.objects[Ref(CLUSTER.kind, "x" * 45)] = another("x" * 45, **joined)
    rig.settle()
    assert rig.num_listed() == {"demo-engine": 30, "other-engine": 970}
    data = rig.world.objects[LIST]["data"]["peers.yaml"]
    tier = ListedPeers()
    PeersFile(str(tmp_path / "peers.yaml"), "", cast(PeersTier, tier)).use(data)
    assert len(tier.peers) == 1000


def test_referring_cluster_uses_the_list_and_password_of_the_other_one() -> None:
    rig = Rig.settled(another(tiers={"peers": {}}), **REFERRING)
    assert LIST not in rig.world.objects
    assert secret_of("peers") not in rig.world.objects
    assert rig.conditions()["Degraded"] == "False"
    template = rig.engines()["template"]
    assert template["metadata"]["labels"]["lmcache.io/peers"] == "other"
    assert part(template["spec"]["volumes"], "peers")["configMap"]["name"] == "other-peers"
    assert (
        part(template["spec"]["volumes"], "peers-auth")["secret"]["secretName"] == "other-peers-uid-of-other"
    )
    env = env_of(container(template["spec"], "sidecar"))
    assert env["LMCACHE_PEER_NAME"].endswith(".demo-engine.team.svc:9465"), "its entry in the other list"


def test_engine_pods_of_both_clusters_reach_each_other() -> None:
    labels = {"lmcache.io/component": "engine", "lmcache.io/peers": "other"}
    for resource in (cluster(**REFERRING), another(tiers={"peers": {}})):
        policies = [each for ref, each in render(resource).items() if ref.kind == "NetworkPolicy"]
        rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
        sources = [rule["from"] for rule in rules if rule["ports"][0]["port"] == 9465]
        assert sources == [[{"podSelector": {"matchLabels": labels}}]]


NOT_SHARED = [
    (None, "there is no LMCacheCluster other: create it"),
    (another(), "LMCacheCluster other has no peers: set tiers.peers there"),
    (another(tiers={"peers": {"clusterRef": {"name": "third"}}}), "itself uses the peers of third: refer to"),
]


@pytest.mark.parametrize(("other", "message"), NOT_SHARED)
def test_pods_keep_their_peers_if_the_reference_is_wrong(other: dict[str, Any] | None, message: str) -> None:
    rig = Rig.settled(other, engine={"replicas": 2}, tiers={"peers": {}})
    before = rig.engines(), {p["metadata"]["uid"] for p in rig.world.pods.values()}
    rig.change(**REFERRING)
    assert (rig.engines(), {p["metadata"]["uid"] for p in rig.world.pods.values()}) == before
    assert rig.num_listed() == {"demo-engine": 2}
    assert message in rig.message("Degraded")
    rig.other = another(tiers={"peers": {}})
    rig.settle()
    assert LIST not in rig.world.objects
    assert rig.engines()["template"]["metadata"]["labels"]["lmcache.io/peers"] == "other"


@pytest.mark.parametrize(("other", "message"), NOT_SHARED)
def test_new_pods_serve_without_peers_if_the_reference_is_wrong(other, message):
    rig = Rig.settled(other, **REFERRING)
    assert rig.conditions() | {"Degraded": "True", "EngineAvailable": "True"} == rig.conditions()
    assert message in rig.message("Degraded")


def test_cluster_scales_after_the_one_that_it_refers_to_was_deleted() -> None:
    rig = Rig.settled(another(tiers={"peers": {}}), **REFERRING)
    template = rig.engines()["template"]
    rig.other = None
    rig.change(engine={"replicas": 3})
    assert (len(rig.world.pods), rig.engines()["template"]) == (3, template)
    assert "there is no LMCacheCluster other" in rig.message("Degraded")


def test_cluster_cannot_refer_to_itself() -> None:
    with pytest.raises(InvalidSpecError, match="must name another LMCacheCluster"):
        parse(cluster(tiers={"peers": {"clusterRef": {"name": "demo"}}}))


# -- which clusters a change wakes


def key(name: str, namespace: str = "team") -> ClusterKey:
    return ClusterKey(namespace, name, f"uid-of-{name}")


def test_change_of_a_cluster_wakes_those_that_refer_to_it_or_that_it_refers_to() -> None:
    references = References()
    assert references.note(key("b"), ["", "a"], 1) == []
    assert references.note(key("a"), [""], 1) == [key("b")], "it exists now"
    assert references.note(key("c"), ["a"], 1) == [key("a")]
    assert references.note(key("b"), ["a"], 1) == [], "no change of its spec"
    assert references.note(key("b"), ["a"], 2) == [key("a")], "another number of pods"
    assert references.note(key("b"), ["c"], 3) == [key("a"), key("c")]
    assert references.note(key("b"), ["c"], None) == [key("c")]
    assert (references.note(key("a"), [], None), references.note(key("a"), [], None)) == ([key("c")], [])
    references.note(key("a")._replace(uid="another uid"), [], 1)
    assert references.note(key("a"), [], None) == [], "a former cluster of this name"


def test_references_do_not_leave_their_namespace() -> None:
    references = References()
    references.note(key("a", "elsewhere"), [], 1)
    assert references.note(key("b"), ["a"], 1) == []


def test_reconciliation_of_a_changed_cluster_wakes_the_other_one() -> None:
    rig = Rig(another(tiers={"peers": {}}), **REFERRING)
    woken: list[ClusterKey] = []
    reconciler = Reconciler(cast(KubeApi, rig.world), Context(STOCK_IMAGES), rig.world.ask, wake=woken.append)

    def reconcile(cluster_key: ClusterKey) -> list[str]:
        woken.clear()
        asyncio.run(reconciler.reconcile(cluster_key))
        return [each.name for each in woken]

    other = ClusterKey("team", "other", "uid-of-other")
    assert (reconcile(other), reconcile(KEY)) == ([], ["other"])
    assert reconcile(KEY) == []
    rig.world.change(engine={"replicas": 5})
    assert reconcile(KEY) == ["other"]
    rig.world.run_stateful_sets()
    assert [reconcile(KEY) for _ in range(3)] == [[], ["other"], []], "its status has pods now"
    rig.other = None
    assert reconcile(other) == ["demo"], "the other one was deleted"
