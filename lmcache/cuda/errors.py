"""What can go wrong with a GPU. Pure."""

from __future__ import annotations


class CudaUnavailableError(Exception):
    """There is no usable driver or GPU here; the message says what is missing."""


class DeviceNotVisibleError(CudaUnavailableError):
    """The GPU exists somewhere, but this process can't see it."""


class CudaError(Exception):
    """A call of the driver failed."""

    SAME_PID = 201
    """Of opening a handle: this process has the same process id, as a number, as the one that exported it,
    be it in another PID namespace. (Also what a call without a context returns.)
    """

    function: str
    code: int
    """``CUresult``."""
    name: str
    """``CUDA_ERROR_...``"""

    def __init__(self, function: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{function}: {name} ({code}){detail}")
        self.function, self.code, self.name = function, code, name

    @property
    def is_sticky(self) -> bool:
        """Is the context broken? Every later call in it fails, and only the end of the process mends that."""
        return self.code in _STICKY


_STICKY = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 722, 723, 726}
"""``CUresult`` of errors after which "the process must be terminated and relaunched" (cuda.h), and of
those of broken hardware: ECC, NVLink, contained errors.
"""
