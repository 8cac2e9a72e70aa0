"""The component of a managed remote tier: a StatefulSet of shards, their list, and who may connect to them.

Sidecars follow the list. A change of the number of shards only changes the list: rows reach their new shard
when sidecars read and write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.api.tiers import MAX_SHARDS, ManagedRemote
from lmcache_operator.components.engine.features.base import TierReport
from lmcache_operator.components.engine.features.remote import RemoteFeature
from lmcache_operator.components.figures import steady_figures
from lmcache_operator.components.images import default_image, recorded
from lmcache_operator.components.remote.pod import pod_template, speaks_tls
from lmcache_operator.components.remote.shards import WINDOW, ShardCounts, next_shards, utc
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Condition, Problem, former_conditions
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.groups import next_eviction, singles
from lmcache_operator.pods.pods import (
    creation_failures,
    is_outdated,
    is_ready,
    kill_problems,
    ready_since,
    started_at,
)
from lmcache_operator.specs import Object, names, paths, stateful
from lmcache_operator.specs.cluster_refs import referred, with_lender
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain

_REMOTE = ("spec", "tiers", "remote")
_AVAILABLE = "RemoteTierAvailable"
_PATIENCE = timedelta(minutes=10)
"""Time for a new shard to become ready. Afterwards autoscaling gives up a size that it chose."""
_SHARDS = "lmcache.io/shards"
"""Annotation of the ConfigMap: ``ShardCounts`` as text."""
_NOT_OF_A_POD = ("access", "image", "shards")
_PORT = {"name": "redis", "port": names.REMOTE_PORT, "protocol": "TCP", "targetPort": "redis"}


class Remote(Component):
    """The shards of a managed remote tier."""

    name = names.REMOTE
    kinds = (
        "ServiceAccount", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Certificate",
        "StatefulSet",
    )  # fmt: skip

    def referred(self, resource: Object) -> str:
        """Name of the cluster whose shards this one uses; empty: none."""
        return referred(resource, "remote")

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster with the one whose shards it uses."""
        return with_lender(cluster, observed.referred)

    def observes_users(self, resource: Object) -> bool:
        """Whether the cluster has shards but no engines: only other clusters' sidecars report on them."""
        return dig(resource, *_REMOTE, "managed") is not None and dig(resource, "spec", "engine") is None

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The children of a new cluster, with the operator's present default image."""
        managed = cluster.spec.tiers.managed
        if managed is None:
            return []
        return _objects(cluster, managed, context.shard_image, ShardCounts(cluster.num_shards), {})

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The steps that are due, from the list in effect and the image recorded on the StatefulSet."""
        managed = cluster.spec.tiers.managed
        if managed is None:
            return differences([], observed)
        *_, live = map(observed.children.get, self.refs(cluster.name))
        former = listed_shards(observed)
        if former and live and max(former.current, former.previous) > live["spec"].get("replicas", 0):
            # The operator never wrote such a list. Without this check, it would create as many servers.
            former = ShardCounts(live["spec"]["replicas"]) if live["spec"].get("replicas") else None
        pods = {_number(pod): pod for pod in observed.pods}
        ready = {number for number, pod in pods.items() if is_ready(pod)}
        shards = next_shards(former, cluster.num_shards, ready, observed.now)
        default = default_image(cluster, live, names.REMOTE, context.shard_image)
        wanted = _objects(cluster, managed, default, shards, pods)
        due, template = differences(wanted, observed), wanted[-1]["spec"]["template"]
        evict, seconds = _eviction(live, observed, template, shards)
        secret = names.child(cluster, names.REMOTE, "Secret", names.created_secret(cluster, names.REMOTE))
        return replace(
            due,
            make=() if len(ready) >= _num_servers(cluster, shards) else (secret,),
            # Evict only after the template is written, or the controller would recreate the old pod.
            evict=() if ref_of(wanted[-1]) in due.lost else evict,
            due_seconds=seconds,
            num_outdated=sum(is_outdated(pod, template) for pod in observed.pods),
            fields={"wanted": cluster.num_shards, "shards": shards},
        )

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Status of the shards. Whether sidecars reach them is in the engine's conditions."""
        is_alone = self.observes_users(observed.resource)
        serves = any(map(is_ready, observed.pods)) if is_alone else None
        if "shards" not in plan.fields:
            former = _former_status(observed) if observed.children else _external_usage(observed)
            return replace(former, degraded=tuple(self._not_shared(observed)), serves=serves)
        num_wanted, shards = plan.fields["wanted"], plan.fields["shards"]
        num_ready = sum(is_ready(pod) and _number(pod) < shards.current for pod in observed.pods)
        count = f"{num_ready} of {shards.current} shards of the remote tier are ready"
        available = Condition("True", "ShardsReady", count)
        if num_ready < shards.current:
            message = f"{count}; rows on the other shards are misses"
            available = Condition("False", "ShardsMissing", message)
        fields = {"shards": shards.current, "readyShards": num_ready}
        fields |= _usage(observed)
        if shards.previous:
            fields |= {"previousShards": shards.previous, "previousUntil": utc(shards.until)}
        return ComponentStatus(
            summary=count,
            serves=serves,
            progressing=_progressing(observed, plan, num_wanted, shards, num_ready, count),
            conditions={_AVAILABLE: available},
            degraded=tuple(kill_problems(observed)),
            fields={"remote": fields},
        )

    def _not_shared(self, observed: Observed) -> Iterator[Problem]:
        if not (name := self.referred(observed.resource)):
            return
        other = observed.referred
        managed, why = dig(other, *_REMOTE, "managed"), "has no tiers.remote.managed"
        if dig(managed, "access") == "Cluster":
            why = "shares it only with its own pods (tiers.remote.managed.access)"
        elif managed is not None:
            return
        what = f"LMCacheCluster {name} {why}" if other else f"there is no LMCacheCluster {name}"
        yield Problem("RemoteTierNotShared", f"tiers.remote.clusterRef: {what}")


