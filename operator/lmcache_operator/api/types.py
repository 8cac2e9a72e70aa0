"""The LMCacheCluster: the spec that a user writes, and the status that the operator reports."""

from __future__ import annotations

from typing import Any, Literal

from lmcache_operator.api.autoscaling import SPEC_RULES as AUTOSCALING_RULES
from lmcache_operator.api.autoscaling import AutoscalingSpec, AutoscalingStatus
from lmcache_operator.api.blend import ENGINE_RULES, Blend
from lmcache_operator.api.clients import CLIENTS, MAX_CLIENTS
from lmcache_operator.api.engine_kinds import CHUNK_TOKENS, ENGINE_KINDS, VERSIONS, VLLM
from lmcache_operator.api.engine_pods import NO_PARALLEL_SIZES, GpuSpec, Parallelism, Prefill, PrefillStatus
from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.images import ImageDefaults, ImagesStatus
from lmcache_operator.api.keywords import ARGUMENTS, IMAGE_NAME, NAME, SECRET_KEY, needs_engine, size_between
from lmcache_operator.api.router import Router, RouterStatus
from lmcache_operator.api.tenants import SPEC_RULES as TENANTS_RULES
from lmcache_operator.api.tenants import TENANTS_STATUS, TenantsSpec, TenantStatus
from lmcache_operator.api.tiers import Tiers

_MODEL: dict[str, Any] = {"maxLength": 512, "pattern": r"^[^-\s\x00-\x1f][^\s\x00-\x1f]*$"}
_MAP_BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
TOKEN: Literal["Token"] = "Token"
_MAX_PODS = 1000
"""Largest number of engine pods of one LMCacheCluster. The operator bounds the size of its lists."""


class SecretKeyRef(Part):
    """A key of a Secret in the same namespace."""

    name: str = field("Name of the Secret, in the same namespace.", **NAME)
    key: str = field("Key in the Secret.", default="token", **SECRET_KEY)


class Model(Part):
    """The model that the engine serves."""

    name: str = field(
        "Model to serve: a name on the model hub, or a path in the model volume (mounted at /models). You "
        "cannot change it, because one Service would answer with two models while pods are replaced.",
        rules=(Rule("self == oldSelf", "cannot be changed: create another LMCacheCluster", lambda _: True),),
        **_MODEL,
    )
    revision: str | None = field("Revision on the model hub: branch, tag or commit.", **_MODEL)
    token_secret_ref: SecretKeyRef | None = field("Token for the model hub. The operator never reads it.")
    volume: dict[str, Any] = field(
        "Volume for model files: any Kubernetes volume source, such as a persistentVolumeClaim. "
        "Default: an emptyDir, so that each pod downloads the model.",
        default={},
        shape="Volume",
    )


