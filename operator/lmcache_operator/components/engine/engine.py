"""The engine component: a StatefulSet of engine pods, their Services, and who may connect to them.

The operator replaces pods one at a time when the user changes their spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import yaml

from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.components.engine.features import FEATURES, merged
from lmcache_operator.components.engine.gpus import CUDA_IPC, claim_spec, planned_transfer
from lmcache_operator.components.engine.kv_fields import discarded
from lmcache_operator.components.engine.pod import MemorySize, pod_template
from lmcache_operator.components.engine.status import engine_status
from lmcache_operator.components.images import lenders_in, recorded, recorded_in, recorded_lenders
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.pods import has_no_node, is_outdated, next_eviction
from lmcache_operator.pods.resize import initial_bytes, largest_in_place, resizing, sidecar_memory
from lmcache_operator.specs import Images, Object, names, paths, stateful
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_store.common.units import format_size

_HIGHEST_PORT = 65535
_HTTP_PORT = {"name": "http", "port": names.ENGINE_PORT, "protocol": "TCP", "targetPort": "http"}
_METRICS_PORT = {"name": "metrics", "port": names.SIDECAR_PORT, "protocol": "TCP", "targetPort": "metrics"}
_REPLACE = "To replace serving pods, one at a time, change an annotation in spec.engine.podTemplate"


class Engine(Component):
    """The engine pods of a cluster, and the objects that belong to them."""

    name = names.ENGINE
    used = (names.PEERS, names.REMOTE)
    kinds = (
        "ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "ResourceClaimTemplate",
        "StatefulSet",
    )  # fmt: skip

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """Children in creation order; the StatefulSet is last."""
        config_and_service = Ref("ConfigMap", names.config_name(cluster_name)), Ref("Service", cluster_name)
        return (*config_and_service, *super().refs(cluster_name))

    def referred(self, resource: Object) -> str:
        """Name of the cluster that a feature uses; empty: none. At most one feature can refer to one."""
        return next(filter(None, (feature.referred(resource) for feature in FEATURES)), "")

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster with the default images at the creation of the StatefulSet, and with its lenders.

        A lender that was deleted stays the same. Otherwise its deletion would replace the engine pods.
        """
        live = _stateful_set(observed)
        lenders = {**lenders_in(live), **cluster.lenders}
        return replace(cluster, default_images=recorded_in(live), lenders=lenders)

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The children that the spec asks for, in the order of ``refs``; none without ``spec.engine``."""
        if cluster.spec.engine is None:
            return []
        return self._children(cluster, context, context.images_for(cluster))

    def _children(self, cluster: Cluster, context: Context, default_images: Images) -> list[Object]:
        child = partial(names.child, cluster, names.ENGINE)
        # Sidecars follow only the files of features.
        config = {"sidecar.yaml": _sidecar_yaml(cluster)} | merged(lambda each: each.files(cluster))
        selector, policy = names.selector(cluster.name, names.ENGINE), _network_policy(cluster, context)
        client_service = {"ports": [_HTTP_PORT], "selector": selector}
        transfer = planned_transfer(cluster, context.allow_all_gpus)
        images, hashed = resolved_images(cluster, default_images), spec_hash(cluster, default_images)
        template = pod_template(cluster, images, hashed, transfer, _memory_size(cluster))
        stateful_set = stateful.stateful_set(cluster, names.ENGINE, cluster.engine.replicas, template)
        claim = claim_spec(cluster)
        records = recorded(default_images) | recorded_lenders(cluster)
        return [
            # The ServiceAccount has no token, because engine and sidecar never talk to the API server.
            child("ServiceAccount", automountServiceAccountToken=False),
            child("ConfigMap", names.config_name(cluster.name), data=config),
            child("Service", spec=stateful.headless_service(selector, _HTTP_PORT, _METRICS_PORT)),
            child("Service", cluster.name, spec=client_service),
            child("NetworkPolicy", spec=policy),
            child("PodDisruptionBudget", spec=stateful.disruption_budget(selector)),
            *([child("ResourceClaimTemplate", spec=claim)] if claim else []),
            child("StatefulSet", annotations=records, spec=stateful_set),
        ]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The steps that are due: changed children, one pod to replace, and pods to resize.

        Images that the user leaves open stay those that were recorded when the StatefulSet was created.
        """
        if cluster.spec.engine is None:
            return Plan()
        live = _stateful_set(observed)
        for feature in FEATURES:
            feature.check_change(observed, live)
        present = context.images_for(cluster)
        images = _default_images(cluster, present)
        wanted = self._children(cluster, context, images)
        due, stateful_set = differences(wanted, observed), wanted[-1]
        template = stateful_set["spec"]["template"]
        latest = [pod for pod in observed.pods if not is_outdated(pod, template)]
        resized = resizing(latest, cluster.memory_bytes, cluster.engine.gpu.count, observed.now)
        # A pod without a node cannot be resized, and the StatefulSet never replaces a pod by itself. So the
        # operator replaces such a pod if it was created with more memory than the template has now.
        made = initial_bytes(live["spec"]["template"]) if live else 0
        too_large = [pod for pod in observed.pods if has_no_node(pod) and 0 < made < initial_bytes(pod)]
        evict = next_eviction(live, observed.pods, template, too_large)
        transfer = planned_transfer(cluster, context.allow_all_gpus)
        return replace(
            due,
            make=tuple(child for feature in FEATURES for child in feature.made(cluster)),
            resize=resized.steps,
            num_starts=resized.num_starts,
            # ``due.lost`` has an entry for each child that this plan writes. Evict only after the template is
            # written, or the controller would recreate the old pod.
            evict=() if ref_of(stateful_set) in due.lost else evict,
            num_outdated=len(observed.pods) - len(latest),
            note=_size_note(cluster.memory_bytes, latest, resized.fixed, template, observed),
            fields={
                "resizing": resized,
                "discarded": discarded(observed, template),
                "images": _images_in_use(cluster, images, present),
                "transfer": {"requested": cluster.spec.sidecar.transfer, **transfer._asdict()},
                **merged(lambda each: each.plan_fields(cluster)),
            },
        )

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Status of the engine pods and their sidecars; empty for a cluster without engines."""
        has_engine = observed.children or "engine" in observed.resource["spec"]
        return engine_status(observed, plan) if has_engine else ComponentStatus()


def _stateful_set(observed: Observed) -> Object | None:
    return observed.children.get(Ref("StatefulSet", names.object_name(observed.name, names.ENGINE)))


def _default_images(cluster: Cluster, present: Images) -> Images:
    """Default images of a cluster, for containers whose image the user leaves open.

    The operator records its defaults when it creates the StatefulSet. An upgrade of the operator therefore
    changes no image of an existing cluster, unless ``spec.images.policy`` is Follow. If the record is lost,
    because the StatefulSet was deleted or edited, the pods get the present defaults.
    """
    if cluster.spec.images.policy == "Follow":
        return present
    return {name: cluster.default_images.get(name, image) for name, image in present.items()}


def _images_in_use(cluster: Cluster, recorded: Images, present: Images) -> Object:
    """``status.images``, with a message if the operator's present defaults differ."""
    used, latest = resolved_images(cluster, recorded), resolved_images(cluster, present)
    newer = [f"{name} {image}" for name, image in latest.items() if image != used[name]]
    remedy = "to use them, set spec.images.policy to Follow"
    message = f"the operator's defaults are {', '.join(newer)}; {remedy}"
    return used | ({"message": message} if newer else {})


