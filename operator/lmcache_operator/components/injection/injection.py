"""The injection component: an LMCacheProfile for pods with the label ``lmcache.io/inject: NAME``.

The API server itself adds the profile to such pods, by the chart's MutatingAdmissionPolicy. So there is no
webhook that could fail, and pods get their cache even while the operator is down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lmcache_operator.api import PROFILE_KIND
from lmcache_operator.api.parse import AS_DECLARED, Cluster
from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.components.injection.profile import PREFIX, profile
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Problem, problem_message
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.pods import pod_problems
from lmcache_operator.specs import Object, names
from lmcache_store.common.text import plain

_INSUFFICIENT = re.compile(r"Insufficient (memory|ephemeral-storage)")
_NOT_INJECTED = (
    "it is older than this LMCacheCluster, or the API server has no MutatingAdmissionPolicy: create it "
    "again, or use lmcache-operator inject"
)


class Injection(Component):
    """The additions to users' own pods, and the status of these pods."""

    name = names.INJECTION
    kinds = (PROFILE_KIND,)
    used = (names.ENGINE, names.REMOTE)
    changes_foreign_pods = True

    def foreign_pods(self, cluster_name: str) -> str:
        """Label selector of the pods that ask for this cluster's cache."""
        return f"{names.INJECT_LABEL}={cluster_name}"

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The LMCacheProfile, with the operator's present default images and the declared sizes.

        Existing pods keep their images and sizes.
        """
        if cluster.spec.engine is None:
            return []
        template = profile(replace(cluster, chosen=AS_DECLARED), context)
        return [names.child(cluster, self.name, PROFILE_KIND, template=template)]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Apply or delete the LMCacheProfile."""
        return differences(self.render(cluster, context), observed)

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Report injected pods that the cache keeps from starting, and labelled pods without a cache.

        Pods without a cache still serve, so neither makes the cluster unready.
        """
        pods = [pod for pod in observed.foreign_pods if not _is_ending(pod)]
        uncached = [pod for pod in pods if not has_cache(pod)]
        summary = f"{len(pods) - len(uncached)} of {len(pods)} labelled pods have the cache" if pods else ""
        stuck = tuple(_stuck(observed, [pod for pod in pods if has_cache(pod)]))
        if not uncached:
            return ComponentStatus(summary=summary, degraded=stuck)
        problem = f"pods labelled {names.INJECT_LABEL}={observed.name} have no cache"
        message = problem_message(
            problem, [(pod["metadata"]["name"], _reason(pod)) for pod in uncached], len(pods)
        )
        return ComponentStatus(summary=summary, degraded=(*stuck, Problem("PodsWithoutCache", message)))


def _reason(pod: Object) -> str:
    return plain(names.annotations_of(pod).get(OUTCOME, _NOT_INJECTED))


def _stuck(observed: Observed, pods: list[Object]) -> Iterator[Problem]:
    """Problems of the injected containers, which also keep the engine from starting.

    Other waits, such as for a queue or a GPU, are the concern of the pod's owner. Lack of memory is reported,
    because the cache requests most of a pod's memory.
    """
    injected = tuple(pod | {"status": _injected_status(pod.get("status") or {})} for pod in pods)
    for problem in pod_problems(replace(observed, pods=injected, children={})):
        if problem.reason == "Unschedulable":
            is_relevant = _INSUFFICIENT.search(problem.message) is not None
        else:
            is_relevant = problem.reason not in ("PodFailed", "ProgressDeadlineExceeded")
        if is_relevant:
            yield problem


def _injected_status(status: Object) -> Object:
    containers = status.get("initContainerStatuses") or ()
    injected = [container for container in containers if container["name"].startswith(PREFIX)]
    return status | {"initContainerStatuses": injected, "containerStatuses": []}


def _is_ending(pod: Object) -> bool:
    is_over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return is_over or "deletionTimestamp" in pod["metadata"]
