"""`spec.clients`: who reaches which port of engines and routers, by all rendered NetworkPolicies together."""

import itertools
from typing import Any

import pytest

from lmcache_operator.api.clients import MAX_CLIENTS
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.router.router import Routing
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import names
from lmcache_operator.specs.names import STOCK_IMAGES
from testing.node.network_policies import rules
from tests.harness.operator.model import NAME, NAMESPACE, cluster
from tests.harness.operator.prefill import child, with_prefill
from tests.harness.operator.render import render

SYSTEM = "lmcache-system"
ENGINE, SIDECAR, EVENTS, PEERS, ROUTER_METRICS, OTHER = 8000, 9464, 5557, 9465, 29000, 12345
RANK_EVENTS, AFTER_EVENTS = range(EVENTS, EVENTS + 8), EVENTS + 8
PORTS = (ENGINE, SIDECAR, *RANK_EVENTS, AFTER_EVENTS, PEERS, ROUTER_METRICS, OTHER, names.GROUP_PORT)
GATEWAY = {"podSelector": {"matchLabels": {"app": "gateway"}}}
REMOTE_GATEWAY = {"namespaceSelector": {"matchLabels": {"team": "web"}}, **GATEWAY}


def pod(address: str, namespace: str = NAMESPACE, labels: Any = None) -> dict[str, Any]:
    metadata = {"name": address, "namespace": namespace, "labels": labels or {}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": address}}


def made_pod(address: str, name: str, component: str) -> dict[str, Any]:
    return pod(address, labels=names.selector(name, component) | {names.PEERS_LABEL: NAME})


def grouped_pod(address: str, number: int) -> dict[str, Any]:
    """A pod of an engine over several nodes."""
    return pod(address, labels=names.selector(NAME, names.ENGINE) | {names.GROUP_LABEL: f"{number}"})


PODS = [
    grouped_pod("engine-0-0", 0),
    grouped_pod("engine-0-1", 0),
    grouped_pod("engine-1-0", 1),
    made_pod("engine", NAME, names.ENGINE),
    made_pod("prefill", f"{NAME}-prefill", names.ENGINE),
    made_pod("router", NAME, names.ROUTER),
    made_pod("other-router", "other", names.ROUTER),
    pod("gateway", labels={"app": "gateway"}),
    pod("neighbour"),
    pod("remote-gateway", "web", {"app": "gateway"}),
    pod("remote-neighbour", "web"),
    pod("prometheus", "monitoring"),
    pod("operator", SYSTEM, names.OPERATOR_LABELS),
]
SPACES = [
    {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name} | labels}}
    for name, labels in {
        NAMESPACE: {}, SYSTEM: {}, "web": {"team": "web"}, "monitoring": {"lmcache.io/scraper": "true"},
    }.items()
]  # fmt: skip
EVERYBODY = {each["status"]["podIP"] for each in PODS}
IN_NAMESPACE = {each["status"]["podIP"] for each in PODS if each["metadata"]["namespace"] == NAMESPACE}
SCRAPERS = IN_NAMESPACE | {"prometheus"}


def policies(changes: dict[str, Any]) -> list[dict[str, Any]]:
    resources = [cluster(**changes)]
    if "prefill" in changes.get("engine", {}):
        resources.append(child(changes))
    context = Context(STOCK_IMAGES, SYSTEM)
    rendered = [render(each, Engine(), Routing(), context=context) for each in resources]
    return [item for each in rendered for ref, item in each.items() if ref.kind == "NetworkPolicy"]


def reaching(target: str, changes: dict[str, Any]) -> dict[int, set[str]]:
    """The pods that reach each TCP port of a pod."""
    reached: dict[int, set[str]] = {port: set() for port in PORTS}
    for line in rules(policies(changes), PODS, SPACES)[1:]:
        words = line.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        if options["-d"] != target or options["-j"] != "RETURN" or options.get("-p", "tcp") != "tcp":
            continue
        first, _, last = options.get("--dport", "1:65535").partition(":")
        for port in PORTS:
            if int(first) <= port <= int(last or first):
                reached[port] |= {options["-s"]} if "-s" in options else EVERYBODY
    return reached


