"""The component of the peers tier: the list of engine pods, and the password that their sidecars share.

The number of replicas determines the names of a StatefulSet's pods. So the operator writes the list without
watching pods. A listed pod that does not run is only a peer that does not answer.

Other clusters can join with ``clusterRef``. The list then has their pods, too, and they have no own list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import yaml

from lmcache_operator.api.parse import Cluster
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.groups import num_nodes
from lmcache_operator.specs import Object, names, paths, stateful
from lmcache_operator.specs.cluster_refs import referred, why_no_peers, with_lender
from lmcache_operator.specs.merge import dig

_MAX_PODS = 1000
"""Largest number of replicas in a spec, and of pods in a list."""
_LOOK_AGAIN_SECONDS = 10.0


class _Pods(NamedTuple):
    """The engine pods of one cluster."""

    cluster_name: str
    num_wanted: int
    """Number of engines."""
    num_listed: int
    """Engines that run or will run, including those that are being removed."""
    num_nodes: int
    """Number of pods of each engine."""

    def pod_names(self) -> Iterator[str]:
        """Names of the listed pods."""
        for number in range(self.num_listed):
            name = names.group_name(self.cluster_name, number)
            for rank in range(self.num_nodes):
                yield f"{name}-{rank}" if self.num_nodes > 1 else name


class Peers(Component):
    """The list of engine pods that read each other's memory tiers, and their password."""

    name = names.PEERS
    kinds = ("ConfigMap", "Certificate")
    used = (names.ENGINE,)  # the list has names in the Service of the engine pods

    def referred(self, resource: Object) -> str:
        """Name of the cluster whose list this one uses; empty: none."""
        return referred(resource, "peers")

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster with the one whose list it uses."""
        return with_lender(cluster, observed.referred)

    def observes_users(self, resource: Object) -> bool:
        """Whether the cluster has a list, which other clusters may join."""
        return dig(resource, "spec", "tiers", "peers") is not None and not referred(resource, "peers")

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The list, unless the cluster uses another one's, and the certificate; none without peers."""
        replicas, nodes = (cluster.engine.replicas, cluster.engine.nodes) if cluster.spec.engine else (0, 1)
        return _objects(cluster, [_Pods(cluster.name, replicas, replicas, nodes)])

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Write the list if it changed, and create the password if it may be missing.

        Pods that are being removed stay in the list, because their peers take over rows from them meanwhile.

        The operator cannot read Secrets. A pod is Ready without the password, so the password may be missing
        until all pods have been Ready with the present list.
        """
        # Before a user has pods, the Service of its pods may belong to another owner.
        users = [each for each in observed.users if _count(each, "replicas")]
        pods = [_pods(each) for each in (observed.resource, *users)]
        due = differences(_objects(cluster, pods), observed)
        peers = cluster.spec.tiers.peers
        if peers is None or peers.cluster_ref is not None:
            return due
        may_be_missing = due.lost or _count(observed.resource, "readyReplicas") < cluster.engine.replicas
        are_leaving = any(each.num_listed > each.num_wanted for each in pods)
        secret = names.child(cluster, names.PEERS, "Secret", names.created_secret(cluster, names.PEERS))
        return replace(
            due,
            make=(secret,) if may_be_missing else (),
            due_seconds=_LOOK_AGAIN_SECONDS if are_leaving else math.inf,
        )

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """A problem if the cluster refers to another one that has no list."""
        return ComponentStatus(degraded=tuple(_not_shared(observed)))


def _not_shared(observed: Observed) -> Iterator[Problem]:
    name = referred(observed.resource, "peers")
    if name and (why := why_no_peers(name, observed.referred)):
        yield Problem("PeersNotShared", f"tiers.peers.clusterRef: {why}")


def _pods(resource: Object) -> _Pods:
    replicas = dig(resource, "spec", "engine", "replicas")
    num_wanted = replicas if isinstance(replicas, int) else 1
    num_listed = min(_MAX_PODS, max(num_wanted, _count(resource, "replicas")))
    return _Pods(str(resource["metadata"]["name"]), num_wanted, num_listed, num_nodes(resource))


def _count(resource: Object, field: str) -> int:
    """A number of engines in the status, as of the last reconciliation. This component does not read pods."""
    number = dig(resource, "status", field)
    return number if isinstance(number, int) else 0


def _objects(cluster: Cluster, pods: Sequence[_Pods]) -> list[Object]:
    peers = cluster.spec.tiers.peers
    if peers is None:
        return []
    host, secret = names.host(cluster.name, names.ENGINE, cluster.namespace), names.peers_certificate(cluster)
    objects = stateful.certificates(cluster, names.PEERS, peers.tls, host, secret)
    if peers.cluster_ref is not None:
        return objects
    listed = (
        f"{name}.{names.host(each.cluster_name, names.ENGINE, cluster.namespace)}:{names.PEERS_PORT}"
        for each in pods
        for name in each.pod_names()
    )
    # Sidecars refuse a longer list. Pods of other clusters must not displace the cluster's own pods.
    data = {paths.PEERS_FILE: str(yaml.safe_dump({"peers": [*islice(listed, _MAX_PODS)]}))}
    return [names.child(cluster, names.PEERS, "ConfigMap", data=data), *objects]
