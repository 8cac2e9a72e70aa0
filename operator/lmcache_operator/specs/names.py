"""Names, labels and annotations: the one place that spells them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lmcache_operator import __version__
from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.api.parse import Cluster
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import BY_NAME

FIELD_MANAGER = "lmcache-operator"
CLUSTER_LABEL = "lmcache.io/cluster"
COMPONENT_LABEL = "lmcache.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR_LABELS = {
    "app.kubernetes.io/component": "operator",
    "app.kubernetes.io/part-of": "lmcache-cluster",
}
"""Of the operator's own pod, as the chart makes it."""

SPEC_HASH = "lmcache.io/spec-hash"
"""On pods: what the user declared for them. A pod with another hash than its template is replaced."""
RENDERED_HASH = "lmcache.io/rendered-hash"
"""On every child: hash of what was rendered, so that fields we stop rendering are noticed and removed."""
DEFAULT_IMAGES = "lmcache.io/default-images"
"""On the StatefulSet: the images that were resolved when it was made, as JSON by container."""

MEMORY_SIZE = "lmcache.io/memory-size"
"""On pods: bytes of the memory tier; the sidecar follows them while it runs."""
RESIZE_REFUSED = "lmcache.io/resize-refused"
"""On pods: a size that they could not get, as JSON: bytes, at, and the message."""

INJECT_LABEL = "lmcache.io/inject"
"""On somebody's own pods: the LMCacheCluster of their namespace whose cache they get."""
INJECTION = "injection"
"""Component: what such pods are given."""

REMOTE = "remote"
"""Component: the shards of a managed remote tier. Also the container in their pods."""
REMOTE_PORT = 6379
REMOTE_USER = "lmcache"
SHARD_IMAGE = "valkey/valkey:8.1.4"
"""Of shards, where neither a cluster nor the operator's flags name one. Valkey is free software as Redis was
up to 7.2: who offers it to others as a service needs nobody's leave."""

AUTOSCALING = "autoscaling"
"""Component: the sizes that were chosen for a cluster."""

ENGINE = "engine"
SIDECAR = "sidecar"
PAYLOAD = "payload"
STOCK_IMAGES: Images = {
    ENGINE: "vllm/vllm-openai:v0.32.0",
    SIDECAR: f"ghcr.io/lmcache-cluster/sidecar:{__version__}",
}
"""Used where a cluster names none, unless the operator's flags name others."""

ENGINE_PORT = 8000
SIDECAR_PORT = 9464


def engine_name(cluster_name: str) -> str:
    """Name of the StatefulSet and of all that belongs to the engine's pods."""
    return f"{cluster_name}-engine"


def config_name(cluster_name: str) -> str:
    """Name of the ConfigMap with the sidecar's settings."""
    return f"{cluster_name}-sidecar"


def autoscaling_name(cluster_name: str) -> str:
    """Name of the ConfigMap with the sizes that were chosen, and what they were chosen from."""
    return f"{cluster_name}-autoscaling"


def remote_name(cluster_name: str) -> str:
    """Name of the StatefulSet of shards, and of list, Secret and Service that belong to it."""
    return f"{cluster_name}-remote"


def remote_tls_name(cluster_name: str) -> str:
    """The Secret with the certificate of a managed remote tier, unless its user names another."""
    return f"{remote_name(cluster_name)}-tls"


def remote_certificate(cluster: Cluster) -> str:
    """The Secret with the certificate of the servers that a cluster uses, and with who signed it."""
    managed = cluster.spec.tiers.managed
    named = managed and managed.tls and managed.tls.secret_ref
    return named.name if named else remote_tls_name(remote_owner(cluster) or "")


def remote_host(cluster: Cluster, owner: str) -> str:
    """The name in DNS that all shards of a cluster of this namespace have in common."""
    return f"{remote_name(owner)}.{cluster.namespace}.svc"


def remote_owner(cluster: Cluster) -> str | None:
    """Whose shards a cluster uses: its own, or those of another one in its namespace; None: of no one."""
    remote = cluster.spec.tiers.remote
    if remote is None or remote.external is not None:
        return None
    return remote.cluster_ref.name if remote.cluster_ref else cluster.name


def injection_name(cluster_name: str) -> str:
    """Name of the LMCacheProfile with what other people's pods are given."""
    return f"{cluster_name}-injection"


def selector(cluster_name: str, component: str) -> dict[str, str]:
    """Labels that select a component's pods. They never change: a StatefulSet's selector is immutable."""
    return {CLUSTER_LABEL: cluster_name, COMPONENT_LABEL: component}


def selector_text(cluster_name: str, component: str) -> str:
    """The same in the words of the API."""
    return ",".join(f"{key}={value}" for key, value in selector(cluster_name, component).items())


def labels(cluster: Cluster, component: str) -> dict[str, str]:
    """Labels of every child of a component."""
    return {
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": cluster.name,
        MANAGED_BY_LABEL: FIELD_MANAGER,
        "app.kubernetes.io/name": "lmcache-cluster",
        **selector(cluster.name, component),
    }


def child(
    cluster: Cluster, component: str, kind: str, name: str, annotations: Object | None = None, **content: Any
) -> Object:
    """An object that the cluster owns and that is deleted with it, also while the operator is down."""
    owner: Object = {"apiVersion": API_VERSION, "kind": KIND, "name": cluster.name, "uid": cluster.uid}
    owner |= {"controller": True, "blockOwnerDeletion": True}
    metadata: Object = {"name": name, "namespace": cluster.namespace}
    metadata |= {"labels": labels(cluster, component), "ownerReferences": [owner]}
    metadata["annotations"] = annotations or {}
    return hashed({"apiVersion": BY_NAME[kind].api_version, "kind": kind, "metadata": metadata, **content})


def hashed(rendered: Object) -> Object:
    """The same object with the hash of all else that is in it."""
    others = {key: value for key, value in annotations_of(rendered).items() if key != RENDERED_HASH}
    bare = rendered | {"metadata": rendered["metadata"] | {"annotations": others}}
    annotations = others | {RENDERED_HASH: digest(bare)}
    return bare | {"metadata": bare["metadata"] | {"annotations": annotations}}


def digest(value: Any) -> str:
    """A short hash of plain data that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def annotations_of(live: Object) -> dict[str, str]:
    """An object's annotations; none when it has no such field."""
    return live["metadata"].get("annotations") or {}
