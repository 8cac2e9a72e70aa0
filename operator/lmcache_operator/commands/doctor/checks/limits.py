"""Checks of ResourceQuotas and LimitRanges against the pods of the spec. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from lmcache_operator.api.autoscaling import AUTO
from lmcache_operator.commands.doctor.amounts import amounts, of_container, of_pod, refusals, shown
from lmcache_operator.commands.doctor.facts import ClusterFacts, Facts
from lmcache_operator.commands.doctor.results import Result, failure, ok, unknown, warning
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig

_COMPUTE = ("cpu", "memory")
_SCOPES = frozenset(("NotBestEffort", "NotTerminating"))
"""Scopes of quotas that include the pods of a cluster."""


def quotas(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the quotas of the namespace admit missing pods, and pods of the largest size."""
    name = "resourceQuota"
    if not facts.quotas.is_known:
        yield unknown(name, facts.quotas)
        return
    problems = [
        problem
        for quota in facts.quotas.items
        if _applies(quota)
        for component, stateful_set in cluster.stateful_sets.items()
        for problem in _quota_problems(name, quota, component, stateful_set, facts, cluster)
    ]
    number = len(facts.quotas.items)
    text = (
        f"The ResourceQuotas ({number}) admit the pods." if number else "The namespace has no ResourceQuota."
    )
    yield from problems or [ok(name, text)]


def _applies(quota: Object) -> bool:
    spec = quota.get("spec") or {}
    return not spec.get("scopeSelector") and set(spec.get("scopes") or ()) <= _SCOPES


def _quota_problems(
    check: str, quota: Object, component: str, stateful_set: Object, facts: Facts, cluster: ClusterFacts
) -> Iterator[Result]:
    name, hard = quota["metadata"]["name"], amounts(dig(quota, "spec", "hard"))
    used = amounts(dig(quota, "status", "used"))
    pod, ranges = stateful_set["spec"]["template"]["spec"], facts.limit_ranges.items
    if unlimited := _without(pod, hard, ranges):
        text = f"ResourceQuota {name} requires {unlimited}, so pods of component {component} are refused."
        remedy = "Set this limit in the spec, or as a default in a LimitRange of the namespace."
        yield failure(check, text, remedy, "FailedCreate")
        return
    num_missing = max(0, stateful_set["spec"]["replicas"] - _num_pods(cluster, component))
    growth = _growth_bytes(cluster) if component == names.ENGINE else Decimal(0)
    needed = {key: num_missing * amount for key, amount in of_pod(pod, ranges).items()}
    for key, limit in hard.items():
        free = limit - used.get(key, Decimal(0))
        resource = key.rpartition(".")[2] if key.rpartition(".")[2] in _COMPUTE else key
        if (amount := needed.get(key, Decimal(0))) > free:
            text = f"ResourceQuota {name} has {shown(resource, max(free, Decimal(0)))} of {key} left."
            text += f" {num_missing} missing pods of component {component} need {shown(resource, amount)}."
            yield failure(check, text, "Raise the quota, or use fewer or smaller pods.", "FailedCreate")
        elif resource == "memory" and growth > free - amount:
            text = f"ResourceQuota {name} has {shown(resource, free)} of {key} left."
            text += f" Autoscaling may use {shown(resource, growth)} more."
            yield warning(check, text, "Raise the quota, or lower memory.maxSize.", "ResizeInfeasible")


def _without(pod: Object, hard: dict[str, Decimal], limit_ranges: Sequence[Object]) -> str:
    """Return a request or limit that a quota requires and a container lacks; empty: none."""
    for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
        requests, limits = of_container(container, limit_ranges)
        for resource in _COMPUTE:
            if f"limits.{resource}" in hard and resource not in limits:
                return f"a {resource} limit of container {container['name']}"
            if {resource, f"requests.{resource}"} & hard.keys() and resource not in requests:
                return f"a {resource} request of container {container['name']}"
    return ""


def _num_pods(cluster: ClusterFacts, component: str) -> int:
    if component != names.ENGINE:
        return len(cluster.shard_pods)
    labels = [figures.pod["metadata"].get("labels") or {} for figures in cluster.pods]
    return sum(each.get(names.COMPONENT_LABEL) == names.ENGINE for each in labels)


def _growth_bytes(cluster: ClusterFacts) -> Decimal:
    """Return the bytes that autoscaling may add to the memory tiers of all pods."""
    parsed = cluster.parsed
    if parsed is None or not parsed.spec.engine or parsed.spec.autoscaling.mode != AUTO:
        return Decimal(0)
    declared = parsed.memory.num_bytes
    bounds = parsed.spec.autoscaling.memory
    _, largest = parsed.spec.autoscaling.memory_bounds(declared) if bounds else (0, declared)
    return Decimal(max(0, largest - declared) * parsed.engine.replicas)


def limit_ranges(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the LimitRanges of the namespace admit the pods."""
    name = "limitRange"
    if not facts.limit_ranges.is_known:
        yield unknown(name, facts.limit_ranges)
        return
    problems = []
    for component, stateful_set in cluster.stateful_sets.items():
        for reason in refusals(stateful_set["spec"]["template"]["spec"], facts.limit_ranges.items):
            text = f"A LimitRange refuses pods of component {component}: {reason}."
            remedy = f"Change the LimitRange of namespace {facts.namespace}, or set resources in the spec."
            problems.append(failure(name, text, remedy, "FailedCreate"))
    number = len(facts.limit_ranges.items)
    text = f"The LimitRanges ({number}) admit the pods." if number else "The namespace has no LimitRange."
    yield from problems or [ok(name, text)]
