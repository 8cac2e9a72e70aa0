"""The component of the router: a Deployment of ``vllm-router``, its Service, and its right to list pods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.router import Router
from lmcache_operator.components.images import default_image, recorded
from lmcache_operator.components.router.pod import WITH_PREFILL, pod_template
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Condition, Problem, former_conditions
from lmcache_operator.pods.differences import differences
from lmcache_operator.specs import Object, names, stateful
from lmcache_operator.specs.kinds import Ref, is_child
from lmcache_operator.specs.merge import dig

_AVAILABLE = "RouterAvailable"
_PORTS = [
    {"name": "http", "port": names.ROUTER_PORT, "protocol": "TCP", "targetPort": "http"},
    {"name": "metrics", "port": names.ROUTER_METRICS_PORT, "protocol": "TCP", "targetPort": "metrics"},
]
_RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
"""Rights of the router: it finds the engine pods of its namespace."""
_RBAC = "rbac.authorization.k8s.io"


class Routing(Component):
    """The router in front of a cluster's engines."""

    name = names.ROUTER
    kinds = (
        "ServiceAccount", "Role", "RoleBinding", "Service", "NetworkPolicy", "PodDisruptionBudget",
        "Deployment",
    )  # fmt: skip

    def referred(self, resource: Object) -> str:
        """Name of the cluster of prefill pods; empty: none."""
        has_prefill = dig(resource, "spec", "engine", "prefill") is not None
        return names.object_name(resource["metadata"]["name"], names.PREFILL) if has_prefill else ""

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The children that the spec asks for; none without ``spec.router``."""
        router = cluster.spec.router
        return [] if router is None else _objects(cluster, router, context.router_image)

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Changed children. The Deployment's controller replaces the pods.

        The router uses only the other engine pods until a prefill pod is ready.
        """
        router = cluster.spec.router
        if router is None:
            return differences([], observed)
        live = _deployment(observed)
        image = default_image(cluster, live, names.ROUTER, context.router_image)
        wanted = _objects(cluster, router, image)
        if cluster.engine.prefill is not None and not _may_use_prefill_pods(observed):
            engine = replace(cluster.engine, prefill=None)
            wanted = _objects(replace(cluster, spec=replace(cluster.spec, engine=engine)), router, image)
        return differences(wanted, observed)

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Status of the router's pods, as the Deployment's controller reports them."""
        live = _deployment(observed)
        if live is None or _ref(observed) in plan.delete:
            is_asked_for = dig(observed.resource, "spec", "router") is not None
            is_invalid = any(problem.reason == "InvalidSpec" for problem in plan.problems)
            return ComponentStatus(serves=False if is_asked_for and not is_invalid else None)
        wanted, status = live["spec"].get("replicas", 1), live.get("status") or {}
        num_ready, num_pods = status.get("readyReplicas", 0), status.get("replicas", 0)
        count = f"{num_ready} of {wanted} routers are ready"
        available = Condition("True", "RouterReady", count)
        if not num_ready:
            available = Condition("False", "RouterNotReady", f"{count}; requests to its Service fail")
        conditions = {_AVAILABLE: available}
        if plan.problems and not status:
            conditions = former_conditions(observed.resource, _AVAILABLE)
        is_stuck = _failure(status)
        is_current = status.get("observedGeneration") == live["metadata"].get("generation")
        is_complete = is_current and status.get("updatedReplicas", 0) == wanted == num_ready == num_pods
        has_prefill = any(map(_uses_prefill_pods, (live, *plan.apply)))
        may_have_prefill = not is_complete and had_prefill_pods(observed.resource)
        progressing = Condition("False", "Complete", count)
        if not is_complete and not is_stuck:
            progressing = Condition("True", "Starting", count)
        return ComponentStatus(
            summary=count,
            serves=num_ready > 0 if wanted else None,
            progressing=progressing,
            conditions=conditions,
            degraded=(Problem("RouterNotReady", f"{count}: {is_stuck}"),) if is_stuck else (),
            fields={
                "router": {
                    "pools": 2 if has_prefill or may_have_prefill else 1,
                    "replicas": num_pods,
                    "readyReplicas": num_ready,
                }
            },
        )


def had_prefill_pods(resource: Object) -> bool:
    """Whether a router pod of the cluster used prefill pods at the last reconciliation."""
    return bool(dig(resource, "status", "router", "pools") == 2)


def _ref(observed: Observed) -> Ref:
    return Ref("Deployment", names.object_name(observed.name, names.ROUTER))


def _deployment(observed: Observed) -> Object | None:
    return observed.children.get(_ref(observed))


def _may_use_prefill_pods(observed: Observed) -> bool:
    """Whether the cluster has a ready prefill pod, or prefill pods that its router already uses."""
    prefill = observed.referred
    if prefill is None or not is_child(prefill, observed.resource):
        return False
    return bool(dig(prefill, "status", "readyReplicas")) or _uses_prefill_pods(_deployment(observed))


def _uses_prefill_pods(child: Object | None) -> bool:
    containers = dig(child, "spec", "template", "spec", "containers") or ()
    return any(WITH_PREFILL in (container.get("args") or ()) for container in containers)


def _failure(status: Object) -> str:
    """Why the Deployment's controller has given up; empty: it has not."""
    for condition in status.get("conditions") or ():
        is_failure = (condition["type"], condition["status"]) in (
            ("Progressing", "False"),
            ("ReplicaFailure", "True"),
        )
        if is_failure:
            return str(condition.get("message") or condition.get("reason"))
    return ""


def _objects(cluster: Cluster, router: Router, default: str) -> list[Object]:
    child, name = partial(names.child, cluster, names.ROUTER), names.object_name(cluster.name, names.ROUTER)
    selector = names.selector(cluster.name, names.ROUTER)
    role = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}
    image, spec = recorded({names.ROUTER: default}), _deployment_spec(cluster, router, default)
    return [
        child("ServiceAccount", automountServiceAccountToken=False),
        child("Role", rules=_RULES),
        child("RoleBinding", roleRef=role, subjects=[account]),
        child("Service", spec={"ports": _PORTS, "selector": selector}),
        child("NetworkPolicy", spec=_network_policy(cluster, selector)),
        child("PodDisruptionBudget", spec=stateful.disruption_budget(selector)),
        child("Deployment", annotations=image, spec=spec),
    ]


def _network_policy(cluster: Cluster, selector: dict[str, str]) -> Object:
    """With a list of clients, only they reach the router, and only scrapers read its metrics."""
    http, metrics = ({"port": port["port"], "protocol": "TCP"} for port in _PORTS)
    if cluster.spec.clients is None:
        return stateful.network_policy(selector, {"ports": [http, metrics]})
    readers = {"from": stateful.scrapers(), "ports": [metrics]}
    return stateful.network_policy(selector, *stateful.from_clients(cluster.spec, [http]), readers)


def _deployment_spec(cluster: Cluster, router: Router, default: str) -> dict[str, Any]:
    return {
        "replicas": router.replicas,
        "selector": {"matchLabels": names.selector(cluster.name, names.ROUTER)},
        # A new pod is ready before an old one stops, so that a single router is replaced without a gap.
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}, "type": "RollingUpdate"},
        "template": pod_template(cluster, router, router.image or default),
    }