def listed_shards(observed: Observed) -> ShardCounts | None:
    """The list of shards in effect; None: there is no valid list."""
    config = observed.children.get(Ref("ConfigMap", names.object_name(observed.name, names.REMOTE)))
    return ShardCounts.parse(names.annotations_of(config).get(_SHARDS, "")) if config else None


def why_filling(observed: Observed) -> str:
    """Why the hit ratio of the shards is temporarily low; empty: it is not."""
    shards = listed_shards(observed)
    if shards is None:
        return "there are no shards yet"
    if shards.previous:
        return "a change of the shards is under way"
    since = [ready_since(pod, observed) for pod in observed.pods if _number(pod) < shards.current]
    if len(since) < shards.current or max(since) + WINDOW > observed.now:
        return "a shard is new, or not ready"
    return ""


def why_never_ready(observed: Observed) -> str:
    """Why a new shard will not become ready; empty: it is ready, or still has time."""
    shards, minutes = listed_shards(observed), _PATIENCE // timedelta(minutes=1)
    if shards is None:
        return ""
    num_read = max(shards.current, shards.previous)
    new = [pod for pod in observed.pods if num_read <= _number(pod) < MAX_SHARDS and not is_ready(pod)]
    for metadata in (pod["metadata"] for pod in new):
        if observed.now - datetime.fromisoformat(metadata["creationTimestamp"]) > _PATIENCE:
            return f"shard {metadata['name']} has not become ready in {minutes} minutes"
    refused = next(creation_failures(observed, _PATIENCE), None)
    if refused and sum(_number(pod) < num_read for pod in observed.pods) == num_read:
        return f"no further shard could be created for {minutes} minutes: {plain(refused.get('message'))}"
    return ""


def _progressing(
    observed: Observed, plan: Plan, num_wanted: int, shards: ShardCounts, num_ready: int, count: str
) -> Condition:
    if num_wanted != shards.current:
        return Condition("True", "Scaling", f"Scaling to {num_wanted} shards: {count}")
    if plan.num_outdated:
        outdated = f"{plan.num_outdated} of {len(observed.pods)} do not match the spec yet"
        return Condition("True", "Replacing", f"Replacing shards, one every 15 minutes: {outdated}")
    if num_ready < shards.current:
        return Condition("True", "Starting", count)
    return Condition("False", "Complete", count)


def _external_usage(observed: Observed) -> ComponentStatus:
    """Status of a remote tier of another cluster or of the user, from the sidecars' reports."""
    usage = _usage(observed)
    return ComponentStatus(fields={"remote": usage} if usage and dig(observed.resource, *_REMOTE) else {})


def _usage(observed: Observed) -> Object:
    """``usedBytes`` and ``evicted`` of ``status.remote``.

    All sidecars use the same servers, and so do those of other clusters that refer to them. A sidecar may not
    be allowed to ask a server, so the largest figure counts.
    """
    reports = list(map(RemoteFeature().report, observed.probed.sidecars if observed.probed else ()))
    # Figures of a cluster without ready engines are old.
    users = (user for user in observed.users if dig(user, "status", "readyReplicas"))
    for figures in (dig(user, "status", "remote") or {} for user in users):
        used, evicted = figures.get("usedBytes", 0), figures.get("evicted", 0)
        reports.append(TierReport(used_bytes=used, evicted=evicted))
    usage = {}
    if used := max((report.used_bytes for report in reports), default=0):
        usage = {"usedBytes": used, "evicted": max(report.evicted for report in reports)}
    status = dig(observed.resource, "status", "remote")
    former = {name: value for name, value in (status or {}).items() if name in ("usedBytes", "evicted")}
    return steady_figures(former, usage)


