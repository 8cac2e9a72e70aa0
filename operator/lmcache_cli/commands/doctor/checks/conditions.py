"""Checks of the cluster's spec and of the conditions that the operator reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, ok, warning
from lmcache_cli.commands.status import is_bad
from lmcache_operator.contract.conditions import TROUBLES
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain

_SERVED = {
    "AutoscalingFrozen",
    "CudaIPCUnavailable",
    "MemoryNotPinned",
    "NoAnswer",
    "OOMKilled",
    "ResizeInfeasible",
}
"""Reasons of problems with which requests are served and cached."""
_SUMMARIES = ("Degraded", "Ready")
"""Conditions that repeat the reasons of others."""
_FIRST_STATUS = timedelta(minutes=1)
"""Time within which the operator reports on a new cluster."""
_OPERATOR = "Check that the operator runs and watches this namespace."


def spec(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that this version accepts the spec."""
    if cluster.invalid_spec:
        yield failure(f"The spec is invalid: {plain(cluster.invalid_spec)}.", "Change it.", "InvalidSpec")
    else:
        yield ok("The spec is valid.")


def progress(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the operator has processed the present spec."""
    metadata = cluster.resource["metadata"]
    listed = _conditions(cluster)
    generation = metadata.get("generation") or 0
    observed = [condition.get("observedGeneration") or 0 for condition in listed]
    if not listed:
        if facts.has_ready_operator and _age(metadata, facts) > _FIRST_STATUS:
            text = "The operator has reported no status."
            yield failure(text, _OPERATOR, "LMCacheOperatorDown")
    elif max(observed) < generation:
        text = f"The operator has processed generation {max(observed)} of the spec, not yet {generation}."
        yield warning(text, f"Wait 15 s. {_OPERATOR}", "LMCacheOperatorDown")
    else:
        yield ok("The operator has processed the present spec.")


def _age(metadata: Object, facts: Facts) -> timedelta:
    created = datetime.fromisoformat(str(metadata.get("creationTimestamp") or "1970-01-01T00:00:00Z"))
    return facts.server_time - created


def _conditions(cluster: ClusterFacts) -> list[Object]:
    return [item for item in dig(cluster.resource, "status", "conditions") or () if isinstance(item, dict)]


def conditions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Report each problem that the operator has found, with its runbook. Other reasons are normal.

    Pods that are not ready explain why no engine is: see `pods.readiness`.
    """
    explained = {"NoEngineReady"} if cluster.unready_pods else set[str]()
    bad = [
        item for item in _conditions(cluster) if is_bad(item) and item.get("reason") in TROUBLES - explained
    ]
    reasons = {item["reason"] for item in bad if item["type"] not in _SUMMARIES}
    for item in bad:
        if item["type"] in _SUMMARIES and item["reason"] in reasons:
            continue
        reasons.add(item["reason"])
        kind, reason = plain(item["type"]), plain(item["reason"])
        text = f"{kind} is {item['status']} ({reason}): {plain(item.get('message'))}"
        level = warning if reason in _SERVED or item["status"] == "Unknown" else failure
        yield level(text, "", reason)._replace(check=f"condition:{kind}")
    if _conditions(cluster) and not bad:
        yield ok("The operator reports no problem.")
