"""Errors of the CUDA driver and of GPUs. Pure."""

from __future__ import annotations


class CudaUnavailableError(Exception):
    """There is no usable driver or GPU. The message says what is missing."""


class DeviceNotVisibleError(CudaUnavailableError):
    """This process can't see the GPU with the given UUID."""


class CudaError(Exception):
    """A call of the driver failed."""

    SAME_PID = 201
    """Code of opening a handle in a process with the same process id as the process that exported it, even in
    another PID namespace. (A call without a context returns the same code.)"""

    function: str
    code: int
    """Value of ``CUresult``."""
    name: str
    """Name of the code, ``CUDA_ERROR_...``."""

    def __init__(self, function: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{function}: {name} ({code}){detail}")
        self.function, self.code, self.name = function, code, name

    @property
    def is_sticky(self) -> bool:
        """True if the context is broken: all later calls in it fail until the process ends."""
        return self.code in _STICKY


_STICKY = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 722, 723, 726}
"""Values of ``CUresult`` after which "the process must be terminated and relaunched" (cuda.h), and those of
broken hardware: ECC, NVLink, contained errors."""
