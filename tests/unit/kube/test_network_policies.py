"""NetworkPolicies as iptables rules of the tests' node: selectors, and policies that are not supported."""

import pytest

from testing.node.network_policies import matches, rules


def policy(*ingress, **spec):
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": list(ingress)} | spec
    return {"metadata": {"name": "p", "namespace": "app"}, "spec": spec}


POD = {
    "metadata": {"name": "engine", "namespace": "app", "labels": {"part": "engine"}},
    "spec": {}, "status": {"phase": "Running", "podIP": "10.0.0.1"},
}  # fmt: skip
SPACES = [{"metadata": {"name": "app", "labels": {}}}]


def test_rules_drop_what_no_policy_allows_to_the_pods_of_a_policy():
    """The tests of ``spec.clients`` show whom policies allow."""
    established, *dropped = rules([policy()], [POD], SPACES)
    assert "ESTABLISHED" in established
    assert [line.split()[3] for line in dropped if line.endswith("DROP")] == ["10.0.0.1"]
    assert len(rules([policy(podSelector={"matchLabels": {"part": "x"}})], [POD], SPACES)) == 1


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
        rules([unknown], [POD], SPACES)