def test_without_the_field_everybody_reaches_the_api() -> None:
    engine = reaching("engine", {"router": {"policy": "CacheAware"}})
    assert engine[ENGINE] == engine[EVENTS] == engine[PEERS] == engine[OTHER] == EVERYBODY
    assert engine[SIDECAR] == SCRAPERS | {"operator"}
    router = reaching("router", {"router": {}})
    assert router[ENGINE] == router[ROUTER_METRICS] == EVERYBODY


def test_only_clients_reach_the_engines_of_a_cluster_without_router() -> None:
    engine = reaching("engine", {"clients": [GATEWAY, REMOTE_GATEWAY]})
    clients = {"gateway", "remote-gateway"}
    assert engine[ENGINE] == engine[EVENTS] == engine[OTHER] == clients
    assert engine[SIDECAR] == SCRAPERS | {"operator"}, "not even clients in other namespaces"


def test_empty_list_admits_only_the_router() -> None:
    assert reaching("engine", {"clients": []})[ENGINE] == set()
    changes = {"clients": [], "router": {}, "tiers": {"peers": {}}}
    engine, router = reaching("engine", changes), reaching("router", changes)
    assert engine[ENGINE] == engine[EVENTS] == {"router"}
    assert engine[OTHER] == router[ENGINE] == router[OTHER] == set()
    assert {"engine", "prefill"} <= engine[PEERS]
    assert not engine[PEERS] & {"gateway", "neighbour", "prometheus"}
    assert router[ROUTER_METRICS] == SCRAPERS


def test_clients_reach_the_router_and_the_router_reaches_all_engines() -> None:
    changes = with_prefill() | {"clients": [GATEWAY]}
    for target in ("engine", "prefill"):
        engine = reaching(target, changes)
        assert engine[ENGINE] == {"router", "gateway"}, target
        assert engine[EVENTS] == {"router"}, target
        assert {"engine", "prefill"} <= engine[PEERS], target
    assert reaching("router", changes)[ENGINE] == {"gateway"}


@pytest.mark.parametrize("clients", [None, [GATEWAY]])
def test_only_the_router_reaches_the_events_of_a_data_parallel_rank(clients: Any) -> None:
    """With a router that reads no events, these ports are as any other."""
    changes = with_prefill() | {"clients": clients}
    changes["engine"] |= {"gpu": {"count": 8}, "parallelism": {"data": 8}}
    for target, policy in itertools.product(("engine", "prefill"), ("KVAware", "PowerOfTwo")):
        reached = reaching(target, changes | {"router": {"policy": policy}})
        expected = {"router"} if policy == "KVAware" else reached[OTHER]
        assert [reached[port] for port in RANK_EVENTS] == [expected] * 8, (target, policy)
        assert "gateway" in reached[OTHER] == reached[AFTER_EVENTS], (target, policy)
    rules_of_ranks = [len(each["spec"]["ingress"]) for each in policies(changes)]
    changes["engine"] |= {"gpu": {"count": 1}, "parallelism": {"data": 1}}
    assert rules_of_ranks == [len(each["spec"]["ingress"]) for each in policies(changes)]


@pytest.mark.parametrize("clients", [None, [GATEWAY]])
def test_only_pods_of_the_same_engine_reach_its_other_ports(clients: Any) -> None:
    """vLLM's ports between nodes need no authentication."""
    engine = {"replicas": 2, "nodes": 2, "parallelism": {"data": 2}}
    changes = {"engine": engine, "router": {"policy": "KVAware"}} | ({"clients": clients} if clients else {})
    reached = reaching("engine-0-1", changes)
    members = {"engine-0-0", "engine-0-1"}
    assert reached[names.GROUP_PORT] == reached[OTHER] == members
    assert reached[EVENTS] == members | {"router"}
    assert reached[ENGINE] == (EVERYBODY if clients is None else members | {"router", "gateway"})
    lines = [line.split() for line in rules(policies(changes), PODS, SPACES)]
    assert not any("udp" in words and "engine-0-1" in words for words in lines), "clients do not reach UDP"


