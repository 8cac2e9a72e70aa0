"""Checks of the injection of the cache into users' own pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, first_of, grouped, ok, unknown, warning
from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.specs import Object, names
from lmcache_store.common.text import plain

_RUNBOOK = "PodsWithoutCache"
_FILES = "Or add the cache on files: lmcache-operator inject."


def policies(facts: Facts) -> Iterator[Result]:
    """Check that the admission policy of the chart exists, if pods have the label."""
    pods = facts.injected_pods.items
    if not facts.injected_pods.is_known:
        yield unknown(facts.injected_pods)
    elif not pods:
        return
    elif all(map(has_cache, pods)) and facts.policies.is_missing:
        yield ok("All pods with the label have the cache. No policy is needed.")
    elif facts.policies.is_missing:
        text = "The API server has no MutatingAdmissionPolicies, so labels have no effect."
        yield failure(text, f"Use Kubernetes 1.36. {_FILES}", _RUNBOOK)
    elif not facts.policies.is_known or not facts.bindings.is_known:
        yield unknown(facts.bindings if facts.policies.is_known else facts.policies)
    elif not facts.policies.items or not facts.bindings.items:
        text = "The admission policy of the chart, or its binding, is missing."
        yield failure(text, f"Upgrade the chart with injection.enabled=true. {_FILES}", _RUNBOOK)
    else:
        yield ok("The admission policy of the chart exists.")


def unknown_names(facts: Facts) -> Iterator[Result]:
    """Check that the labels of pods name LMCacheClusters of the namespace."""
    if facts.has_one_cluster or not facts.listed_clusters.is_known:
        return
    known = {cluster.name for cluster in facts.clusters}
    pods = [pod for pod in facts.injected_pods.items if cluster_of(pod) not in known]
    if pods:
        missing = plain(cluster_of(pods[0]))
        text = f"Pods name an LMCacheCluster {missing} that does not exist in the namespace: "
        text += f"{first_of([pod['metadata']['name'] for pod in pods])}."
        remedy = f"Create LMCacheCluster {missing}, or correct the label {names.INJECT_LABEL}."
        yield failure(text, remedy, _RUNBOOK)


def cluster_of(pod: Object) -> str:
    """Return the name of the LMCacheCluster whose cache a pod asks for; empty: none."""
    return str((pod["metadata"].get("labels") or {}).get(names.INJECT_LABEL, ""))


def injected_pods(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that each pod with the label has the cache."""
    pods = [figures.pod for figures in cluster.pods if cluster_of(figures.pod) == cluster.name]
    if not pods:
        return
    profile = names.object_name(cluster.name, names.INJECTION)
    if facts.profiles.is_known and profile not in [each["metadata"]["name"] for each in facts.profiles.items]:
        text = f"The LMCacheProfile {profile} is missing, so new pods get no cache."
        yield failure(text, "Check that the operator runs.", "LMCacheOperatorDown")
    uncached = [(str(pod["metadata"]["name"]), _reason(facts, pod)) for pod in pods if not has_cache(pod)]
    all_well = ok(f"Pods with the label that have the cache: {len(pods)}.")
    yield from grouped(uncached, len(pods), all_well)


def _reason(facts: Facts, pod: Object) -> Result:
    outcome = plain((pod["metadata"].get("annotations") or {}).get(OUTCOME))
    if outcome.startswith("refused"):
        text = f"The pod has no cache: {outcome}."
        return warning(text, "Change this field in the Deployment of the pod.", _RUNBOOK)
    text = "The pod has no cache: no policy processed it at its creation."
    remedy = "If it belongs to a Deployment, delete it, so that the Deployment creates it again:"
    return warning(text, remedy, _RUNBOOK, facts.kubectl("delete pod POD"))
