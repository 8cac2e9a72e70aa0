"""Access to device memory of another process, by CUDA's legacy IPC handles of 64 bytes.

These facts determine its use. Sources: NVIDIA's documentation, and experience of NCCL, UCX and LMCache.

- A handle stands for a whole allocation, whatever address in it was exported.
- Opening fails with ``CudaError.SAME_PID`` if both processes have the same process id, as a number.
- A new allocation at a freed address may have the same handle. So an old mapping may show freed memory.
- A mapping keeps the memory alive after its owner has ended, and a mapping is writable.
- Virtual memory (sleep mode, expandable segments) has no handle.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from lmcache_client.cuda.driver import GpuContext
from lmcache_client.cuda.errors import CudaError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the only flag that the driver defines


@dataclass(frozen=True)
class Exported:
    """Memory that another process can open."""

    handle: bytes
    """IPC handle of the allocation, 64 bytes."""
    base: int
    """Address of the allocation in this process."""
    num_bytes: int
    """Bytes of the allocation."""
    offset: int
    """Offset of the exported address in the allocation."""


def is_exportable(context: GpuContext, address: int) -> bool:
    """Return True if ``address`` is device memory that ``export`` can share."""
    attribute = context.driver.bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    try:
        return bool(context.call("cuPointerGetAttribute", attribute, address))
    except CudaError:
        return False


def export(context: GpuContext, address: int) -> Exported:
    """Export the allocation that contains ``address``. Raises CudaError."""
    base, num_bytes = context.call("cuMemGetAddressRange", address)
    handle = context.call("cuIpcGetMemHandle", int(base))
    raw = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    return Exported(raw, int(base), int(num_bytes), address - int(base))


class Mapping:
    """An allocation of another process that is mapped here. ``Mappings`` creates it."""

    def __init__(self, owner: Mappings, handle: bytes, base: int, num_bytes: int) -> None:
        self._owner, self.handle = owner, handle
        self.base = base
        """Address of the allocation in this process."""
        self.num_bytes = num_bytes
        """Bytes of the allocation according to the driver, not according to the peer."""
        self.users = 1
        """Number of users that have not closed the mapping."""

    def close(self) -> None:
        """Remove one user; the last one unmaps the memory. No copy may be running. Raises CudaError."""
        self._owner.close_one(self)


class Mappings:
    """Open mappings of one context, one per handle with any number of users. Thread-safe."""

    def __init__(self, context: GpuContext) -> None:
        self._context = context
        self._lock = threading.Lock()  # protects the table, and the order of opening and closing
        self._open: dict[bytes, Mapping] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes) -> Mapping:
        """Map the allocation of ``handle``, or add a user to its mapping. Each user must close it.

        Raises ValueError if the handle's length is wrong, and CudaError.
        """
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        with self._lock:
            mapping = self._open.get(handle)
            if mapping is not None:
                mapping.users += 1
                return mapping
            raw = self._context.driver.bindings.CUipcMemHandle()
            ctypes.memmove(raw.getPtr(), handle, HANDLE_BYTES)
            base = int(self._context.call("cuIpcOpenMemHandle", raw, _LAZY_PEER_ACCESS))
            try:
                _, num_bytes = self._context.call("cuMemGetAddressRange", base)
            except CudaError:
                self._context.call("cuIpcCloseMemHandle", base)
                raise
            self._open[handle] = mapping = Mapping(self, handle, base, int(num_bytes))
            return mapping

    def close_one(self, mapping: Mapping) -> None:
        """See ``Mapping.close``."""
        with self._lock:
            mapping.users -= 1
            if mapping.users == 0:
                del self._open[mapping.handle]
                self._context.call("cuIpcCloseMemHandle", mapping.base)
