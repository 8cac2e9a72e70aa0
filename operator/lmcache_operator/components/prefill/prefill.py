"""The component of prefill pods: their own LMCacheCluster, which the operator derives from the parent's spec.

So prefill pods have everything that engine pods have: replacement one at a time, /scale, conditions, sizing.
They use the parent's peers, and thus hand their KV over. The parent's router sends prompts to them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

from lmcache_operator.api import KIND
from lmcache_operator.api.parse import EVENTS_FOR, Cluster, parse, written
from lmcache_operator.api.tiers import ClusterRef, Tiers
from lmcache_operator.api.types import EngineSpec
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.kinds.vllm import DISCOVERY
from lmcache_operator.components.router.router import had_prefill_pods
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Condition, Problem, Reason, Trouble
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.pods.differences import differences
from lmcache_operator.specs import Images, Object, names, stateful
from lmcache_operator.specs.merge import dig

_AVAILABLE = "PrefillAvailable"
_ARGUMENT = re.compile(r"spec\.engine\.args\[(\d+)\]")
_DELETED_LATER = Condition("True", "Replacing", "prefill pods are deleted when no router pod uses them")


class PrefillPods(Component):
    """The LMCacheCluster of the pods that only compute prompts."""

    name = names.PREFILL
    kinds = (KIND,)
    used = (names.PEERS, names.REMOTE)

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The LMCacheCluster; none without ``spec.engine.prefill``."""
        return _objects(cluster, {}, context)

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Write the LMCacheCluster if it changed. Delete it when no router pod uses prefill pods any more.

        It gets the images that the parent's StatefulSet records. Otherwise the defaults of a later operator
        could give it another version of the engine, which might not load KV of the parent's engines.
        """
        images = dict(cluster.default_images) if cluster.spec.images.policy == "Keep" else {}
        due = differences(_objects(cluster, images, context), observed)
        return replace(due, delete=()) if had_prefill_pods(observed.resource) else due

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Status of the prefill pods, as their LMCacheCluster reports it."""
        ref, *_ = self.refs(observed.name)
        child = observed.children.get(ref)
        if child is None or ref in plan.delete:
            return ComponentStatus()
        status = child.get("status") or {}
        num_pods, num_ready = status.get("replicas", 0), status.get("readyReplicas", 0)
        num_wanted = dig(child, "spec", "engine", "replicas")
        is_used = had_prefill_pods(observed.resource)
        is_declared = dig(observed.resource, "spec", "engine", "prefill") is not None
        count = f"{num_ready} of {num_wanted} prefill pods are ready"
        available = Condition("True", "EnginesReady", count)
        if not num_ready:
            reason: Reason = "NoEngineReady" if num_wanted else "ScaledToZero"
            unused = "the router uses only the other engine pods"
            effect = "requests to the router fail" if is_used else unused
            available = Condition("False", reason, f"{count}; {effect}")
        conditions = {each["type"]: each for each in status.get("conditions") or ()}
        degraded = conditions.get("Degraded", {})
        problem = Problem(cast(Trouble, degraded.get("reason")), f"{ref}: {degraded.get('message')}")
        progressing = _progressing(child, conditions.get("Progressing", {}), count)
        return ComponentStatus(
            summary=count,
            serves=num_ready > 0 if is_used else None,
            progressing=_DELETED_LATER if is_used and not is_declared else progressing,
            conditions={_AVAILABLE: available},
            degraded=(problem,) if degraded.get("status") == "True" else (),
            fields={"prefill": {"replicas": num_pods, "readyReplicas": num_ready}},
        )


def _progressing(child: Object, reported: Object, count: str) -> Condition:
    generation = child["metadata"].get("generation")
    if reported.get("observedGeneration") != generation:
        return Condition("True", "Starting", count)
    if reported["status"] == "True":
        return Condition("True", cast(Reason, reported["reason"]), f"Prefill pods: {reported['message']}")
    return Condition("False", "Complete", count)


def _objects(cluster: Cluster, images: Images, context: Context) -> list[Object]:
    """The LMCacheCluster. Raises InvalidSpecError if no prefill pod can have its settings."""
    if cluster.spec.engine is None or cluster.engine.prefill is None:
        return []
    annotations = {EVENTS_FOR: cluster.events_reader} if cluster.events_reader else {}
    spec = _spec(cluster, images)
    child = names.child(cluster, names.PREFILL, KIND, annotations=annotations, spec=spec)
    try:
        Engine().render(parse(child), context)
    except InvalidSpecError as error:
        path, _, sentence = _in_parent(str(error), cluster.engine).partition(": ")
        raise InvalidSpecError(path, sentence) from error
    return [child]


def _in_parent(message: str, engine: EngineSpec) -> str:
    """A message about the derived spec, with the fields of the user's spec."""
    assert engine.prefill is not None

    def argument(match: re.Match[str]) -> str:
        number = int(match[1]) - len(engine.args)
        return match[0] if number < 0 else f"spec.engine.prefill.args[{number}]"

    message = _ARGUMENT.sub(argument, message)
    for name in written(engine.prefill).keys() - {"args"}:
        message = message.replace(f"spec.engine.{name}", f"spec.engine.prefill.{name}")
    return message


def _spec(cluster: Cluster, images: Images) -> Object:
    """The parent's spec with the settings of ``engine.prefill``. Only set replicas are part of it, so that
    autoscalers may change them otherwise."""
    spec, engine, prefill = cluster.spec, cluster.engine, cluster.engine.prefill
    assert prefill is not None
    settings = {
        name: value
        for name in ("gpu", "resources", "node_selector", "tolerations")
        if (value := getattr(prefill, name)) is not None
    }
    image = engine.image or images.get(names.ENGINE)
    # Prefill pods do not know the parent's router.
    args = [*engine.args, *prefill.args, *([DISCOVERY] if cluster.tokenizes_for_router else [])]
    engine = replace(engine, prefill=None, image=image, args=args, **settings)
    sidecar = replace(spec.sidecar, image=spec.sidecar.image or images.get(names.SIDECAR))
    router = names.selector(cluster.name, names.ROUTER)
    derived = replace(
        spec,
        engine=engine,
        sidecar=sidecar,
        tiers=_tiers(cluster),
        router=None,
        clients=None if spec.clients is None else [*spec.clients, stateful.from_pods(router)],
        autoscaling=replace(spec.autoscaling, remote=None),
    )
    rendered = written(derived)
    replicas = {} if prefill.replicas is None else {"replicas": prefill.replicas}
    unscaled = {key: value for key, value in rendered["engine"].items() if key != "replicas"}
    return rendered | {"engine": unscaled | replicas}


def _tiers(cluster: Cluster) -> Tiers:
    """The parent's tiers. Those that the parent shares are references to it."""
    tiers = cluster.spec.tiers
    assert tiers.peers is not None
    peers = replace(tiers.peers, cluster_ref=ClusterRef(name=names.peers_owner(cluster)))
    if tiers.managed is None or tiers.remote is None:
        return replace(tiers, peers=peers)
    return replace(
        tiers,
        peers=peers,
        remote=replace(tiers.remote, managed=None, cluster_ref=ClusterRef(name=cluster.name)),
    )
