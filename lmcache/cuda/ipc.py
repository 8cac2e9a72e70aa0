"""Device memory of another process, by CUDA's legacy IPC handles of 64 bytes.

What decides how this is used (NVIDIA's documentation, and what NCCL, UCX and LMCache found):

- A handle is of a whole allocation, whatever address in it was asked for.
- Opening fails with ``CudaError.SAME_PID`` if both processes have the same process id, as a number.
- A new allocation at a freed address may have the very same handle: a kept mapping proves nothing.
- A mapping keeps the memory alive when its owner is gone, and a mapping can be written to.
- Memory of virtual memory management (sleep mode, expandable segments) has no handle.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from lmcache.cuda.driver import Context
from lmcache.cuda.errors import CudaError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the only flags that there are


@dataclass(frozen=True)
class Exported:
    """Memory that another process can open."""

    handle: bytes
    """Of the allocation."""
    base: int
    """Address of the allocation here."""
    num_bytes: int
    """Of the allocation."""
    offset: int
    """Of the address that was exported, in the allocation."""


def is_exportable(context: Context, address: int) -> bool:
    """Can ``export`` be expected to work? False also where ``address`` is no device memory."""
    attribute = context.driver.bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    try:
        return bool(context.call("cuPointerGetAttribute", attribute, address))
    except CudaError:
        return False


def export(context: Context, address: int) -> Exported:
    """Raises CudaError."""
    base, num_bytes = context.call("cuMemGetAddressRange", address)
    handle = context.call("cuIpcGetMemHandle", int(base))
    raw = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    return Exported(raw, int(base), int(num_bytes), address - int(base))


class Mapping:
    """Another process's allocation, opened here. Made by ``Mappings``."""

    def __init__(self, owner: Mappings, handle: bytes, base: int, num_bytes: int) -> None:
        self._owner, self.handle = owner, handle
        self.base = base
        """Its address here."""
        self.num_bytes = num_bytes
        """What the driver says of it, not what anybody told."""
        self.users = 1

    def close(self) -> None:
        """One user less; the last one's unmaps it. No copy may be under way. Raises CudaError."""
        self._owner.close_one(self)


class Mappings:
    """What is open in one context: one mapping per handle, however many users. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()  # protects the table, and the order of opening and closing
        self._open: dict[bytes, Mapping] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes) -> Mapping:
        """Map the allocation of ``handle``, or add a user to its mapping. Close it as often.

        Raises ValueError when that is no handle; CudaError.
        """
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, this has {len(handle)}")
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
