"""Why the scheduler finds no node for a pod: the amounts that the pod requests, and their fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain

from lmcache_operator.contract.base import Observed
from lmcache_operator.pods.fields import missing_object
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import COMPONENT_LABEL, ENGINE, REMOTE, SIZE_ARGUMENT
from lmcache_store.common.units import format_size, parse_quantity

_LACKING = re.compile(r"Insufficient ([^\s,]+?)[.]?(?=[\s,]|$)")
# On preemption, which would evict other pods, users can do nothing.
_TAIL = re.compile(
    r"((?<=not found\.) not found|no new claims to deallocate|still not schedulable|preemption:).*", re.DOTALL
)
_PARTS = {ENGINE: "spec.engine", REMOTE: "spec.tiers.remote.managed"}
"""Parts of the spec, by component and by the name of its main container."""
_PLACING = {
    "untolerated taint": "tolerations",
    "node affinity/selector": "nodeSelector",
    "topology spread constraints": "topologySpreadConstraints",
}
_SIZE = re.compile(f"{SIZE_ARGUMENT}([0-9]{{1,18}})")
_BYTES = ("ephemeral-storage", "memory")
_NO_GPUS = "Without GPUs, set spec.engine.gpu.count to 0, and an image for CPUs (examples/cpu.yaml)"


def unplaced_message(pod: Object, message: str, observed: Observed) -> str:
    """The problem of a pod without a node. It names fields, and quotes the scheduler's ``message``."""
    name, words = pod["metadata"]["name"], _TAIL.sub("", message).rstrip()
    if missing := missing_object(words, observed):
        return f"pod {name}: {missing}"
    part = _PARTS.get((pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))
    sentences = [_amounts(pod, resource, part, observed) for resource in lacking(words)]
    if "cannot allocate all claims" in words and part == _PARTS[ENGINE]:
        gpu = dig(observed.resource, "spec", "engine", "gpu") or {}
        devices = f"{gpu.get('count', 1)} of the device class {gpu.get('deviceClassName')}"
        sentences.append(f"requests {devices} (spec.engine.gpu). {_NO_GPUS}")
    fields = [f"{part}.{field}" for reason, field in _PLACING.items() if part and reason in words]
    sentences += [f"may not run on some nodes: check {', '.join(fields)}"] if fields else []
    if not any(sentences):
        return f"pod {name}: {words}"
    return f"pod {name} {'. It '.join(filter(None, sentences))}. Scheduler: {words}"


def lacking(message: str) -> list[str]:
    """Resources that nodes lack according to the scheduler, such as memory or nvidia.com/gpu."""
    return list(dict.fromkeys(_LACKING.findall(message)))


def largest_amounts(nodes: Iterable[Object]) -> dict[str, Decimal]:
    """The largest amount of each resource that one node has for pods."""
    largest = dict[str, Decimal]()
    for node in nodes:
        for resource, amount in (dig(node, "status", "allocatable") or {}).items():
            largest[resource] = max(parse_quantity(amount), largest.get(resource, Decimal()))
    return largest


def _amounts(pod: Object, resource: str, part: str | None, observed: Observed) -> str:
    """The pod's request of a resource, and the amount of the largest node; empty if it requests nothing."""
    gpu = dig(observed.resource, "spec", "engine", "gpu") or {}
    is_gpu = bool(part) and resource == gpu.get("resourceName", "nvidia.com/gpu")
    amounts = [(item, amount) for item in _running(pod) if (amount := _requested(item, resource))]
    if not amounts:
        return ""
    total = sum((amount for _, amount in amounts), Decimal())
    # `podTemplate` may set the request of the whole pod, or add a container that runs alone.
    larger = (pod["spec"], *(dig(pod, "spec", "initContainers") or ()))
    if any(_requested(each, resource) > total for each in larger):
        return ""
    sources = [
        f"{_text(resource, each)} for {_source(item, resource, part, is_gpu)}" for item, each in amounts
    ]
    requested = f"requests {_text(resource, total)} of {resource}: {', '.join(sources)}"
    if len(sources) == 1:
        requested = f"requests {sources[0].replace(' for ', f' of {resource} for ')}"
    if observed.largest is None:
        return f"{requested}. {_NO_GPUS}" if is_gpu else requested
    limit = observed.largest.get(resource, Decimal())
    if is_gpu and not limit:
        return f"{requested}. No node has any. {_NO_GPUS}"
    rest = "" if limit < total else ", but other pods use a part of it"
    return f"{requested}. The largest node has {_text(resource, limit)}{rest}"


def _running(pod: Object) -> Iterator[Object]:
    """Containers that run at the same time, so that their requests add up."""
    sidecars = (
        each for each in dig(pod, "spec", "initContainers") or () if each.get("restartPolicy") == "Always"
    )
    return chain(sidecars, dig(pod, "spec", "containers") or ())


def _requested(container: Object, resource: str) -> Decimal:
    resources = container.get("resources") or {}
    return parse_quantity(dig(resources, "requests", resource) or dig(resources, "limits", resource) or 0)


def _source(container: Object, resource: str, part: str | None, is_gpu: bool) -> str:
    """The field that a container's request follows from; else the container."""
    sizes = [match for text in container.get("args") or () if (match := _SIZE.fullmatch(text))]
    name = container["name"]
    if sizes and resource == "memory":
        return f"a memory tier of {format_size(int(sizes[-1][1]))} (spec.tiers.memory.size)"
    if part is None or name not in _PARTS:
        return f"container {name}"
    if name == REMOTE and resource == "memory":
        return f"{part}.memoryPerShard"
    return f"{part}.gpu.count" if name == ENGINE and is_gpu else f"{part}.resources"


def _text(resource: str, amount: Decimal) -> str:
    return format_size(float(amount)) if resource in _BYTES else f"{amount.normalize():f}"
