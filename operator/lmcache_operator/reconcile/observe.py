"""Observe: reads the present state of a cluster's component from the API server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import chain, islice

from lmcache_operator.contract.base import Component, Observed
from lmcache_operator.errors import ApiError, RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.pods.nodes import doubtful_nodes
from lmcache_operator.pods.placement import largest_amounts
from lmcache_operator.pods.pods import claim_names, has_started, incomplete_sets, is_ready, lacks_resources
from lmcache_operator.pods.resize import largest_in_place
from lmcache_operator.reconcile.contest import Contested
from lmcache_operator.reconcile.needed import of_cluster, of_event, of_node, of_pod
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, CLUSTER, EVENT, NODE, POD, Ref, controller_uid, is_child
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import group_number, selector_text
from lmcache_store.common.units import parse_quantity

_MAX_READS = 16
"""Largest number of objects of groups that are read by name."""
_NODES_SECONDS = 300.0


async def observe(
    api: KubeApi,
    component: Component,
    resource: Object,
    contested: Contested,
    absent: Set[Ref],
    now: datetime,
) -> Observed:
    """Read the state of one component. The sidecars' reports follow after the plans are applied.

    Children in ``absent`` are known not to exist and are not read.
    """
    namespace, name = (resource["metadata"][key] for key in ("namespace", "name"))
    refs, labels = component.refs(name), selector_text(name, component.name)
    is_of_group = partial(_is_of_group, component, name)
    live, kinds = await _read(api, namespace, [ref for ref in refs if ref not in absent]), list[str]()
    if (wanted := component.group_refs(resource, live)) is not None:
        kinds = [k for k in component.group_kinds if k != "PodGroup" or await api.serves(BY_NAME[k])]
        for kind in kinds:
            listed = await api.find(BY_NAME[kind], namespace, labelSelector=labels)
            named = {Ref(kind, child["metadata"]["name"]): child for child in listed}
            live |= {ref: child for ref, child in named.items() if is_of_group(ref)}
        # An object that the lists lack may have another owner, or may have lost its labels. If a later one
        # exists, the API server refuses to create it, and the next reconciliation reads it.
        lacking = (ref for ref in wanted if ref.kind in kinds and ref not in live)
        live |= await _read(api, namespace, [*islice(lacking, _MAX_READS)])
    children = {ref: child for ref, child in live.items() if is_child(child, resource)}
    owners = {child["metadata"]["uid"] for ref, child in children.items() if ref.kind == "StatefulSet"}
    pods = await api.find(POD, namespace, of_pod, labelSelector=labels) if owners else ()
    foreign = component.foreign_pods(name)
    foreign_pods = await api.find(POD, namespace, of_pod, labelSelector=foreign) if foreign else ()
    referred = component.referred(resource)
    clusters = await api.find(CLUSTER, namespace, of_cluster) if component.observes_users(resource) else ()
    observed = Observed(
        resource=resource,
        referred=await api.get(CLUSTER, namespace, referred) if referred else None,
        children=children,
        taken=frozenset(live.keys() - children.keys()),
        pods=tuple(pod for pod in pods if controller_uid(pod) in owners),
        foreign_pods=tuple(foreign_pods),
        users=tuple(user for user in clusters if component.referred(user) == name),
        serves_pod_groups="PodGroup" in kinds,
        contested={ref: paths for ref, paths in contested.items() if ref in refs or is_of_group(ref)},
        now=now,
    )
    observed = await _with_nodes(api, observed)
    # Events are read only while a pod is missing or not ready, and for one such set and one such pod. A pod
    # without a started container is preferred, because only Events explain its state.
    staying = [pod for pod in observed.pods if "deletionTimestamp" not in pod["metadata"]]
    unready = sorted((pod for pod in staying if not is_ready(pod)), key=has_started)[:1]
    about = [*(owner for owner, _ in islice(incomplete_sets(observed), 1)), *unready]
    selectors = [f"involvedObject.uid={item['metadata']['uid']},type=Warning" for item in about]
    # Without a storage class, the Event that explains an unbound claim has type Normal.
    claims = [claim for pod in unready for claim in claim_names(pod)]
    selectors += [
        f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}" for claim in claims
    ]
    lists = [await api.find(EVENT, namespace, of_event, fieldSelector=each) for each in selectors]
    return replace(observed, warnings=tuple(chain.from_iterable(lists)))


def _is_of_group(component: Component, cluster_name: str, ref: Ref) -> bool:
    return ref.kind in component.group_kinds and group_number(cluster_name, ref.name) is not None


async def _read(api: KubeApi, namespace: str, refs: Sequence[Ref]) -> dict[Ref, Object]:
    """The objects that exist."""
    objects = await asyncio.gather(*(api.get(BY_NAME[ref.kind], namespace, ref.name) for ref in refs))
    return {ref: child for ref, child in zip(refs, objects, strict=True) if child is not None}


class LargestNodes:
    """The largest amount of each resource on a node. All nodes are read, at most every five minutes."""

    def __init__(self, api: KubeApi, monotonic: Callable[[], float]) -> None:
        self._api, self._monotonic = api, monotonic
        self._amounts: Mapping[str, Decimal] | None = None
        self._due = -math.inf
        self._lock = asyncio.Lock()

    async def amounts(self, observed: Iterable[Observed]) -> Mapping[str, Decimal] | None:
        """The amounts if a pod waits for a node with more, or a size needs new pods.

        None: neither is so, or the nodes can't be read.
        """
        if not any(_needs_nodes(part) for part in observed):
            return None
        async with self._lock:
            if self._monotonic() >= self._due:
                try:
                    self._amounts = largest_amounts(await self._api.find(NODE, "", of_node))
                except ApiError:  # an installation for single namespaces may lack this right
                    self._amounts = None
                self._due = self._monotonic() + _NODES_SECONDS
        return self._amounts


def _needs_nodes(part: Observed) -> bool:
    try:
        wanted = parse_quantity(dig(part.resource, "spec", "tiers", "memory", "size") or 0)
    except ValueError:  # the spec is invalid
        wanted = Decimal()
    # The status would say so only after this reconciliation, and a write of the status starts no other.
    is_too_large = any(0 < largest_in_place(pod) < wanted for pod in part.pods)
    return is_too_large or lacks_resources((*part.pods, *part.foreign_pods))


async def _with_nodes(api: KubeApi, observed: Observed) -> Observed:
    names = sorted(doubtful_nodes(observed.pods))
    try:
        nodes = await asyncio.gather(*(api.get(NODE, "", name) for name in names))
    except RefusedError as error:  # an installation for single namespaces may lack this right
        return replace(observed, node_refusal=error.message)
    return replace(observed, nodes=dict(zip(names, nodes, strict=True)))
