"""Adds the cache to objects that make pods: what ``lmcache-operator inject`` prints. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_operator.api import KIND
from lmcache_operator.api.parse import TYPE_NAMES, Cluster, parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.pods import has_cache, inject
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import INJECT_LABEL

_TEMPLATE = ("spec", "template")
_PODS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"), _TEMPLATE),
    "CronJob": ("spec", "jobTemplate", *_TEMPLATE),
    "Pod": (),
}
"""Where the pod is in an object of a kind."""
_GROUPS = ("LeaderWorkerSet", "RayCluster", "RayService")
_NAMED = {"name": str}
_CONTAINER = _NAMED | {
    "command": [str], "args": [str], "env": [_NAMED], "ports": [{}], "volumeMounts": [{}],
    "securityContext": {}, "resources": {},
}  # fmt: skip
_POD: Object = {
    "metadata": {"annotations": {}, "labels": {}},
    "spec": {
        "containers": [_CONTAINER], "initContainers": [_CONTAINER], "volumes": [_NAMED],
        "securityContext": {"supplementalGroups": [int]}, "resources": {},
    },
}  # fmt: skip
"""The shape of what is read of a pod."""


def inject_objects(
    objects: Sequence[Any], resources: Sequence[Any], cluster_name: str | None, context: Context
) -> list[Any]:
    """The objects; those whose pods name an LMCacheCluster by their label have its cache.

    ``resources`` may hold LMCacheClusters, and so may the objects; ``cluster_name`` is for pods without a
    label. What has its cache already, and what makes no pods, stays as it is.

    Raises:
        InvalidSpecError: a pod can't have a cache, or there is none that asks for one.
    """
    given = [item for found in objects for item in _items(found)]
    others = [item for found in resources for item in _items(found)]
    parsed = map(parse, (one for one in (*given, *others) if _kind(one) == KIND))
    clusters = {(cluster.name, cluster.namespace): cluster for cluster in parsed}
    injected, num_asked = [], 0
    for found in given:
        if (path := _pod_path(found)) is None:
            injected.append(found)
            continue
        where = f"{found['kind']} {_at(found, ('metadata', 'name'))}: {''.join(f'{key}.' for key in path)}"
        pod = _at(found, path)
        _check_shape(pod, _POD, where.rstrip(": ."))
        name = _at(pod, ("metadata", "labels", INJECT_LABEL)) or cluster_name
        if name is not None:
            num_asked += 1
            cluster = _named(name, clusters, _at(found, ("metadata", "namespace")), where)
            pod = pod if has_cache(pod) else _with_cache(pod, cluster, context, where)
        injected.append(_replaced(found, path, pod))
    if not num_asked:
        raise InvalidSpecError(INJECT_LABEL, "no pod has this label: add it, or say --name LMCACHECLUSTER")
    return injected


def _named(
    name: str, clusters: Mapping[tuple[str, str], Cluster], namespace: str | None, where: str
) -> Cluster:
    """The one of the pod's namespace; where one of the two says none, it is taken for the other's."""
    label = f"{where}metadata.labels[{INJECT_LABEL}]"
    found = {cluster.namespace: cluster for cluster in clusters.values() if cluster.name == name}
    if not found:
        raise InvalidSpecError(label, f"there is no LMCacheCluster {name}: give its file with --cluster")
    for own in (namespace, "default", *(found if namespace is None else ())):
        if own in found:
            return found[own]
    raise InvalidSpecError(label, f"LMCacheCluster {name} is in another namespace, {', '.join(found)}")


def _with_cache(pod: Object, cluster: Cluster, context: Context, where: str) -> Object:
    metadata = pod.get("metadata") or {}
    labels = (metadata.get("labels") or {}) | {INJECT_LABEL: cluster.name}
    return inject(pod | {"metadata": metadata | {"labels": labels}}, profile(cluster, context), where)


def _items(found: Any) -> Iterator[Any]:
    """An object, or those of a list as ``kubectl get`` prints it."""
    if _kind(found) == "List" and isinstance(found.get("items"), list):
        yield from found["items"]
    elif found is not None:
        yield found


def _kind(found: Any) -> Any:
    return found.get("kind") if isinstance(found, dict) else None


def _pod_path(found: Any) -> tuple[str, ...] | None:
    """Where the pod is; None if the object makes no pods."""
    kind = _kind(found)
    if kind in _GROUPS:
        raise InvalidSpecError(f"kind {kind}", "engines of several pods can't have a cache in this version")
    return _PODS.get(kind) if isinstance(kind, str) else None


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _replaced(value: Any, path: Sequence[str], leaf: Object) -> Any:
    return value | {path[0]: _replaced(value[path[0]], path[1:], leaf)} if path else leaf


def _check_shape(value: Any, shape: Any, path: str) -> None:
    """Names and containers are required, and everything else may be absent."""
    expected: type = shape if isinstance(shape, type) else type(shape)
    is_expected = isinstance(value, expected)
    if not is_expected:
        raise InvalidSpecError(path, f"must be {TYPE_NAMES[expected]}, not {reprlib.repr(value)}")
    for index, item in enumerate(value if expected is list else ()):
        _check_shape(item, shape[0], f"{path}[{index}]")
    for key in shape if expected is dict else ():
        if value.get(key) is not None or key in ("name", "spec", "containers"):
            _check_shape(value.get(key), shape[key], f"{path}.{key}")
