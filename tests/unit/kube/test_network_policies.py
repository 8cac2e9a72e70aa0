"""NetworkPolicies as iptables rules of the tests' node."""

import pytest

from testing.node.network_policies import matches, rules


def pod(name, address, namespace="app", **labels):
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {},
        "status": {"phase": "Running", "podIP": address},
    }


def namespace(name, **labels):
    return {"metadata": {"name": name, "labels": labels}}


def policy(*ingress, selector=None, **spec):
    spec = {"podSelector": selector or {}, "policyTypes": ["Ingress"], "ingress": list(ingress)} | spec
    return {"metadata": {"name": "p", "namespace": "app"}, "spec": spec}


SPACES = [namespace("app"), namespace("scrapers", scraper="true"), namespace("other")]
PODS = [
    pod("engine", "10.0.0.1", part="engine"),
    pod("friend", "10.0.0.2"),
    pod("prometheus", "10.0.0.3", "scrapers"),
    pod("stranger", "10.0.0.4", "other"),
]


def allowed(*policies):
    """(source or '', target, port) of each rule that allows traffic, and the isolated pods."""
    lines = rules(list(policies), PODS, SPACES)
    assert "ESTABLISHED" in lines[0]
    dropped = [line.split()[3] for line in lines if line.endswith("DROP")]
    num_accept_rules = len(lines) - len(dropped)
    assert not any(line.endswith("DROP") for line in lines[:num_accept_rules])
    accepted = set()
    for line in lines[1:num_accept_rules]:
        words = line.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        accepted.add((options.get("-s", ""), options["-d"], options.get("--dport", "")))
    return accepted, dropped


def test_pods_without_policy_accept_all_traffic():
    assert allowed(policy(selector={"matchLabels": {"part": "unmatched"}}))[1] == []


def test_sources_are_pods_of_the_policys_and_of_selected_namespaces():
    peers = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {"scraper": "true"}}}]
    rule = {"from": peers, "ports": [{"port": 9464, "protocol": "TCP"}]}
    accepted, dropped = allowed(policy(rule, selector={"matchLabels": {"part": "engine"}}))
    assert accepted == {(f"10.0.0.{n}", "10.0.0.1", "9464") for n in (1, 2, 3)}
    assert dropped == ["10.0.0.1"]


def test_rule_without_sources_allows_all_sources_to_its_ports():
    rule = {"ports": [{"port": 1, "endPort": 9463, "protocol": "TCP"}, {"port": 9465, "protocol": "TCP"}]}
    accepted, _ = allowed(policy(rule, selector={"matchLabels": {"part": "engine"}}))
    assert accepted == {("", "10.0.0.1", "1:9463"), ("", "10.0.0.1", "9465")}


def test_policy_without_rules_isolates_its_pods():
    assert allowed(policy()) == (set(), ["10.0.0.1", "10.0.0.2"])


@pytest.mark.parametrize(
    ("rule", "labels", "is_match"),
    [
        ({"operator": "In", "values": ["a", "b"]}, {"k": "a"}, True),
        ({"operator": "In", "values": ["a", "b"]}, {}, False),
        ({"operator": "NotIn", "values": ["a"]}, {}, True),
        ({"operator": "NotIn", "values": ["a"]}, {"k": "a"}, False),
        ({"operator": "Exists"}, {"k": ""}, True),
        ({"operator": "DoesNotExist"}, {"k": ""}, False),
    ],
)
def test_matches_evaluates_selector_expressions(rule, labels, is_match):
    assert matches({"matchExpressions": [{"key": "k", **rule}]}, labels) is is_match


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [
        (policy(policyTypes=["Ingress", "Egress"]), "only policies for ingress are enforced"),
        (policy({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}), "blocks of addresses are not supported"),
        (policy({"ports": [{"port": "http"}]}), "named ports are not supported"),
    ],
    ids=["egress", "addresses", "named port"],
)
def test_unsupported_policy_is_refused(unknown, reason):
    with pytest.raises(ValueError, match=reason):
        rules([unknown], PODS, SPACES)
