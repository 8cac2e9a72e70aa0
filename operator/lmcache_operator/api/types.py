"""The LMCacheCluster as a user writes it (spec) and as the operator reports on it (status)."""

# ruff: noqa: RUF009  (`field` makes a dataclasses.field; nothing is shared between instances)
from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from .fields import Rule, field
from .quantity import BYTES_PATTERN, parse_quantity

_NAME: dict[str, Any] = {"minLength": 1, "maxLength": 253, "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_SECRET_KEY: dict[str, Any] = {"minLength": 1, "maxLength": 253, "pattern": r"^[-._a-zA-Z0-9]+$"}
_IMAGE: dict[str, Any] = {"minLength": 1, "maxLength": 512, "pattern": r"^\S+$"}
_MODEL: dict[str, Any] = {"minLength": 1, "maxLength": 512, "pattern": r"^[^-\s]\S*$"}
_MAP_BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
_SMALLEST_MEMORY, _LARGEST_MEMORY = "64Mi", "16Ti"
_SMALLEST_MEMORY_BYTES, _LARGEST_MEMORY_BYTES = 64 * 2**20, 16 * 2**40
_PARALLELISM_FLAGS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


def flag_of(arg: str) -> str:
    """The option an argument sets, as the engine reads it: without its value, `_` as `-`."""
    name = arg.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


class TransferPreference(StrEnum):
    """What the user asks for in `sidecar.transfer`."""

    AUTO = "Auto"
    CUDA_IPC = "CudaIPC"
    SHARED_MEMORY = "SharedMemory"


@dataclass(frozen=True, kw_only=True)
class SecretKeyRef:
    """One key of a Secret in the object's own namespace."""

    name: str = field("Name of the Secret, in the same namespace.", **_NAME)
    key: str = field("Key in the Secret.", default="token", **_SECRET_KEY)


@dataclass(frozen=True, kw_only=True)
class Model:
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
    )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPUs of one engine pod."""

    count: int = field("GPUs of one pod; 0 for an engine on CPUs.", default=1, minimum=0, maximum=64)
    resource_name: str = field(
        "Extended resource a device plugin offers. Not used with deviceClassName.",
        default="nvidia.com/gpu",
        minLength=1,
        maxLength=253,
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
    )
    device_class_name: str | None = field(
        "DeviceClass for dynamic resource allocation. Engine and sidecar then name the same claim, so that "
        "the sidecar sees the engine's GPUs.",
        **_NAME,
    )
    runtime_class_name: str | None = field("RuntimeClass of the pods, e.g. nvidia.", **_NAME)

    @property
    def uses_claims(self) -> bool:
        """Whether the GPUs come by dynamic resource allocation."""
        return self.count > 0 and self.device_class_name is not None


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the engine splits the model over the GPUs of its pod."""

    tensor: int = field("Tensor parallel size.", default=1, minimum=1, maximum=64)
    pipeline: int = field("Pipeline parallel size.", default=1, minimum=1, maximum=64)

    @property
    def num_ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The inference engine: one StatefulSet of pods, each with a sidecar."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.gpu.count == 0 || self.parallelism.tensor * self.parallelism.pipeline == self.gpu.count",
            "parallelism.tensor x parallelism.pipeline must equal gpu.count: an engine runs in one pod",
            lambda engine: engine.gpu.count in (0, engine.parallelism.num_ranks),
        ),
    )

    image: str | None = field("Image with vLLM 0.29-0.32. Default: the operator's, see its help.", **_IMAGE)
    replicas: int = field("Engine pods; autoscalers change it.", default=1, minimum=0, maximum=1000)
    gpu: Gpu = field("GPUs of one pod.", default={})
    parallelism: Parallelism = field("How the model is split over the GPUs of a pod.", default={})
    args: list[str] = field(
        "More arguments for `vllm serve`. A --kv-transfer-config given here runs beside LMCache, in a "
        "MultiConnector.",
        default=[],
        maxItems=64,
        items={"maxLength": 4096},
        rules=(
            Rule(
                r"self.all(a, !a.matches('^(--(tensor|pipeline)[-_]parallel[-_]size|-tp|-pp)(=|$)'))",
                "set engine.parallelism instead of passing parallel sizes as arguments",
                lambda args: not any(flag_of(a) in _PARALLELISM_FLAGS for a in args),
            ),
        ),
    )
    pod_template: dict[str, Any] = field(
        "Merged into the rendered pod: maps by key, containers, volumes, env and mounts by name (the "
        "containers are called engine, sidecar and payload).",
        default={},
    )


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The process beside each engine that owns the pod's cache."""

    image: str | None = field("Sidecar image. Default: the one of the operator's version.", **_IMAGE)
    transfer: TransferPreference = field(
        "How sidecar and engine share KV: CudaIPC gives the sidecar sight of the engine's GPUs, SharedMemory "
        "does not, Auto takes CudaIPC where it is possible. Outcome and reason are in status.transfer.",
        default="Auto",
    )
    chunk_tokens: int = field(
        "Tokens of one chunk, the unit of storage; a multiple of the engine's block size.",
        default=256,
        minimum=16,
        maximum=8192,
        rules=(Rule("self % 16 == 0", "chunkTokens must be a multiple of 16", lambda n: n % 16 == 0),),
    )


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Host memory of one pod."""

    size: str = field(
        "Bytes of the arena of each pod, e.g. 64Gi. A change reaches a pod when it is next replaced.",
        maxLength=20,
        pattern=BYTES_PATTERN,
        rules=(
            Rule(
                f"!isQuantity(self) || (quantity(self).compareTo(quantity('{_SMALLEST_MEMORY}')) >= 0 && "
                f"quantity(self).compareTo(quantity('{_LARGEST_MEMORY}')) <= 0)",
                f"tiers.memory.size must be between {_SMALLEST_MEMORY} and {_LARGEST_MEMORY}",
                lambda size: _SMALLEST_MEMORY_BYTES <= parse_quantity(size) <= _LARGEST_MEMORY_BYTES,
            ),
        ),
    )

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return int(parse_quantity(self.size))


@dataclass(frozen=True, kw_only=True)
class AuthSecretRef:
    """Credentials of the remote tier."""

    name: str = field("Name of the Secret, in the same namespace.", **_NAME)
    username_key: str | None = field("Key of the user name. Default: Redis' default user.", **_SECRET_KEY)
    password_key: str = field("Key of the password.", default="password", **_SECRET_KEY)


@dataclass(frozen=True, kw_only=True)
class ExternalRemote:
    """A Redis or Valkey the user runs."""

    url: str = field(
        "redis://host:port/db, without credentials.",
        maxLength=512,
        pattern=r"^redis://[^\s/?#]+(/[0-9]+)?$",
        rules=(Rule("!self.contains('@')", "credentials belong into authSecretRef", lambda u: "@" not in u),),
    )
    auth_secret_ref: AuthSecretRef | None = field("Credentials; mounted, never read.")


_NOT_YET = "is not available in this version of the operator: use remote.external"


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """A cache that all pods share."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.managed), has(self.external), has(self.clusterRef)].filter(x, x).size() == 1",
            "exactly one of managed, external and clusterRef must be set",
            lambda r: [r.managed, r.external, r.cluster_ref].count(None) == 2,
        ),
        Rule(
            "!has(self.managed) || has(self.external) || has(self.clusterRef)",
            f"remote.managed {_NOT_YET}",
            lambda r: r.managed is None or r.external is not None or r.cluster_ref is not None,
        ),
        Rule(
            "!has(self.clusterRef) || has(self.external) || has(self.managed)",
            f"remote.clusterRef {_NOT_YET}",
            lambda r: r.cluster_ref is None or r.external is not None or r.managed is not None,
        ),
    )

    external: ExternalRemote | None = field("A Redis or Valkey that exists already.")
    managed: dict[str, Any] | None = field("A Redis tier the operator runs. Not in this version.")
    cluster_ref: dict[str, Any] | None = field("The tier of another cluster. Not in this version.")


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where KV is kept, fastest first."""

    memory: MemoryTier = field("Host memory, per pod.")
    remote: RemoteTier | None = field("A remote tier all pods share. Default: none.")

    @property
    def external(self) -> ExternalRemote | None:
        """The remote tier, if there is one."""
        return self.remote.external if self.remote else None

    @property
    def remote_auth(self) -> AuthSecretRef | None:
        """Credentials of the remote tier, if it needs any."""
        return self.external.auth_secret_ref if self.external else None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an LMCacheCluster should be."""

    model: Model = field("What the engine serves.")
    engine: Engine = field("The inference engine.", default={})
    sidecar: Sidecar = field("The cache beside each engine.", default={})
    tiers: Tiers = field("Where KV is kept.")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One aspect of the present state."""

    type: str = field("CamelCase name of the aspect.", maxLength=316)
    status: str = field("True, False or Unknown.", enum=["True", "False", "Unknown"])
    reason: str = field("CamelCase cause, for programs.", maxLength=1024)
    message: str = field("The same for people.", maxLength=32768)
    observed_generation: int = field("metadata.generation this was derived from.", format="int64")
    last_transition_time: str = field("When `status` last flipped.", format="date-time")


@dataclass(frozen=True, kw_only=True)
class TransferStatus:
    """How sidecar and engine share KV, and why."""

    mode: str = field("CudaIPC: the sidecar sees the engine's GPUs. SharedMemory: the engine copies.")
    reason: str = field("CamelCase cause.")


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the operator sees."""

    observed_generation: int | None = field("metadata.generation this was derived from.", format="int64")
    replicas: int | None = field("Engine pods that exist.")
    ready_replicas: int | None = field("Engine pods that are Ready.")
    selector: str | None = field("Label selector of the engine pods, for autoscalers.")
    transfer: TransferStatus | None = field("How sidecar and engine share KV.")
    conditions: list[Condition] = field("Aspects of the present state.", default=[], **_MAP_BY_TYPE)
