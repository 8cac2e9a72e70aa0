"""A second component, for tests only: a router, there while a cluster has more than one engine pod."""

from __future__ import annotations

from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Component, Condition, Context, Observed, Plan, Status
from lmcache_operator.components.differences import differences
from lmcache_operator.components.pods import is_ready
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import child, labels, selector

Object = dict[str, Any]


class Router(Component):
    """A StatefulSet and a ConfigMap that come and go with the number of engine pods."""

    name = "router"

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        return tuple(Ref(kind, f"{cluster_name}-router") for kind in ("ConfigMap", "StatefulSet"))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        if cluster.engine.replicas < 2:
            return []
        name, pods = f"{cluster.name}-router", selector(cluster.name, self.name)
        containers = [{"name": "router", "image": "registry.example/router:1"}]
        spec = {
            "replicas": 1,
            "selector": {"matchLabels": pods},
            "serviceName": name,
            "template": {
                "metadata": {"labels": labels(cluster, self.name)},
                "spec": {"containers": containers, "initContainers": []},
            },
        }
        data = {"engines": str(cluster.engine.replicas)}
        return [
            child(cluster, self.name, "ConfigMap", name, data=data),
            child(cluster, self.name, "StatefulSet", name, spec=spec),
        ]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        return differences(self.render(cluster, context), observed)

    def status(self, observed: Observed, plan: Plan) -> Status:
        if not observed.children or plan.delete:
            return Status()
        serves = any(map(is_ready, observed.pods))
        found = Condition("True", "Serving", "the router answers") if serves else None
        waiting = Condition("False", "NotServing", "the router does not answer")
        progressing = Condition("False", "Complete", "") if serves else Condition("True", "Starting", "")
        return Status(
            summary="the router serves",
            progressing=progressing,
            conditions={"RouterAvailable": found or waiting},
        )
