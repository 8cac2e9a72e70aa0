"""Names, labels and annotations: the one place that spells them."""

from __future__ import annotations

from lmcache_operator import __version__
from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.api.parse import Cluster
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import BY_NAME, Ref

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

ENGINE = "engine"
SIDECAR = "sidecar"
PAYLOAD = "payload"
STOCK_IMAGES: Images = {
    ENGINE: "vllm/vllm-openai:v0.32.0",
    SIDECAR: f"ghcr.io/lmcache-cluster/sidecar:{__version__}",
}
"""Used where a cluster names none, unless the operator is told others."""

ENGINE_PORT = 8000
SIDECAR_PORT = 9464


def engine_name(cluster_name: str) -> str:
    """Name of the StatefulSet and of all that belongs to the engine's pods."""
    return f"{cluster_name}-engine"


def config_name(cluster_name: str) -> str:
    """Name of the ConfigMap with the sidecar's settings."""
    return f"{cluster_name}-sidecar"


def child_refs(cluster_name: str) -> tuple[Ref, ...]:
    """Every child that a cluster can have. The names are ours, so that none has to be searched for."""
    engine = engine_name(cluster_name)
    kinds = ("ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet")
    others = Ref("ConfigMap", config_name(cluster_name)), Ref("Service", cluster_name)
    return (*(Ref(kind, engine) for kind in kinds), *others)


def selector(cluster_name: str) -> dict[str, str]:
    """Labels that select the engine's pods. They never change: a StatefulSet's selector is immutable."""
    return {CLUSTER_LABEL: cluster_name, COMPONENT_LABEL: ENGINE}


def labels(cluster: Cluster) -> dict[str, str]:
    """Labels of every child."""
    return {
        "app.kubernetes.io/component": ENGINE,
        "app.kubernetes.io/instance": cluster.name,
        MANAGED_BY_LABEL: FIELD_MANAGER,
        "app.kubernetes.io/name": "lmcache-cluster",
        **selector(cluster.name),
    }


def child(cluster: Cluster, kind: str, name: str, **content: object) -> Object:
    """An object that the cluster owns and that is deleted with it, also while the operator is down."""
    owner: Object = {"apiVersion": API_VERSION, "kind": KIND, "name": cluster.name, "uid": cluster.uid}
    owner |= {"controller": True, "blockOwnerDeletion": True}
    metadata: Object = {"name": name, "namespace": cluster.namespace}
    metadata |= {"labels": labels(cluster), "ownerReferences": [owner], "annotations": {}}
    return {"apiVersion": BY_NAME[kind].api_version, "kind": kind, "metadata": metadata, **content}
