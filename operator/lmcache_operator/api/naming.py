"""Rules that an LMCacheCluster's name and its spec must follow together."""

from __future__ import annotations

from typing import Protocol

from lmcache_operator.api.fields import Rule
from lmcache_operator.api.types import Spec


class Named(Protocol):
    """An LMCacheCluster."""

    @property
    def name(self) -> str:
        """Name of the object."""

    @property
    def spec(self) -> Spec:
        """Spec of the object."""


_MAX_LENGTH = 37
_SUFFIX = "-prefill"


def prefill_name(cluster_name: str) -> str:
    """Name of the LMCacheCluster whose pods only compute prompts for another one."""
    return f"{cluster_name}{_SUFFIX}"


def _refers_to_itself(cluster: Named) -> bool:
    peers = cluster.spec.tiers.peers
    return peers is not None and peers.cluster_ref is not None and peers.cluster_ref.name == cluster.name


_NO_PEERS_REF = "!has(self.spec.tiers.peers) || !has(self.spec.tiers.peers.clusterRef)"
NAMING = (
    Rule(
        f"{_NO_PEERS_REF} || self.spec.tiers.peers.clusterRef.name != self.metadata.name",
        "spec.tiers.peers.clusterRef must name another LMCacheCluster: leave it out for this one's own peers",
        lambda cluster: not _refers_to_itself(cluster),
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
