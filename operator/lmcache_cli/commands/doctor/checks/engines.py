"""Checks of the engines: arguments, versions, settings, and whether pods can share keys. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, grouped, ok, unknown, warning
from lmcache_cli.commands.gather import PodFigures, objects_in, sidecar_port
from lmcache_operator.components.engine.kinds import KINDS, kind_in
from lmcache_operator.components.engine.kinds.base import EngineKind, KindProblem
from lmcache_operator.components.injection.pods import CONTAINER
from lmcache_operator.specs import Object, names
from lmcache_store.common.text import plain
from lmcache_store.explain import merge

_MAX_CLIENTS = 128


def engine_container(pod: Object) -> Object | None:
    """Return the container of the engine; None if the pod does not say which one it is."""
    containers = pod["spec"].get("containers") or []
    chosen = (pod["metadata"].get("annotations") or {}).get(CONTAINER, names.ENGINE)
    by_name = {container["name"]: container for container in containers}
    return by_name.get(chosen) or (containers[0] if len(containers) == 1 else None)


def kind_of_pod(pod: Object) -> EngineKind:
    """Return the kind of engine that a pod runs. A command that is not known may start the default kind."""
    container = engine_container(pod)
    return (kind_in(container) if container else None) or KINDS[0]


def _result(problem: KindProblem) -> Result:
    if problem.is_failure:
        return failure(problem.statement, problem.remedy, "EngineNotAttached")
    return warning(problem.statement, problem.remedy)


def clients(stats: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the engine's processes that are attached to a sidecar, as it reports them."""
    listed = objects_in(stats, "clients", _MAX_CLIENTS)
    return [each for each in listed if each.get("is_attached") is True]


def arguments(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the arguments of each engine that has a sidecar."""
    pods = [figures for figures in cluster.pods if sidecar_port(figures.pod) is not None]
    problems = [(figures.name, problem) for figures in pods for problem in _argument_problems(figures)]
    good = ok("The arguments of the engines are right for the cache.")
    yield from grouped(problems, len(pods), good)


def _argument_problems(figures: PodFigures) -> Iterator[Result]:
    """Yield the problems in the arguments and variables of one engine."""
    if container := engine_container(figures.pod):
        is_shared = any(not each.get("private_reason") for each in clients(figures.stats))
        for problem in kind_of_pod(figures.pod).argument_problems(container, is_shared=is_shared):
            yield _result(problem)


def engine_versions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the engines run a supported version."""
    known = [(each, plain(each.stats.get("version"))) for each in cluster.engines if each.stats]
    known = [(each, version) for each, version in known if version]
    kinds = [(each.name, kind_of_pod(each.pod), version) for each, version in known]
    problems = []
    for pod, kind, version in kinds:
        if not kind.supports(version):
            text = f"{kind.name} {version} is not supported, so the engine runs without the cache."
            remedy = f"Use an image with {kind.name} {kind.api.versions}."
            problems.append((pod, failure(text, remedy, "EngineNotAttached")))
    yield from grouped(problems, len(known))
    if known and not problems:
        versions = {f"{kind.name} {version}" for _, kind, version in kinds}
        yield ok(f"The engines run {', '.join(sorted(versions)[:3])}.")
    elif cluster.engines and not known:
        yield unknown(_unread(cluster))


def _unread(cluster: ClusterFacts) -> ApiAnswer:
    figures = cluster.engines[0]
    right = figures.problem.removeprefix("forbidden: ") if figures.problem.startswith("forbidden: ") else ""
    return ApiAnswer(problem=f"engine of pod {figures.name}: {figures.problem}.", missing_right=right)


def engine_settings(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the engines' cache settings, as the engines report them."""
    parsed = cluster.parsed
    chunk_tokens = parsed.spec.sidecar.chunk_tokens if parsed and parsed.spec.engine else 0
    known = [(each, merge.part(each.stats, "cache")) for each in cluster.engines]
    known = [(each, cache) for each, cache in known if cache]
    problems = [
        (each.name, _result(problem))
        for each, cache in known
        for problem in kind_of_pod(each.pod).setting_problems(cache, chunk_tokens)
    ]
    settings = {kind_of_pod(each.pod).settings(cache) for each, cache in known}
    yield from grouped(problems, len(known), ok(" ".join(sorted(settings)[:3])))


def private_keys(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that chunks can be shared between pods and survive in lower tiers."""
    tiers = cluster.resource["spec"].get("tiers") or {}
    has_lower_tier = tiers.get("disk") or tiers.get("remote") or tiers.get("peers") is not None
    attached = {figures.name: clients(figures.stats) for figures in cluster.pods}
    attached = {pod: listed for pod, listed in attached.items() if listed}
    problems = []
    for pod, listed in attached.items():
        reasons = sorted({plain(each.get("private_reason")) for each in listed} - {""})
        for reason in reasons[:1]:
            text = f"Keys are private, so only the memory tier of this pod is used: {reason}."
            remedy = "Correct the setting that the reason names, or restart the engine."
            problems.append((pod, (failure if has_lower_tier else warning)(text, remedy, "KVPrivate")))
    good = ok("Keys are the same in all engines, so pods can share rows.")
    yield from grouped(problems, len(attached), good)
