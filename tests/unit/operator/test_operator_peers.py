"""The peers tier: the list of engine pods, their password, and the options of their sidecars."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.peers.peers import Peers
from lmcache_operator.errors import InvalidSpecError, RefusedError
from lmcache_operator.specs.kinds import Ref
from lmcache_sidecar.config import Config, read
from lmcache_sidecar.files.peers import PeersFile
from lmcache_store.tiers.peers.tier import PeersTier
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.injection import outcome, pod
from tests.harness.operator.model import cluster, secret_of
from tests.harness.operator.render import (
    ENGINES,
    child_of,
    children,
    container,
    pod_of,
    template_of,
)

LIST, SECRET = Ref("ConfigMap", "demo-peers"), secret_of("peers")
TLS = {"issuer": {"issuerRef": {"name": "caches"}}, "secret": {"secretRef": {"name": "ours"}}}


def with_peers(replicas: int = 2, *, kind: str = "vLLM", **limits: Any) -> dict[str, Any]:
    return {"engine": {"replicas": replicas, "kind": kind}, "tiers": {"peers": limits}}


def listed(config_map: dict[str, Any]) -> list[str]:
    content = yaml.safe_load(config_map["data"]["peers.yaml"])
    assert list(content) == ["peers"]
    return content["peers"]


def expanded(container: dict[str, Any], pod_name: str) -> dict[str, str]:
    """Variables of a container as the kubelet sets them: a reference needs an earlier variable."""
    env: dict[str, str] = {}
    for item in container["env"]:
        if "valueFrom" in item:
            assert item["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        value = item.get("value", pod_name)
        for name, earlier in env.items():
            value = value.replace(f"$({name})", earlier)
        assert "$(" not in value
        env[item["name"]] = value
    return env


def config_of(changes: dict[str, Any], pod_name: str = "demo-engine-0") -> Config:
    """The options of a sidecar, as the sidecar itself reads them."""
    reading = read({}, expanded(container(pod_of(**changes), "sidecar"), pod_name))
    assert not reading.warnings
    return reading.usable()


class Rig(ReconciledCluster):
    @property
    def peers(self) -> list[str]:
        return listed(self.world.objects[LIST])


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_sidecars_read_the_list_and_know_their_own_entry(kind: str) -> None:
    changes = with_peers(3, kind=kind)
    peers = listed(child_of("ConfigMap", Peers(), **changes))
    assert len(set(peers)) == 3
    for number, peer in enumerate(peers):
        config = config_of(changes, f"demo-engine-{number}")
        assert config.peer_name == peer == f"demo-engine-{number}.demo-engine.team.svc:9465"
        assert (config.peer_port, config.peer_bandwidth) == (9465, 0)
    service = children(**changes)[Ref("Service", "demo-engine")]["spec"]  # it gives pods these names
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_pods_of_engines_over_several_nodes_are_peers() -> None:
    changes = with_peers()
    changes["engine"] |= {"nodes": 2, "parallelism": {"data": 2}}
    rig = Rig.settled(**changes)
    assert rig.peers == [f"{name}.demo-engine.team.svc:9465" for name in sorted(rig.world.pods)]
    for name, peer in zip(sorted(rig.world.pods), rig.peers, strict=True):
        assert config_of(changes, name).peer_name == peer


def test_pods_read_only_pods_with_the_same_columns() -> None:
    changes = with_peers(2)
    changes["engine"] |= {"nodes": 2, "parallelism": {"tensor": 2}}
    content = child_of("ConfigMap", Peers(), **changes)["data"]["peers.yaml"]
    config = config_of(changes, "demo-engine-1-0")
    asked: list[Any] = []
    tier = cast(PeersTier, SimpleNamespace(set_peers=asked.extend))
    PeersFile("peers.yaml", config.peer_name, tier, of_part=config.peers_of_part).use(content)
    assert [*map(str, asked)] == ["demo-engine-0-0.demo-engine.team.svc:9465"]


def ports_open_to(sources: list[Any] | None, changes: dict[str, Any]) -> list[tuple[int, int]]:
    policy = child_of("NetworkPolicy", **changes)["spec"]
    rules = [rule for rule in policy["ingress"] if rule.get("from") == sources]
    ports = [port for rule in rules for port in rule["ports"] if port["protocol"] == "TCP"]
    return [(port["port"], port.get("endPort", port["port"])) for port in ports]


def test_only_engine_pods_with_the_same_list_reach_the_port_for_peers() -> None:
    labels = {"lmcache.io/component": "engine", "lmcache.io/peers": "demo"}
    engines = [{"podSelector": {"matchLabels": labels}}]
    assert labels.items() <= template_of(**with_peers())["metadata"]["labels"].items()
    assert ports_open_to(engines, with_peers()) == [(9465, 9465)]
    assert ports_open_to(None, with_peers()) == [(1, 9463), (9466, 65535)]
    assert ports_open_to(None, {}) == [(1, 9463), (9465, 65535)], "the port is the user's without peers"


def test_scaling_changes_only_the_list_and_the_number_of_pods() -> None:
    rig = Rig.settled(**with_peers(2))
    template = rig.world.objects[ENGINES]["spec"]["template"]
    pods = {name: pod["metadata"]["uid"] for name, pod in rig.world.pods.items()}
    for replicas in (4, 2, 0):
        writes = rig.change(engine={"replicas": replicas})
        assert {w for w in writes if w != "status"} == {f"apply {LIST}", f"apply {ENGINES}"}
        assert rig.peers == [f"demo-engine-{n}.demo-engine.team.svc:9465" for n in range(replicas)]
        assert rig.world.objects[ENGINES]["spec"]["template"] == template
        now = {name: pod["metadata"]["uid"] for name, pod in rig.world.pods.items()}
        assert all(now[name] == pods[name] for name in now.keys() & pods.keys())


def test_password_exists_before_the_first_pod_and_is_not_created_again() -> None:
    rig = Rig(**with_peers())
    rig.world.failures["create"] = RefusedError("create", "forbidden")
    rig.run()
    assert {LIST, ENGINES} <= rig.world.objects.keys(), "engines run without peers"
    assert "forbidden" in rig.message("Degraded")
    del rig.world.failures["create"], rig.world.objects[ENGINES]
    writes = rig.run()
    assert writes.index(f"create {SECRET}") < writes.index(f"apply {ENGINES}")
    rig.settle()
    rig.world.failures["create"] = RefusedError("create", "not needed")
    assert rig.run() == []


def test_injected_pods_are_no_peers() -> None:
    plain = {"engine": {"replicas": 2}}
    profile, other = (child_of("LMCacheProfile", Injection(), **each) for each in (plain, with_peers(2)))
    assert profile["template"] == other["template"]
    assert child_of("ConfigMap")["data"] == child_of("ConfigMap", **with_peers())["data"], "they read it, too"
    assert outcome(pod(), **plain) == outcome(pod(), **with_peers(2))
    assert "lmcache-sidecar" in str(outcome(pod()).objects)


@pytest.mark.parametrize(("source", "secret"), [("issuer", secret_of("peers-tls").name), ("secret", "ours")])
def test_sidecar_alone_has_the_certificate(source: str, secret: str) -> None:
    changes = with_peers(tls=TLS[source])
    pod = pod_of(**changes)
    (volume,) = (v for v in pod["volumes"] if v.get("secret", {}).get("secretName") == secret)
    assert volume["secret"]["optional"] is True, "engines start without it"
    assert [item["key"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key", "ca.crt"]
    sidecar, *rest = pod["initContainers"] + pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    assert mounts[config_of(changes).peer_tls_dir] == volume["name"]
    assert volume["name"] not in [mount["name"] for each in rest for mount in each["volumeMounts"]]


def test_issuer_gives_a_certificate_for_all_pods() -> None:
    rig = Rig.settled(**with_peers(2, tls=TLS["issuer"]))
    certificate = rig.world.objects[Ref("Certificate", "demo-peers")]["spec"]
    assert certificate["secretName"] == secret_of("peers-tls").name
    assert certificate["dnsNames"] == ["*.demo-engine.team.svc"]
    assert all(name.partition(".")[2] == "demo-engine.team.svc:9465" for name in rig.peers)
    rig.change(tiers={"peers": {"tls": TLS["secret"] | {"issuerRef": None}}})
    assert Ref("Certificate", "demo-peers") not in rig.world.objects


def test_cluster_that_uses_another_list_has_a_certificate_and_no_password() -> None:
    changes = with_peers(2, tls=TLS["issuer"], clusterRef={"name": "other"})
    assert [ref.kind for ref in children(Peers(), **changes)] == ["Certificate"]


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"bytesPerSecond": "1Ki"}, "tiers.peers.bytesPerSecond must be between 16Mi and 1Ti"),
        ({"bytesPerSecond": "fast"}, "must be an amount of bytes"),
        ({"pods": 2}, "spec.tiers.peers.pods"),
        ({"tls": {}}, "exactly one of secretRef and issuerRef"),
        ({"tls": TLS["issuer"] | TLS["secret"]}, "exactly one of secretRef and issuerRef"),
    ],
)
def test_wrong_limits_are_refused(tiers: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        parse(cluster(tiers={"peers": tiers}))
