"""The LMCacheCluster as a user writes it (spec) and as the operator reports on it (status)."""

from __future__ import annotations

import re
from typing import Any

from lmcache.units import parse_quantity
from lmcache_operator.api.autoscaling import Autoscaling, AutoscalingStatus
from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import CLUSTER_NAME_PATTERN, IMAGE_NAME, NAME, SECRET_KEY, size_between
from lmcache_operator.api.tiers import Tiers

_MODEL: dict[str, Any] = {"maxLength": 512, "pattern": r"^[^-\s\x00-\x1f][^\s\x00-\x1f]*$"}
_MAP_BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
_PLUGIN_RESOURCE = "nvidia.com/gpu"
_PARALLEL_SIZE = "^(--(tensor|pipeline|data)[-_]parallel[-_]size|--nnodes|-tp|-pp|-dp)(=|$)"
CLUSTER_NAME = Rule(
    f"self.metadata.name.matches('{CLUSTER_NAME_PATTERN}')",
    "metadata.name must start with a letter, hold only a-z, 0-9 and '-', and have at most 45 characters",
    lambda name: re.fullmatch(CLUSTER_NAME_PATTERN, name) is not None,
)


class SecretKeyRef(Part):
    """One key of a Secret in the object's own namespace."""

    name: str = field("Name of the Secret, in the same namespace.", **NAME)
    key: str = field("Key in the Secret.", default="token", **SECRET_KEY)


class Model(Part):
    """What the engine serves."""

    name: str = field(
        "Model to serve: a name on the model hub, or a path in the model volume (mounted at /models). It "
        "cannot be changed: while pods are replaced one by one, one Service would answer with two models.",
        rules=(Rule("self == oldSelf", "cannot be changed: create another LMCacheCluster", lambda _: True),),
        **_MODEL,
    )
    revision: str | None = field("Revision on the model hub: branch, tag or commit.", **_MODEL)
    token_secret_ref: SecretKeyRef | None = field("Token for the model hub; mounted, never read.")
    volume: dict[str, Any] = field(
        "Where model files are kept: any Kubernetes volume source, such as a persistentVolumeClaim. "
        "Default: an emptyDir, so that each pod downloads the model.",
        default={},
        shape="Volume",
    )


class Gpu(Part):
    """The GPUs of one engine pod: by a device plugin, or by a claim (dynamic resource allocation)."""

    RULES = (
        Rule(
            f"!has(self.deviceClassName) || self.resourceName == '{_PLUGIN_RESOURCE}'",
            "deviceClassName and resourceName exclude each other: GPUs come by claims or by a device plugin",
            lambda gpu: gpu.device_class_name is None or gpu.resource_name == _PLUGIN_RESOURCE,
        ),
    )

    count: int = field("GPUs of one pod; 0 for an engine on CPUs.", default=1, minimum=0, maximum=64)
    resource_name: str = field(
        "Extended resource a device plugin offers; of no meaning beside deviceClassName.",
        default=_PLUGIN_RESOURCE,
        maxLength=253,
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
    )
    device_class_name: str | None = field(
        "DeviceClass, e.g. gpu.nvidia.com: GPUs come by a claim that engine and sidecar share (Kubernetes >= "
        "1.34). Default: a device plugin's resourceName.",
        **NAME,
    )
    runtime_class_name: str | None = field("RuntimeClass of the pods, e.g. nvidia.", **NAME)


class Parallelism(Part):
    """How the engine splits the model over the GPUs of its pod."""

    tensor: int = field("Tensor parallel size.", default=1, minimum=1, maximum=64)
    pipeline: int = field("Pipeline parallel size.", default=1, minimum=1, maximum=64)

    @property
    def num_ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor * self.pipeline


