"""The clients of a cluster: who may connect to its pods, as in ``from`` of a NetworkPolicy."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from lmcache_operator.api.fields import Rule

MAX_CLIENTS = 64
"""Items of the list, at most."""
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_KEY = re.compile(rf"(?!.{{254,}}/)({_DNS_LABEL}([.]{_DNS_LABEL})*/)?{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_NETWORK = re.compile(r"[0-9a-fA-F:.]+/(0|[1-9][0-9]{0,2})")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _is_one_form(client: dict[str, Any]) -> bool:
    given = {kind for kind, value in client.items() if value is not None}
    return given == {"ipBlock"} or (bool(given) and given <= {"podSelector", "namespaceSelector"})


def _is_valid(client: dict[str, Any]) -> bool:
    parts = {kind: value for kind, value in client.items() if value is not None}
    return all(_is_block(part) if kind == "ipBlock" else _is_selector(part) for kind, part in parts.items())


def _is_selector(selector: Any) -> bool:
    if not isinstance(selector, dict) or selector.keys() - {"matchLabels", "matchExpressions"}:
        return False
    labels, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
    if not isinstance(labels, dict) or not isinstance(expressions, list):
        return False
    is_labels = all(_fits(_KEY, key) and _fits(_VALUE, value) for key, value in labels.items())
    return is_labels and all(map(_is_expression, expressions))


def _is_expression(expression: Any) -> bool:
    match expression:
        case {"key": key, "operator": "In" | "NotIn", "values": [_, *_] as values}:
            return _fits(_KEY, key) and all(_fits(_VALUE, value) for value in values)
        case {"key": key, "operator": "Exists" | "DoesNotExist"}:
            return _fits(_KEY, key) and not expression.get("values")
    return False


def _fits(pattern: re.Pattern[str], text: Any) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


def _is_block(block: Any) -> bool:
    if not isinstance(block, dict):
        return False
    whole, parts = _network(block.get("cidr")), block.get("except") or []
    return whole is not None and isinstance(parts, list) and all(_is_part(part, whole) for part in parts)


def _is_part(text: Any, whole: _Network) -> bool:
    part = _network(text)
    return part is not None and part.prefixlen > whole.prefixlen and part.network_address in whole


def _network(text: Any) -> _Network | None:
    if not _fits(_NETWORK, text):
        return None
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        return None
    # New versions of Kubernetes refuse an IPv4 network that is written as an IPv6 network.
    return None if getattr(network.network_address, "ipv4_mapped", None) else network


def _given(name: str) -> str:
    """Whether a client has a member, in CEL. ``has`` is true for a null."""
    return f"(has(c.{name}) && c.{name} != null)"


CLIENTS: dict[str, Any] = {
    "maxItems": MAX_CLIENTS,
    "shape": "NetworkPolicyIngressRule.from",
    "rules": (
        Rule(
            f"self.all(c, {_given('ipBlock')} != ({_given('podSelector')} || {_given('namespaceSelector')}))",
            "each client needs podSelector, namespaceSelector or both, or ipBlock alone",
            lambda clients: all(map(_is_one_form, clients)),
        ),
        Rule(
            None,
            "selectors need valid labels and expressions, and ipBlock a network such as 10.0.0.0/8, with "
            "smaller networks of it in except",
            lambda clients: all(map(_is_valid, clients)),
        ),
    ),
}
"""Keywords of the field with the clients."""
