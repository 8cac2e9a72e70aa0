"""References from one LMCacheCluster to a tier of another one in its namespace. Pure.

Both are objects as the API server stores them, and may be invalid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from lmcache_operator.api.keywords import CLUSTER_NAME_PATTERN
from lmcache_operator.api.parse import Cluster, Lender, parse
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig


def referred(resource: Object | None, tier: str) -> str:
    """Name of the cluster in ``spec.tiers.TIER.clusterRef``; empty: none, or an invalid name."""
    name = dig(resource, "spec", "tiers", tier, "clusterRef", "name")
    return name if isinstance(name, str) and re.fullmatch(CLUSTER_NAME_PATTERN, name) else ""


def with_lender(cluster: Cluster, other: Object | None) -> Cluster:
    """The cluster with another one among its lenders. None: the other cluster does not exist."""
    if other is None:
        return cluster
    secret = dig(other, "spec", "tiers", "remote", "managed", "tls", "secretRef", "name")
    lender = Lender(other["metadata"].get("uid", ""), secret if isinstance(secret, str) else "")
    return replace(cluster, lenders={**cluster.lenders, other["metadata"]["name"]: lender})


def with_lenders(resource: Object, resources: Sequence[Object]) -> Cluster:
    """Parse a cluster of a file, with the ones among ``resources`` whose tiers it uses.

    A missing namespace on either side matches any. An equal one has precedence.

    Raises:
        InvalidSpecError: the cluster is invalid.
    """
    cluster, namespace = parse(resource), dig(resource, "metadata", "namespace")
    owners = referred(resource, "remote"), referred(resource, "peers")
    for other in sorted(resources, key=lambda each: dig(each, "metadata", "namespace") == namespace):
        may_match = namespace is None or dig(other, "metadata", "namespace") in (namespace, None)
        if may_match and dig(other, "metadata", "name") in owners:
            cluster = with_lender(cluster, other)
    return cluster


def why_no_peers(name: str, other: Object | None) -> str:
    """Why the pods of another cluster cannot be peers, with the remedy; empty: they can.

    Args:
        name: name of the other cluster.
        other: the other cluster; None: it does not exist.
    """
    if other is None:
        return f"there is no LMCacheCluster {name}: create it, or name another one"
    if dig(other, "spec", "tiers", "peers") is None:
        return f"LMCacheCluster {name} has no peers: set tiers.peers there"
    if owner := referred(other, "peers"):
        return f"LMCacheCluster {name} itself uses the peers of {owner}: refer to {owner}"
    return ""
