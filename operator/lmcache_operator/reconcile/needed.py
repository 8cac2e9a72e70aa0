"""The parts of listed objects that a reconciliation needs. Pure.

Users choose the size of the other parts: a namespace may have any number of objects of a megabyte.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lmcache_operator.specs import Object

_WHOLE: Object = {}


def _all(*fields: str) -> Object:
    return dict.fromkeys(fields, _WHOLE)


def _picked(value: Any, fields: Object) -> Any:
    """The named fields of an object, or of each item of a list."""
    if isinstance(value, list) and fields:
        return [_picked(item, fields) for item in value]
    if isinstance(value, dict) and fields:
        return {key: _picked(value[key], fields[key]) for key in fields.keys() & value.keys()}
    return value


_REFERENCE = {"clusterRef": _all("name")}
of_cluster = partial(
    _picked,
    fields={
        "metadata": _all("name"),
        "spec": {"engine": _all("nodes", "replicas"), "tiers": {"peers": _REFERENCE, "remote": _REFERENCE}},
        "status": _all("readyReplicas", "replicas") | {"remote": _all("evicted", "usedBytes")},
    },
)
"""Returns what a cluster reads of another one that refers to it."""
_METADATA = (
    "annotations", "creationTimestamp", "deletionTimestamp", "generation", "labels", "name", "namespace",
    "ownerReferences", "uid",
)  # fmt: skip
_OF_POD = {
    "metadata": _all(*_METADATA) | {"managedFields": _all("manager", "subresource", "time")},
    "spec": {
        # Arguments and variables of an engine are as large as users write them, in each of up to 1,000 pods.
        "containers": _all("name", "resources", "startupProbe"),
        "initContainers": _all("args", "env", "name", "resources", "restartPolicy", "volumeMounts"),
        "volumes": _all("ephemeral", "name", "persistentVolumeClaim") | {"secret": _all("secretName")},
        **_all("nodeName", "resources"),
    },
    "status": _WHOLE,
}
of_pod = partial(_picked, fields=_OF_POD)
"""Returns identity, state, volumes and resources of a pod, and the settings of its sidecar."""
of_node = partial(_picked, fields={"status": _all("allocatable")})
"""Returns what a node has for pods."""
of_event = partial(
    _picked,
    fields=_all("eventTime", "firstTimestamp", "lastTimestamp", "message", "reason")
    | {"involvedObject": _all("name", "uid"), "series": _all("lastObservedTime")},
)
"""Returns what an Event says, about which object and when."""
