"""The component of the router: a Deployment of ``vllm-router``, its Service, and its right to list pods."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.router import Router
from lmcache_operator.components.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.components.conditions import Condition, Problem, former_conditions
from lmcache_operator.components.images import default_image, recorded
from lmcache_operator.components.router.pod import pod_template
from lmcache_operator.pods.differences import differences
from lmcache_operator.specs import Object, names, stateful
from lmcache_operator.specs.kinds import Ref

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

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """References to all children. The Deployment is last."""
        kinds = ("ServiceAccount", "Role", "RoleBinding", "Service", "NetworkPolicy", "PodDisruptionBudget")
        return tuple(Ref(kind, names.router_name(cluster_name)) for kind in (*kinds, "Deployment"))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The children that the spec asks for; none without ``spec.router``."""
        router = cluster.spec.router
        return [] if router is None else _objects(cluster, router, context.router_image)

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Changed children. The Deployment's controller replaces the pods."""
        router = cluster.spec.router
        if router is None:
            return differences([], observed)
        live = _deployment(observed)
        image = default_image(cluster, live, names.ROUTER, context.router_image)
        return differences(_objects(cluster, router, image), observed)

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Status of the router's pods, as the Deployment's controller reports them."""
        live = _deployment(observed)
        if live is None or Ref("Deployment", names.router_name(observed.name)) in plan.delete:
            return ComponentStatus()
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
        progressing = Condition("False", "Complete", count)
        if not is_complete and not is_stuck:
            progressing = Condition("True", "Starting", count)
        return ComponentStatus(
            summary=count,
            progressing=progressing,
            conditions=conditions,
            degraded=(Problem("RouterNotReady", f"{count}: {is_stuck}"),) if is_stuck else (),
            fields={"router": {"replicas": num_pods, "readyReplicas": num_ready}},
        )


def _deployment(observed: Observed) -> Object | None:
    return observed.children.get(Ref("Deployment", names.router_name(observed.name)))


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
    child, name = partial(names.child, cluster, names.ROUTER), names.router_name(cluster.name)
    selector = names.selector(cluster.name, names.ROUTER)
    account = {"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}
    traffic = {"ports": [{"port": port["port"], "protocol": "TCP"} for port in _PORTS]}
    return [
        child("ServiceAccount", name, automountServiceAccountToken=False),
        child("Role", name, rules=_RULES),
        child(
            "RoleBinding",
            name,
            roleRef={"apiGroup": _RBAC, "kind": "Role", "name": name},
            subjects=[account],
        ),
        child("Service", name, spec={"ports": _PORTS, "selector": selector}),
        child("NetworkPolicy", name, spec=stateful.network_policy(selector, traffic)),
        child("PodDisruptionBudget", name, spec=stateful.disruption_budget(selector)),
        child(
            "Deployment",
            name,
            recorded(names.ROUTER, default),
            spec=_deployment_spec(cluster, router, default),
        ),
    ]


def _deployment_spec(cluster: Cluster, router: Router, default: str) -> dict[str, Any]:
    return {
        "replicas": router.replicas,
        "selector": {"matchLabels": names.selector(cluster.name, names.ROUTER)},
        # A new pod is ready before an old one stops, so that a single router is replaced without a gap.
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}, "type": "RollingUpdate"},
        "template": pod_template(cluster, router, router.image or default),
    }
