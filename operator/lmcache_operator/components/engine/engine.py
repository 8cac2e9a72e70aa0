"""The component: one StatefulSet of engine pods, how to reach them, and who may.

Its pods are replaced one at a time, when the user declared something else for them.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial

import yaml

from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.components.base import Component, Context, Observed, Plan, Status
from lmcache_operator.components.differences import differences
from lmcache_operator.components.engine.gpus import (
    CUDA_IPC,
    Transfer,
    claim_spec,
    planned_transfer,
    transfer_fields,
)
from lmcache_operator.components.engine.pod import DISK_SIZE, MemorySize, pod_template
from lmcache_operator.components.engine.status import engine_status
from lmcache_operator.components.pods import has_no_node, is_outdated, next_eviction
from lmcache_operator.components.resize import made_with, named_sidecar, resizing
from lmcache_operator.specs import Images, Object, names, paths
from lmcache_operator.specs.kinds import Ref, ref_of

SCRAPER_LABEL = "lmcache.io/scraper"
"""A namespace with this label set to "true" may reach the sidecars' metrics port."""
_HIGHEST_PORT = 65535
_HTTP_PORT = {"name": "http", "port": names.ENGINE_PORT, "protocol": "TCP", "targetPort": "http"}
_METRICS_PORT = {"name": "metrics", "port": names.SIDECAR_PORT, "protocol": "TCP", "targetPort": "metrics"}
_FORMER_SIZE = (
    "still have the former size of a tier, which they can't change while they run: replaced pods get the "
    "new one; a changed annotation in spec.engine.podTemplate replaces all"
)


