"""Injects the cache into objects that create pods, for ``lmcache-operator inject``. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.api import KIND
from lmcache_operator.api.engine_kinds import ANY_ENGINE
from lmcache_operator.api.parse import TYPE_NAMES, Cluster
from lmcache_operator.api.types import TOKEN
from lmcache_operator.components.injection.pods import has_cache, has_engine, inject
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object
from lmcache_operator.specs.cluster_refs import with_lenders
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import INJECT_LABEL, remote_owner

_TEMPLATE = ("spec", "template")
_PODS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"), _TEMPLATE),
    "CronJob": ("spec", "jobTemplate", *_TEMPLATE),
    "Pod": (),
}
"""Path of the pod or pod template in an object, by kind."""
_SET_NODES = "instead, set spec.engine.nodes of an LMCacheCluster"
_GROUPS = {
    "LeaderWorkerSet": f"it restarts a whole engine when a sidecar restarts: {_SET_NODES}",
    **dict.fromkeys(("RayCluster", "RayService"), f"its engines have several pods: {_SET_NODES}"),
}
"""Reasons why pods of a kind can't have a cache."""
_NO_LABEL = "no pod has this label: add it, or use --name LMCACHECLUSTER"
_NOT_CERTAIN = f"no container certainly runs {ANY_ENGINE}: if one does, label the pods {INJECT_LABEL}: {{}}"
_NO_UID = "is missing, and names of Secrets contain it: give the stored object with --cluster"
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
"""The types of the fields that injection reads of a pod."""


class Injected(NamedTuple):
    """Result of an injection."""

    objects: list[Any]
    """All objects, in their original order."""
    remarks: list[str]
    """A sentence on each object that has a cache now, or that was left unchanged for lack of a label."""


def clusters_in(objects: Sequence[Any]) -> list[Cluster]:
    """Parse the LMCacheClusters among objects and in lists of objects. They may refer to each other.

    Raises:
        InvalidSpecError: an LMCacheCluster is invalid.
    """
    items = [item for each in objects for item in _items(each) if _kind(item) == KIND]
    return [with_lenders(item, items) for item in items]


def inject_objects(
    objects: Sequence[Any], resources: Sequence[Any], cluster_name: str | None, context: Context
) -> Injected:
    """Inject the caches that pods ask for by their label.

    LMCacheClusters are among the objects and the ``resources``. ``cluster_name``: the cache for pods without
    a label that certainly run an engine. Objects that have a cache already or create no pods stay unchanged.

    Raises:
        InvalidSpecError: the cache can't be injected into a pod, or no pod asks for one.
    """
    known = {(cluster.name, cluster.namespace): cluster for cluster in clusters_in([*objects, *resources])}
    injected = Injected([], [])
    has_request = False
    for item in (nested for each in objects for nested in _items(each)):
        if (path := _pod_path(item)) is None:
            injected.objects.append(item)
            continue
        title = f"{item['kind']} {dig(item, 'metadata', 'name')}"
        where = f"{title}: {''.join(f'{key}.' for key in path)}"
        pod = dig(item, *path)
        _check_shape(pod, _POD, where.rstrip(": ."))
        label = dig(pod, "metadata", "labels", INJECT_LABEL)
        name = label or (cluster_name if has_engine(pod) else None)
        if name is not None:
            has_request = True
            cluster = _named(name, known, dig(item, "metadata", "namespace"), where)
            pod = pod if has_cache(pod) else _with_cache(pod, cluster, context, where)
            injected.remarks.append(f"{title}: has the cache of {name}")
        elif cluster_name is not None:
            injected.remarks.append(f"{title}: left unchanged, {_NOT_CERTAIN.format(cluster_name)}")
        injected.objects.append(_replaced(item, path, pod))
    if not has_request:
        remedy = _NOT_CERTAIN.format(cluster_name) if cluster_name else _NO_LABEL
        raise InvalidSpecError(INJECT_LABEL, remedy)
    return injected


def _named(
    name: str, clusters: Mapping[tuple[str, str], Cluster], namespace: str | None, where: str
) -> Cluster:
    """The cluster of this name in the pod's namespace. A missing namespace on either side matches any."""
    label = f"{where}metadata.labels[{INJECT_LABEL}]"
    by_namespace = {cluster.namespace: cluster for cluster in clusters.values() if cluster.name == name}
    if not by_namespace:
        raise InvalidSpecError(label, f"there is no LMCacheCluster {name}: give its file with --cluster")
    for candidate in (namespace, "default", *(by_namespace if namespace is None else ())):
        if candidate in by_namespace:
            return by_namespace[candidate]
    raise InvalidSpecError(label, f"LMCacheCluster {name} is in another namespace, {', '.join(by_namespace)}")


def _with_cache(pod: Object, cluster: Cluster, context: Context, where: str) -> Object:
    _check_uids(cluster)
    metadata = pod.get("metadata") or {}
    labels = (metadata.get("labels") or {}) | {INJECT_LABEL: cluster.name}
    return inject(pod | {"metadata": metadata | {"labels": labels}}, profile(cluster, context), where)


def _check_uids(cluster: Cluster) -> None:
    """Check that the names of all Secrets are known that the operator creates for the pod."""
    needed = {cluster.name} if cluster.spec.sidecar.http_authentication == TOKEN else set()
    needed |= {owner} if (owner := remote_owner(cluster)) else set()
    uids = {name: lender.uid for name, lender in cluster.lenders.items()} | {cluster.name: cluster.uid}
    for name in sorted(needed):
        if not uids.get(name):
            path = f"metadata.uid of LMCacheCluster {name}"
            raise InvalidSpecError(path, f"{_NO_UID}: kubectl get lmcluster {name} -o yaml")


def _items(value: Any) -> Iterator[Any]:
    """The object itself, or the items of a List as ``kubectl get`` prints it."""
    if _kind(value) == "List" and isinstance(value.get("items"), list):
        yield from value["items"]
    elif value is not None:
        yield value


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else None


def _pod_path(value: Any) -> tuple[str, ...] | None:
    """Path of the pod in an object; None if the object creates no pods."""
    kind = _kind(value)
    if why := _GROUPS.get(str(kind)):
        raise InvalidSpecError(f"kind {kind}", why)
    return _PODS.get(kind) if isinstance(kind, str) else None


def _replaced(value: Any, path: Sequence[str], leaf: Object) -> Any:
    return value | {path[0]: _replaced(value[path[0]], path[1:], leaf)} if path else leaf


def _check_shape(value: Any, shape: Any, path: str) -> None:
    """Check the types of a pod's fields. Only names, ``spec`` and ``containers`` are required."""
    expected: type = shape if isinstance(shape, type) else type(shape)
    is_expected = isinstance(value, expected)
    if not is_expected:
        raise InvalidSpecError(path, f"must be {TYPE_NAMES[expected]}, not {reprlib.repr(value)}")
    for index, item in enumerate(value if expected is list else ()):
        _check_shape(item, shape[0], f"{path}[{index}]")
    for key in shape if expected is dict else ():
        if value.get(key) is not None or key in ("name", "spec", "containers"):
            _check_shape(value.get(key), shape[key], f"{path}.{key}")
