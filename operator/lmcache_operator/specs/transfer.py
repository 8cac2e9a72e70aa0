"""How engine and sidecar share KV in a pod, and why so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..api.parse import Cluster
from ..api.types import TransferPreference
from ..settings import RenderSettings


class GpuSight(StrEnum):
    """By what means the sidecar sees the engine's GPUs."""

    NONE = "None"
    CLAIM = "Claim"
    ALL_GPUS = "AllGPUs"


@dataclass(frozen=True)
class Transfer:
    """The outcome that stands in `status.transfer`."""

    mode: TransferPreference
    reason: str
    sight: GpuSight
    problem: str | None = None
    """Why CudaIPC, though asked for, is not possible."""


def resolve_transfer(cluster: Cluster, settings: RenderSettings) -> Transfer:
    """Decide whether the sidecar gets sight of the engine's GPUs.

    A sidecar that asked the device plugin for a GPU would get another one than the engine's, so there are two
    ways only: both containers name one claim, or the sidecar sees all GPUs of the node, which whoever
    installed the operator has to allow.
    """
    shared_memory, gpu = TransferPreference.SHARED_MEMORY, cluster.spec.engine.gpu
    wanted = cluster.spec.sidecar.transfer
    if wanted is shared_memory:
        return Transfer(shared_memory, "Requested", GpuSight.NONE)
    if gpu.count == 0:
        problem = "the engine has no GPU" if wanted is TransferPreference.CUDA_IPC else None
        return Transfer(shared_memory, "NoGPU", GpuSight.NONE, problem)
    if gpu.uses_claims:
        return Transfer(TransferPreference.CUDA_IPC, "DRAClaimShared", GpuSight.CLAIM)
    if settings.allow_all_gpus_sidecar:
        return Transfer(TransferPreference.CUDA_IPC, "AllGPUsVisible", GpuSight.ALL_GPUS)
    if wanted is TransferPreference.CUDA_IPC:
        problem = (
            "CudaIPC needs engine.gpu.deviceClassName, or an operator that runs with "
            "--allow-all-gpus-sidecar: the engine copies instead"
        )
        return Transfer(shared_memory, "GPUNotShared", GpuSight.NONE, problem)
    return Transfer(shared_memory, "GPUNotShared", GpuSight.NONE)