class Engine(Component):
    """Engine pods."""

    name = names.ENGINE

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """The StatefulSet last, as in all that follows."""
        engine = names.engine_name(cluster_name)
        others = Ref("ConfigMap", names.config_name(cluster_name)), Ref("Service", cluster_name)
        kinds = ("ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "ResourceClaimTemplate")
        return (*others, *(Ref(kind, engine) for kind in (*kinds, "StatefulSet")))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """What the pods need comes before them."""
        if cluster.spec.engine is None:
            return []
        child, engine = partial(names.child, cluster, names.ENGINE), names.engine_name(cluster.name)
        config, policy = {"sidecar.yaml": _sidecar_yaml(cluster)}, _network_policy(cluster, context)
        client_service = {"ports": [_HTTP_PORT], "selector": _selector(cluster)}
        recorded = {names.DEFAULT_IMAGES: json.dumps(context.images, sort_keys=True)}
        transfer = planned_transfer(cluster, context.allow_all_gpus)
        stateful_set = _stateful_set(cluster, context.images, transfer)
        claim = claim_spec(cluster)
        return [
            # An identity of its own, without a token: engine and sidecar never talk to the API server.
            child("ServiceAccount", engine, automountServiceAccountToken=False),
            child("ConfigMap", names.config_name(cluster.name), data=config),
            child("Service", engine, spec=_headless_service(cluster)),
            child("Service", cluster.name, spec=client_service),
            child("NetworkPolicy", engine, spec=policy),
            child("PodDisruptionBudget", engine, spec=_disruption_budget(cluster)),
            *([child("ResourceClaimTemplate", engine, spec=claim)] if claim else []),
            child("StatefulSet", engine, recorded, spec=stateful_set),
        ]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Before anything, the images that the StatefulSet was made with."""
        if cluster.spec.engine is None:
            return Plan()
        live = observed.children.get(Ref("StatefulSet", names.engine_name(cluster.name)))
        images = _default_images(cluster, observed, context.images)
        wanted = self.render(cluster, context._replace(images=images))
        due, stateful_set = differences(wanted, observed), wanted[-1]
        template = stateful_set["spec"]["template"]
        others = [pod for pod in observed.pods if not is_outdated(pod, template)]
        resized = resizing(others, cluster.memory_bytes, cluster.engine.gpu.count, observed.now)
        # The StatefulSet never replaces a pod by itself, and a pod without a node can't be resized.
        made = made_with(live["spec"]["template"]) if live else 0
        too_large = [pod for pod in observed.pods if has_no_node(pod) and 0 < made < made_with(pod)]
        fixed = set(resized.fixed) | {_name(pod) for pod in others if _disk_size(pod) != _disk_size(template)}
        return replace(
            due,
            resize=resized.steps,
            num_starts=resized.num_starts,
            # Not before the template is written: the old pod would be made again.
            evict=()
            if ref_of(stateful_set) in due.lost
            else next_eviction(live, observed.pods, template, too_large),
            num_outdated=len(observed.pods) - len(others),
            note=f"{len(fixed)} {_FORMER_SIZE}" if fixed else "",
            fields={
                "resizing": resized,
                "images": _images_in_use(cluster, images, context.images),
                **transfer_fields(
                    cluster.spec.sidecar.transfer, planned_transfer(cluster, context.allow_all_gpus)
                ),
            },
        )

    def status(self, observed: Observed, plan: Plan) -> Status:
        """Of pods and of sidecars."""
        has_engine = observed.children or "engine" in observed.resource["spec"]
        return engine_status(observed, plan) if has_engine else Status()


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _disk_size(pod_or_template: Object) -> list[str]:
    """The size of its disk tier, as the sidecar is told."""
    variables = named_sidecar(pod_or_template["spec"].get("initContainers")).get("env") or ()
    return [item.get("value", "") for item in variables if item["name"] == DISK_SIZE]


def _default_images(cluster: Cluster, observed: Observed, images: Images) -> Images:
    """The images that stand in where the user names none.

    They are recorded when the StatefulSet is made, so that an upgrade of the operator changes no image of a
    cluster that exists, unless its user wants it to. Where the record is lost, with the StatefulSet or by
    hand, the status has what pods were given.
    """
    if cluster.spec.images.policy == "Follow":
        return images
    stateful_set = observed.children.get(
        Ref("StatefulSet", names.engine_name(cluster.name)), {"metadata": {}}
    )
    in_use = (observed.resource.get("status") or {}).get("images") or {}
    kept = {name: image for name, image in in_use.items() if not _named_images(cluster).get(name)}
    with contextlib.suppress(ValueError, TypeError):
        kept |= json.loads(names.annotations_of(stateful_set).get(names.DEFAULT_IMAGES, "{}"))
    return images | {name: kept[name] for name in images if isinstance(kept.get(name), str)}


def _images_in_use(cluster: Cluster, recorded: Images, present: Images) -> Object:
    """``status.images``, with a sentence where the operator has others by now."""
    used, others = resolved_images(cluster, recorded), resolved_images(cluster, present)
    found = [f"{name} {image}" for name, image in others.items() if image != used[name]]
    remedy = "spec.images.policy: Follow takes them"
    return {
        **used,
        **({"message": f"the operator's defaults are {', '.join(found)}; {remedy}"} if found else {}),
    }


def resolved_images(cluster: Cluster, default_images: Images) -> Images:
    """The images of a cluster's containers."""
    return {name: image or default_images[name] for name, image in _named_images(cluster).items()}


def _named_images(cluster: Cluster) -> dict[str, str | None]:
    return {names.ENGINE: cluster.engine.image, names.SIDECAR: cluster.spec.sidecar.image}


def spec_hash(cluster: Cluster, default_images: Images) -> str:
    """Hash of what the user declared for a pod, and of its images.

    Replicas are not in it, nor sizes: a cache resize never reloads a model. Nor is anything the operator
    chooses: its upgrade restarts no pod; nor does naming the image that a pod has already.
    """
    wanted = declared(cluster.spec)
    wanted.pop("autoscaling", None)
    engine, sidecar, tiers = (wanted.pop(part, {}) for part in ("engine", "sidecar", "tiers"))
    for tier in ("memory", "disk"):
        tiers.get(tier, {}).pop("size", None)
    if (managed := cluster.spec.tiers.managed) is not None:  # pods need to know no more of it
        tiers["remote"] = {"managed": True}
        if (
            managed.tls
            and (own := managed.tls.secret_ref)
            and own.name != names.remote_tls_name(cluster.name)
        ):
            tiers["remote"]["tls"] = own.name  # mounted by its name
    kept: Object = {
        "engine": {key: value for key, value in engine.items() if key not in ("image", "replicas")},
        "tiers": {key: value for key, value in tiers.items() if value or key != "memory"},
        "images": resolved_images(cluster, default_images),
    }
    no_news = ("transfer", CUDA_IPC)  # to a pod it is what Auto is
    if sidecar := dict(item for item in sidecar.items() if item[0] != "image" and item != no_news):
        kept["sidecar"] = sidecar
    return names.digest(wanted | kept)


def _selector(cluster: Cluster) -> dict[str, str]:
    return names.selector(cluster.name, names.ENGINE)


def _stateful_set(cluster: Cluster, default_images: Images, transfer: Transfer) -> Object:
    images, hashed = resolved_images(cluster, default_images), spec_hash(cluster, default_images)
    return {
        # The operator replaces pods itself: one at a time, by eviction, when the user changed something.
        "updateStrategy": {"type": "OnDelete"},
        "podManagementPolicy": "Parallel",
        "replicas": cluster.engine.replicas,
        "selector": {"matchLabels": _selector(cluster)},
        "serviceName": names.engine_name(cluster.name),
        "template": pod_template(cluster, images, hashed, transfer, _memory_size(cluster)),
    }


def _memory_size(cluster: Cluster) -> MemorySize:
    """It changes up to the upper bound of sizes that are chosen or recommended, by default four times what is
    declared: the tier's file has holes, and its tables are some 0.01 % of it."""
    _, most = cluster.spec.autoscaling.memory_bounds(cluster.memory.num_bytes)
    return MemorySize(cluster.memory_bytes, most)


def _sidecar_yaml(cluster: Cluster) -> str:
    """The sidecar's configuration file.

    The kubelet renews it under sidecars of older images too. They ignore keys that they do not know, so what
    a later version needs is a new key here: never a new meaning of a key, and never a flag.
    """
    config: Object = {"arena": paths.ARENA_PATH, "socket": paths.SOCKET_PATH}
    config |= {"http_port": names.SIDECAR_PORT, "log_format": "json"}
    if (transfer := cluster.spec.sidecar.transfer) != "Auto":
        config["transfer"] = transfer
    if (admit := cluster.spec.tiers.admit) != "All":
        config["admit"] = admit
    if (quota := cluster.memory.tenant_quota_percent) != 100:
        config["tenant_quota_percent"] = quota
    if external := cluster.spec.tiers.external:
        config["remote_url"] = external.url
    if owner := names.remote_owner(cluster):
        # The host is for people, and for sidecars that have no list (yet).
        host = names.remote_host(cluster, owner)
        config["remote_url"] = f"redis://{names.REMOTE_USER}@{host}:{names.REMOTE_PORT}"
        config["remote_shards_file"] = f"{paths.REMOTE_DIR}/{paths.SHARDS_FILE}"
        config["remote_password_file"] = f"{paths.REMOTE_AUTH_DIR}/password"
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