def test_udp_is_limited_like_tcp() -> None:
    lines = rules(policies({"clients": [GATEWAY]}), PODS, SPACES)
    udp = [line for line in lines if "-p udp" in line]
    assert udp
    assert [line for line in udp if "-s gateway" not in line] == []


BLOCK = {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.3.4/32"]}
VALID = (
    GATEWAY,
    REMOTE_GATEWAY,
    {"podSelector": {}},
    {"podSelector": {"matchExpressions": [{"key": "a.b/c", "operator": "In", "values": ["", "x_Y.z"]}]}},
    {"namespaceSelector": {"matchExpressions": [{"key": "k", "operator": "Exists", "values": None}]}},
    {"ipBlock": BLOCK},
    {"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}},
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": None}},
)


@pytest.mark.parametrize("client", VALID, ids=str)
def test_valid_client_is_rendered_as_it_is(client: dict[str, Any]) -> None:
    (policy,) = policies({"clients": [client]})
    assert policy["spec"]["ingress"][0]["from"] == [client]


def expression(**parts: Any) -> dict[str, Any]:
    return {"podSelector": {"matchExpressions": [parts]}}


def block(cidr: Any, **parts: Any) -> dict[str, Any]:
    return {"ipBlock": {"cidr": cidr, **parts}}


LABELS = (["a"], {"app": "no blanks"}, {"-app": "a"}, {"a..b/c": "a"}, {"-a.b/c": "a"}, {"a": 1},
          {"a" * 254 + "/c": "a"}, {"a": "a" * 64})  # fmt: skip
NETWORKS = ("10.0.0.0", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/08", "10.0.0.0/255.0.0.0", "10.00.0.0/8",
            "fe80::%1/64", "::ffff:10.0.0.0/104", "a/b", 8)  # fmt: skip
EXCEPTIONS = (["10.0.0.0/8"], ["11.0.0.0/16"], ["fd00::/16"], [None], "10.1.0.0/16")
INVALID = (
    {},
    {"podSelector": None},
    {"ipBlock": BLOCK, **GATEWAY},
    {"ipBlock": BLOCK, "namespaceSelector": {}},
    {"service": {}},
    {"podSelector": {"app": "gateway"}},
    {"podSelector": "app=gateway"},
    {"podSelector": {"matchExpressions": {}} | {"matchExpressions": "a"}},
    *({"podSelector": {"matchLabels": labels}} for labels in LABELS),
    expression(key="a", operator="in", values=["b"]),
    expression(key="a", operator="In"),
    expression(key="a", operator="In", values=[]),
    expression(key="a", operator="NotIn", values="b"),
    expression(key="a", operator="Exists", values=["b"]),
    expression(operator="Exists"),
    {"ipBlock": {}},
    {"ipBlock": "10.0.0.0/8"},
    *map(block, NETWORKS),
    *(block("10.0.0.0/8", **{"except": parts}) for parts in EXCEPTIONS),
)


@pytest.mark.parametrize("client", INVALID, ids=str)
def test_invalid_client_is_refused_by_its_field(client: dict[str, Any]) -> None:
    resource = cluster()
    resource["spec"]["clients"] = [GATEWAY, client]
    with pytest.raises(InvalidSpecError, match=r"^spec\.clients: ") as refused:
        parse(resource)
    assert "client" in str(refused.value) or "selectors need" in str(refused.value)


def test_too_many_clients_for_prefill_pods_are_refused() -> None:
    """The router is one more client of prefill pods."""
    assert parse(cluster(clients=[GATEWAY] * MAX_CLIENTS))
    derived = child(with_prefill() | {"clients": [GATEWAY] * (MAX_CLIENTS - 1)})
    assert len(parse(derived).spec.clients or ()) == MAX_CLIENTS
    with pytest.raises(InvalidSpecError, match="clients may have at most 63 items with engine"):
        parse(cluster(**with_prefill(), clients=[GATEWAY] * MAX_CLIENTS))
