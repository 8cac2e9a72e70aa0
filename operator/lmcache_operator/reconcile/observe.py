"""Observe: what there is of a component of a cluster, as the API server has it now."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime

from lmcache_operator.components.base import Component, Observed
from lmcache_operator.components.nodes import doubtful_nodes
from lmcache_operator.components.pods import claim_names, has_started, incomplete_sets, is_ready
from lmcache_operator.errors import RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.contest import Contested
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, CLUSTER, EVENT, NODE, POD, controller_uid
from lmcache_operator.specs.names import selector_text


async def observe(
    api: KubeApi, component: Component, resource: Object, contested: Contested, now: datetime
) -> Observed:
    """Everything but what sidecars say: they are asked when what is due has been done."""
    namespace, name, uid = (resource["metadata"][key] for key in ("namespace", "name", "uid"))
    refs = component.refs(name)
    found = await asyncio.gather(*(api.get(BY_NAME[ref.kind], namespace, ref.name) for ref in refs))
    live = {ref: child for ref, child in zip(refs, found, strict=True) if child is not None}
    own = {ref: child for ref, child in live.items() if controller_uid(child) == uid}
    owners = {child["metadata"]["uid"] for ref, child in own.items() if ref.kind == "StatefulSet"}
    labels = selector_text(name, component.name)
    pods = await api.find(POD, namespace, labelSelector=labels) if owners else ()
    asking = component.foreign_pods(name)
    foreign_pods = await api.find(POD, namespace, labelSelector=asking) if asking else ()
    other = component.referred(resource)
    others = await api.find(CLUSTER, namespace) if component.asks_users(resource) else ()
    observed = Observed(
        resource=resource,
        referred=await api.get(CLUSTER, namespace, other) if other else None,
        children=own,
        taken=frozenset(live.keys() - own.keys()),
        pods=tuple(pod for pod in pods if controller_uid(pod) in owners),
        foreign_pods=tuple(foreign_pods),
        users=tuple(user for user in others if component.referred(user) == name),
        contested={ref: paths for ref, paths in contested.items() if ref in refs},
        now=now,
    )
    observed = await _with_nodes(api, observed)
    # Asked only while something is missing; one pod that is not ready stands for all, and rather one of which
    # only Events can say why.
    staying = [pod for pod in observed.pods if "deletionTimestamp" not in pod["metadata"]]
    unready = sorted((pod for pod in staying if not is_ready(pod)), key=has_started)[:1]
    about = [*(owner for owner, _ in incomplete_sets(observed)), *unready]
    selectors = [f"involvedObject.uid={one['metadata']['uid']},type=Warning" for one in about]
    # What keeps a claim from being bound is no warning where no storage class is there.
    claims = [claim for pod in unready for claim in claim_names(pod)]
    selectors += [
        f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}" for claim in claims
    ]
    warnings = [event for one in selectors for event in await api.find(EVENT, namespace, fieldSelector=one)]
    return replace(observed, warnings=tuple(warnings))


async def _with_nodes(api: KubeApi, observed: Observed) -> Observed:
    names = sorted(doubtful_nodes(observed.pods))
    try:
        found = await asyncio.gather(*(api.get(NODE, "", name) for name in names))
    except RefusedError as error:  # with a list of namespaces somebody may have taken the right away
        return replace(observed, node_refusal=error.message)
    return replace(observed, nodes=dict(zip(names, found, strict=True)))
