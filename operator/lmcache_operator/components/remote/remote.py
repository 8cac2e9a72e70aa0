"""The component: a StatefulSet of shards, the list of them that sidecars follow, and who may reach them.

Nothing is moved between shards: a change of their number is a change of the list, and rows find their way by
being read and written.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from lmcache_operator.api.keywords import CLUSTER_NAME_PATTERN
from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.api.tiers import MAX_SHARDS, ManagedRemote
from lmcache_operator.components.base import (
    Component,
    Condition,
    Context,
    Observed,
    Plan,
    Problem,
    Status,
    former_conditions,
)
from lmcache_operator.components.differences import differences
from lmcache_operator.components.figures import remote_usage
from lmcache_operator.components.pods import (
    is_outdated,
    is_ready,
    kill_problems,
    next_eviction,
    not_made,
    plain,
    ready_since,
    started_at,
)
from lmcache_operator.components.remote.pod import pod_template, speaks_tls
from lmcache_operator.components.remote.shards import WINDOW, Shards, next_shards, utc
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.merge import at

_REMOTE = ("spec", "tiers", "remote")
_AVAILABLE = "RemoteTierAvailable"
_PATIENCE = timedelta(minutes=10)
"""For a shard that was asked for: sizes that nobody declared are given up then."""
_SHARDS = "lmcache.io/shards"
"""Annotation of the ConfigMap: the list, in numbers."""
_NOT_OF_A_POD = ("access", "image", "shards")
_PORT = {"name": "redis", "port": names.REMOTE_PORT, "protocol": "TCP", "targetPort": "redis"}


class Remote(Component):
    """The shards of a managed remote tier."""

    name = names.REMOTE

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """But the Secret, which nobody but pods reads."""
        kinds = ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Certificate", "StatefulSet")
        return tuple(Ref(kind, names.remote_name(cluster_name)) for kind in kinds)

    def referred(self, resource: Object) -> str:
        """Whose shards it uses instead of its own."""
        name = at(resource, *_REMOTE, "clusterRef", "name")
        return name if isinstance(name, str) and re.fullmatch(CLUSTER_NAME_PATTERN, name) else ""

    def asks_users(self, resource: Object) -> bool:
        """Without engines of its own nobody who may ask its servers is here."""
        return at(resource, *_REMOTE, "managed") is not None and at(resource, "spec", "engine") is None

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """As they are when nothing was there before."""
        managed = cluster.spec.tiers.managed
        if managed is None:
            return []
        image = managed.image or context.shard_image
        return _objects(cluster, managed, image, context.shard_image, Shards(cluster.num_shards), {})

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Before anything, the list of now, and the image that the StatefulSet was made with."""
        managed = cluster.spec.tiers.managed
        if managed is None:
            return differences([], observed)
        *_, live = map(observed.children.get, self.refs(cluster.name))
        former = listed_shards(observed)
        if former and live and max(former.current, former.previous) > live["spec"].get("replicas", 0):
            # No such list was written here: a number in it would make as many servers.
            former = Shards(live["spec"]["replicas"]) if live["spec"].get("replicas") else None
        pods = {_number(pod): pod for pod in observed.pods}
        ready = {number for number, pod in pods.items() if is_ready(pod)}
        shards = next_shards(former, cluster.num_shards, ready, observed.now)
        default = _default_image(cluster, live, context.shard_image)
        wanted = _objects(cluster, managed, managed.image or default, default, shards, pods)
        due, template = differences(wanted, observed), wanted[-1]["spec"]["template"]
        evict, seconds = _eviction(live, observed, template, shards)
        return replace(
            due,
            make=() if len(ready) >= _num_servers(cluster, shards) else (_secret(cluster),),
            # Not before the template is written: the old pod would be made again.
            evict=() if ref_of(wanted[-1]) in due.lost else evict,
            due_seconds=seconds,
            num_outdated=sum(is_outdated(pod, template) for pod in observed.pods),
            fields={"wanted": cluster.num_shards, "shards": shards},
        )

    def status(self, observed: Observed, plan: Plan) -> Status:
        """Of the shards themselves; whether they are reached, sidecars say."""
        if "shards" not in plan.fields:
            former = _former_status(observed) if observed.children else _of_others(observed)
            return replace(former, degraded=tuple(self._not_shared(observed)))
        num_wanted, shards = plan.fields["wanted"], plan.fields["shards"]
        num_ready = sum(is_ready(pod) and _number(pod) < shards.current for pod in observed.pods)
        count = f"{num_ready} of {shards.current} shards of the remote tier are ready"
        available = Condition("True", "ShardsReady", count)
        if num_ready < shards.current:
            message = f"{count}: what the others hold is not found"
            available = Condition("False", "ShardsMissing", message)
        fields = {"shards": shards.current, "readyShards": num_ready}
        fields |= remote_usage(observed)
        if shards.previous:
            fields |= {"previousShards": shards.previous, "previousUntil": utc(shards.until)}
        return Status(
            summary=count,
            progressing=_progressing(observed, plan, num_wanted, shards, num_ready, count),
            conditions={_AVAILABLE: available},
            degraded=tuple(kill_problems(observed)),
            fields={"remote": fields},
        )

    def _not_shared(self, observed: Observed) -> Iterator[Problem]:
        if not (name := self.referred(observed.resource)):
            return
        other = observed.referred
        managed, why = at(other, *_REMOTE, "managed"), "has no tiers.remote.managed"
        if at(managed, "access") == "Cluster":
            why = "keeps it for its own pods (tiers.remote.managed.access)"
        elif (secret := at(managed, "tls", "secretRef", "name")) not in (None, names.remote_tls_name(name)):
            why = f"keeps its certificate in Secret {secret}: others look for {names.remote_tls_name(name)}"
        elif managed is not None:
            return
        what = f"LMCacheCluster {name} {why}" if other else f"there is no LMCacheCluster {name}"
        yield Problem("RemoteTierNotShared", f"tiers.remote.clusterRef: {what}")


