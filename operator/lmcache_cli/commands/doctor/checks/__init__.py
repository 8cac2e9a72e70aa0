"""The checks, in modules by subject. Each check is a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks import (
    admission,
    conditions,
    engines,
    features,
    injection,
    installation,
    peers,
    pods,
    redis_servers,
    rights,
    sidecars,
)
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Level, Result, unknown

INSTALLATION: Mapping[str, Callable[[Facts], Iterator[Result]]] = {
    "kubernetesVersion": installation.kubernetes_version,
    "crd": installation.definitions,
    "operator": installation.operator,
    "versions": installation.versions,
    "clocks": installation.clocks,
}
"""Checks by name. Programs may rely on the names. A check with several results gives each its own name."""
NAMESPACE: Mapping[str, Callable[[Facts], Iterator[Result]]] = {
    "namespace": installation.namespace,
    "clusters": installation.listed_clusters,
    "watchedNamespace": installation.watched_namespace,
    "userRights": rights.user_rights,
    "operatorRights": rights.operator_rights,
    "injectionPolicy": injection.policies,
    "injectionNames": injection.unknown_names,
}
CLUSTER: Mapping[str, Callable[[Facts, ClusterFacts], Iterator[Result]]] = {
    "spec": conditions.spec,
    "reconciled": conditions.progress,
    "gpuClaims": features.gpu_claims,
    "resizes": features.resizes,
    "podAdmission": admission.admission,
    "injection": injection.injected_pods,
    "engineArguments": engines.arguments,
    "engineVersion": engines.engine_versions,
    "engineSettings": engines.engine_settings,
    "privateKeys": engines.private_keys,
    "sidecars": sidecars.answers,
    "sidecarVersions": sidecars.versions,
    "podClocks": sidecars.clocks,
    "transfer": sidecars.transfer,
    "pinnedMemory": sidecars.pinned_memory,
    "encryptionKeys": sidecars.encryption,
    "peersReachable": peers.reachable,
    "remoteReachable": redis_servers.reachable,
    "remoteRefusals": redis_servers.refusals,
    "remoteSettings": redis_servers.settings,
    "remoteLatency": redis_servers.latency,
    "remoteEvictions": redis_servers.evictions,
    "shards": redis_servers.shards,
    "conditions": conditions.conditions,
    "pods": pods.readiness,
}
_WITH_OPERATOR = ("operator", "watchedNamespace", "operatorRights")
NEEDS: Mapping[str, Sequence[str]] = {
    "operator": ("crd",),
    "versions": ("crd", "operator"),
    "clusters": ("crd", "namespace"),
    "watchedNamespace": ("namespace",),
    "userRights": ("namespace",),
    "operatorRights": ("namespace", "operator", "watchedNamespace"),
    "injectionPolicy": ("clusters",),
    "injectionNames": ("clusters",),
    "injection": ("operator",),
    "reconciled": _WITH_OPERATOR,
    "podAdmission": ("spec",),
    "conditions": ("spec", "reconciled", *_WITH_OPERATOR),
}
"""Checks that must not fail before another one, which would report a consequence of the same cause."""
_REPEATING = ("conditions", "pods")
"""Checks whose results with a runbook are left out if an earlier result has the same."""
_ORDER = {level: position for position, level in enumerate(Level)}
_INSTALLATION = "installation"


def run_checks(facts: Facts) -> list[Result]:
    """Return the results of all checks, failures first. One cause gives one failure."""
    if absent := installation.absent(facts):
        return [absent._replace(check="installed", subject=_INSTALLATION)]
    failed = set[str]()
    listed = _run(INSTALLATION, _INSTALLATION, failed, facts)
    listed += _run(NAMESPACE, facts.namespace, failed, facts)
    for cluster in facts.clusters:
        listed += _run(CLUSTER, f"{facts.namespace}/{cluster.name}", set(failed), facts, cluster)
    unread = [result for result in listed if result.statement == unknown(ApiAnswer()).statement]
    if unread and facts.unanswered:
        missed = installation.api_server(facts, [result.check for result in unread])
        listed = [result for result in listed if result not in unread]
        listed.append(missed._replace(check="apiServer", subject=_INSTALLATION))
    return sorted(listed, key=lambda result: _ORDER[result.level])


def _run(
    checks: Mapping[str, Callable[..., Iterator[Result]]], subject: str, failed: set[str], *facts: Any
) -> list[Result]:
    """Return the results about a subject. Adds to ``failed`` the names of checks with a failure."""
    results = list[Result]()
    for name, check in checks.items():
        if failed.isdisjoint(NEEDS.get(name, ())):
            new = list(check(*facts))
            reported = {result.runbook for result in results} - {""}
            results += [
                result._replace(check=result.check or name, subject=subject)
                for result in new
                if name not in _REPEATING or result.runbook not in reported
            ]
            if any(result.level is Level.FAILURE for result in new):
                failed.add(name)
    return results
