"""The user's pod settings: fields of ``spec.engine`` that are named as in a pod, and ``podTemplate``. Pure.

The fields are shortcuts for the most common settings; ``podTemplate`` takes every other pod field. The two
must not contradict each other, and neither may break what the cache needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.features import FEATURES
from lmcache_operator.components.engine.kinds.base import NODES
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig, first_difference, merge
from lmcache_operator.specs.objects import PodContainer, PodTemplate

SHM = "shm"
"""Name of the volume that is mounted as the engine's /dev/shm."""
_FREE_TO_CHANGE = (
    "imagePullPolicy", "lifecycle", "livenessProbe", "readinessProbe", "resources", "securityContext",
    "startupProbe", "terminationGracePeriodSeconds", "terminationMessagePolicy",
)  # fmt: skip
_HEALTH_PROBES = {"livenessProbe", "startupProbe"}
"""Without them, a pod of an engine over several nodes would be ready while its engine starts or hangs."""
_PLACES = "the operator sets it, so that engine, sidecar and operator find each other"
_SET_BY = "it is set by spec.{}"
_RESERVED: dict[str, dict[str, str]] = {
    names.ENGINE: {"VLLM_DP_": NODES},
    names.SIDECAR: {
        **dict.fromkeys(("LMCACHE_ARENA", "LMCACHE_SOCKET", "LMCACHE_CONFIG", "LMCACHE_HTTP_"), _PLACES),
        **dict.fromkeys(
            ("LMCACHE_MEMORY_SIZE", "LMCACHE_MEMORY_MAX_SIZE"), _SET_BY.format("tiers.memory.size")
        ),
        "LMCACHE_MEMORY_RETAIN_PERCENT": _SET_BY.format("tiers.memory.retainPercent"),
        "LMCACHE_MEMORY_MAX_TTL_SECONDS": _SET_BY.format("tiers.memory.maxTtlSeconds"),
        "LMCACHE_ADMIT": _SET_BY.format("tiers.admit"),
        "LMCACHE_TRANSFER": _SET_BY.format("sidecar.transfer"),
        "LMCACHE_STAY_UP": "a sidecar that exits makes its pod unready",
        **{begin: _SET_BY.format(field) for each in FEATURES for begin, field in each.reserved.items()},
    },
}
"""Reasons why the user may not set a variable, by container and prefix of the variable's name."""


def declared_template(cluster: Cluster) -> Object:
    """The user's template: the fields of ``spec.engine`` and ``podTemplate``, merged.

    Raises:
        InvalidSpecError: ``podTemplate`` contradicts a field.
    """
    merged: Object = {}
    parts = dict(_parts(cluster))
    for part in parts.values():
        merged = merge(merged, part)
    for name, part in parts.items():
        if name != "podTemplate" and (broken := first_difference(part, merged)):
            sentence = f"contradicts spec.engine.{name} at {broken}: set it in only one of the two"
            raise InvalidSpecError("spec.engine.podTemplate", sentence)
    return merged


def with_template(base: PodTemplate, cluster: Cluster) -> PodTemplate:
    """The rendered template with the user's merged in.

    Raises:
        InvalidSpecError: a field, or ``podTemplate``, breaks what the cache needs.
    """
    declared_template(cluster)
    needed, merged = _needed(base), base
    for name, part in _parts(cluster):
        path = f"spec.engine.{name}"
        _check_reserved(part, path)
        merged = merge(merged, part)
        if broken := first_difference(needed, merged):
            raise InvalidSpecError(path, f"changes {broken}, which the cache depends on")
        removed = _HEALTH_PROBES - find_container(merged, names.ENGINE).keys()
        if removed and cluster.engine.nodes > 1:
            why = "with engine.nodes, readiness does not depend on the engine's health"
            raise InvalidSpecError(path, f"removes {min(removed)} of the container engine: {why}")
        for container in (names.ENGINE, names.SIDECAR):
            for item in as_list(dig(find_container(merged, container), "env")):
                if dig(item, "value") and dig(item, "valueFrom") is not None:
                    what = f"sets {dig(item, 'name')} of the container {container}"
                    raise InvalidSpecError(path, f"{what}, which comes from a field of the pod or a Secret")
    return merged


def find_container(template: Object, name: str) -> Any:
    """A container of the user's template, which is free-form; empty if the template does not name it."""
    spec = dig(template, "spec")
    containers = [item for kind in ("containers", "initContainers") for item in as_list(dig(spec, kind))]
    return next((item for item in containers if dig(item, "name") == name), {})


def as_list(value: Any) -> list[Any]:
    """A list of a free-form object; empty if it is something else."""
    return value if isinstance(value, list) else []


def _parts(cluster: Cluster) -> Iterator[tuple[str, Object]]:
    """Parts of a template with the names of the fields that set them; ``podTemplate`` is last."""
    engine = cluster.engine
    if engine.env:
        yield "env", _of_engine(env=engine.env)
    if engine.resources:
        yield "resources", _of_engine(resources=engine.resources)
    if engine.shared_memory_size is not None:
        limit = {"sizeLimit": engine.shared_memory_size}
        yield "sharedMemorySize", {"spec": {"volumes": [{"name": SHM, "emptyDir": limit}]}}
    selector = {"matchLabels": names.selector(cluster.name, names.ENGINE)}
    of_pod = {
        "nodeSelector": engine.node_selector,
        "priorityClassName": engine.priority_class_name,
        "tolerations": engine.tolerations,
        "topologySpreadConstraints": [
            {"labelSelector": selector, **constraint} for constraint in engine.topology_spread_constraints
        ],
    }
    yield from ((name, {"spec": {name: value}}) for name, value in of_pod.items() if value)
    yield "podTemplate", engine.pod_template


def _of_engine(**fields: Any) -> Object:
    return {"spec": {"containers": [{"name": names.ENGINE, **fields}]}}


def _check_reserved(part: Object, path: str) -> None:
    of_features = (item for each in FEATURES for item in each.reserved_labels.items())
    for label, field in ((names.GROUP_LABEL, "engine.nodes"), *of_features):
        if dig(part, "metadata", "labels", label) is not None:
            raise InvalidSpecError(path, f"sets the label {label}: {_SET_BY.format(field)}")
    for container, reserved in _RESERVED.items():
        for item in as_list(dig(find_container(part, container), "env")):
            variable = str(dig(item, "name"))
            if why := next((why for begin, why in reserved.items() if variable.startswith(begin)), ""):
                raise InvalidSpecError(path, f"sets {variable} of the container {container}: {why}")


def _needed(base: PodTemplate) -> Object:
    """The part of the rendered template that a user's template must not change."""

    def strip(container: PodContainer) -> Object:
        needed = {key: value for key, value in container.items() if key not in _FREE_TO_CHANGE}
        if container["name"] in (names.ENGINE, names.SIDECAR):
            # The engine needs one GPU per rank, and shares its claim with the sidecar. A sidecar with a lower
            # memory limit would be killed when its arena is full.
            resources = container["resources"]
            needed["resources"] = {key: resources[key] for key in ("claims", "limits") if key in resources}
        return needed

    spec: Object = {key: value for key, value in base["spec"].items() if key not in _FREE_TO_CHANGE}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != SHM]
    for kind in ("containers", "initContainers"):
        spec[kind] = [strip(container) for container in spec[kind]]
    return {"metadata": base["metadata"], "spec": spec}
