"""Checks that engine pods become ready. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.checks.conditions import conditions_of
from lmcache_cli.commands.doctor.checks.installation import starting
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, grouped, ok, warning
from lmcache_operator.contract.base import Observed
from lmcache_operator.pods.pods import has_started, pod_problems, start_limit, unready_since
from lmcache_operator.specs import Object
from lmcache_store.common.text import plain


def readiness(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that each pod is ready, or still has time to start. Only the first problem of a pod counts."""
    unready = cluster.unready_pods
    states = ((str(pod["metadata"]["name"]), _state(facts, cluster, pod)) for pod in unready)
    results = [(name, state) for name, state in states if state]
    all_ready = None if unready else ok(f"Pods that are ready: {len(cluster.pods)}.")
    yield from grouped(results, len(cluster.pods), all_ready)


def _state(facts: Facts, cluster: ClusterFacts, pod: Object) -> Result | None:
    """The pod's problem, or for how long it starts; None: Degraded says why it does not start."""
    observed = Observed(resource=cluster.resource, pods=(pod,), now=facts.server_time)
    for problem in pod_problems(observed):
        text = problem.message.replace(f"pod {pod['metadata']['name']}", "The pod", 1)
        describe = facts.kubectl("describe pod POD")
        return failure(f"{plain(text)}.", "Read its Events:", problem.reason, describe)
    if _is_explained(cluster, pod):
        return None
    return warning(starting(observed.now - unready_since(pod, observed), start_limit(pod)), "Wait.")


def _is_explained(cluster: ClusterFacts, pod: Object) -> bool:
    """Whether Degraded says why a pod does not start. It quotes one pod per reason, and events that only
    the operator reads."""
    for item in conditions_of(cluster):
        if item["type"] == "Degraded" and item["status"] == "True":
            is_named = any(f"pod {pod['metadata']['name']}{end}" in str(item.get("message")) for end in ":,")
            return is_named or (item.get("reason") == "FailedMount" and not has_started(pod))
    return False
