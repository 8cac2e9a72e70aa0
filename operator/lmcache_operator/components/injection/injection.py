"""The component: an LMCacheProfile with what pods get that carry the label ``lmcache.io/inject: NAME``.

The API server itself adds it, by the chart's MutatingAdmissionPolicy: there is no webhook that could fail,
and pods get their cache also while the operator is down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lmcache_operator.api import PROFILE_KIND
from lmcache_operator.api.parse import AS_DECLARED, Cluster
from lmcache_operator.components.base import Component, Context, Observed, Plan, Problem, Status
from lmcache_operator.components.differences import differences
from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.components.injection.profile import PREFIX, profile
from lmcache_operator.components.pods import plain, pod_problems
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import Ref

_NO_ROOM = re.compile(r"Insufficient (memory|ephemeral-storage)")
_NOT_SEEN = (
    "it is older than this object, or the API server has no MutatingAdmissionPolicy: make it anew, or use "
    "lmcache-operator inject"
)


class Injection(Component):
    """What other people's pods are given."""

    name = names.INJECTION
    is_for_others = True

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """One."""
        return (Ref(PROFILE_KIND, names.injection_name(cluster_name)),)

    def foreign_pods(self, cluster_name: str) -> str:
        """Those that ask for the cache."""
        return f"{names.INJECT_LABEL}={cluster_name}"

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """With the images of today, and the sizes that are declared: pods that exist keep theirs."""
        if cluster.spec.engine is None:
            return []
        name, declared = names.injection_name(cluster.name), replace(cluster, chosen=AS_DECLARED)
        return [names.child(cluster, self.name, PROFILE_KIND, name, template=profile(declared, context))]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The differences."""
        return differences(self.render(cluster, context), observed)

    def status(self, observed: Observed, plan: Plan) -> Status:
        """Pods that their cache keeps from starting; those that ask for one and have none: these serve."""
        pods = [pod for pod in observed.foreign_pods if not _is_ending(pod)]
        bare = [pod for pod in pods if not has_cache(pod)]
        summary = f"other pods with its cache: {len(pods) - len(bare)}" if pods else ""
        stuck = tuple(_stuck(observed, [pod for pod in pods if has_cache(pod)]))
        if not bare:
            return Status(summary=summary, degraded=stuck)
        first, label = bare[0], f"{names.INJECT_LABEL}={observed.name}"
        why = plain(names.annotations_of(first).get(OUTCOME, _NOT_SEEN))
        count = f"{len(bare)} of {len(pods)} pods labelled {label} have no cache"
        message = f"{count}: pod {first['metadata']['name']}: {why}"
        return Status(summary=summary, degraded=(*stuck, Problem("PodsWithoutCache", message)))


def _stuck(observed: Observed, pods: list[Object]) -> Iterator[Problem]:
    """What keeps our containers from running, and with them the engine, which starts after them.

    What pods wait for otherwise, a queue or a GPU, is their owner's; of nodes' memory we ask for the most.
    """
    ours = tuple(pod | {"status": _of_ours(pod.get("status") or {})} for pod in pods)
    for problem in pod_problems(replace(observed, pods=ours, children={})):
        if problem.reason == "Unschedulable":
            is_of_ours = _NO_ROOM.search(problem.message) is not None
        else:
            is_of_ours = problem.reason not in ("PodFailed", "ProgressDeadlineExceeded")
        if is_of_ours:
            yield problem


def _of_ours(status: Object) -> Object:
    containers = status.get("initContainerStatuses") or ()
    ours = [container for container in containers if container["name"].startswith(PREFIX)]
    return status | {"initContainerStatuses": ours, "containerStatuses": []}


def _is_ending(pod: Object) -> bool:
    is_over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return is_over or "deletionTimestamp" in pod["metadata"]
