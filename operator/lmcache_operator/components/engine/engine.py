"""The engine component: StatefulSets of engine pods, their Services, and who may connect to them.

The operator replaces pods one at a time when the user changes their spec. If an engine spreads over several
nodes, its pods are replaced together, one engine at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import yaml

from lmcache_operator.api.blend import is_off
from lmcache_operator.api.parse import Cluster, declared
from lmcache_operator.components.engine.features import FEATURES, merged
from lmcache_operator.components.engine.gpus import CUDA_IPC, claim_spec, planned_transfer
from lmcache_operator.components.engine.groups import group_secrets, pod_objects, with_pod_groups
from lmcache_operator.components.engine.kv_fields import discarded
from lmcache_operator.components.engine.pod import MemorySize, pod_template
from lmcache_operator.components.engine.status import engine_status
from lmcache_operator.components.images import lenders_in, recorded, recorded_in, recorded_lenders
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.groups import Group, groups_of, next_eviction, num_nodes, sets_of, staying
from lmcache_operator.pods.pods import has_no_node, is_outdated, is_ready
from lmcache_operator.pods.resize import initial_bytes, largest_in_place, resizing, sidecar_memory
from lmcache_operator.specs import Images, Object, names, paths, stateful
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.objects import PodTemplate
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
    group_kinds = ("NetworkPolicy", "PodGroup", "StatefulSet")

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """Children in creation order; the StatefulSet is last."""
        config_and_service = Ref("ConfigMap", names.config_name(cluster_name)), Ref("Service", cluster_name)
        return (*config_and_service, *super().refs(cluster_name))

    def group_refs(self, resource: Object, children: Mapping[Ref, Object]) -> Iterable[Ref] | None:
        """Children of each engine over several nodes.

        Such engines have records on the Service. If only the Service is missing, there may be such engines.
        """
        name, engine = resource["metadata"]["name"], dig(resource, "spec", "engine")
        service = children.get(_service(name))
        if (nodes := num_nodes(resource)) == 1:
            return () if (recorded_in(service) if service else engine and children) else None
        replicas = dig(engine, "replicas")
        numbers = range(max(1, replicas) if isinstance(replicas, int) else 1)
        kinds = ("NetworkPolicy", "StatefulSet")
        refs = (Ref(kind, names.group_name(name, n)) for n in numbers for kind in kinds)
        # PodGroups come last, because a group may have none, and only the first missing objects are read.
        return chain(refs, (Ref("PodGroup", names.pod_group_name(name, n, nodes)) for n in numbers))

    def referred(self, resource: Object) -> str:
        """Name of the cluster that a feature uses; empty: none. At most one feature can refer to one."""
        return next(filter(None, (feature.referred(resource) for feature in FEATURES)), "")

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster with the default images at the creation of its pods, and with its lenders.

        A lender that was deleted stays the same. Otherwise its deletion would replace the engine pods.
        """
        live = next((owner for _, owner in sets_of(observed)), None)
        lenders = {**lenders_in(live), **cluster.lenders}
        return replace(cluster, default_images=recorded_in(live), lenders=lenders)

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The children that the spec asks for, in the order of ``refs``; none without ``spec.engine``."""
        if cluster.spec.engine is None:
            return []
        images = context.images_for(cluster)
        template, has_groups = _template(cluster, context, images), cluster.engine.nodes > 1
        return _children(cluster, context, images, template, _wanted(cluster), has_groups)

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The steps that are due: changed children, pods to replace, and pods to resize.

        Images that the user leaves open stay those that were recorded when the StatefulSet was created.
        """
        if cluster.spec.engine is None:
            return Plan()
        live = next((owner for _, owner in sets_of(observed)), None)
        for feature in FEATURES:
            feature.check_change(observed, live)
        present = context.images_for(cluster)
        images = _default_images(cluster, present)
        pod, groups = _template(cluster, context, images), groups_of(observed)
        template: Object = {**pod}
        sizes = _sizes(cluster, groups, template)
        numbers = {names.group_number(observed.name, ref.name) for ref in observed.children}
        has_groups = cluster.engine.nodes > 1 or bool(numbers - {None})
        children = _children(cluster, context, images, pod, sizes, has_groups)
        if observed.serves_pod_groups and cluster.engine.nodes > 1:
            children = with_pod_groups(cluster, children, observed)
        made = [child for feature in FEATURES for child in feature.made(cluster)]
        due = differences(children, observed)
        # A pod starts only with the Secret, so it may be missing before the first pods, and while pods start.
        if due.lost or any(not (is_ready(pod) or has_no_node(pod)) for pod in observed.pods):
            made += group_secrets(cluster)
        latest = [pod for pod in observed.pods if not is_outdated(pod, template)]
        resized = resizing(latest, cluster.memory_bytes, cluster.engine.gpu.count, observed.now)
        transfer = planned_transfer(cluster, context.allow_all_gpus)
        # ``due.lost`` has an entry for each child that this plan writes. Evict only after the template is
        # written, or the controller would recreate the old pod. New groups have no pods.
        is_written = any(ref.kind == "StatefulSet" and ref in observed.children for ref in due.lost)
        return replace(
            due,
            make=tuple(made),
            resize=resized.steps,
            num_starts=resized.num_starts,
            evict=() if is_written else _eviction(groups, observed, template),
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


def _service(cluster_name: str) -> Ref:
    return Ref("Service", names.object_name(cluster_name, names.ENGINE))


def _wanted(cluster: Cluster) -> dict[int | None, int]:
    """Number of pods that the spec asks for, by the number of their group; None: pods without a group.

    The first StatefulSet always exists, because it has the records.
    """
    replicas, nodes = cluster.engine.replicas, cluster.engine.nodes
    return (dict.fromkeys(range(replicas), nodes) or {0: 0}) if nodes > 1 else {None: replicas}


def _sizes(cluster: Cluster, groups: Sequence[Group], template: Object) -> dict[int | None, int]:
    """Number of pods of each StatefulSet now, by the number of its group.

    A StatefulSet that the spec no longer asks for has 0 pods, and is deleted after its last pod has ended. An
    engine keeps its size until its pods of a former spec end. A further pod would wait for them, and the
    disruption budget would count it as unavailable, and so would never allow their replacement.
    """
    wanted = _wanted(cluster)
    held = {
        group.number: group.size
        for group in groups
        if group.number is not None and group.number in wanted
        if any(is_outdated(pod, template) for pod in staying(group.pods))
    }
    return {group.number: 0 for group in groups if group.pods} | wanted | held


def _template(cluster: Cluster, context: Context, default_images: Images) -> PodTemplate:
    """The template of all engine pods."""
    images, hashed = resolved_images(cluster, default_images), spec_hash(cluster, default_images)
    transfer = planned_transfer(cluster, context.allow_all_gpus)
    return pod_template(cluster, images, hashed, transfer, _memory_size(cluster))


def _children(
    cluster: Cluster,
    context: Context,
    default_images: Images,
    template: PodTemplate,
    sizes: Mapping[int | None, int],
    has_groups: bool,
) -> list[Object]:
    """The children in creation order, the StatefulSets last. ``sizes``: see ``_sizes``."""
    child = partial(names.child, cluster, names.ENGINE)
    # Sidecars follow only the files of features.
    config = {"sidecar.yaml": _sidecar_yaml(cluster)} | merged(lambda each: each.files(cluster))
    selector = names.selector(cluster.name, names.ENGINE)
    client_service = {"ports": [_HTTP_PORT], "selector": stateful.serving_pods(cluster)}
    claim = claim_spec(cluster)
    records = recorded(default_images) | recorded_lenders(cluster)
    headless = stateful.headless_service(selector, _HTTP_PORT, _METRICS_PORT)
    return [
        # The ServiceAccount has no token, because engine and sidecar never talk to the API server.
        child("ServiceAccount", automountServiceAccountToken=False),
        child("ConfigMap", names.config_name(cluster.name), data=config),
        # The annotation only says that there are groups. Who may write Services must not choose images.
        child("Service", annotations=records if has_groups else None, spec=headless),
        child("Service", cluster.name, spec=client_service),
        child("NetworkPolicy", spec=_network_policy(cluster, context, has_groups)),
        child("PodDisruptionBudget", spec=stateful.disruption_budget(selector)),
        *([child("ResourceClaimTemplate", spec=claim)] if claim else []),
        *chain.from_iterable(pod_objects(cluster, *item, template, records) for item in sizes.items()),
    ]


def _eviction(groups: Sequence[Group], observed: Observed, template: Object) -> tuple[Object, ...]:
    """The pods to replace now: one pod, or pods of one engine."""
    # A pod without a node cannot be resized, and the StatefulSet never replaces a pod by itself. So the
    # operator replaces such a pod if it was created with more memory than the template has now.
    made = max((initial_bytes(owner["spec"]["template"]) for _, owner in sets_of(observed)), default=0)
    too_large = [pod for pod in observed.pods if has_no_node(pod) and 0 < made < initial_bytes(pod)]
    return next_eviction(groups, template, too_large)


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
    unhashed = {"image", "prefill", "replicas", *(("blend",) if is_off(cluster.engine.blend) else ())}
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
    of_memory = declared(cluster.memory).items()
    config |= {f"memory_{name}": value for name, value in of_memory if name != "size"}
    return str(yaml.safe_dump(config | merged(lambda each: each.config(cluster)), sort_keys=True))


def _network_policy(cluster: Cluster, context: Context, has_groups: bool) -> Object:
    """Allow only scrapers and the operator to reach the sidecar's port.

    Ports of features have senders of their own, and only the router reads KV events. Clients reach the other
    ports, and the router that of the engine. Egress stays open.

    Clients of an engine over several nodes reach only its HTTP server: on its other ports, the pods exchange
    prompts without authentication. ``has_groups``: such engines exist, and may still end.
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
    other_ports: list[Object] = [
        *({"endPort": last, "port": first, "protocol": "TCP"} for first, last in ranges),
        {"endPort": _HIGHEST_PORT, "port": 1, "protocol": "UDP"},
    ]
    if has_groups:
        other_ports = [{"port": names.ENGINE_PORT, "protocol": "TCP"}]
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
