"""The checks, in modules by subject. Each check is a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from lmcache_cli.commands.doctor.checks import (
    admission,
    conditions,
    engines,
    features,
    injection,
    installation,
    peers,
    redis_servers,
    rights,
    sidecars,
)
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Level, Result

INSTALLATION: Mapping[str, Callable[[Facts], Iterator[Result]]] = {
    "kubernetesVersion": installation.kubernetes_version,
    "crd": installation.definitions,
    "operator": installation.operator,
    "versions": installation.versions,
    "clocks": installation.clocks,
}
"""Checks by name. Programs may rely on the names. A check with several results gives each its own name."""
NAMESPACE: Mapping[str, Callable[[Facts], Iterator[Result]]] = {
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
    "conditions": conditions.conditions,
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
}
_ORDER = {level: position for position, level in enumerate(Level)}
_INSTALLATION = "installation"


def run_checks(facts: Facts) -> list[Result]:
    """Return the results of all checks, failures first."""
    if absent := installation.absent(facts):
        return [absent._replace(check="installed", subject=_INSTALLATION)]
    results = [(_INSTALLATION, name, check(facts)) for name, check in INSTALLATION.items()]
    results += [(facts.namespace, name, check(facts)) for name, check in NAMESPACE.items()]
    for cluster in facts.clusters:
        subject = f"{facts.namespace}/{cluster.name}"
        results += [(subject, name, check(facts, cluster)) for name, check in CLUSTER.items()]
    listed = [
        result._replace(check=result.check or name, subject=subject)
        for subject, name, checked in results
        for result in checked
    ]
    return sorted(listed, key=lambda result: _ORDER[result.level])
