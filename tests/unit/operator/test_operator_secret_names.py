"""Names of the Secrets that the operator does not read: no Secret of somebody else has such a name."""

import json
from typing import Any

import pytest

from lmcache_operator.specs.kinds import CLUSTER, Ref
from lmcache_operator.specs.names import SPEC_HASH
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.model import Object, cluster, secret_of
from tests.harness.operator.render import ENGINES, part, secrets_in

TLS = {"tls": {"issuerRef": {"name": "caches"}}}
DERIVED: Object = {
    "engine": {"replicas": 2},
    "sidecar": {"httpAuthentication": "Token"},
    "tiers": {"peers": TLS, "remote": {"managed": {"memoryPerShard": "1Gi", **TLS}}},
}
"""A spec that needs all Secrets whose names the operator chooses."""
REFERRING: Object = {"engine": {"replicas": 2}, "tiers": {"remote": {"clusterRef": {"name": "kv"}}}}
KV = Ref(CLUSTER.kind, "kv")


def test_names_that_the_operator_chooses_contain_the_uid() -> None:
    """A user chooses the name of an LMCacheCluster. Without the uid, it could lead to anybody's Secret."""
    bench = ReconciledCluster.settled(**DERIVED)
    sources = [*secrets_in([*bench.world.objects.values()])]
    names = {source.get("secretName") or source["name"] for source in sources}
    purposes = ("pages", "peers", "peers-tls", "remote", "remote-tls")
    assert names == {secret_of(purpose).name for purpose in purposes}
    created = {ref for ref in bench.world.objects if ref.kind == "Secret"}
    assert created == {secret_of(purpose) for purpose in ("pages", "peers", "remote")}


def test_pods_mount_the_keys_that_they_need_and_never_a_whole_secret() -> None:
    bench = ReconciledCluster.settled(**DERIVED)
    mounted = [source for source in secrets_in([*bench.world.objects.values()]) if "issuerRef" not in source]
    assert len(mounted) > 10
    assert [source for source in mounted if not source.get("items")] == []


def test_pods_mount_one_key_of_a_list_and_only_of_a_cluster_that_exists() -> None:
    """Otherwise a reference would lead to any ConfigMap whose name ends like that of a list."""
    kv: Object = {"clusterRef": {"name": "kv"}}
    bench = ReconciledCluster.settled(tiers={"peers": kv, "remote": kv})
    assert lists(bench) == {}
    owner = tier("first")
    owner["spec"]["tiers"]["peers"] = {}
    bench.world.objects[KV] = owner
    bench.settle()
    assert lists(bench) == {"kv-peers": "peers.yaml", "kv-remote": "shards.yaml"}


def test_shards_have_an_account_of_their_own() -> None:
    """The default account of a namespace may have Secrets that pull images, or a role of a cloud."""
    bench = ReconciledCluster.settled(**DERIVED)
    spec = bench.world.objects[Ref("StatefulSet", "demo-remote")]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "demo-remote"
    assert spec["automountServiceAccountToken"] is False
    assert bench.world.objects[Ref("ServiceAccount", "demo-remote")]["automountServiceAccountToken"] is False


def tier(uid: str, **tls: Any) -> Object:
    """The cluster that owns the shards, as the API server stores it."""
    resource = cluster({"tiers": {"remote": {"managed": {"memoryPerShard": "1Gi", **tls}}}})
    return resource | {"metadata": {**resource["metadata"], "name": "kv", "uid": uid}}


def mounts(bench: ReconciledCluster) -> list[str]:
    """Secrets of the remote tier that the engine pods mount."""
    volumes = bench.world.objects[ENGINES]["spec"]["template"]["spec"]["volumes"]
    sources = part(volumes, "remote-auth")["projected"]["sources"]
    return [source["secret"]["name"] for source in sources]


def lists(bench: ReconciledCluster) -> dict[str, str]:
    """The ConfigMaps of other components that the engine pods mount, with their key."""
    volumes = bench.world.objects[ENGINES]["spec"]["template"]["spec"]["volumes"]
    sources = [each["configMap"] for each in volumes if "configMap" in each]
    return {each["name"]: each["items"][0]["key"] for each in sources if each.get("optional")}


def evicted(bench: ReconciledCluster) -> int:
    return sum(write.startswith("evict") for write in bench.settle())


def test_secrets_of_another_cluster_follow_its_uid() -> None:
    bench = ReconciledCluster.settled(**REFERRING)
    assert mounts(bench) == [], "there is no such cluster, and nobody's Secret is taken for its own"
    bench.world.objects[KV] = tier("first")
    assert evicted(bench) == 2, "running pods get the password"
    assert mounts(bench) == ["kv-remote-first", "kv-remote-tls-first"]
    bench.world.objects[KV] = tier("first", tls={"secretRef": {"name": "ours"}})
    assert evicted(bench) == 2
    assert mounts(bench) == ["kv-remote-first", "ours"]

    del bench.world.objects[KV]
    bench.restart_operator()
    assert evicted(bench) == 0, "a deleted tier costs no engine pod"
    assert mounts(bench) == ["kv-remote-first", "ours"]
    bench.world.objects[KV] = tier("second")
    assert evicted(bench) == 2
    assert mounts(bench) == ["kv-remote-second", "kv-remote-tls-second"]


@pytest.mark.parametrize(
    "record",
    ["", "[]", '{"other": "x"}', '{"kv": ["x"]}', '{"kv": 1}', '{"kv": null}', '[[1, "x"], ["b", "y/"]]',
     "[" * 100_000, '{"kv": ""}', '{"kv": "A B/x"}', '{"kv": "x/A B"}', '{"kv": "-/"}',
     f'{{"kv": "{"x" * 300}/"}}'],
    ids=lambda record: record[:20],
)  # fmt: skip
def test_damaged_record_of_another_cluster_is_ignored(record: str) -> None:
    bench = ReconciledCluster.settled(**REFERRING)
    bench.world.edit(ENGINES, "metadata", "annotations", "lmcache.io/lenders", value=record)
    bench.settle()
    assert mounts(bench) == []
    assert "InternalError" not in bench.message("Degraded")
    bench.world.objects[KV] = tier("first")
    bench.settle()
    assert mounts(bench) == ["kv-remote-first", "kv-remote-tls-first"]


def test_record_has_the_uid_of_each_other_cluster() -> None:
    bench = ReconciledCluster(**REFERRING)
    bench.world.objects[KV] = tier("first")
    bench.settle()
    annotations = bench.world.objects[ENGINES]["metadata"]["annotations"]
    assert json.loads(annotations["lmcache.io/lenders"]) == {"kv": "first/"}
    assert (
        "lmcache.io/lenders"
        not in ReconciledCluster.settled().world.objects[ENGINES]["metadata"]["annotations"]
    )


def test_pods_with_the_former_names_are_replaced() -> None:
    """An operator of an earlier version mounted Secrets whose names had no uid."""
    bench = ReconciledCluster.settled(**DERIVED)
    for pod in bench.world.pods.values():
        pod["metadata"]["annotations"][SPEC_HASH] = "former"
    created = [ref for ref in bench.world.objects if ref.kind == "Secret"]
    for ref in created:
        del bench.world.objects[ref]
    for _ in range(6):
        bench.run()
        bench.world.run_stateful_sets(is_ready=False)
        bench.run()
        for name in bench.world.pods:
            bench.world.set_ready(name, True)
    assert {*created} <= bench.world.objects.keys()
    assert "former" not in {each["metadata"]["annotations"][SPEC_HASH] for each in bench.world.pods.values()}
