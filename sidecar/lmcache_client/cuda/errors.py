"""Errors of the CUDA driver and of GPUs, each with a remedy if there is one. Pure."""

from __future__ import annotations

SHARE_GPU = "give this container the engine's GPU, in Kubernetes by one resource claim for engine and sidecar"


class CudaUnavailableError(Exception):
    """There is no usable driver or GPU. The message says what is missing."""


class DeviceNotVisibleError(CudaUnavailableError):
    """This process can't see the GPU with the given UUID."""


class CudaError(Exception):
    """A call of the driver failed. The message names the remedy if one is known.

    ``code`` is the value of ``CUresult``, and ``name`` its name, ``CUDA_ERROR_...``.
    """

    SAME_PID = 201
    """Code of opening a handle in a process with the same process id as the process that exported it, even in
    another PID namespace. (A call without a context returns the same code.)"""

    def __init__(self, function: str, code: int, name: str, detail: str = "") -> None:
        remedy = REMEDIES.get((function, code))
        super().__init__(f"{function}: {name} ({code}){detail}{f': {remedy}' if remedy else ''}")
        self.function, self.code, self.name = function, code, name

    @property
    def is_sticky(self) -> bool:
        """True if the context is broken: all later calls in it fail until the process ends."""
        return self.code in _STICKY


_NO_IPC = "CUDA IPC does not work on this platform: set --transfer SharedMemory (spec.sidecar.transfer)"

REMEDIES = {
    ("cuInit", 100): SHARE_GPU,
    ("cuInit", 803): "the NVIDIA driver was updated under running containers: reboot the node",
    ("cuInit", 804): "remove the package cuda-compat from the image: it does not support this GPU",
    ("cuInit", 999): "load the kernel module nvidia-uvm on the node, and give the container /dev/nvidia-uvm",
    ("cuDevicePrimaryCtxRetain", 2): "the GPU's memory is full: lower --gpu-memory-utilization of the engine",
    ("cuDevicePrimaryCtxRetain", 46): "only one process may use the GPU: set its compute mode to Default",
    ("cuMemHostRegister", 2): "raise the limit of locked memory (ulimit -l), or reduce the memory tier",
    ("cuMemHostRegister", 800): "this platform forbids pinning, so copies stay slow",
    ("cuMemHostRegister", 801): "this platform forbids pinning, so copies stay slow",
    ("cuIpcOpenMemHandle", 1): "engine and sidecar need the same GPU or MIG slice: use one resource claim",
    ("cuIpcOpenMemHandle", CudaError.SAME_PID): "engine and reader have the same process id: delete the pod",
    ("cuIpcOpenMemHandle", 801): _NO_IPC,
    ("cuIpcGetMemHandle", 801): _NO_IPC,
}
"""Remedies by function and code."""

_STICKY = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 722, 723, 726}
"""Values of ``CUresult`` after which "the process must be terminated and relaunched" (cuda.h), and those of
broken hardware: ECC, NVLink, contained errors."""
