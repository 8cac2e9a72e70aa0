"""Checks that engine pods become ready. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.checks.installation import starting
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, grouped, ok, warning
from lmcache_operator.contract.base import Observed
from lmcache_operator.pods.pods import pod_problems, start_limit, unready_since
from lmcache_operator.specs import Object
from lmcache_store.common.text import plain


def readiness(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that each pod is ready, or still has time to start. Only the first problem of a pod counts."""
    results = [(str(pod["metadata"]["name"]), _state(facts, cluster, pod)) for pod in cluster.unready_pods]
    yield from grouped(results, len(cluster.pods), ok(f"Pods that are ready: {len(cluster.pods)}."))


def _state(facts: Facts, cluster: ClusterFacts, pod: Object) -> Result:
    observed = Observed(resource=cluster.resource, pods=(pod,), now=facts.server_time)
    for problem in pod_problems(observed):
        text = problem.message.replace(f"pod {pod['metadata']['name']}", "The pod", 1)
        describe = facts.kubectl("describe pod POD")
        return failure(f"{plain(text)}.", "Read its Events:", problem.reason, describe)
    return warning(starting(observed.now - unready_since(pod, observed), start_limit(pod)), "Wait.")