def listed_shards(observed: Observed) -> Shards | None:
    """What sidecars are told; None: nothing that can be read."""
    config = observed.children.get(Ref("ConfigMap", names.remote_name(observed.name)))
    return Shards.parse(names.annotations_of(config).get(_SHARDS, "")) if config else None


def why_filling(observed: Observed) -> str:
    """Why shards hit less at present than they will; empty: they don't."""
    shards = listed_shards(observed)
    if shards is None:
        return "there are no shards yet"
    if shards.previous:
        return "a change of the shards is under way"
    since = [ready_since(pod, observed) for pod in observed.pods if _number(pod) < shards.current]
    if len(since) < shards.current or max(since) + WINDOW > observed.now:
        return "a shard is new, or not ready"
    return ""


def why_not_coming(observed: Observed) -> str:
    """Why a shard that was asked for is not waited for any more; empty: it is there, or may come."""
    shards, minutes = listed_shards(observed), _PATIENCE // timedelta(minutes=1)
    if shards is None:
        return ""
    num_read = max(shards.current, shards.previous)
    coming = [pod for pod in observed.pods if num_read <= _number(pod) < MAX_SHARDS and not is_ready(pod)]
    for told in (pod["metadata"] for pod in coming):
        if observed.now - datetime.fromisoformat(told["creationTimestamp"]) > _PATIENCE:
            return f"shard {told['name']} has not become ready in {minutes} minutes"
    refused = next(not_made(observed, _PATIENCE), None)
    if refused and sum(_number(pod) < num_read for pod in observed.pods) == num_read:
        return f"no further shard could be made for {minutes} minutes: {plain(refused.get('message'))}"
    return ""


def _progressing(
    observed: Observed, plan: Plan, num_wanted: int, shards: Shards, num_ready: int, count: str
) -> Condition:
    if num_wanted != shards.current:
        return Condition("True", "Scaling", f"{num_wanted} shards are wanted; {count}")
    if plan.num_outdated:
        message = f"{plan.num_outdated} of {len(observed.pods)} shards are to be replaced, one in 15 minutes"
        return Condition("True", "Replacing", message)
    if num_ready < shards.current:
        return Condition("True", "Starting", count)
    return Condition("False", "Complete", count)


def _of_others(observed: Observed) -> Status:
    """What sidecars say of servers that are another cluster's, or the user's."""
    usage = remote_usage(observed)
    return Status(fields={"remote": usage} if usage and at(observed.resource, *_REMOTE) else {})


def _former_status(observed: Observed) -> Status:
    """As it was, while the spec is invalid."""
    before, conditions = observed.resource.get("status") or {}, former_conditions(observed.resource)
    return Status(
        conditions={kind: conditions[kind] for kind in (_AVAILABLE,) if kind in conditions},
        fields={field: before[field] for field in ("remote",) if field in before},
    )


def _number(pod: Object) -> int:
    """Beyond all of ours for a pod that somebody else gave to the StatefulSet."""
    number = pod["metadata"]["name"].rpartition("-")[2]
    return int(number) if number.isdecimal() else MAX_SHARDS


def _num_servers(cluster: Cluster, shards: Shards) -> int:
    """Those that are wanted, and those that are read."""
    return max(cluster.num_shards, shards.current, shards.previous)


def _default_image(cluster: Cluster, live: Object | None, present: str) -> str:
    """The one that stands in where the user names none: as a rule that of when the StatefulSet was made."""
    if live is not None and cluster.spec.images.policy != "Follow":
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(names.annotations_of(live)[names.DEFAULT_IMAGES])[names.REMOTE])
    return present


