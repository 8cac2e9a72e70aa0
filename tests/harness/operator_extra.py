"""A further component for tests: pods that exist while a cluster has more than one engine pod."""

from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.components.conditions import Condition
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import child, labels, selector

Object = dict[str, Any]


class Extra(Component):
    """A StatefulSet and a ConfigMap that depend on the number of engine pods."""

    name = "extra"

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        return tuple(Ref(kind, f"{cluster_name}-extra") for kind in ("ConfigMap", "StatefulSet"))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        if cluster.engine.replicas < 2:
            return []
        name, pods = f"{cluster.name}-extra", selector(cluster.name, self.name)
        containers = [{"name": "extra", "image": "registry.example/extra:1"}]
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

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        if not observed.children or plan.delete:
            return ComponentStatus()
        is_serving = any(map(is_ready, observed.pods))
        serving = Condition("True", "Serving", "the pod answers") if is_serving else None
        waiting = Condition("False", "NotServing", "the pod does not answer")
        progressing = Condition("False", "Complete", "") if is_serving else Condition("True", "Starting", "")
        return ComponentStatus(
            summary="the pod serves",
            progressing=progressing,
            conditions={"ExtraAvailable": serving or waiting},
        )