def resolved_images(cluster: Cluster, default_images: Images) -> Images:
    """The images of a cluster's containers."""
    named = {names.ENGINE: cluster.engine.image, names.SIDECAR: cluster.spec.sidecar.image}
    return {name: image or default_images[name] for name, image in named.items()}


def spec_hash(cluster: Cluster, default_images: Images) -> str:
    """Hash of the user's settings for a pod, and of its images. A pod with another hash is replaced.

    Four kinds of changes do not change the hash, so that they replace no pod:
    - replicas and tier sizes: a resize of the cache never reloads a model;
    - what sidecars follow in a file, such as shares of tenants;
    - everything that the operator chooses: an upgrade of the operator restarts no pod;
    - an image that the user writes into the spec, if it equals the default that the pod already runs.
    """
    settings = declared(cluster.spec)
    engine, sidecar = settings.pop("engine", {}), settings.pop("sidecar", {})
    for part in ("autoscaling", "clients", "images", "router"):
        settings.pop(part, None)
    tiers = settings.setdefault("tiers", {})
    tiers.get("memory", {}).pop("size", None)
    for feature in FEATURES:
        feature.hashed(cluster, settings)
    if not tiers.get("memory"):
        tiers.pop("memory", None)
    unhashed = ("image", "prefill", "replicas")
    settings["engine"] = {key: value for key, value in engine.items() if key not in unhashed}
    settings["images"] = resolved_images(cluster, default_images)
    if cluster.events_reader:
        settings["events"] = True
    if cluster.tokenizes_for_router:
        settings["tokenizes"] = True
    if secrets := cluster.spec.images.pull_secrets:
        settings["pull_secrets"] = secrets
    same_as_auto = ("transfer", CUDA_IPC)  # renders the same pod as Auto
    if sidecar := dict(item for item in sidecar.items() if item[0] != "image" and item != same_as_auto):
        settings["sidecar"] = sidecar
    return names.digest(settings)


