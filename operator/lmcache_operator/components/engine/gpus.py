"""GPUs of the engine pod, and whether the sidecar or the engine copies KV out of them.

The sidecar can copy only if it sees the engine's GPUs. A device plugin assigns a GPU to one container, so
there are two ways:
- Both containers name one resource claim (dynamic resource allocation).
- The sidecar sees all GPUs of the node. This gives up isolation, so only a flag of the operator allows it.

Everywhere else the engine copies into memory that both containers share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds import kind_of
from lmcache_operator.contract.base import SidecarState
from lmcache_operator.contract.conditions import Problem, problem_message
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.objects import PodSpec, Resources
from lmcache_operator.specs.stateful import NO_GPUS

_OF_NVIDIA = re.compile("nvidia[.]com/")
CUDA_IPC, SHARED_MEMORY = "CudaIPC", "SharedMemory"
CLAIM = "gpu"
"""Name of the pod's resource claim, and of the request in it."""
_REMEDY = (
    "a device plugin gives the engine's GPUs to no other container: name spec.engine.gpu.deviceClassName "
    "(Kubernetes >= 1.34 with a DRA driver), or run the operator with --allow-all-gpus-sidecar"
)


class Transfer(NamedTuple):
    """The side that copies KV out of the GPUs: CudaIPC (the sidecar) or SharedMemory (the engine)."""

    mode: str
    reason: str
    message: str


def planned_transfer(cluster: Cluster, allow_all_gpus: bool) -> Transfer:
    """The transfer that pods are rendered for. ``allow_all_gpus``: sidecars may see all GPUs of a node."""
    gpu = cluster.engine.gpu
    if cluster.spec.sidecar.transfer == SHARED_MEMORY:
        return Transfer(SHARED_MEMORY, "Requested", "spec.sidecar.transfer is SharedMemory")
    if not (kind := kind_of(cluster)).can_share_gpus:
        return Transfer(SHARED_MEMORY, "EngineCopies", f"{kind.name} copies its KV through its host memory")
    if not gpu.count:
        return Transfer(SHARED_MEMORY, "NoGPU", "the engine has no GPU: spec.engine.gpu.count is 0")
    if gpu.device_class_name is not None:
        return Transfer(CUDA_IPC, "DRAClaimShared", "engine and sidecar share one claim")
    if allow_all_gpus:
        return Transfer(CUDA_IPC, "AllGPUsVisible", "the sidecar sees all GPUs of its node")
    return Transfer(SHARED_MEMORY, "GPUNotShared", _REMEDY)


def engine_resources(cluster: Cluster) -> Resources:
    """GPU resources of the engine's container: a claim, a limit, or nothing."""
    gpu = cluster.engine.gpu
    if has_claim(cluster):
        return {"claims": [{"name": CLAIM}]}
    return {"limits": {gpu.resource_name: str(gpu.count)}} if gpu.count else {}


def pod_claims(cluster: Cluster) -> PodSpec:
    """Resource claims in the pod's spec; empty without a claim."""
    if not has_claim(cluster):
        return {}
    template = names.object_name(cluster.name, names.ENGINE)
    return {"resourceClaims": [{"name": CLAIM, "resourceClaimTemplateName": template}]}


def has_claim(cluster: Cluster) -> bool:
    """Whether the engine gets its GPUs through a resource claim."""
    gpu = cluster.engine.gpu
    return bool(gpu.count) and gpu.device_class_name is not None


def claim_spec(cluster: Cluster) -> Object:
    """The spec of the ResourceClaimTemplate, which is immutable; empty without a claim."""
    gpu = cluster.engine.gpu
    if not has_claim(cluster):
        return {}
    request = {"exactly": {"count": gpu.count, "deviceClassName": gpu.device_class_name}, "name": CLAIM}
    return {"spec": {"devices": {"requests": [request]}}}


def sidecar_env(transfer: Transfer) -> dict[str, str]:
    """Variables that tell the container runtime which GPUs to show the sidecar.

    The GPUs of a claim are visible whatever these variables say.
    """
    if transfer.reason == "AllGPUsVisible":
        return {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", "NVIDIA_VISIBLE_DEVICES": "all"}
    return NO_GPUS


def engine_env(cluster: Cluster, declared: Object) -> dict[str, str]:
    """Hide GPUs from an engine without a device plugin, which sets the variable itself.

    ``declared``: the engine's container in the user's template, which may ask a plugin for GPUs, too. The
    variable would replace the plugin's.
    """
    limits = engine_resources(cluster).get("limits") or dig(declared, "resources", "limits") or ()
    has_plugin = cluster.engine.gpu.resource_name in limits or any(map(_OF_NVIDIA.match, limits))
    return {} if has_plugin else NO_GPUS


def transfer_in_use(fields: Mapping[str, Any], sidecars: Sequence[SidecarState]) -> Object:
    """``status.transfer`` corrected by the sidecars' reports; the message quotes the first that cannot copy.

    Sidecars whose engine does not serve yet are left out: their GPU readers may still be starting.
    """
    reporting = [s for s in sidecars if s.transfer and s.is_attached and s.is_engine_ready]
    failed = [sidecar for sidecar in reporting if sidecar.transfer != CUDA_IPC]
    if fields.get("mode") != CUDA_IPC or not failed:
        return dict(fields)
    reasons = [(sidecar.pod, sidecar.transfer_reason) for sidecar in failed]
    message = problem_message("sidecars cannot copy, so their engines do", reasons, len(reporting))
    return {**fields, "mode": SHARED_MEMORY, "reason": "SidecarCannotCopy", "message": message}


def transfer_problems(fields: Mapping[str, Any]) -> tuple[Problem, ...]:
    """A problem if the user asked for CudaIPC and engines copy instead. The engines still serve."""
    if fields.get("requested") != CUDA_IPC or fields.get("mode") == CUDA_IPC:
        return ()
    return (Problem("CudaIPCUnavailable", f"engines copy instead of sidecars: {fields['message']}"),)
