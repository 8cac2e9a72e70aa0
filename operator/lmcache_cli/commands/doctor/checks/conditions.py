"""Checks of the cluster's spec and of the conditions that the operator reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.checks.installation import operator_log
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, ok, warning
from lmcache_cli.commands.heartbeat import attendance, sentence
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
    "ResizePending",
}
"""Reasons of problems with which requests are served and cached."""
_SUMMARIES = ("Degraded", "Ready")
"""Conditions that repeat the reasons of others."""


def spec(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that this version accepts the spec."""
    if cluster.invalid_spec:
        yield failure(f"The spec is invalid: {plain(cluster.invalid_spec)}.", "Change it.", "InvalidSpec")
    else:
        yield ok("The spec is valid.")


def progress(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that an operator works on the cluster, and has processed the present spec."""
    judged = attendance(cluster.resource, facts.server_time.timestamp())
    text, command = sentence(judged, cluster.name), operator_log(facts)
    if judged.is_working is not False and text:
        yield warning(text, "Wait 15 s. If nothing changes, read its log:", "LMCacheOperatorDown", command)
    elif not text:
        yield ok("The operator has processed the present spec.")
    elif facts.has_ready_operator:
        yield failure(text, "Read its log:", "LMCacheOperatorDown", command)


def conditions_of(cluster: ClusterFacts) -> list[Object]:
    """The conditions in the cluster's status."""
    return [item for item in dig(cluster.resource, "status", "conditions") or () if isinstance(item, dict)]


def conditions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Report each problem that the operator has found, with its runbook. Other reasons are normal.

    Pods that are not ready explain why no engine is: see `pods.readiness`.
    """
    explained = {"NoEngineReady"} if cluster.unready_pods else set[str]()
    known = TROUBLES | {"ResizePending"}
    bad = [
        item for item in conditions_of(cluster) if is_bad(item) and item.get("reason") in known - explained
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
    if conditions_of(cluster) and not bad:
        yield ok("The operator reports no problem.")
