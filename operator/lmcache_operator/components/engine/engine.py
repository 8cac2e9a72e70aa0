"""The component: one StatefulSet of engine pods and what they need; its pods are replaced one at a time."""

from __future__ import annotations

import json
from dataclasses import replace

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Component
from lmcache_operator.components.differences import differences
from lmcache_operator.components.engine import objects
from lmcache_operator.components.engine.status import engine_status
from lmcache_operator.components.pods import is_outdated, next_eviction
from lmcache_operator.components.types import Context, Observed, Plan, Status
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.names import (
    DEFAULT_IMAGES,
    ENGINE,
    SIDECAR,
    annotations_of,
    config_name,
    engine_name,
)  # fmt: skip

_FORMER_SIZE = (
    "still have the former size of the memory tier: replaced pods get the new one; a changed annotation in "
    "spec.engine.podTemplate replaces all"
)


class Engine(Component):
    """Engine pods."""

    name = ENGINE

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """See ``Component``, as for all of these."""
        engine = engine_name(cluster_name)
        kinds = ("ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet")
        others = Ref("ConfigMap", config_name(cluster_name)), Ref("Service", cluster_name)
        return (*(Ref(kind, engine) for kind in kinds), *others)

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The StatefulSet last."""
        return objects.render(cluster, context)

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Before anything, the images that the StatefulSet was made with."""
        live = observed.children.get(Ref("StatefulSet", engine_name(cluster.name)))
        wanted = self.render(cluster, context._replace(images=_default_images(live, context.images)))
        due, stateful_set = differences(wanted, observed), wanted[-1]
        template = stateful_set["spec"]["template"]
        others = [pod for pod in observed.pods if not is_outdated(pod, template)]
        num_former = sum(_memory_size(pod) != _memory_size(template) for pod in others)
        return replace(
            due,
            # Not before the template is written: the old pod would be made again.
            evict=() if ref_of(stateful_set) in due.lost else next_eviction(live, observed.pods, template),
            num_outdated=len(observed.pods) - len(others),
            note=f"{num_former} {_FORMER_SIZE}" if num_former else "",
        )

    def status(self, observed: Observed, plan: Plan) -> Status:
        """Of pods and of sidecars."""
        return engine_status(observed, plan)


def _memory_size(pod_or_template: Object) -> list[str]:
    """The size of the memory tier, as the sidecar is told it."""
    return [
        argument
        for container in pod_or_template["spec"].get("initContainers") or ()
        for argument in container.get("args") or ()
        if container["name"] == SIDECAR and argument.startswith("--memory-size")
    ]


def _default_images(stateful_set: Object | None, images: Images) -> Images:
    """The images that stand in where the user names none.

    They are recorded when the StatefulSet is made, so that an upgrade of the operator changes no image of a
    cluster that exists.
    """
    if stateful_set is None:
        return images
    try:
        recorded = json.loads(annotations_of(stateful_set).get(DEFAULT_IMAGES, "{}"))
        return images | {name: recorded[name] for name in images if isinstance(recorded.get(name), str)}
    except (ValueError, AttributeError):
        return images  # edited by hand: written anew