class Engine(Part):
    """The inference engine: one StatefulSet of pods, each with a sidecar."""

    RULES = (
        Rule(
            "self.gpu.count == 0 || self.parallelism.tensor * self.parallelism.pipeline == self.gpu.count",
            "parallelism.tensor x parallelism.pipeline must equal gpu.count: an engine runs in one pod",
            lambda engine: engine.gpu.count in (0, engine.parallelism.num_ranks),
        ),
    )

    image: str | None = field(
        "Image with vLLM 0.29-0.33. Default: the operator's, see its help.", **IMAGE_NAME
    )
    replicas: int = field("Engine pods; autoscalers change it.", default=1, minimum=0, maximum=1000)
    gpu: Gpu = field("GPUs of one pod.", default={})
    parallelism: Parallelism = field("How the model is split over the GPUs of a pod.", default={})
    args: list[str] = field(
        "More arguments for `vllm serve`, without those that the cache depends on.",
        default=[],
        maxItems=64,
        items={"type": "string", "maxLength": 4096, "pattern": r"^[^\x00]*$"},
        rules=(
            Rule(
                f"self.all(a, !a.matches('{_PARALLEL_SIZE}'))",
                "set engine.parallelism, and engine.replicas for more engines, instead of passing parallel "
                "sizes as arguments",
                lambda args: not any(re.search(_PARALLEL_SIZE, arg) for arg in args),
            ),
        ),
    )
    env: list[dict[str, Any]] = field(
        "More environment variables of the engine's container.",
        default=[],
        maxItems=256,
        shape="Container.env",
    )
    resources: dict[str, Any] = field(
        "CPU and memory of the engine's container; its GPUs are those of gpu. Default: requests of 1 CPU and "
        "4 GiB for each worker (tensor x pipeline), without those that a limit of yours stands for.",
        default={},
        shape="Container.resources",
    )
    shared_memory_size: str | None = field(
        "Most that the engine's workers may have in /dev/shm, which is memory of the pod. Default: 8Gi.",
        **size_between("engine.sharedMemorySize", "64Mi", "16Ti"),
    )
    node_selector: dict[str, Any] = field(
        "Labels of the nodes that pods may run on.", default={}, shape="PodSpec.nodeSelector"
    )
    tolerations: list[dict[str, Any]] = field(
        "Taints of nodes that pods tolerate.", default=[], maxItems=64, shape="PodSpec.tolerations"
    )
    topology_spread_constraints: list[dict[str, Any]] = field(
        "How pods are spread over nodes and zones. Without a labelSelector: the engine pods of this cluster.",
        default=[],
        maxItems=16,
        shape="PodSpec.topologySpreadConstraints",
    )
    priority_class_name: str | None = field("PriorityClass of the pods.", **NAME)
    pod_template: dict[str, Any] = field(
        "Merged into the rendered pod: maps by key, containers, volumes, env and mounts by name (the "
        "containers are called engine, sidecar and payload).",
        default={},
        shape="PodTemplateSpec",
    )


class Sidecar(Part):
    """The process beside each engine that owns the pod's cache."""

    image: str | None = field("Sidecar image. Default: the one of the operator's version.", **IMAGE_NAME)
    chunk_tokens: int = field(
        "Tokens of one chunk, the unit of storage; a multiple of the engine's block size.",
        default=256,
        minimum=16,
        maximum=8192,
        multipleOf=16,
    )
    payload: str = field(
        "How the connector comes into the engine's container. InitContainer: copied out of the sidecar's "
        "image. ImageVolume: that image is mounted, which takes no time and no space, on nodes that can "
        "(Kubernetes >= 1.35, containerd >= 2.1, and a runtime that does not mount images noexec).",
        default="InitContainer",
        enum=["InitContainer", "ImageVolume"],
    )
    transfer: str = field(
        "Who copies KV out of the GPUs. CudaIPC: the sidecar, which needs to see the engine's: by "
        "gpu.deviceClassName, or by an operator that runs with --allow-all-gpus-sidecar. SharedMemory: the "
        "engine. Auto: the sidecar where it can. Where CudaIPC can't be had the engine copies, and Degraded "
        "says why.",
        default="Auto",
        enum=["Auto", "CudaIPC", "SharedMemory"],
    )


