"""Parts of NetworkPolicies: who may connect to pods. Pure."""

from __future__ import annotations

from lmcache_operator.api.types import Spec
from lmcache_operator.specs import Object

SCRAPER_LABEL = "lmcache.io/scraper"
"""A namespace with this label set to "true" may reach metrics ports."""


def from_pods(labels: dict[str, str]) -> Object:
    """Pods of the policy's namespace with these labels."""
    return {"podSelector": {"matchLabels": labels}}


def scrapers() -> list[Object]:
    """Readers of metrics: the policy's namespace, and those with the label ``lmcache.io/scraper=true``."""
    return [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {SCRAPER_LABEL: "true"}}}]


def from_clients(spec: Spec, ports: list[Object]) -> list[Object]:
    """The rule that opens ports to the clients in the spec, by default to everybody.

    There is no rule for an empty list: Kubernetes takes an empty ``from`` for everybody.
    """
    if spec.clients is None:
        return [{"ports": ports}]
    return [{"from": spec.clients, "ports": ports}] if spec.clients else []