def _eviction(
    live: Object | None, observed: Observed, template: Object, shards: Shards
) -> tuple[tuple[Object, ...], float]:
    """The pod to replace now, and in how many seconds to look again.

    A new server is empty. Were the next one replaced at once, all would be; so it has as long to fill as a
    change of the list has, and nothing is replaced during one.
    """
    new = (ready_since(pod, observed) for pod in observed.pods if not is_outdated(pod, template))
    free_at = [since + WINDOW for since in new if len(observed.pods) > 1]
    busy = [shards.until] if shards.previous else []
    is_outdated_one = any(is_outdated(pod, template) for pod in observed.pods)
    waits = [time for time in busy + (free_at if is_outdated_one else []) if time > observed.now]
    if waits:
        return (), (max(waits) - observed.now).total_seconds()
    # The emptiest first: where what is declared changes again, no second one is emptied.
    newest = sorted(observed.pods, key=lambda pod: started_at(pod, observed), reverse=True)
    return next_eviction(live, newest, template), math.inf


def _secret(cluster: Cluster) -> Object:
    """Made once, with a password that nobody is told; the user's own is as good."""
    return names.child(cluster, names.REMOTE, "Secret", names.remote_name(cluster.name))


def _objects(
    cluster: Cluster,
    managed: ManagedRemote,
    image: str,
    default_image: str,
    shards: Shards,
    pods: Mapping[int, Object],
) -> list[Object]:
    child, name = partial(names.child, cluster, names.REMOTE), names.remote_name(cluster.name)
    selector = names.selector(cluster.name, names.REMOTE)
    number = _num_servers(cluster, shards)
    hashed = {key: value for key, value in declared(managed).items() if key not in _NOT_OF_A_POD}
    template = pod_template(cluster, managed, image, names.digest(hashed | {"image": image}))
    host = names.remote_host(cluster, cluster.name)
    endpoints = [f"{name}-{n}.{host}:{names.REMOTE_PORT}" for n in range(number)]
    # As each is at present: one after the other is replaced.
    secure = {n for n in range(number) if speaks_tls(pods.get(n, template))}
    files = {
        paths.SHARDS_FILE: shards.document(
            endpoints, secure, f"{paths.REMOTE_AUTH_DIR}/{paths.AUTHORITY_FILE}"
        )
    }
    stateful_set = {
        "updateStrategy": {"type": "OnDelete"},
        "podManagementPolicy": "Parallel",
        "replicas": number,
        "selector": {"matchLabels": selector},
        "serviceName": name,
        "template": template,
    }
    # A server has a name before it is ready, so that nobody remembers that it has none.
    service = {
        "clusterIP": "None", "ports": [_PORT], "publishNotReadyAddresses": True, "selector": selector
    }  # fmt: skip
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": selector}}
    recorded = {names.DEFAULT_IMAGES: json.dumps({names.REMOTE: default_image})}
    return [
        child("ConfigMap", name, {_SHARDS: str(shards)}, data=files),
        child("Service", name, spec=service),
        child("NetworkPolicy", name, spec=_network_policy(cluster, managed)),
        child("PodDisruptionBudget", name, spec=budget | {"unhealthyPodEvictionPolicy": "AlwaysAllow"}),
        *_certificate(cluster, managed, host),
        child("StatefulSet", name, recorded, spec=stateful_set),
    ]


def _certificate(cluster: Cluster, managed: ManagedRemote, host: str) -> Iterator[Object]:
    if managed.tls and (issuer := managed.tls.issuer_ref):
        spec = {
            "dnsNames": [f"*.{host}"],
            "issuerRef": {"group": issuer.group, "kind": issuer.kind, "name": issuer.name},
            "privateKey": {"rotationPolicy": "Always"},
            "secretName": names.remote_certificate(cluster),
            "usages": ["digital signature", "key encipherment", "server auth"],
        }
        yield names.child(cluster, names.REMOTE, "Certificate", names.remote_name(cluster.name), spec=spec)


def _network_policy(cluster: Cluster, managed: ManagedRemote) -> Object:
    """Sidecars only: those of the cluster's own pods, or those of all in the namespace."""
    engines: Object = {"matchLabels": names.selector(cluster.name, names.ENGINE)}
    others: Object = {"matchLabels": {names.INJECT_LABEL: cluster.name}}
    if managed.access == "Namespace":
        engines = {"matchLabels": {names.COMPONENT_LABEL: names.ENGINE}}
        others = {"matchExpressions": [{"key": names.INJECT_LABEL, "operator": "Exists"}]}
    return {
        "ingress": [
            {
                "from": [{"podSelector": engines}, {"podSelector": others}],
                "ports": [{"port": names.REMOTE_PORT, "protocol": "TCP"}],
            }
        ],
        "podSelector": {"matchLabels": names.selector(cluster.name, names.REMOTE)},
        "policyTypes": ["Ingress"],
    }