class EngineSpec(Part):
    """The inference engines: pods, each with a sidecar."""

    RULES = (
        Rule(
            "self.gpu.count == 0 || self.parallelism.tensor * self.parallelism.pipeline * "
            "self.parallelism.data == self.nodes * self.gpu.count",
            "parallelism.tensor x pipeline x data must equal nodes x gpu.count",
            lambda engine: engine.gpu.count * engine.nodes in (0, engine.parallelism.num_ranks),
        ),
        Rule(
            "self.parallelism.data % self.nodes == 0 || self.parallelism.data == 1 && "
            "self.parallelism.tensor * self.parallelism.pipeline % self.nodes == 0",
            "a data-parallel rank must fill whole pods, or a pod whole ranks: set parallelism.data to a "
            "multiple of nodes, or to 1. With 1, tensor x pipeline must be a multiple of nodes",
            lambda engine: engine.parallelism.can_span(engine.nodes),
        ),
        Rule(
            f"self.replicas * self.nodes <= {_MAX_PODS}",
            f"replicas x nodes must be at most {_MAX_PODS}: the operator could not read more pods",
            lambda engine: engine.replicas * engine.nodes <= _MAX_PODS,
        ),
        Rule(
            "self.nodes == 1 || !has(self.prefill)",
            "prefill pods span one node for now: leave out prefill, or nodes",
            lambda engine: engine.nodes == 1 or engine.prefill is None,
        ),
        Rule(
            "self.nodes > 1 || !has(self.topologyKey)",
            "topologyKey needs nodes > 1: for one pod, set podTemplate.spec.affinity",
            lambda engine: engine.nodes > 1 or engine.topology_key is None,
        ),
        Rule(
            "!has(self.prefill) || !has(self.prefill.gpu) || self.prefill.gpu.count == self.gpu.count",
            "engine.prefill.gpu.count must equal engine.gpu.count: KV is shared only at equal parallelism",
            lambda engine: (
                not (engine.prefill and engine.prefill.gpu) or engine.prefill.gpu.count == engine.gpu.count
            ),
        ),
        *ENGINE_RULES,
    )

    kind: str = field(
        "Inference engine. You cannot change it: while pods are replaced, one Service would answer with two "
        "engines, and neither engine can load KV of the other.",
        default=VLLM.name,
        enum=[*ENGINE_KINDS],
        rules=(Rule("self == oldSelf", "cannot be changed: create another LMCacheCluster", lambda _: True),),
    )
    image: str | None = field(
        f"Image with {VERSIONS}, by kind. Default: see lmcache-operator --help.", **IMAGE_NAME
    )
    replicas: int = field(
        "Number of engines, each of `nodes` pods. Autoscalers change it.",
        default=1,
        minimum=0,
        maximum=_MAX_PODS,
    )
    nodes: int = field(
        "Number of pods of one engine. Each has gpu.count GPUs and a cache of its own, and all start and "
        "restart together. Needs vLLM, and parallelism.data must be 1 or a multiple of nodes. For models "
        "without experts, set data to 1, or use replicas. Changes from or to 1 restart all engines at once.",
        default=1,
        minimum=1,
        maximum=32,
    )
    topology_key: str | None = field(
        "Key of a label of nodes, such as one for racks. All pods of an engine run on nodes with the same "
        "value of this label. Needs nodes above 1.",
        maxLength=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    )
    gpu: GpuSpec = field("GPUs of one pod.", default={})
    parallelism: Parallelism = field(
        "Split of the model and its requests over the GPUs of an engine.", default={}
    )
    blend: Blend | None = field(
        "Reuse of the KV of documents at any position of a prompt, for requests that ask for it, or for all. "
        "Their answers are approximate. Needs vLLM. Default: all answers are exact."
    )
    hints_route: bool = field(
        "Whether vLLM serves POST /v1/lmcache/hints, which takes hints without a request. Hints with a "
        "request need no route. Needs vLLM, and a sidecar image of the operator's version or later. A change "
        "replaces the pods, one at a time.",
        default=False,
    )
    args: list[str] = field(
        "Additional arguments of the engine's server, such as `vllm serve`. Arguments that the cache depends "
        "on are refused.",
        default=[],
        **ARGUMENTS,
        rules=(NO_PARALLEL_SIZES,),
    )
    env: list[dict[str, Any]] = field(
        "Additional environment variables of the engine's container.",
        default=[],
        maxItems=256,
        shape="Container.env",
    )
    resources: dict[str, Any] = field(
        "CPU and memory of the engine's container. Set GPUs in engine.gpu. Default: requests of 1 CPU and 4 "
        "GiB for each worker (tensor x pipeline x data). A limit that you set replaces the default request.",
        default={},
        shape="Container.resources",
    )
    shared_memory_size: str | None = field(
        "Largest size of /dev/shm for the engine's workers. It counts as memory of the pod. Default: 8Gi.",
        **size_between("engine.sharedMemorySize", "64Mi", "16Ti"),
    )
    node_selector: dict[str, Any] = field(
        "Labels of the nodes that pods may run on.", default={}, shape="PodSpec.nodeSelector"
    )
    tolerations: list[dict[str, Any]] = field(
        "Taints of nodes that pods tolerate.", default=[], maxItems=64, shape="PodSpec.tolerations"
    )
    topology_spread_constraints: list[dict[str, Any]] = field(
        "Spread of pods over nodes and zones. Default labelSelector: the engine pods of this cluster.",
        default=[],
        maxItems=16,
        shape="PodSpec.topologySpreadConstraints",
    )
    priority_class_name: str | None = field("PriorityClass of the pods.", **NAME)
    pod_template: dict[str, Any] = field(
        "Pod template to merge into the rendered pod: maps by key; containers, volumes, env and mounts by "
        "name. The containers are engine, sidecar, and payload, which copies the connector into the engine.",
        default={},
        shape="PodTemplateSpec",
    )
    prefill: Prefill | None = field(
        "Pods that only compute prompts. The other engine pods then only generate answers, and read the KV "
        "of prompts from these. Needs router and tiers.peers. Default: each engine pod does both."
    )


