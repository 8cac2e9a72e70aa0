"""The LMCacheCluster as a user writes it (spec) and as the operator reports on it (status)."""

from __future__ import annotations

import re
from typing import Any

from lmcache.units import SIZE_PATTERN, parse_quantity, parse_size
from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.grammar import IMAGE, REMOTE_URL, hosts_of

_NAME: dict[str, Any] = {"maxLength": 253, "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_SECRET_KEY: dict[str, Any] = {"maxLength": 253, "pattern": r"^[-._a-zA-Z0-9]+$"}
_MODEL: dict[str, Any] = {"maxLength": 512, "pattern": r"^[^-\s\x00-\x1f][^\s\x00-\x1f]*$"}
_MAP_BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
_PLUGIN_RESOURCE = "nvidia.com/gpu"
_PARALLEL_SIZE = "^(--(tensor|pipeline|data)[-_]parallel[-_]size|--nnodes|-tp|-pp|-dp)(=|$)"
# The longest child name is "<name>-engine-<ten-letter revision>" as a label value: at most 63.
_CLUSTER_NAME = "^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$"


def _matches(pattern: str, message: str) -> Rule:
    """For a pattern that would be no help as a message."""
    return Rule(f"self.matches(r'{pattern}')", message, lambda text: re.fullmatch(pattern, text) is not None)


def _size(path: str, least: str, most: str) -> dict[str, Any]:
    """Keywords of a field that holds an amount of bytes within bounds; ``path`` is what messages call it."""
    in_bounds = Rule(
        f"!isQuantity(self) || (quantity(self).compareTo(quantity('{least}')) >= 0 && "
        f"quantity(self).compareTo(quantity('{most}')) <= 0)",
        f"{path} must be between {least} and {most}",
        lambda size: parse_quantity(least) <= parse_quantity(size) <= parse_quantity(most),
    )
    is_size = _matches(SIZE_PATTERN, "must be an amount of bytes such as 64Gi or 0.5Ti")
    return {"maxLength": 20, "rules": (is_size, in_bounds)}


_IS_IMAGE = _matches(IMAGE, "must be an image such as registry.example/team/vllm:v1, by tag or digest")
_IMAGE: dict[str, Any] = {"maxLength": 512, "rules": (_IS_IMAGE,)}
CLUSTER_NAME = Rule(
    f"self.metadata.name.matches('{_CLUSTER_NAME}')",
    "metadata.name must start with a letter, hold only a-z, 0-9 and '-', and have at most 45 characters",
    lambda name: re.fullmatch(_CLUSTER_NAME, name) is not None,
)


class SecretKeyRef(Part):
    """One key of a Secret in the object's own namespace."""

    name: str = field("Name of the Secret, in the same namespace.", **_NAME)
    key: str = field("Key in the Secret.", default="token", **_SECRET_KEY)


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
        **_NAME,
    )
    runtime_class_name: str | None = field("RuntimeClass of the pods, e.g. nvidia.", **_NAME)


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

    image: str | None = field("Image with vLLM 0.29-0.33. Default: the operator's, see its help.", **_IMAGE)
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
        **_size("engine.sharedMemorySize", "64Mi", "16Ti"),
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
    priority_class_name: str | None = field("PriorityClass of the pods.", **_NAME)
    pod_template: dict[str, Any] = field(
        "Merged into the rendered pod: maps by key, containers, volumes, env and mounts by name (the "
        "containers are called engine, sidecar and payload).",
        default={},
        shape="PodTemplateSpec",
    )


class Sidecar(Part):
    """The process beside each engine that owns the pod's cache."""

    image: str | None = field("Sidecar image. Default: the one of the operator's version.", **_IMAGE)
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


class MemoryTier(Part):
    """Host memory of one pod."""

    size: str = field(
        "Bytes of the arena of each pod, e.g. 64Gi. A change reaches a pod when it is next replaced.",
        **_size("tiers.memory.size", "64Mi", "16Ti"),
    )
    tenant_quota_percent: int = field(
        "How much of the memory the rows of one tenant, that is of requests with one cache_salt, may take: "
        "a tenant that has as much makes room with its own. Requests without a salt are not limited. 100: no "
        "limit. A change replaces the pods, one at a time.",
        default=100,
        minimum=1,
        maximum=100,
    )

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return parse_size(self.size)


