"""Names, labels and annotations of all objects. No other module spells them out."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from lmcache_operator import __version__
from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.api.engine_kinds import VLLM
from lmcache_operator.api.parse import Cluster
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import BY_NAME

FIELD_MANAGER = "lmcache-operator"
HEARTBEAT_MANAGER = f"{FIELD_MANAGER}-heartbeat"
"""Owner of `HEARTBEAT`, so that no write of the other fields of the status removes it."""
CLUSTER_LABEL = "lmcache.io/cluster"
COMPONENT_LABEL = "lmcache.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR_LABELS = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/part-of": "lmcache-cluster"}
"""Labels of the operator's own pod, as the chart sets them."""

SPEC_HASH = "lmcache.io/spec-hash"
"""On pods: hash of the user's settings. A pod whose hash differs from its template's is replaced."""
KV_FIELDS = "lmcache.io/kv-fields"
"""On engine pods: fields that cached KV depends on, as JSON."""
RENDERED_HASH = "lmcache.io/rendered-hash"
"""On every child: hash of the rendered object. It reveals fields that the operator no longer renders."""
DEFAULT_IMAGES = "lmcache.io/default-images"
"""On the StatefulSet: the default images at its creation, as JSON by container."""
LENDERS = "lmcache.io/lenders"
"""On the StatefulSet: uid and certificate of the clusters whose tiers the pods use, as JSON by name."""

MEMORY_SIZE = "lmcache.io/memory-size"
"""On pods: bytes of the memory tier. The running sidecar follows this value."""
RESIZE_REFUSED = "lmcache.io/resize-refused"
"""On pods: a refused size of the memory tier, as JSON with the keys bytes, at and message."""

PEERS_LABEL = "lmcache.io/peers"
"""On engine pods: name of the LMCacheCluster whose list of peers their sidecars use. Sidecars with the same
list may read each other's memory tiers."""
PAGES_LABEL = "lmcache.io/pages"
"""On engine pods: "Token" if the sidecar's pages need a token. The chart's PodMonitors skip these pods."""
INJECT_LABEL = "lmcache.io/inject"
"""On users' own pods: name of the LMCacheCluster in their namespace whose cache is injected."""
INJECTION = "injection"
"""Component: the additions to pods with that label."""

REMOTE = "remote"
"""Component: the shards of a managed remote tier. Also the container in their pods."""
REMOTE_PORT = 6379
REMOTE_USER = "lmcache"
SHARD_IMAGE = "valkey/valkey:8.1.4"
"""Default image of shards. Valkey has a BSD license, as Redis had up to 7.2, so it may be offered as a
service without restrictions."""

ROUTER = "router"
"""Component: the router in front of the engines. Also the container in its pods."""
ROUTER_IMAGE = f"ghcr.io/lmcache-cluster/router:{__version__}"
"""Default image of the router."""
ROUTER_PORT = 8000
ROUTER_METRICS_PORT = 29000

AUTOSCALING = "autoscaling"
"""Component: the sizes that the operator chose for a cluster."""

ENGINE = "engine"
SIDECAR = "sidecar"
SIZE_ARGUMENT = "--memory-size="
"""Start of the argument with the size of a sidecar's memory tier at its creation."""
PAYLOAD = "payload"
STOCK_IMAGES: Images = {ENGINE: VLLM.image, SIDECAR: f"ghcr.io/lmcache-cluster/sidecar:{__version__}"}
"""Default images by container. The operator's flags may name others."""

ENGINE_PORT = 8000
SIDECAR_PORT = 9464
EVENTS_PORT = 5557
"""Port of an engine's KV events. Only the router may connect."""

GROUP = "group"
"""The Secret of the links between the pods of an engine over several nodes."""
GROUP_LABEL = "lmcache.io/group"
"""On the pods of an engine over several nodes: number of the engine."""
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
"""Kubernetes sets this label to the number of a pod in its StatefulSet."""
GROUP_PORT = 9466
"""Port on which the launchers of such pods watch one another. Only pods of the same engine may connect."""
GROUP_READY_PORT = 9467
"""Port of a launcher that is open while all pods of its engine serve. Only the kubelet connects."""

PREFILL = "prefill"
"""Component: the LMCacheCluster of the pods that only compute prompts."""

PAGES = "pages"
"""The Secret with the tokens for the sidecars' pages."""

PEERS = "peers"
"""Component: the list of engine pods whose sidecars read each other's memory tiers."""
PEERS_PORT = 9465
"""Port on which a sidecar serves its memory tier to its peers."""


def object_name(cluster_name: str, component: str) -> str:
    """Name of all objects of a component, except for those that other functions name."""
    return f"{cluster_name}-{component}"


def group_name(cluster_name: str, number: int | str) -> str:
    """Name of the objects of one engine over several nodes."""
    return f"{object_name(cluster_name, ENGINE)}-{number}"


def group_number(cluster_name: str, name: str) -> int | None:
    """Number of the engine over several nodes that an object belongs to by its name; None: none."""
    match = re.fullmatch(group_name(cluster_name, "(0|[1-9][0-9]{0,3})(-[0-9]+-pods)?"), name)
    return int(match[1]) if match else None


