"""The objects of the engine: its StatefulSet, how to reach its pods, and who may."""

from __future__ import annotations

import json
from functools import partial

import yaml

from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.components.engine.pod import pod_template
from lmcache_operator.components.types import Context
from lmcache_operator.specs import Images, Object, names, paths

SCRAPER_LABEL = "lmcache.io/scraper"
"""A namespace with this label set to "true" may reach the sidecars' metrics port."""
_HIGHEST_PORT = 65535
_HTTP_PORT = {"name": "http", "port": names.ENGINE_PORT, "protocol": "TCP", "targetPort": "http"}
_METRICS_PORT = {"name": "metrics", "port": names.SIDECAR_PORT, "protocol": "TCP", "targetPort": "metrics"}


def render(cluster: Cluster, context: Context) -> list[Object]:
    """All of them, prerequisites of the pods first and the StatefulSet last.

    Raises:
        InvalidSpecError: the spec can't be rendered.
    """
    child, engine = partial(names.child, cluster, names.ENGINE), names.engine_name(cluster.name)
    config, policy = {"sidecar.yaml": _sidecar_yaml(cluster)}, _network_policy(cluster, context)
    client_service = {"ports": [_HTTP_PORT], "selector": _selector(cluster)}
    recorded = {names.DEFAULT_IMAGES: json.dumps(context.images, sort_keys=True)}
    stateful_set = _stateful_set(cluster, context.images)
    return [
        # An identity of its own, without a token: engine and sidecar never talk to the API server.
        child("ServiceAccount", engine, automountServiceAccountToken=False),
        child("ConfigMap", names.config_name(cluster.name), data=config),
        child("Service", engine, spec=_headless_service(cluster)),
        child("Service", cluster.name, spec=client_service),
        child("NetworkPolicy", engine, spec=policy),
        child("PodDisruptionBudget", engine, spec=_disruption_budget(cluster)),
        child("StatefulSet", engine, recorded, spec=stateful_set),
    ]


def resolved_images(cluster: Cluster, default_images: Images) -> Images:
    """The images of a cluster's containers."""
    named = {names.ENGINE: cluster.spec.engine.image, names.SIDECAR: cluster.spec.sidecar.image}
    return {name: image or default_images[name] for name, image in named.items()}


def spec_hash(cluster: Cluster, default_images: Images) -> str:
    """Hash of what the user declared for a pod, and of its images.

    Replicas are not in it, nor sizes: a cache resize never reloads a model. Nor is anything the operator
    chooses: its upgrade restarts no pod; nor does naming the image that a pod has already.
    """
    wanted = declared(cluster.spec)
    engine, sidecar, tiers = (wanted.pop(part, {}) for part in ("engine", "sidecar", "tiers"))
    kept: Object = {
        "engine": {key: value for key, value in engine.items() if key not in ("image", "replicas")},
        "tiers": {key: value for key, value in tiers.items() if key != "memory"},
        "images": resolved_images(cluster, default_images),
    }
    if sidecar := {key: value for key, value in sidecar.items() if key != "image"}:
        kept["sidecar"] = sidecar
    return names.digest(wanted | kept)


def _selector(cluster: Cluster) -> dict[str, str]:
    return names.selector(cluster.name, names.ENGINE)


def _stateful_set(cluster: Cluster, default_images: Images) -> Object:
    images, hashed = resolved_images(cluster, default_images), spec_hash(cluster, default_images)
    return {
        # The operator replaces pods itself: one at a time, by eviction, when the user changed something.
        "updateStrategy": {"type": "OnDelete"},
        "podManagementPolicy": "Parallel",
        "replicas": cluster.spec.engine.replicas,
        "selector": {"matchLabels": _selector(cluster)},
        "serviceName": names.engine_name(cluster.name),
        "template": pod_template(cluster, images, hashed),
    }


def _sidecar_yaml(cluster: Cluster) -> str:
    """The sidecar's configuration file.

    The kubelet renews it under sidecars of older images too. They ignore keys that they do not know, so what
    a later version needs is a new key here: never a new meaning of a key, and never a flag.
    """
    config: Object = {"arena": paths.ARENA_PATH, "socket": paths.SOCKET_PATH}
    config |= {"http_port": names.SIDECAR_PORT, "log_format": "json"}
    if external := cluster.spec.tiers.external:
        config["remote_url"] = external.url
    if auth := cluster.spec.tiers.remote_auth:
        config["remote_password_file"] = f"{paths.REMOTE_AUTH_DIR}/password"
        if auth.username_key is not None:
            config["remote_username_file"] = f"{paths.REMOTE_AUTH_DIR}/username"
    return str(yaml.safe_dump(config, sort_keys=True))


def _headless_service(cluster: Cluster) -> Object:
    return {
        "clusterIP": "None",
        "ports": [_HTTP_PORT, _METRICS_PORT],
        # A sidecar is worth watching before its engine has loaded the model.
        "publishNotReadyAddresses": True,
        "selector": _selector(cluster),
    }


def _network_policy(cluster: Cluster, context: Context) -> Object:
    """Limits who reaches the sidecar's port; every other port of the pod stays open, and egress too."""
    scrapers = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {SCRAPER_LABEL: "true"}}}]
    if context.operator_namespace:
        # The label of a namespace that nobody can set to another's name.
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": context.operator_namespace}}
        scrapers.append(
            {"namespaceSelector": namespace, "podSelector": {"matchLabels": names.OPERATOR_LABELS}}
        )
    others = [
        {"endPort": names.SIDECAR_PORT - 1, "port": 1, "protocol": "TCP"},
        {"endPort": _HIGHEST_PORT, "port": names.SIDECAR_PORT + 1, "protocol": "TCP"},
        {"endPort": _HIGHEST_PORT, "port": 1, "protocol": "UDP"},
    ]
    own = {"from": scrapers, "ports": [{"port": names.SIDECAR_PORT, "protocol": "TCP"}]}
    return {
        "ingress": [{"ports": others}, own],
        "podSelector": {"matchLabels": _selector(cluster)},
        "policyTypes": ["Ingress"],
    }


def _disruption_budget(cluster: Cluster) -> Object:
    return {
        "maxUnavailable": 1,
        "selector": {"matchLabels": _selector(cluster)},
        # A pod that serves nothing may go at any time.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
