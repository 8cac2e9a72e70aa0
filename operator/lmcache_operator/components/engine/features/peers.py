"""The peers tier: the list, password and certificate that a sidecar mounts, its options and its port. Pure.

The component ``peers`` writes the list and the password.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.api.types import Spec
from lmcache_operator.components.engine.features.base import (
    POD_NAME,
    PodFeature,
    Volume,
    optional_files,
    optional_list,
    part_of,
)
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.cluster_refs import referred, why_no_peers
from lmcache_operator.specs.merge import dig

_CERTIFICATE = ("tls.crt", "tls.key", paths.AUTHORITY_FILE)
_FIELD = "tiers.peers"


class PeersFeature(PodFeature[bool]):
    """The peers tier of an engine pod. The report says whether a sidecar can read other pods' memory."""

    name = "peers"
    is_tier = True
    reserved = dict.fromkeys(
        ("LMCACHE_PEERS_", "LMCACHE_PEER_BANDWIDTH", "LMCACHE_PEER_HOST", "LMCACHE_PEER_NAME",
         "LMCACHE_PEER_PASSWORD_FILE", "LMCACHE_PEER_PORT", "LMCACHE_PEER_TLS_DIR"),
        _FIELD,
    )  # fmt: skip
    reserved_labels: ClassVar[Mapping[str, str]] = {names.PEERS_LABEL: _FIELD}
    absent = False

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """Peers with only defaults count, too. Their list is not part of the pod."""
        if (peers := cluster.spec.tiers.peers) is not None:
            secret = names.tier_secret(cluster, names.peers_owner(cluster), names.PEERS)
            settings["tiers"]["peers"] = declared(peers) | {"password": secret}

    def env(self, cluster: Cluster) -> dict[str, str]:
        """Options of the tier. Injected sidecars must not get them: their pods have no stable names."""
        if (peers := cluster.spec.tiers.peers) is None:
            return {}
        host = names.host(cluster.name, names.ENGINE, cluster.namespace)
        env = {
            "LMCACHE_PEERS_FILE": f"{paths.PEERS_DIR}/{paths.PEERS_FILE}",
            "LMCACHE_PEER_NAME": f"$({POD_NAME}).{host}:{names.PEERS_PORT}",
            "LMCACHE_PEER_PASSWORD_FILE": f"{paths.PEERS_AUTH_DIR}/password",
            "LMCACHE_PEER_PORT": f"{names.PEERS_PORT}",
        }
        if cluster.num_parts > 1:
            env["LMCACHE_PEERS_OF_PART"] = "true"
        if peers.tls:
            env["LMCACHE_PEER_TLS_DIR"] = paths.PEERS_TLS_DIR
        return env | ({"LMCACHE_PEER_BANDWIDTH": f"{peers.rate_bytes}"} if peers.rate_bytes else {})

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """List, password and certificate. All are optional: without them, the engine runs without peers."""
        if (peers := cluster.spec.tiers.peers) is None:
            return
        owner = names.peers_owner(cluster)
        if password := names.tier_secret(cluster, owner, names.PEERS):
            yield Volume("peers", paths.PEERS_DIR, optional_list(owner, names.PEERS, paths.PEERS_FILE))
            yield Volume("peers-auth", paths.PEERS_AUTH_DIR, optional_files(password, "password"))
        if peers.tls:
            # Without the certificate, the sidecar refuses its peers.
            files = optional_files(names.peers_certificate(cluster), *_CERTIFICATE)
            yield Volume("peers-tls", paths.PEERS_TLS_DIR, files)

    def labels(self, cluster: Cluster) -> dict[str, str]:
        """The label that admits the pod to the ports of its peers."""
        return {names.PEERS_LABEL: names.peers_owner(cluster)} if cluster.spec.tiers.peers else {}

    def ports(self, cluster: Cluster) -> dict[str, int]:
        """The port on which the sidecar serves its memory tier."""
        return {"peers": names.PEERS_PORT} if cluster.spec.tiers.peers else {}

    def for_injected_pods(self, spec: Spec) -> Spec:
        """Injected pods are no peers, because they have no stable DNS names."""
        return replace(spec, tiers=replace(spec.tiers, peers=None))

    def referred(self, resource: Object) -> str:
        """Name of the cluster whose peers this one uses; empty: none."""
        return referred(resource, self.name)

    def check_change(self, observed: Observed, live: Object | None) -> None:
        """Keep the peers of existing pods if the spec now refers to peers that do not exist.

        Raises:
            InvalidSpecError: the cluster that the spec refers to has no list of peers.
        """
        name = self.referred(observed.resource)
        if live and name and (why := why_no_peers(name, observed.referred)):
            labels = dig(live, "spec", "template", "metadata", "labels")
            if dig(labels, names.PEERS_LABEL) != name:
                raise InvalidSpecError(f"spec.{_FIELD}.clusterRef", why)

    def read(self, stats: Mapping[str, Any]) -> bool:
        """Whether ``/stats`` has a part about the tier."""
        return bool(part_of(stats, self.name))

    def is_present(self, sidecar: SidecarState) -> bool:
        """Whether a sidecar can read the memory tiers of other pods."""
        return self.report(sidecar)
