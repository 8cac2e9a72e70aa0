"""Checked calls of the CUDA driver, and devices, primary contexts, streams and events.

Any thread may use them: calls that need a current context make theirs current for the call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lmcache_client.cuda.errors import SHARE_GPU, CudaError, CudaUnavailableError, DeviceNotVisibleError

UPDATE_DRIVER = "update the NVIDIA driver, or install a version of cuda-bindings that is as old as the driver"

_NO_DEVICE, _NOT_FOUND = 100, 500
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_SLOT_BYTES = 32  # at least 13, for 0000:00:00.0
_NON_BLOCKING = 1  # flag of a stream: it and the legacy stream don't wait for each other
_SLEEPING, _WITHOUT_TIME = 1, 2  # flags of an event: threads sleep while they wait for it, and it has no time


class Driver:
    """The loaded CUDA driver. ``load`` creates it."""

    def __init__(self, bindings: ModuleType) -> None:
        self.bindings = bindings
        """Module ``cuda.bindings.driver``, for its types."""
        self.version = int(self.call("cuDriverGetVersion"))
        """CUDA version: 1000 times the major plus 10 times the minor version, such as 12080 for 12.8."""

    def call(self, function: str, *arguments: object) -> Any:
        """Call ``function`` of the driver. Return its one result, or a tuple of them. Raises CudaError."""
        try:
            code, *results = getattr(self.bindings, function)(*arguments)
        except RuntimeError as error:  # of cuda-bindings: the driver has no such function
            remedy = UPDATE_DRIVER if hasattr(self, "version") else SHARE_GPU  # no driver has no version
            raise CudaError(function, _NOT_FOUND, f"{error}", f": {remedy}") from error
        if int(code):
            raise self.error(function, int(code))
        return results[0] if len(results) == 1 else tuple(results)

    def error(self, function: str, code: int, detail: str = "") -> CudaError:
        """Create the error for a call that returned ``code``."""
        name = self.bindings.cuGetErrorName(self.bindings.CUresult(code))[1]
        return CudaError(function, code, name.decode() if name else "an unknown error", detail)

    def allow_calls_during_captures(self) -> None:
        """Let this thread make any call while another thread of this process captures a CUDA graph.

        Engines capture graphs at their start. Without this, registering memory at that time fails, and so
        does the engine's capture. Call it on threads that capture nothing. Raises CudaError.
        """
        relaxed = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call("cuThreadExchangeStreamCaptureMode", relaxed)

    @functools.cache  # noqa: B019 - there is one driver
    def function(self, name: str, version: int, *types: type) -> Any:
        """Return a function of CUDA ``version`` that takes ctypes' arguments and releases the GIL.

        ``types``: types of its arguments. Returns None if this driver lacks it.
        """
        code, address, _ = self.bindings.cuGetProcAddress(name.encode(), version, 0)
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address) if not int(code) and address else None


@functools.cache
def load() -> Driver:
    """Load and initialize the driver of this host, once. Raises CudaUnavailableError."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise CudaUnavailableError(
            f"cuda-bindings is not installed ({error}): install the extra cuda"
        ) from error
    try:
        driver = Driver(bindings)
        driver.call("cuInit", 0)
    except CudaError as error:
        problem = (
            "no NVIDIA GPU is visible here" if error.code == _NO_DEVICE else "there is no working CUDA driver"
        )
        raise CudaUnavailableError(f"{problem}: {error}") from error
    return driver


