"""Checks of the engines: arguments, versions, settings, and whether pods can share keys. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache.explain import merge
from lmcache.explain.text import plain
from lmcache_operator.commands.doctor.answers import Answer
from lmcache_operator.commands.doctor.checks.installation import parse_version
from lmcache_operator.commands.doctor.facts import ClusterFacts, Facts
from lmcache_operator.commands.doctor.results import Result, failure, grouped, ok, unknown, warning
from lmcache_operator.commands.gather import PodFigures, sidecar_port
from lmcache_operator.components.engine import vllm
from lmcache_operator.components.injection.pods import CONTAINER
from lmcache_operator.specs import Object, names

MIN_VLLM, MAX_VLLM = (0, 29), (0, 33)
"""Oldest and newest supported version of vLLM. A test compares them with the connector."""
_HASH_ALGORITHM = "sha256_cbor"
_MAX_CLIENTS = 128
_WITHOUT_PREFIXES = "every prefix is loaded again, and models with recurrent states are not cached."
_RUNBOOK = "EngineNotAttached"


def engine_container(pod: Object) -> Object | None:
    """Return the container of the engine; None if the pod does not say which one it is."""
    containers = pod["spec"].get("containers") or []
    chosen = (pod["metadata"].get("annotations") or {}).get(CONTAINER, names.ENGINE)
    by_name = {container["name"]: container for container in containers}
    return by_name.get(chosen) or (containers[0] if len(containers) == 1 else None)


def engine_port(pod: Object) -> int:
    """Return the port of the engine's HTTP server."""
    container = engine_container(pod) or {}
    return vllm.int_option(_words(container), "--port") or names.ENGINE_PORT


def has_tls(pod: Object) -> bool:
    """Whether the engine serves HTTPS only."""
    return vllm.option(_words(engine_container(pod) or {}), vllm.SSL_CERTIFICATE) is not None


def _words(container: Object) -> list[str]:
    return [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]