class SidecarSpec(Part):
    """The sidecar, a container in each engine pod that owns the pod's cache."""

    image: str | None = field("Sidecar image. Default: the image of the operator's version.", **IMAGE_NAME)
    chunk_tokens: int = field(
        "Tokens of one chunk, the unit of storage. It must be a multiple of vLLM's block size. SGLang stores "
        "pages: set --page-size in engine.args instead. After a change, engines do not find former rows.",
        default=CHUNK_TOKENS,
        minimum=16,
        maximum=8192,
        multipleOf=16,
    )
    transfer: str = field(
        "Process that copies KV out of the GPUs. CudaIPC: the sidecar. It must see the engine's GPUs: set "
        "gpu.deviceClassName, or run the operator with --allow-all-gpus-sidecar. SharedMemory: the engine. "
        "Auto: the sidecar if possible. If CudaIPC is not possible, the engine copies, and the condition "
        "Degraded says why. SGLang always copies itself.",
        default="Auto",
        enum=["Auto", "CudaIPC", "SharedMemory"],
    )
    http_authentication: str = field(
        "None: pages such as /metrics need no token. Token: clients outside the pod need the bearer token in "
        "the Secret NAME-pages-UID, which the operator creates. UID is metadata.uid of this object. A change "
        "replaces the pods, one at a time.",
        default="None",
        enum=["None", TOKEN],
    )


class Spec(Part):
    """The declared state of an LMCacheCluster."""

    RULES = (
        Rule(
            "has(self.engine) == has(oldSelf.engine)",
            "engine cannot be added or removed: create another LMCacheCluster",
            lambda _: True,
        ),
        Rule(
            "has(self.engine) == has(self.model)",
            "model and engine belong together: set engine: {} for its defaults, or neither for a remote tier "
            "alone",
            lambda spec: (spec.engine is None) == (spec.model is None),
        ),
        *(rule for kind in ENGINE_KINDS.values() for rule in kind.rules),
        needs_engine("router", "set router at the clusters that have engines"),
        needs_engine("clients", "tiers.remote.managed.access limits who reaches a remote tier alone"),
        Rule(
            "!has(self.clients) || !has(self.engine) || !has(self.engine.prefill) || "
            f"size(self.clients) < {MAX_CLIENTS}",
            "clients may have at most 63 items with engine.prefill, because prefill pods also admit the "
            "router: combine some of them",
            lambda spec: not (spec.engine and spec.engine.prefill and len(spec.clients or ()) >= MAX_CLIENTS),
        ),
        Rule(
            "!has(self.engine) || !has(self.engine.prefill) || (has(self.router) && has(self.tiers.peers))",
            "engine.prefill needs router and tiers.peers: set both, {} has their defaults",
            lambda spec: (
                not (spec.engine and spec.engine.prefill) or None not in (spec.router, spec.tiers.peers)
            ),
        ),
        Rule(
            "!has(self.engine) || has(self.tiers.memory)",
            "tiers.memory is required if engine is set",
            lambda spec: spec.engine is None or spec.tiers.memory is not None,
        ),
        Rule(
            "has(self.engine) || (has(self.tiers.remote) && has(self.tiers.remote.managed) && "
            "!has(self.tiers.memory) && !has(self.tiers.disk) && !has(self.tiers.peers))",
            "without an engine, tiers must have tiers.remote.managed, and none of memory, disk and peers",
            lambda spec: spec.engine is not None or spec.tiers.is_remote_alone,
        ),
        Rule(
            "has(self.engine) || !has(self.tiers.remote) || !has(self.tiers.remote.encryption)",
            "tiers.remote.encryption needs an engine: set it at the clusters that use this tier, because "
            "their sidecars encrypt",
            lambda spec: spec.engine is not None or "remote" not in spec.tiers.key_secrets,
        ),
        *AUTOSCALING_RULES,
        *TENANTS_RULES,
    )

    model: Model | None = field("The model that the engine serves.")
    engine: EngineSpec | None = field(
        "The inference engine; {} has all defaults. Without it, the cluster is only a managed remote tier, "
        "which other clusters may refer to."
    )
    sidecar: SidecarSpec = field("The sidecar of each engine, which owns its cache.", default={})
    images: ImageDefaults = field("Choice of default images, and the Secrets that pull images.", default={})
    tiers: Tiers = field("Tiers of the cache.")
    tenants: TenantsSpec | None = field(
        "Budgets for tenants in the tiers of each pod. Adding or removing this field replaces the pods, one "
        "at a time; most changes in it do not. So set {} if you want to name tenants later. Default: "
        "no budgets."
    )
    router: Router | None = field("Router in front of the engines, at Service NAME-router. Default: none.")
    clients: list[dict[str, Any]] | None = field(
        "Pods and networks that may connect to engines and routers, as in `from` of a NetworkPolicy. A "
        "podSelector without a namespaceSelector selects pods of this namespace. The cluster's router "
        "always reaches engines; []: nothing else does. The ports 9464 and 9465 have senders of their own. "
        "A change replaces no pod. Default: all pods and networks may connect.",
        **CLIENTS,
    )
    autoscaling: AutoscalingSpec = field("Autoscaling of tiers by their savings and costs.", default={})


