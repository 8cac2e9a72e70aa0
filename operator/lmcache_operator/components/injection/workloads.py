"""Adds the cache to objects that make pods: what ``lmcache-operator inject`` prints. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.api import KIND
from lmcache_operator.api.parse import TYPE_NAMES, Cluster, parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.pods import has_cache, has_engine, inject
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
_NONE_ASKS = "no pod has this label: add it, or say --name LMCACHECLUSTER"
_NOT_CERTAIN = f"no container is vLLM's for certain: if one is, label the pods {INJECT_LABEL}: {{}}"
_NAMED = {"name": str}
_CONTAINER = _NAMED | {
    "image": str, "command": [str], "args": [str], "env": [_NAMED], "ports": [{}], "volumeMounts": [{}],
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


class Injected(NamedTuple):
    """What became of objects."""

    objects: list[Any]
    """All of them, in their order."""
    remarks: list[str]
    """Which have a cache now, and which of those without a label have none; a sentence each."""


def clusters_in(objects: Sequence[Any]) -> list[Cluster]:
    """The LMCacheClusters among objects, or in lists of them.

    Raises:
        InvalidSpecError: one can't be rendered.
    """
    return [parse(item) for found in objects for item in _items(found) if _kind(item) == KIND]


def inject_objects(
    objects: Sequence[Any], clusters: Sequence[Cluster], cluster_name: str | None, context: Context
) -> Injected:
    """The objects; those whose pods name an LMCacheCluster by their label have its cache.

    LMCacheClusters may be among the objects; ``cluster_name`` is for pods without a label that are vLLM's for
    certain. What has its cache already, and what makes no pods, stays as it is.

    Raises:
        InvalidSpecError: a pod can't have a cache, or there is none that asks for one.
    """
    known = {(cluster.name, cluster.namespace): cluster for cluster in (*clusters_in(objects), *clusters)}
    injected = Injected([], [])
    is_asked = False
    for found in (item for each in objects for item in _items(each)):
        if (path := _pod_path(found)) is None:
            injected.objects.append(found)
            continue
        title = f"{found['kind']} {_at(found, ('metadata', 'name'))}"
        where = f"{title}: {''.join(f'{key}.' for key in path)}"
        pod = _at(found, path)
        _check_shape(pod, _POD, where.rstrip(": ."))
        label = _at(pod, ("metadata", "labels", INJECT_LABEL))
        name = label or (cluster_name if has_engine(pod) else None)
        if name is not None:
            is_asked = True
            cluster = _named(name, known, _at(found, ("metadata", "namespace")), where)
            pod = pod if has_cache(pod) else _with_cache(pod, cluster, context, where)
            injected.remarks.append(f"{title}: has the cache of {name}")
        elif cluster_name is not None:
            injected.remarks.append(f"{title}: left as it is, {_NOT_CERTAIN.format(cluster_name)}")
        injected.objects.append(_replaced(found, path, pod))
    if not is_asked:
        asking = _NOT_CERTAIN.format(cluster_name) if cluster_name else _NONE_ASKS
        raise InvalidSpecError(INJECT_LABEL, asking)
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
