"""Rules that an LMCacheCluster's name and its spec must follow together."""

from __future__ import annotations

from lmcache_operator.api.fields import Rule

_MAX_LENGTH = 37
_SUFFIX = "-prefill"


def prefill_name(cluster_name: str) -> str:
    """Name of the LMCacheCluster whose pods only compute prompts for another one."""
    return f"{cluster_name}{_SUFFIX}"


_NO_PEERS_REF = "!has(self.spec.tiers.peers) || !has(self.spec.tiers.peers.clusterRef)"
NAMING = (
    Rule(
        f"{_NO_PEERS_REF} || self.spec.tiers.peers.clusterRef.name != self.metadata.name",
        "spec.tiers.peers.clusterRef must name another LMCacheCluster: leave it out for this one's own peers",
        lambda cluster: (
            not ((peers := cluster.spec.tiers.peers) and peers.cluster_ref)
            or peers.cluster_ref.name != cluster.name
        ),
    ),
    Rule(
        "!has(self.spec.engine) || !has(self.spec.engine.prefill) || "
        f"(self.metadata.name.size() <= {_MAX_LENGTH} && !self.metadata.name.endsWith('{_SUFFIX}'))",
        "with spec.engine.prefill, metadata.name must have at most 37 characters and must not end with "
        "-prefill, because NAME-prefill is the LMCacheCluster of the prefill pods",
        lambda cluster: (
            not (cluster.spec.engine and cluster.spec.engine.prefill)
            or (len(cluster.name) <= _MAX_LENGTH and not cluster.name.endswith(_SUFFIX))
        ),
    ),
)