class StatusCondition(Part):
    """One aspect of the present state, such as Ready."""

    type: str = field("CamelCase name of the aspect.", maxLength=316)
    status: str = field("True, False or Unknown.", enum=["True", "False", "Unknown"])
    reason: str = field("Cause as a CamelCase word, for programs.", maxLength=1024)
    message: str = field("Cause as a sentence, for users.", maxLength=32768)
    observed_generation: int = field("The metadata.generation that was observed.", format="int64")
    last_transition_time: str = field("Time of the last change of `status`.", format="date-time")


class TransferStatus(Part):
    """The process that copies KV out of the GPUs."""

    requested: str | None = field("Value of spec.sidecar.transfer.")
    mode: str | None = field("CudaIPC: the sidecar, in all pods. SharedMemory: the engine, in one or more.")
    reason: str | None = field("Cause as a CamelCase word, for programs.")
    message: str | None = field("Cause as a sentence, for users.")


class RemoteStatus(Part):
    """The servers of the remote tier."""

    shards: int | None = field("Shards that rows are written to.")
    ready_shards: int | None = field("Shards that are Ready.")
    previous_shards: int | None = field("Shards before a change. Sidecars still look up rows there.")
    previous_until: str | None = field("Time until which sidecars use previousShards.", format="date-time")
    used_bytes: int | None = field(
        "Bytes in use in all servers together, if sidecars may ask the servers. A cluster without an engine "
        "reports the figures of the clusters that use it, up to 15 minutes late.",
        format="int64",
    )
    evicted: int | None = field("Values that servers evicted since the sidecars started.", format="int64")


class HitPercent(Part):
    """Hits of each tier, in per cent of looked-up tokens. The tier nearest to the engine counts a hit."""

    engine: int | None = field("Hits in the engines' own prefix caches.")
    memory: int | None = field("Hits in the memory tier.")
    disk: int | None = field("Hits in the disk tier.")
    peers: int | None = field("Hits in the memory tiers of other pods.")
    remote: int | None = field("Hits in the remote tier.")


class Status(Part):
    """The observed state of an LMCacheCluster."""

    observed_generation: int | None = field("The metadata.generation that was observed.", format="int64")
    replicas: int | None = field("Number of engines.")
    ready_replicas: int | None = field("Number of engines that are Ready with all their pods.")
    selector: str | None = field("Label selector of one pod of each engine, for autoscalers.")
    images: ImagesStatus | None = field(
        "Images of new engine pods. Your own pods with an injected sidecar get the operator's defaults."
    )
    transfer: TransferStatus | None = field("Process that copies KV out of the GPUs.")
    hit_percent: HitPercent | None = field("Hits by tier since the pods started, in per cent of tokens.")
    tenants: list[TenantStatus] | None = field(
        "Hits and memory of each tenant. Present with spec.tenants.", **TENANTS_STATUS
    )
    remote: RemoteStatus | None = field("Servers of the remote tier.")
    router: RouterStatus | None = field("Pods of the router.")
    prefill: PrefillStatus | None = field("Pods that only compute prompts.")
    autoscaling: AutoscalingStatus | None = field("Recommended sizes of tiers, and the reasons.")
    last_heartbeat_time: str | None = field(
        "Time at which the operator last confirmed this status, which it does once a minute. If this time is "
        "older than 150 s, no operator works on this object.",
        format="date-time",
    )
    conditions: list[StatusCondition] = field("Aspects of the present state.", default=[], **_MAP_BY_TYPE)
