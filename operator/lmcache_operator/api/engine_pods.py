"""Settings of engine pods: GPUs, the split of the model over them, and pods that only compute prompts."""

from __future__ import annotations

import re
from typing import Any

from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import ARGUMENTS, NAME

_PLUGIN_RESOURCE = "nvidia.com/gpu"
_PARALLEL_SIZE = (
    "^(--(tensor|pipeline|data)[-_]parallel[-_]size|--(tp|pp|dp)([-_]size)?|--nnodes|-tp|-pp|-dp)(=|$)"
)
NO_PARALLEL_SIZES = Rule(
    f"self.all(a, !a.matches('{_PARALLEL_SIZE}'))",
    "set engine.parallelism and engine.nodes, and engine.replicas for more engines, instead of passing "
    "parallel sizes as arguments",
    lambda args: not any(re.search(_PARALLEL_SIZE, arg) for arg in args),
)


class GpuSpec(Part):
    """The GPUs of one engine pod, from a device plugin or a claim (dynamic resource allocation)."""

    RULES = (
        Rule(
            f"!has(self.deviceClassName) || self.resourceName == '{_PLUGIN_RESOURCE}'",
            "deviceClassName and resourceName exclude each other: set only one of them",
            lambda gpu: gpu.device_class_name is None or gpu.resource_name == _PLUGIN_RESOURCE,
        ),
    )

    count: int = field("GPUs of one pod. 0: the engine runs on CPUs.", default=1, minimum=0, maximum=64)
    resource_name: str = field(
        "Extended resource of the device plugin. Ignored if deviceClassName is set.",
        default=_PLUGIN_RESOURCE,
        maxLength=253,
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
    )
    device_class_name: str | None = field(
        "DeviceClass, such as gpu.nvidia.com. Engine and sidecar then share the GPUs of a claim (Kubernetes "
        ">= 1.34). Default: the pod requests resourceName from a device plugin.",
        **NAME,
    )
    runtime_class_name: str | None = field("RuntimeClass of the pods, such as nvidia.", **NAME)


class Parallelism(Part):
    """Split of the model and its requests over the GPUs of one engine."""

    tensor: int = field("Tensor parallel size.", default=1, minimum=1, maximum=64)
    pipeline: int = field("Pipeline parallel size.", default=1, minimum=1, maximum=64)
    data: int = field(
        "Data parallel size. Each data-parallel rank has tensor x pipeline GPUs and computes requests of its "
        "own. All ranks of a pod share its cache.",
        default=1,
        minimum=1,
        maximum=256,
    )
    expert: bool = field(
        "Give each GPU whole experts, instead of a part of each expert. Only for mixture-of-experts models "
        "and engine.kind vLLM.",
        default=False,
    )

    @property
    def num_ranks(self) -> int:
        """Number of workers of one engine."""
        return self.tensor * self.pipeline * self.data

    def can_span(self, nodes: int) -> bool:
        """Whether each pod can have whole data-parallel ranks, or an equal share of a single rank."""
        return (self.num_ranks if self.data == 1 else self.data) % nodes == 0


class Prefill(Part):
    """Engine pods that only compute prompts. Settings without a value are those of the other engine pods."""

    replicas: int | None = field(
        "Number of pods. Default: not set by the operator, first 1. Scale the LMCacheCluster NAME-prefill.",
        minimum=0,
        maximum=1000,
    )
    gpu: GpuSpec | None = field("GPUs of one pod, as many as engine.gpu.count.")
    args: list[str] = field(
        "Additional arguments for `vllm serve`, after those of engine.args.",
        default=[],
        **ARGUMENTS,
        rules=(NO_PARALLEL_SIZES,),
    )
    resources: dict[str, Any] | None = field(
        "CPU and memory of the engine's container.", shape="Container.resources"
    )
    node_selector: dict[str, Any] | None = field(
        "Labels of the nodes that pods may run on.", shape="PodSpec.nodeSelector"
    )
    tolerations: list[dict[str, Any]] | None = field(
        "Taints of nodes that pods tolerate.", maxItems=64, shape="PodSpec.tolerations"
    )


class PrefillStatus(Part):
    """Pods that only compute prompts."""

    replicas: int | None = field("Number of pods.")
    ready_replicas: int | None = field("Pods that are Ready.")