class ImageDefaults(Part):
    """The images of containers for which no ``image`` field names one."""

    policy: str = field(
        "Keep: those that the operator had when the cluster was made, so that its upgrade replaces no pod. "
        "Follow: those of the present operator; when it is upgraded, pods are replaced one at a time. A "
        "change to Follow and back moves the cluster to the present ones once.",
        default="Keep",
        enum=["Keep", "Follow"],
    )


def _within(path: str, operator: str, bound: str) -> str:
    """In CEL, of two sizes; what is no size is refused by its own rule."""
    own, other = f"self.{path}", f"self.{bound}"
    compared = f"quantity({own}).compareTo(quantity({other})) {operator} 0"
    return f"(!isQuantity({own}) || !isQuantity({other}) || {compared})"


_NO_MEMORY_BOUNDS = "!has(self.autoscaling) || !has(self.autoscaling.memory) || !has(self.tiers.memory)"


class Spec(Part):
    """What an LMCacheCluster should be."""

    RULES = (
        Rule(
            "has(self.engine) == has(oldSelf.engine)",
            "engine cannot be added or removed: create another LMCacheCluster",
            lambda _: True,
        ),
        Rule(
            "has(self.engine) == has(self.model)",
            "model and engine belong together: engine: {} has all defaults, and without both it is a remote "
            "tier alone",
            lambda spec: (spec.engine is None) == (spec.model is None),
        ),
        Rule(
            "!has(self.engine) || has(self.tiers.memory)",
            "tiers.memory is required: every engine has one",
            lambda spec: spec.engine is None or spec.tiers.memory is not None,
        ),
        Rule(
            "has(self.engine) || (has(self.tiers.remote) && has(self.tiers.remote.managed) && "
            "!has(self.tiers.memory) && !has(self.tiers.disk))",
            "without an engine, tiers.remote.managed is all that a cluster has",
            lambda spec: (
                spec.engine is not None
                or (spec.tiers.managed is not None and not spec.tiers.memory and not spec.tiers.disk)
            ),
        ),
        Rule(
            "!has(self.autoscaling) || has(self.engine) || "
            "!(has(self.autoscaling.memory) || has(self.autoscaling.remote))",
            "without an engine nothing is looked up: set autoscaling at a cluster with one",
            lambda spec: spec.engine is not None or not (spec.autoscaling.memory or spec.autoscaling.remote),
        ),
        Rule(
            "!has(self.autoscaling) || !has(self.autoscaling.remote) || !has(self.engine) || "
            "(has(self.tiers.remote) && has(self.tiers.remote.managed))",
            "autoscaling.remote needs tiers.remote.managed: the operator changes no servers but its own",
            lambda spec: spec.autoscaling.remote is None or not spec.engine or spec.tiers.managed is not None,
        ),
        Rule(
            f"{_NO_MEMORY_BOUNDS} || {_within('tiers.memory.size', '<=', 'autoscaling.memory.maxSize')} && "
            f"(!has(self.autoscaling.memory.minSize) || "
            f"{_within('tiers.memory.size', '>=', 'autoscaling.memory.minSize')})",
            "tiers.memory.size must be within autoscaling.memory.minSize and maxSize: it is where it starts",
            lambda spec: _is_memory_within(spec),
        ),
        Rule(
            "!has(self.autoscaling) || !has(self.autoscaling.remote) || !has(self.tiers.remote) || "
            "!has(self.tiers.remote.managed) || "
            "(self.autoscaling.remote.minShards <= self.tiers.remote.managed.shards && "
            "self.tiers.remote.managed.shards <= self.autoscaling.remote.maxShards)",
            "tiers.remote.managed.shards must be within autoscaling.remote.minShards and maxShards: it is "
            "where it starts",
            lambda spec: _are_shards_within(spec),
        ),
    )

    model: Model | None = field("What the engine serves.")
    engine: Engine | None = field(
        "The inference engine; {} is one with all defaults. Without it the cluster is a managed remote tier "
        "alone, which other clusters may refer to."
    )
    sidecar: Sidecar = field("The cache beside each engine.", default={})
    images: ImageDefaults = field("Images where no field names one.", default={})
    tiers: Tiers = field("Where KV is kept.")
    autoscaling: Autoscaling = field("How large tiers should be, by what they gain and cost.", default={})


