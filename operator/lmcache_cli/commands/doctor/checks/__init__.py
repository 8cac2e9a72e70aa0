"""The checks, in modules by subject. Each check is a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

INSTALLATION: Sequence[Callable[[Facts], Iterator[Result]]] = (
    installation.kubernetes_version,
    installation.definitions,
    installation.operator,
    installation.versions,
    installation.clocks,
)
NAMESPACE: Sequence[Callable[[Facts], Iterator[Result]]] = (
    installation.watched_namespace,
    rights.user_rights,
    rights.operator_rights,
    injection.policies,
    injection.unknown_names,
)
CLUSTER: Sequence[Callable[[Facts, ClusterFacts], Iterator[Result]]] = (
    conditions.spec,
    conditions.progress,
    conditions.conditions,
    features.gpu_claims,
    features.resizes,
    admission.admission,
    injection.injected_pods,
    engines.arguments,
    engines.engine_versions,
    engines.engine_settings,
    engines.private_keys,
    sidecars.answers,
    sidecars.versions,
    sidecars.clocks,
    sidecars.transfer,
    sidecars.pinned_memory,
    sidecars.encryption,
    peers.reachable,
    redis_servers.reachable,
    redis_servers.refusals,
    redis_servers.settings,
    redis_servers.latency,
    redis_servers.evictions,
    redis_servers.shards,
)
_ORDER = {level: position for position, level in enumerate(Level)}
_INSTALLATION = "installation"


def run_checks(facts: Facts) -> list[Result]:
    """Return the results of all checks, failures first."""
    if installation.is_absent(facts):
        return [installation.absent()._replace(subject=_INSTALLATION)]
    results = [(facts.namespace, installation.listed_clusters(facts))]
    results += [(_INSTALLATION, check(facts)) for check in INSTALLATION]
    results += [(facts.namespace, check(facts)) for check in NAMESPACE]
    for cluster in facts.clusters:
        subject = f"{facts.namespace}/{cluster.name}"
        results += [(subject, check(facts, cluster)) for check in CLUSTER]
    listed = [result._replace(subject=subject) for subject, checked in results for result in checked]
    return sorted(listed, key=lambda result: _ORDER[result.level])
