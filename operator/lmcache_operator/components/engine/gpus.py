"""How GPUs reach the engine's pod, and who copies KV out of them: the sidecar only where it sees them.

A device plugin gives a GPU to one container. So the sidecar has the engine's by a claim that both containers
name (dynamic resource allocation), or sees all GPUs of the node, which is no isolation at all and therefore
the choice of whoever runs the operator. Everywhere else the engine copies, into memory that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Problem, Sidecar
from lmcache_operator.specs import Object, names

CUDA_IPC, SHARED_MEMORY = "CudaIPC", "SharedMemory"
CLAIM = "gpu"
"""Of the pod, and the request in it."""
_REMEDY = (
    "a device plugin gives the engine's GPUs to no other container: name spec.engine.gpu.deviceClassName "
    "(Kubernetes >= 1.34 with a DRA driver), or run the operator with --allow-all-gpus-sidecar"
)


class Transfer(NamedTuple):
    """Who copies KV out of the GPUs, CudaIPC (the sidecar) or SharedMemory (the engine), and why."""

    mode: str
    reason: str
    message: str


def planned_transfer(cluster: Cluster, allow_all_gpus: bool) -> Transfer:
    """What pods are rendered for. ``allow_all_gpus``: sidecars may see all GPUs of their nodes."""
    gpu = cluster.engine.gpu
    if cluster.spec.sidecar.transfer == SHARED_MEMORY:
        return Transfer(SHARED_MEMORY, "Requested", "the engine copies, as spec.sidecar.transfer asks for")
    if not gpu.count:
        return Transfer(SHARED_MEMORY, "NoGPU", "the engine has no GPU: spec.engine.gpu.count is 0")
    if gpu.device_class_name is not None:
        return Transfer(CUDA_IPC, "DRAClaimShared", "engine and sidecar share one claim")
    if allow_all_gpus:
        return Transfer(CUDA_IPC, "AllGPUsVisible", "the sidecar sees all GPUs of its node")
    return Transfer(SHARED_MEMORY, "GPUNotShared", _REMEDY)


def engine_resources(cluster: Cluster) -> Object:
    """What the engine's container has of the GPUs."""
    gpu = cluster.engine.gpu
    if has_claim(cluster):
        return {"claims": [{"name": CLAIM}]}
    return {"limits": {gpu.resource_name: str(gpu.count)}} if gpu.count else {}


def pod_claims(cluster: Cluster) -> Object:
    """What the pod's spec says of claims."""
    if not has_claim(cluster):
        return {}
    template = names.engine_name(cluster.name)
    return {"resourceClaims": [{"name": CLAIM, "resourceClaimTemplateName": template}]}


def has_claim(cluster: Cluster) -> bool:
    """Whether GPUs come by a claim."""
    gpu = cluster.engine.gpu
    return bool(gpu.count) and gpu.device_class_name is not None


def claim_spec(cluster: Cluster) -> Object:
    """The spec of the ResourceClaimTemplate, empty without one; nobody can change it once it is there."""
    gpu = cluster.engine.gpu
    if not has_claim(cluster):
        return {}
    request = {"exactly": {"count": gpu.count, "deviceClassName": gpu.device_class_name}, "name": CLAIM}
    return {"spec": {"devices": {"requests": [request]}}}


def sidecar_env(transfer: Transfer) -> dict[str, str]:
    """Which GPUs the container runtime shows the sidecar. A claim's come whatever is said here."""
    if transfer.reason == "AllGPUsVisible":
        return {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", "NVIDIA_VISIBLE_DEVICES": "all"}
    # No GPUs is said aloud: some images default to all of them.
    return {"NVIDIA_VISIBLE_DEVICES": "void"}


def transfer_fields(requested: str, planned: Transfer) -> Object:
    """``status.transfer`` as far as it follows from what is declared."""
    return {"transfer": {"requested": requested, **planned._asdict()}}


def transfer_in_use(fields: Mapping[str, Any], sidecars: Sequence[Sidecar]) -> Object:
    """The same with what the sidecars say: one that does not copy stands for all of these.

    Before the engine serves, who copies for it may still be starting.
    """
    said = [s for s in sidecars if s.transfer and s.is_attached and s.is_engine_ready]
    fallen = [sidecar for sidecar in said if sidecar.transfer != CUDA_IPC]
    if fields.get("mode") != CUDA_IPC or not fallen:
        return dict(fields)
    why = f"pod {fallen[0].pod}: {fallen[0].transfer_reason}"
    message = f"{len(fallen)} of {len(said)} sidecars leave copying to their engines: {why}"
    return {**fields, "mode": SHARED_MEMORY, "reason": "SidecarCannotCopy", "message": message}


def transfer_problems(fields: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What is not as it was asked for; the engines copy, and serve."""
    if fields.get("requested") != CUDA_IPC or fields.get("mode") == CUDA_IPC:
        return ()
    return (Problem("CudaIPCUnavailable", f"the engines copy, not the sidecars: {fields['message']}"),)