def clients(stats: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the engine's processes that are attached to a sidecar, as it reports them."""
    listed = stats.get("clients")
    valid = (
        [each for each in listed[:_MAX_CLIENTS] if isinstance(each, Mapping)]
        if isinstance(listed, list)
        else []
    )
    return [each for each in valid if each.get("is_attached") is True]


def arguments(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the arguments of each engine that has a sidecar."""
    name = "engineArguments"
    pods = [figures for figures in cluster.pods if sidecar_port(figures.pod) is not None]
    problems = [(figures.name, problem) for figures in pods for problem in argument_problems(name, figures)]
    yield from grouped(problems, len(pods))
    if pods and not problems:
        yield ok(name, "The arguments of the engines are right for the cache.")


def argument_problems(name: str, figures: PodFigures) -> Iterator[Result]:
    """Yield the problems in the arguments and variables of one engine."""
    container = engine_container(figures.pod)
    if container is None:
        return
    words = _words(container)
    flags = [vllm.flag_of(word) for word in words]
    if "--no-enable-prefix-caching" in flags:
        text = f"--no-enable-prefix-caching is set: {_WITHOUT_PREFIXES}"
        yield warning(name, text, "Remove the argument.")
    config = vllm.option(words, "--kv-transfer-config")
    if config is None:
        return  # a shell or a file may set the options: /stats says whether the engine is attached
    yield from _config_problems(name, config)
    algorithm = vllm.option(words, "--prefix-caching-hash-algo")
    if algorithm != _HASH_ALGORITHM:
        value = plain(algorithm) or "not set"
        text = f"--prefix-caching-hash-algo is {value}, so keys are private to the engine."
        yield warning(name, text, f"Set --prefix-caching-hash-algo {_HASH_ALGORITHM}.")
    seed = next((each for each in container.get("env") or () if each["name"] == "PYTHONHASHSEED"), None)
    is_shared = any(not each.get("private_reason") for each in clients(figures.stats))
    if (seed is None or seed.get("value") == "random") and not is_shared:
        text = "PYTHONHASHSEED is not set, so keys may be private to the engine."
        yield warning(name, text, "Set the variable PYTHONHASHSEED=0 in the engine's container.")


def _config_problems(name: str, config: str) -> Iterator[Result]:
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        yield failure(name, "--kv-transfer-config is not a JSON object.", "Correct the argument.", _RUNBOOK)
    elif (policy := parsed.get("kv_load_failure_policy")) != "recompute":
        text = (
            f"kv_load_failure_policy is {plain(policy) or 'not set'}, so a failed load may fail its request."
        )
        yield warning(name, text, 'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.')


def engine_versions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the engines run a supported version of vLLM."""
    name = "engineVersion"
    known = {each.name: plain(each.stats.get("version")) for each in cluster.engines if each.stats}
    known = {pod: version for pod, version in known.items() if version}
    problems = []
    for pod, version in known.items():
        number = parse_version(version)
        if number and not MIN_VLLM <= number <= MAX_VLLM:
            text = f"vLLM {version} is not supported, so the engine runs without the cache."
            problems.append((pod, failure(name, text, "Use an image with vLLM 0.29-0.33.", _RUNBOOK)))
    yield from grouped(problems, len(known))
    if known and not problems:
        yield ok(name, f"The engines run vLLM {', '.join(sorted(set(known.values()))[:3])}.")
    elif cluster.engines and not known:
        yield unknown(name, _unread(cluster))


def _unread(cluster: ClusterFacts) -> Answer:
    figures = cluster.engines[0]
    right = figures.problem.removeprefix("forbidden: ") if figures.problem.startswith("forbidden: ") else ""
    return Answer(problem=f"engine of pod {figures.name}: {figures.problem}.", missing_right=right)


def engine_settings(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the engines' cache settings, as the engines report them in their metrics."""
    name = "engineSettings"
    known = {each.name: merge.part(each.stats, "cache") for each in cluster.engines}
    known = {pod: cache for pod, cache in known.items() if cache}
    problems = [
        (pod, problem) for pod, cache in known.items() for problem in _setting_problems(name, cache, cluster)
    ]
    yield from grouped(problems, len(known))
    if known and not problems:
        blocks = sorted({plain(cache.get("block_size")) for cache in known.values()})
        yield ok(name, f"Prefix caching is on. A block has {', '.join(blocks[:3])} tokens.")


def _setting_problems(name: str, cache: Mapping[str, Any], cluster: ClusterFacts) -> Iterator[Result]:
    if cache.get("enable_prefix_caching") == "False":
        yield warning(
            name, f"Prefix caching is off: {_WITHOUT_PREFIXES}", "Remove --no-enable-prefix-caching."
        )
    block, parsed = plain(cache.get("block_size")), cluster.parsed
    chunk = parsed.spec.sidecar.chunk_tokens if parsed and parsed.spec.engine else 0
    if block.isdecimal() and 0 < int(block) <= 1 << 20 and chunk % int(block):
        tokens = -(-chunk // int(block)) * int(block)
        text = f"spec.sidecar.chunkTokens {chunk} is no multiple of the engine's block of {block} tokens."
        yield warning(name, text, f"Set it to {tokens}, which the engine uses already.")


def private_keys(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that chunks can be shared between pods and survive in lower tiers."""
    name = "privateKeys"
    attached = {figures.name: clients(figures.stats) for figures in cluster.pods}
    attached = {pod: listed for pod, listed in attached.items() if listed}
    problems = []
    for pod, listed in attached.items():
        reasons = sorted({plain(each.get("private_reason")) for each in listed} - {""})
        for reason in reasons[:1]:
            text = f"Keys are private, so only the memory tier of this pod is used: {reason}."
            remedy = "Correct this setting of the engine (docs/guides/sidecar.md, Settings of the engine)."
            problems.append((pod, (failure if _has_lower_tier(cluster) else warning)(name, text, remedy)))
    yield from grouped(problems, len(attached))
    if attached and not problems:
        yield ok(name, "Keys are the same in all engines, so pods can share rows.")


def _has_lower_tier(cluster: ClusterFacts) -> bool:
    tiers = cluster.resource["spec"].get("tiers") or {}
    return bool(tiers.get("disk") or tiers.get("remote"))
