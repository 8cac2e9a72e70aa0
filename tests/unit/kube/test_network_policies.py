"""What the tests' node makes of NetworkPolicies."""

from __future__ import annotations

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
    """(source or '', target, port) of each rule that lets something in, and the isolated pods."""
    lines = rules(list(policies), PODS, SPACES)
    assert "ESTABLISHED" in lines[0]
    dropped = [line.split()[3] for line in lines if line.endswith("DROP")]
    num_others = len(lines) - len(dropped)
    assert not any(line.endswith("DROP") for line in lines[:num_others])
    found = set()
    for line in lines[1:num_others]:
        words = line.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        found.add((options.get("-s", ""), options["-d"], options.get("--dport", "")))
    return found, dropped


def test_pods_that_no_policy_selects_stay_open():
    assert allowed(policy(selector={"matchLabels": {"part": "nobody"}}))[1] == []


def test_sources_are_pods_of_the_own_and_of_labelled_namespaces():
    peers = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {"scraper": "true"}}}]
    rule = {"from": peers, "ports": [{"port": 9464, "protocol": "TCP"}]}
    found, dropped = allowed(policy(rule, selector={"matchLabels": {"part": "engine"}}))
    assert found == {(f"10.0.0.{n}", "10.0.0.1", "9464") for n in (1, 2, 3)}
    assert dropped == ["10.0.0.1"]


def test_a_rule_without_sources_lets_all_in_to_its_ports():
    rule = {"ports": [{"port": 1, "endPort": 9463, "protocol": "TCP"}, {"port": 9465, "protocol": "TCP"}]}
    found, _ = allowed(policy(rule, selector={"matchLabels": {"part": "engine"}}))
    assert found == {("", "10.0.0.1", "1:9463"), ("", "10.0.0.1", "9465")}


def test_a_policy_without_rules_shuts_its_pods():
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
def test_expressions_of_selectors(rule, labels, is_match):
    assert matches({"matchExpressions": [{"key": "k", **rule}]}, labels) is is_match


@pytest.mark.parametrize(
    "unknown",
    [
        policy(policyTypes=["Ingress", "Egress"]),
        policy({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}),
        policy({"ports": [{"port": "http"}]}),
    ],
)
def test_what_is_not_understood_is_refused(unknown):
    with pytest.raises(ValueError, match="enforced"):
        rules([unknown], PODS, SPACES)