def _former_status(observed: Observed) -> ComponentStatus:
    """The former status, for use while the spec is invalid."""
    before = observed.resource.get("status") or {}
    fields = {"remote": before["remote"]} if "remote" in before else {}
    return ComponentStatus(conditions=former_conditions(observed.resource, _AVAILABLE), fields=fields)


def _number(pod: Object) -> int:
    """Number of a shard's pod. For a foreign pod of the StatefulSet it is larger than any shard's."""
    number = pod["metadata"]["name"].rpartition("-")[2]
    return int(number) if number.isdecimal() else MAX_SHARDS


def _num_servers(cluster: Cluster, shards: ShardCounts) -> int:
    """Number of servers that must run: the wanted ones, and those that the list still names."""
    return max(cluster.num_shards, shards.current, shards.previous)


def _eviction(
    live: Object | None, observed: Observed, template: Object, shards: ShardCounts
) -> tuple[tuple[Object, ...], float]:
    """The pod to replace now (one or none), and the seconds until the next one may be due.

    A new server is empty. It gets 15 minutes to fill before the next one is replaced, or all would be empty
    at once. No pod is replaced during a change of the list.
    """
    new = (ready_since(pod, observed) for pod in observed.pods if not is_outdated(pod, template))
    free_at = [since + WINDOW for since in new if len(observed.pods) > 1]
    busy = [shards.until] if shards.previous else []
    has_outdated = any(is_outdated(pod, template) for pod in observed.pods)
    waits = [time for time in busy + (free_at if has_outdated else []) if time > observed.now]
    if waits:
        return (), (max(waits) - observed.now).total_seconds()
    # Replace the most recently started shard first: it holds the fewest rows.
    newest = sorted(observed.pods, key=lambda pod: started_at(pod, observed), reverse=True)
    return next_eviction(singles(live, newest) if live else (), template), math.inf


def _objects(
    cluster: Cluster, managed: ManagedRemote, default: str, shards: ShardCounts, pods: Mapping[int, Object]
) -> list[Object]:
    child, name = partial(names.child, cluster, names.REMOTE), names.object_name(cluster.name, names.REMOTE)
    selector = names.selector(cluster.name, names.REMOTE)
    number, image = _num_servers(cluster, shards), managed.image or default
    hashed = {key: value for key, value in declared(managed).items() if key not in _NOT_OF_A_POD}
    hashed |= {"image": image, "password": names.created_secret(cluster, names.REMOTE)}
    if secrets := cluster.spec.images.pull_secrets:
        hashed["imagePullSecrets"] = [{"name": name} for name in secrets]
    template = pod_template(cluster, managed, image, names.digest(hashed))
    host = names.host(cluster.name, names.REMOTE, cluster.namespace)
    endpoints = [f"{name}-{n}.{host}:{names.REMOTE_PORT}" for n in range(number)]
    # Servers are replaced one at a time, so during a change only some of them use TLS.
    secure = {n for n in range(number) if speaks_tls(pods.get(n) or template)}
    authority = f"{paths.REMOTE_AUTH_DIR}/{paths.AUTHORITY_FILE}"
    secret = names.remote_certificate(cluster)
    files = {paths.SHARDS_FILE: shards.document(endpoints, secure, authority)}
    stateful_set = stateful.stateful_set(cluster, names.REMOTE, number, template)
    return [
        # Without an account of its own, the user's image would be pulled with the Secrets of another one.
        child("ServiceAccount", automountServiceAccountToken=False),
        child("ConfigMap", annotations={_SHARDS: str(shards)}, data=files),
        child("Service", spec=stateful.headless_service(selector, _PORT)),
        child("NetworkPolicy", spec=_network_policy(cluster, managed)),
        child("PodDisruptionBudget", spec=stateful.disruption_budget(selector)),
        *stateful.certificates(cluster, names.REMOTE, managed.tls, host, secret),
        child("StatefulSet", annotations=recorded({names.REMOTE: default}), spec=stateful_set),
    ]


def _network_policy(cluster: Cluster, managed: ManagedRemote) -> Object:
    """Allow only sidecars: those of this cluster, or with access Namespace those of all clusters."""
    engines: Object = {"matchLabels": names.selector(cluster.name, names.ENGINE)}
    injected: Object = {"matchLabels": {names.INJECT_LABEL: cluster.name}}
    if managed.access == "Namespace":
        engines = {"matchLabels": {names.COMPONENT_LABEL: names.ENGINE}}
        injected = {"matchExpressions": [{"key": names.INJECT_LABEL, "operator": "Exists"}]}
    peers = [{"podSelector": engines}, {"podSelector": injected}]
    ingress = {"from": peers, "ports": [{"port": names.REMOTE_PORT, "protocol": "TCP"}]}
    return stateful.network_policy(names.selector(cluster.name, names.REMOTE), ingress)
