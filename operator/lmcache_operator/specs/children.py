"""Everything an LMCacheCluster owns."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml

from ..api.parse import Cluster, declared
from ..settings import RenderSettings
from . import Images, Object, paths
from .names import (
    DEFAULT_IMAGES,
    ENGINE,
    ENGINE_PORT,
    RENDERED_HASH,
    SIDECAR,
    SIDECAR_PORT,
    child,
    engine_name,
    selector,
)
from .pod import pod_template

SCRAPER_LABEL = "lmcache.io/scraper"
"""A namespace with this label set to "true" may reach the sidecars' metrics port."""
_HIGHEST_PORT = 65535


def children(cluster: Cluster, default_images: Images, settings: RenderSettings) -> list[Object]:
    """All objects of a cluster, prerequisites of the pods first.

    `default_images` are the images by container that stand in where the user names none.

    Raises:
        InvalidSpec: the spec can't be rendered.
    """
    objects = [
        _service_account(cluster),
        _config_map(cluster),
        _headless_service(cluster),
        _client_service(cluster),
        _network_policy(cluster),
        _disruption_budget(cluster),
        *_claim_templates(cluster),
        _stateful_set(cluster, default_images, settings),
    ]
    for rendered in objects:
        annotations = rendered["metadata"].setdefault("annotations", {})
        annotations[RENDERED_HASH] = digest(rendered)
    return objects


def digest(value: Any) -> str:
    """A short hash of plain data that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_hash(cluster: Cluster, images: Images) -> str:
    """Hash of what the user declared for a pod, and of its images.

    Replicas are not in it, nor sizes: a cache resize never reloads a model. Nor is anything the operator
    chooses: its upgrade restarts no pod.
    """
    wanted = declared(cluster.spec)
    engine = {key: value for key, value in wanted.get("engine", {}).items() if key != "replicas"}
    tiers = {key: value for key, value in wanted["tiers"].items() if key != "memory"}
    return digest({**wanted, "engine": engine, "tiers": tiers, "images": images})


def _stateful_set(cluster: Cluster, default_images: Images, settings: RenderSettings) -> Object:
    declared_images = {ENGINE: cluster.spec.engine.image, SIDECAR: cluster.spec.sidecar.image}
    images = {name: image or default_images[name] for name, image in declared_images.items()}
    spec = {
        # The operator replaces pods itself: one at a time, by eviction, when the user changed something.
        "updateStrategy": {"type": "OnDelete"},
        "podManagementPolicy": "Parallel",
        "replicas": cluster.spec.engine.replicas,
        "selector": {"matchLabels": selector(cluster.name)},
        "serviceName": engine_name(cluster.name),
        "template": pod_template(cluster, images, spec_hash(cluster, images), settings),
    }
    rendered = child(cluster, "apps/v1", "StatefulSet", engine_name(cluster.name), spec=spec)
    rendered["metadata"]["annotations"] = {DEFAULT_IMAGES: json.dumps(default_images, sort_keys=True)}
    return rendered


def _config_map(cluster: Cluster) -> Object:
    """The sidecar's configuration file."""
    config: Object = {"arena": paths.ARENA_PATH, "socket": paths.SOCKET_PATH}
    config |= {"http_port": SIDECAR_PORT, "log_format": "json"}
    if external := cluster.spec.tiers.external:
        config["remote_url"] = external.url
    if auth := cluster.spec.tiers.remote_auth:
        config["remote_password_file"] = f"{paths.REMOTE_AUTH_DIR}/password"
        if auth.username_key is not None:
            config["remote_username_file"] = f"{paths.REMOTE_AUTH_DIR}/username"
    data = {"sidecar.yaml": yaml.safe_dump(config, sort_keys=True)}
    return child(cluster, "v1", "ConfigMap", f"{cluster.name}-sidecar", data=data)


def _service_account(cluster: Cluster) -> Object:
    """An identity of its own, without a token: engine and sidecar never talk to the API server."""
    name = engine_name(cluster.name)
    return child(cluster, "v1", "ServiceAccount", name, automountServiceAccountToken=False)


def _client_service(cluster: Cluster) -> Object:
    spec = {"ports": [_service_port("http", ENGINE_PORT)], "selector": selector(cluster.name)}
    return child(cluster, "v1", "Service", cluster.name, spec=spec)


def _headless_service(cluster: Cluster) -> Object:
    spec = {
        "clusterIP": "None",
        "ports": [_service_port("http", ENGINE_PORT), _service_port("metrics", SIDECAR_PORT)],
        # A sidecar is worth watching before its engine has loaded the model.
        "publishNotReadyAddresses": True,
        "selector": selector(cluster.name),
    }
    return child(cluster, "v1", "Service", engine_name(cluster.name), spec=spec)


def _service_port(name: str, port: int) -> Object:
    return {"name": name, "port": port, "protocol": "TCP", "targetPort": name}


def _network_policy(cluster: Cluster) -> Object:
    """Limits who reaches the sidecar's port; every other port of the pod stays open, and egress too."""
    scrapers = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {SCRAPER_LABEL: "true"}}}]
    others = [
        {"endPort": SIDECAR_PORT - 1, "port": 1, "protocol": "TCP"},
        {"endPort": _HIGHEST_PORT, "port": SIDECAR_PORT + 1, "protocol": "TCP"},
        {"endPort": _HIGHEST_PORT, "port": 1, "protocol": "UDP"},
    ]
    own = {"from": scrapers, "ports": [{"port": SIDECAR_PORT, "protocol": "TCP"}]}
    spec = {
        "ingress": [{"ports": others}, own],
        "podSelector": {"matchLabels": selector(cluster.name)},
        "policyTypes": ["Ingress"],
    }
    return child(cluster, "networking.k8s.io/v1", "NetworkPolicy", engine_name(cluster.name), spec=spec)


def _disruption_budget(cluster: Cluster) -> Object:
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector(cluster.name)},
        # A pod that serves nothing may go at any time.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child(cluster, "policy/v1", "PodDisruptionBudget", engine_name(cluster.name), spec=spec)


def _claim_templates(cluster: Cluster) -> list[Object]:
    """With dynamic resource allocation: one claim per pod, which engine and sidecar both name."""
    gpu = cluster.spec.engine.gpu
    if not gpu.uses_claims:
        return []
    exactly = {"allocationMode": "ExactCount", "count": gpu.count, "deviceClassName": gpu.device_class_name}
    spec = {"spec": {"devices": {"requests": [{"exactly": exactly, "name": "gpus"}]}}}
    name = engine_name(cluster.name)
    return [child(cluster, "resource.k8s.io/v1", "ResourceClaimTemplate", name, spec=spec)]
