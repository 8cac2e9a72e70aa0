"""Resources that pods request, as quotas and limit ranges count them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from lmcache.common.units import format_size, parse_quantity
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

Amounts = dict[str, Decimal]
"""Amounts by resource, such as cpu, memory and nvidia.com/gpu."""
_ZERO = Decimal(0)


def amounts(listed: Any) -> Amounts:
    """Return quantities by resource as numbers. Values that are not quantities are left out."""
    parsed = {}
    for name, value in listed.items() if isinstance(listed, Mapping) else ():
        try:
            parsed[str(name)] = parse_quantity(value)
        except ValueError:
            continue
    return parsed


def limits_of(limit_ranges: Iterable[Object], kind: str) -> list[Object]:
    """Return the entries of LimitRanges about a kind: Container or Pod."""
    listed = [item for limit_range in limit_ranges for item in dig(limit_range, "spec", "limits") or ()]
    return [item for item in listed if item.get("type") == kind]


def of_container(container: Object, limit_ranges: Iterable[Object]) -> tuple[Amounts, Amounts]:
    """Return requests and limits of a container, with the defaults of LimitRanges."""
    limits = amounts(dig(container, "resources", "limits"))
    requests = limits | amounts(dig(container, "resources", "requests"))
    for item in limits_of(limit_ranges, "Container"):
        limits = amounts(item.get("default")) | limits
        requests = amounts(item.get("default")) | amounts(item.get("defaultRequest")) | requests
    return requests, limits


def of_pod(pod: Object, limit_ranges: Iterable[Object] = ()) -> Amounts:
    """Return the amounts of a pod's spec by the names of quotas, such as requests.memory."""
    totals: defaultdict[str, Decimal] = defaultdict(Decimal, pods=Decimal(1))
    ranges = list(limit_ranges)
    for kind, part in (("requests", 0), ("limits", 1)):
        for name, amount in _total(pod, ranges, part).items():
            totals[f"{kind}.{name}"] = amount
    for volume in pod.get("volumes") or ():
        claim = dig(volume, "ephemeral", "volumeClaimTemplate", "spec", "resources", "requests")
        if claim:
            totals["persistentvolumeclaims"] += 1
            totals["requests.storage"] += amounts(claim).get("storage", _ZERO)
    totals |= {name: totals[f"requests.{name}"] for name in ("cpu", "memory")}
    return dict(totals)


def _total(pod: Object, limit_ranges: list[Object], part: int) -> Amounts:
    """Return the largest sum of requests or limits (``part`` 0 or 1) of containers that run together."""
    running: defaultdict[str, Decimal] = defaultdict(Decimal)
    largest: defaultdict[str, Decimal] = defaultdict(Decimal)
    for container in pod.get("initContainers") or ():
        is_sidecar = container.get("restartPolicy") == "Always"
        for name, amount in of_container(container, limit_ranges)[part].items():
            largest[name] = max(largest[name], running[name] + amount)
            running[name] += amount if is_sidecar else _ZERO
    for container in pod.get("containers") or ():
        for name, amount in of_container(container, limit_ranges)[part].items():
            running[name] += amount
    return {name: max(running[name], largest[name]) for name in (*running, *largest)}


def refusals(pod: Object, limit_ranges: list[Object]) -> Iterator[str]:
    """Yield why LimitRanges refuse a pod."""
    for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
        requests, limits = of_container(container, limit_ranges)
        where = f"container {container['name']}"
        for name, request in requests.items():
            if name in limits and request > limits[name]:
                text = f"{shown(name, request)}, more than its default limit {shown(name, limits[name])}"
                yield f"{where} requests {name} {text}"
        for item in limits_of(limit_ranges, "Container"):
            yield from _outside(where, requests, limits, item)
    total = of_pod(pod, limit_ranges)
    for item in limits_of(limit_ranges, "Pod"):
        yield from _outside("the pod", _part_of(total, "requests"), _part_of(total, "limits"), item)


def _part_of(total: Amounts, kind: str) -> Amounts:
    beginning = f"{kind}."
    return {key.removeprefix(beginning): value for key, value in total.items() if key.startswith(beginning)}


def _outside(where: str, requests: Amounts, limits: Amounts, item: Object) -> Iterator[str]:
    for name, maximum in amounts(item.get("max")).items():
        if name not in limits:
            yield f"{where} has no {name} limit, and the maximum is {shown(name, maximum)}"
        elif limits[name] > maximum:
            limit = shown(name, limits[name])
            yield f"{where} has the {name} limit {limit}, and the maximum is {shown(name, maximum)}"
    for name, minimum in amounts(item.get("min")).items():
        if requests.get(name, _ZERO) < minimum:
            request = shown(name, requests.get(name, _ZERO))
            yield f"{where} requests {name} {request}, and the minimum is {shown(name, minimum)}"
    for name, ratio in amounts(item.get("maxLimitRequestRatio")).items():
        if requests.get(name) and limits.get(name, _ZERO) / requests[name] > ratio:
            yield f"{where} has a {name} limit of more than {ratio} times its request"


def shown(name: str, amount: Decimal) -> str:
    """Return an amount for people. Memory and storage have binary units."""
    if name.endswith(("memory", "storage")):
        return format_size(float(amount))
    return f"{amount.normalize():f}"