def _memory_size(cluster: Cluster) -> MemorySize:
    """Present size of a memory tier, and the largest size that it may grow to while the pod runs.

    The limit is the upper bound of autoscaling, by default four times the declared size. It costs little: the
    tier's file is sparse, and its tables take about 0.01 % of the largest size.
    """
    _, max_bytes = cluster.spec.autoscaling.memory_bounds(cluster.memory.num_bytes)
    return MemorySize(cluster.memory_bytes, max_bytes)


def _size_note(
    wanted: int, pods: Sequence[Object], fixed: Sequence[str], template: Object, observed: Observed
) -> str:
    """Why pods that match the spec keep other sizes of tiers, and what to do; empty: none does.

    ``fixed``: names of the pods whose memory tier cannot get the ``wanted`` bytes.
    """
    sentences, remedy = list[str](), _REPLACE
    if present := [largest_in_place(pod) for pod in pods if pod["metadata"]["name"] in fixed]:
        number = f"{len(present)} engine pod{'s' if len(present) > 1 else ''}"
        bound = f"{'up to' if wanted > max(present) else 'only'} {format_size(max(present))} while running"
        needs = f"{format_size(wanted)} (spec.tiers.memory.size) needs new pods"
        sentences.append(f"{number} can have {bound}: {needs}")
        limit = (observed.largest or {}).get("memory")
        if limit is not None and limit < sidecar_memory(wanted):
            remedy = f"The largest node has {format_size(float(limit))}, so a new pod would not start"
    if former := sum(any(each.has_former_size(pod, template) for each in FEATURES) for pod in pods):
        sentences.append(f"A change of spec.tiers.disk.size needs new pods: {former} have the former size")
    return ". ".join([*sentences, remedy]) if sentences else ""


def _sidecar_yaml(cluster: Cluster) -> str:
    """The sidecar's configuration file.

    The kubelet also updates it in pods with older sidecar images, which ignore unknown keys. A new setting
    therefore needs a new key: never a new meaning of an existing key, and never a command-line flag.
    """
    config: Object = {"arena": paths.ARENA_PATH, "socket": paths.SOCKET_PATH}
    config |= {"http_port": names.SIDECAR_PORT, "log_format": "json"}
    if (transfer := cluster.spec.sidecar.transfer) != "Auto":
        config["transfer"] = transfer
    if (admit := cluster.spec.tiers.admit) != "All":
        config["admit"] = admit
    return str(yaml.safe_dump(config | merged(lambda each: each.config(cluster)), sort_keys=True))


def _network_policy(cluster: Cluster, context: Context) -> Object:
    """Allow only scrapers and the operator to reach the sidecar's port.

    Ports of features have senders of their own, and only the router reads KV events. Clients reach the other
    ports, and the router that of the engine. Egress stays open.
    """
    metrics = stateful.scrapers()
    if context.operator_namespace:
        # The API server sets this label itself, so no user can claim the name of another namespace.
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": context.operator_namespace}}
        metrics.append(
            {"namespaceSelector": namespace, "podSelector": {"matchLabels": names.OPERATOR_LABELS}}
        )
    senders: dict[int, list[Object]] = {names.SIDECAR_PORT: metrics}
    for feature in FEATURES:
        engines = stateful.from_pods({names.COMPONENT_LABEL: names.ENGINE} | feature.labels(cluster))
        senders |= {port: [engines] for port in feature.ports(cluster).values()}
    events, last = range(0), dict[int, Object]()
    if reader := cluster.events_reader:
        # Each data-parallel rank publishes on the port after that of the rank before.
        events = range(names.EVENTS_PORT, names.EVENTS_PORT + cluster.engine.parallelism.data)
        senders[names.EVENTS_PORT] = [stateful.from_pods(names.selector(reader, names.ROUTER))]
        last = {names.EVENTS_PORT: {"endPort": events[-1]}} if len(events) > 1 else {}
    ranges = _open_ranges(sorted({*senders, *events}))
    other_ports = [
        *({"endPort": last, "port": first, "protocol": "TCP"} for first, last in ranges),
        {"endPort": _HIGHEST_PORT, "port": 1, "protocol": "UDP"},
    ]
    if cluster.spec.router and cluster.spec.clients is not None:
        senders[names.ENGINE_PORT] = [stateful.from_pods(names.selector(cluster.name, names.ROUTER))]
    limited = [
        {"from": allowed, "ports": [{"port": port, "protocol": "TCP"} | last.get(port, {})]}
        for port, allowed in senders.items()
    ]
    selector = names.selector(cluster.name, names.ENGINE)
    return stateful.network_policy(selector, *stateful.from_clients(cluster.spec, other_ports), *limited)


def _open_ranges(restricted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last port of each range between these ports, which are in ascending order."""
    edges = [0, *restricted, _HIGHEST_PORT + 1]
    return ((before + 1, after - 1) for before, after in pairwise(edges) if after - before > 1)