class DiskTier(Part):
    """A volume of each pod's own, made and deleted with the pod."""

    size: str = field(
        "Bytes of the volume, e.g. 500Gi. The tier takes 85 % of them: a file system needs some for itself, "
        "and gets slow when it is nearly full. A change reaches a pod when it is next replaced.",
        **_size("tiers.disk.size", "1Gi", "1024Ti"),
    )
    storage_class_name: str | None = field(
        "StorageClass of the volume, best one of local NVMe. Default: the Kubernetes cluster's own.", **_NAME
    )

    @property
    def volume_bytes(self) -> int:
        """Bytes of the volume."""
        return parse_size(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tier. It takes no more than nine tenths of what is free on an empty volume: 95 % of
        one of 1 GiB with ext4, 98 % of one of 100 GiB (mkfs.ext4 -m0)."""
        return self.volume_bytes * 85 // 100


class AuthSecretRef(Part):
    """Credentials of the remote tier."""

    name: str = field("Name of the Secret, in the same namespace.", **_NAME)
    username_key: str | None = field("Key of the user name. Default: Redis' default user.", **_SECRET_KEY)
    password_key: str = field("Key of the password.", default="password", **_SECRET_KEY)


class ExternalRemote(Part):
    """A Redis or Valkey the user runs."""

    url: str = field(
        "redis://host:port/db, without credentials. Several hosts, joined by commas, are shards. "
        "Also rediss:// (TLS), redis-sentinel://hosts/service, redis-cluster://hosts. "
        "Options: prefix, verify.",
        maxLength=512,
        rules=(
            Rule("!self.contains('@')", "credentials belong into authSecretRef", lambda url: "@" not in url),
            _matches(
                REMOTE_URL,
                "must be redis://host:port/db, redis-sentinel://host:port/service/db or "
                "redis-cluster://host:port (with TLS: rediss), ports from 1 to 65535; options: prefix, "
                "and with TLS verify=full, ca or none",
            ),
            Rule(None, "names a host twice", lambda url: len(set(hosts_of(url))) == url.count(",") + 1),
        ),
    )
    auth_secret_ref: AuthSecretRef | None = field("Credentials; mounted, never read.")


class RemoteTier(Part):
    """A cache that all pods share."""

    RULES = (
        Rule(
            "[has(self.managed), has(self.external), has(self.clusterRef)].filter(x, x).size() == 1",
            "exactly one of managed, external and clusterRef must be set",
            lambda tier: [tier.managed, tier.external, tier.cluster_ref].count(None) == 2,
        ),
        Rule(
            "has(self.external) || !(has(self.managed) || has(self.clusterRef))",
            "managed and clusterRef are not available in this version of the operator: use external",
            lambda tier: tier.external is not None,
        ),
    )

    external: ExternalRemote | None = field("A Redis or Valkey that exists already.")
    managed: dict[str, Any] | None = field("A Redis tier the operator runs. Not in this version.")
    cluster_ref: dict[str, Any] | None = field("The tier of another cluster. Not in this version.")


class Tiers(Part):
    """Where KV is kept, fastest first."""

    memory: MemoryTier = field("Host memory, per pod.")
    disk: DiskTier | None = field("A volume, per pod. Default: none.")
    remote: RemoteTier | None = field("A remote tier all pods share. Default: none.")
    admit: str = field(
        "Which chunks are written to the disk and remote tiers. All: every chunk, at once. OnReuse: those "
        "that were hit in memory, which spares volumes and networks where few prompts come again.",
        default="All",
        enum=["All", "OnReuse"],
    )

    @property
    def external(self) -> ExternalRemote | None:
        """The remote tier, if there is one."""
        return self.remote.external if self.remote else None

    @property
    def remote_auth(self) -> AuthSecretRef | None:
        """Credentials of the remote tier, if it needs any."""
        return self.external.auth_secret_ref if self.external else None


class ImageDefaults(Part):
    """The images of containers for which no ``image`` field names one."""

    policy: str = field(
        "Keep: those that the operator had when the cluster was made, so that its upgrade replaces no pod. "
        "Follow: those of the present operator; when it is upgraded, pods are replaced one at a time. A "
        "change to Follow and back moves the cluster to the present ones once.",
        default="Keep",
        enum=["Keep", "Follow"],
    )


class Spec(Part):
    """What an LMCacheCluster should be."""

    model: Model = field("What the engine serves.")
    engine: Engine = field("The inference engine; {} is one with all defaults.")
    sidecar: Sidecar = field("The cache beside each engine.", default={})
    images: ImageDefaults = field("Images where no field names one.", default={})
    tiers: Tiers = field("Where KV is kept.")


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
    conditions: list[Condition] = field("Aspects of the present state.", default=[], **_MAP_BY_TYPE)