def pod_group_name(cluster_name: str, number: int, num_pods: int) -> str:
    """Name of the PodGroup of one engine over several nodes. Its number of pods is immutable."""
    return f"{group_name(cluster_name, number)}-{num_pods}-pods"


def secret_name(cluster_name: str, purpose: str, uid: str) -> str:
    """Name of a Secret that the operator, or cert-manager on its behalf, creates for a cluster.

    The operator cannot read Secrets, so it cannot see whose they are. Nobody knows the uid before the cluster
    exists, so no Secret has this name by chance. Without an API server, there is no uid.
    """
    return f"{cluster_name}-{purpose}-{uid or 'UID'}"


def created_secret(cluster: Cluster, purpose: str) -> str:
    """Name of a Secret that is created for this cluster."""
    return secret_name(cluster.name, purpose, cluster.uid)


def tier_secret(cluster: Cluster, owner: str, tier: str) -> str:
    """Name of the Secret with the password of a tier of ``owner``; empty: the owner has never existed."""
    if owner == cluster.name:
        return created_secret(cluster, tier)
    lender = cluster.lenders.get(owner)
    return secret_name(owner, tier, lender.uid) if lender else ""


def host(cluster_name: str, component: str, namespace: str) -> str:
    """Common DNS suffix of a component's pods."""
    return f"{object_name(cluster_name, component)}.{namespace}.svc"


def peers_owner(cluster: Cluster) -> str:
    """Name of the cluster whose list and password of peers a cluster uses: its own, or another's."""
    peers = cluster.spec.tiers.peers
    return peers.cluster_ref.name if peers and peers.cluster_ref else cluster.name


def peers_certificate(cluster: Cluster) -> str:
    """Name of the Secret with the certificate, and the CA, of a cluster's sidecars."""
    peers = cluster.spec.tiers.peers
    secret_ref = peers and peers.tls and peers.tls.secret_ref
    return secret_ref.name if secret_ref else created_secret(cluster, f"{PEERS}-tls")


def config_name(cluster_name: str) -> str:
    """Name of the ConfigMap with the sidecar's settings."""
    return f"{cluster_name}-sidecar"


def remote_certificate(cluster: Cluster) -> str:
    """Name of the Secret with the certificate, and the CA, of the shards that a cluster uses; empty: their
    owner has never existed."""
    managed, owner = cluster.spec.tiers.managed, remote_owner(cluster) or ""
    secret_ref = managed and managed.tls and managed.tls.secret_ref
    lender = cluster.lenders.get(owner)
    named = secret_ref.name if secret_ref else lender.certificate if lender else ""
    return named or tier_secret(cluster, owner, f"{REMOTE}-tls")


def remote_owner(cluster: Cluster) -> str | None:
    """Name of the cluster whose shards a cluster uses: its own, or another's; None: no managed shards."""
    remote = cluster.spec.tiers.remote
    if remote is None or remote.external is not None:
        return None
    return remote.cluster_ref.name if remote.cluster_ref else cluster.name


def selector(cluster_name: str, component: str) -> dict[str, str]:
    """Labels that select a component's pods. They never change: a StatefulSet's selector is immutable."""
    return {CLUSTER_LABEL: cluster_name, COMPONENT_LABEL: component}


def selector_text(cluster_name: str, component: str) -> str:
    """The labels of ``selector`` as a label selector string."""
    return ",".join(f"{key}={value}" for key, value in selector(cluster_name, component).items())


def labels(cluster: Cluster, component: str) -> dict[str, str]:
    """Labels of all children of a component."""
    return {
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": cluster.name,
        MANAGED_BY_LABEL: FIELD_MANAGER,
        "app.kubernetes.io/name": "lmcache-cluster",
        **selector(cluster.name, component),
    }


def child(
    cluster: Cluster,
    component: str,
    kind: str,
    name: str = "",
    *,
    annotations: Object | None = None,
    **content: Any,
) -> Object:
    """Build an object that the cluster owns. It is deleted with the cluster, even if the operator is down.

    ``name``: see ``object_name``, which is the default.
    """
    owner: Object = {"apiVersion": API_VERSION, "kind": KIND, "name": cluster.name, "uid": cluster.uid}
    owner |= {"controller": True, "blockOwnerDeletion": True}
    name = name or object_name(cluster.name, component)
    metadata: Object = {"name": name, "namespace": cluster.namespace}
    metadata |= {"labels": labels(cluster, component), "ownerReferences": [owner]}
    metadata["annotations"] = annotations or {}
    return hashed({"apiVersion": BY_NAME[kind].api_version, "kind": kind, "metadata": metadata, **content})


def hashed(rendered: Object) -> Object:
    """A copy of an object with the annotation ``RENDERED_HASH``, a hash of everything else in it."""
    annotations = {key: value for key, value in annotations_of(rendered).items() if key != RENDERED_HASH}
    unhashed = rendered | {"metadata": rendered["metadata"] | {"annotations": annotations}}
    annotations = annotations | {RENDERED_HASH: digest(unhashed)}
    return unhashed | {"metadata": unhashed["metadata"] | {"annotations": annotations}}


def digest(value: Any) -> str:
    """Short hash of plain data, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def annotations_of(live: Object) -> dict[str, str]:
    """Annotations of an object; empty if it has none."""
    return live["metadata"].get("annotations") or {}