def _is_memory_within(spec: Spec) -> bool:
    bounds, memory = spec.autoscaling.memory, spec.tiers.memory
    if bounds is None or memory is None:
        return True
    size = parse_quantity(memory.size)
    least = size if bounds.min_size is None else parse_quantity(bounds.min_size)
    return least <= size <= parse_quantity(bounds.max_size)


def _are_shards_within(spec: Spec) -> bool:
    bounds, managed = spec.autoscaling.remote, spec.tiers.managed
    return bounds is None or managed is None or bounds.min_shards <= managed.shards <= bounds.max_shards


class Condition(Part):
    """One aspect of the present state."""

    type: str = field("CamelCase name of the aspect.", maxLength=316)
    status: str = field("True, False or Unknown.", enum=["True", "False", "Unknown"])
    reason: str = field("CamelCase cause, for programs.", maxLength=1024)
    message: str = field("The same for people.", maxLength=32768)
    observed_generation: int = field("metadata.generation this was derived from.", format="int64")
    last_transition_time: str = field("When `status` last flipped.", format="date-time")


class TransferStatus(Part):
    """Who copies KV out of the GPUs."""

    requested: str | None = field("What spec.sidecar.transfer asks for.")
    mode: str | None = field("CudaIPC: the sidecars of all pods. SharedMemory: the engine, in one at least.")
    reason: str | None = field("CamelCase cause, for programs.")
    message: str | None = field("The same for people.")


class ImagesStatus(Part):
    """Images that new pods get."""

    engine: str | None = field("Of the engine.")
    sidecar: str | None = field("Of the sidecar, and of the client in the engine.")
    message: str | None = field("Which other images the operator has as its defaults, and how to get them.")


class RemoteStatus(Part):
    """The servers of the remote tier."""

    shards: int | None = field("Shards that rows are written to.")
    ready_shards: int | None = field("Those of them that are Ready.")
    previous_shards: int | None = field("Shards before a change; rows are looked for there, too.")
    previous_until: str | None = field("Up to when.", format="date-time")
    used_bytes: int | None = field(
        "Memory in use, of all servers together, where sidecars may ask for it. A tier without engines of "
        "its own says what the clusters that use it told, with up to 15 minutes of delay.",
        format="int64",
    )
    evicted: int | None = field(
        "Values that servers removed to make room, since a sidecar runs.", format="int64"
    )


class HitPercent(Part):
    """How much each tier had, and none nearer to the engine, of the tokens that requests looked up."""

    engine: int | None = field("The engines' own prefix caches.")
    memory: int | None = field("Memory.")
    disk: int | None = field("Disk.")
    remote: int | None = field("The remote tier.")


class Status(Part):
    """What the operator sees."""

    observed_generation: int | None = field("metadata.generation this was derived from.", format="int64")
    replicas: int | None = field("Engine pods that exist.")
    ready_replicas: int | None = field("Engine pods that are Ready.")
    selector: str | None = field("Label selector of the engine pods, for autoscalers.")
    images: ImagesStatus | None = field(
        "Images that new pods of the engine get; injected pods get the operator's present defaults."
    )
    transfer: TransferStatus | None = field("Who copies KV out of the GPUs.")
    hit_percent: HitPercent | None = field("Hits by tier, in per cent, since the pods run.")
    remote: RemoteStatus | None = field("The remote tier.")
    autoscaling: AutoscalingStatus | None = field("What sizes of tiers would be best, and why.")
    conditions: list[Condition] = field("Aspects of the present state.", default=[], **_MAP_BY_TYPE)