@dataclass(frozen=True)
class Device:
    """A GPU, or a slice of one (MIG), that this process can see."""

    driver: Driver
    ordinal: int
    """Position of the device among the visible devices."""
    uuid: str
    """UUID of the device, ``GPU-...`` or ``MIG-...``, as ``nvidia-smi -L`` prints it."""

    @classmethod
    def visible(cls) -> list[Device]:
        """Return all devices that this process can see. Raises CudaUnavailableError."""
        driver = load()
        return [cls._from_ordinal(driver, ordinal) for ordinal in range(driver.call("cuDeviceGetCount"))]

    @classmethod
    def find(cls, wanted: str) -> Device:
        """Return the device with a UUID. Raises DeviceNotVisibleError or CudaUnavailableError."""
        devices = cls.visible()
        for device in devices:
            if device.uuid.lower() == wanted.lower():
                return device
        kind = "the MIG slice" if wanted.startswith("MIG-") else "GPU"
        visible = ", ".join(device.uuid for device in devices)
        raise DeviceNotVisibleError(f"{kind} {wanted} is not visible here; visible: {visible}: {SHARE_GPU}")

    @classmethod
    def of(cls, address: int) -> Device | None:
        """Return the device whose memory is at ``address``; None if none is. Raises CudaUnavailableError."""
        driver = load()
        names = driver.bindings.CUpointer_attribute
        try:
            kind = driver.call("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            if int(kind) != int(driver.bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE):
                return None
            ordinal = driver.call("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        except CudaError:  # the driver does not know this address
            return None
        return cls._from_ordinal(driver, int(ordinal))

    @classmethod
    def _from_ordinal(cls, driver: Driver, ordinal: int) -> Device:
        device = driver.call("cuDeviceGet", ordinal)
        # Only the name shows whether the device is a MIG slice. The UUID of a slice is its own.
        is_slice = b" MIG " in driver.call("cuDeviceGetName", 64, device)
        # In cuda-bindings 12, the first form returns the UUID of the GPU that a slice belongs to.
        form = "cuDeviceGetUuid_v2" if hasattr(driver.bindings, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        raw = uuid.UUID(bytes=bytes(driver.call(form, device).bytes))
        return cls(driver, ordinal, f"{'MIG' if is_slice else 'GPU'}-{raw}")

    def attribute(self, name: str) -> int:
        """Return the value of ``CU_DEVICE_ATTRIBUTE_<name>``. Raises CudaError."""
        attribute = getattr(self.driver.bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self.ordinal))

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the device's slot; None if the host does not say. A virtual machine may not."""
        try:
            slot = self.driver.call("cuDeviceGetPCIBusId", _SLOT_BYTES, self.ordinal)
            name = slot.split(b"\0")[0].decode().lower()
            node = int((_PCI_DEVICES / name / "numa_node").read_text())
        except (CudaError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def primary_context(self) -> GpuContext:
        """Return a reference to the context that this process shares; close it. Raises CudaError."""
        return GpuContext(self)


class GpuContext:
    """A reference to a device's primary context. ``with context:`` makes it current on the calling thread."""

    def __init__(self, device: Device) -> None:
        """Raises CudaError, for example if memory is exhausted or another process owns the device."""
        self.device, self.driver = device, device.driver
        self.can_batch = bool(device.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        """False on WSL and others, where batches of copies with pinned memory fail later, and break the
        context."""
        self._raw: Any = self.driver.call("cuDevicePrimaryCtxRetain", device.ordinal)

    def __enter__(self) -> GpuContext:
        self.driver.call("cuCtxPushCurrent", self._raw)
        return self

    def __exit__(self, *exception: object) -> None:
        self.driver.call("cuCtxPopCurrent")

    def call(self, function: str, *arguments: object) -> Any:
        """Call ``function`` in this context, see ``Driver.call``. Raises CudaError."""
        with self:
            return self.driver.call(function, *arguments)

    def close(self) -> None:
        """Release the context. Objects that were created in it must be closed before. Raises CudaError."""
        if self._raw is not None:
            self._raw = None
            self.driver.call("cuDevicePrimaryCtxRelease", self.device.ordinal)


class GpuEvent:
    """A point in a stream's work. Threads that wait for it sleep, without the GIL."""

    def __init__(self, context: GpuContext) -> None:
        """Raises CudaError."""
        self._context = context
        self.raw: Any = context.call("cuEventCreate", _SLEEPING | _WITHOUT_TIME)

    def record(self, stream: GpuStream) -> None:
        """Set the event to the present end of the stream's work. Raises CudaError."""
        self._context.call("cuEventRecord", self.raw, stream.raw)

    def synchronize(self) -> None:
        """Wait until the work before the event has ended. Raises CudaError."""
        self._context.call("cuEventSynchronize", self.raw)

    def close(self) -> None:
        """Destroy the event. Queued work that waits for it is not affected. Raises CudaError."""
        raw, self.raw = self.raw, None
        if raw is not None:
            self._context.call("cuEventDestroy", raw)


class GpuStream:
    """A queue of work on a device, in a context."""

    def __init__(self, context: GpuContext, handle: int | None = None) -> None:
        """Create a stream, or wrap a raw ``handle`` (torch: ``stream.cuda_stream``). Raises CudaError."""
        self.context = context
        self._is_created_here = handle is None
        bindings = context.driver.bindings
        self.raw: Any = (
            context.call("cuStreamCreate", _NON_BLOCKING) if handle is None else bindings.CUstream(handle)
        )
        self._lock = threading.Lock()  # so that only one thread creates the event
        self._end: GpuEvent | None = None

    def wait(self, event: GpuEvent) -> None:
        """Let later work of the stream begin only after the work before ``event``. Raises CudaError."""
        self.context.call("cuStreamWaitEvent", self.raw, event.raw, 0)

    def synchronize(self) -> None:
        """Sleep until all work of the stream has ended. Raises CudaError, also if that work failed."""
        with self._lock:  # cuStreamSynchronize would spin if the engine's context is set so
            self._end = self._end or GpuEvent(self.context)
            self._end.record(self)
        self._end.synchronize()

    def close(self) -> None:
        """Destroy the stream if it was created here. Queued work still runs. Raises CudaError."""
        raw, self.raw, end, self._end = self.raw, None, self._end, None
        if end is not None:
            end.close()
        if raw is not None and self._is_created_here:
            self.context.call("cuStreamDestroy", raw)
