"""Checked calls of the CUDA driver, devices, primary contexts, streams and events.

Calls may come from any thread: what needs a current context makes its own current for the call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import uuid
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lmcache.cuda.errors import CudaError, CudaUnavailableError, DeviceNotVisibleError

_NOT_READY, _NO_DEVICE, _NOT_FOUND = 600, 100, 500
_NON_BLOCKING = 1  # of a stream: the legacy stream doesn't wait for it, nor it for that
_SLEEPING, _WITHOUT_TIME = 1, 2  # of an event: who waits for it sleeps instead of spinning


class Driver:
    """The loaded driver. See ``load``."""

    def __init__(self, bindings: ModuleType) -> None:
        self.bindings = bindings
        """``cuda.bindings.driver``, for its types."""
        self.version = int(self.call("cuDriverGetVersion"))
        """1000 times the major version of CUDA, plus 10 times the minor one: 12080 is 12.8."""

    def call(self, function: str, *arguments: object) -> Any:
        """Call ``function``; returns what it gives out: nothing, a value, or a tuple. Raises CudaError."""
        try:
            code, *results = getattr(self.bindings, function)(*arguments)
        except RuntimeError as error:  # of cuda-bindings: the driver has no such function
            raise CudaError(function, _NOT_FOUND, str(error)) from error
        if int(code):
            raise self.error(function, int(code))
        return results[0] if len(results) == 1 else tuple(results)

    def error(self, function: str, code: int, detail: str = "") -> CudaError:
        """The error of a call that returned ``code``."""
        name = self.bindings.cuGetErrorName(self.bindings.CUresult(code))[1]
        return CudaError(function, code, name.decode() if name else "an unknown error", detail)

    @functools.cache  # noqa: B019 - there is one driver
    def function(self, name: str, version: int, *types: type) -> Any:
        """``name`` as CUDA ``version`` has it, callable with ctypes' arguments without the GIL; None if this
        driver lacks it.
        """
        code, address, _ = self.bindings.cuGetProcAddress(name.encode(), version, 0)
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address) if not int(code) and address else None


@functools.cache
def load() -> Driver:
    """The driver of this host. Raises CudaUnavailableError."""
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
        what = (
            "no NVIDIA GPU is visible here" if error.code == _NO_DEVICE else "there is no working CUDA driver"
        )
        raise CudaUnavailableError(f"{what}: {error}") from error
    return driver


@dataclass(frozen=True)
class Device:
    """A GPU, or a slice of one (MIG), that this process can see."""

    driver: Driver
    ordinal: int
    """Its number among the visible devices."""
    uuid: str
    """``GPU-...`` or ``MIG-...``, as ``nvidia-smi -L`` prints it."""

    @classmethod
    def visible(cls) -> list[Device]:
        """All that this process can see. Raises CudaUnavailableError."""
        driver = load()
        return [cls._at(driver, ordinal) for ordinal in range(driver.call("cuDeviceGetCount"))]

    @classmethod
    def find(cls, wanted: str) -> Device:
        """The device of a UUID. Raises DeviceNotVisibleError, CudaUnavailableError."""
        devices = cls.visible()
        for device in devices:
            if device.uuid.lower() == wanted.lower():
                return device
        what = "the MIG slice" if wanted.startswith("MIG-") else "GPU"
        seen = ", ".join(device.uuid for device in devices)
        raise DeviceNotVisibleError(f"{what} {wanted} is not visible here; visible: {seen}")

    @classmethod
    def of(cls, address: int) -> Device | None:
        """Where the memory at ``address`` lies; None: not in device memory. Raises CudaUnavailableError."""
        driver = load()
        names = driver.bindings.CUpointer_attribute
        try:
            kind = driver.call("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            if int(kind) != int(driver.bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE):
                return None
            ordinal = driver.call("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        except CudaError:  # the driver knows nothing about it
            return None
        return cls._at(driver, int(ordinal))

    @classmethod
    def _at(cls, driver: Driver, ordinal: int) -> Device:
        device = driver.call("cuDeviceGet", ordinal)
        # The name is the driver API's only word about MIG; of a slice, the UUID is its own.
        is_slice = b" MIG " in driver.call("cuDeviceGetName", 64, device)
        raw = uuid.UUID(bytes=bytes(driver.call("cuDeviceGetUuid", device).bytes))
        return cls(driver, ordinal, f"{'MIG' if is_slice else 'GPU'}-{raw}")

    def attribute(self, name: str) -> int:
        """``CU_DEVICE_ATTRIBUTE_<name>``. Raises CudaError."""
        which = getattr(self.driver.bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", which, self.ordinal))

    @property
    def is_exclusive(self) -> bool:
        """May only one process have a context on it (or none at all)?"""
        return self.attribute("COMPUTE_MODE") in (2, 3)

    def primary_context(self) -> Context:
        """The context that all users of the device in this process share; close it. Raises CudaError."""
        return Context(self)


class Context:
    """A reference to a device's primary context. ``with context:`` makes it current on the calling thread."""

    def __init__(self, device: Device) -> None:
        """Raises CudaError: out of memory, or the device is another process's alone."""
        self.device, self.driver = device, device.driver
        self._raw: Any = self.driver.call("cuDevicePrimaryCtxRetain", device.ordinal)

    def __enter__(self) -> Context:
        self.driver.call("cuCtxPushCurrent", self._raw)
        return self

    def __exit__(self, *exception: object) -> None:
        self.driver.call("cuCtxPopCurrent")

    def call(self, function: str, *arguments: object) -> Any:
        """``Driver.call`` in this context."""
        with self:
            return self.driver.call(function, *arguments)

    def close(self) -> None:
        """Let go of it. What was made in it must be closed before."""
        if self._raw is not None:
            self._raw = None
            self.driver.call("cuDevicePrimaryCtxRelease", self.device.ordinal)


class Event:
    """A point in a stream's work. Who waits for it sleeps, without the GIL."""

    def __init__(self, context: Context) -> None:
        """Raises CudaError."""
        self._context = context
        self.raw: Any = context.call("cuEventCreate", _SLEEPING | _WITHOUT_TIME)

    def record(self, stream: Stream) -> None:
        """From now on it stands for the present end of the stream's work. Raises CudaError."""
        self._context.call("cuEventRecord", self.raw, stream.raw)

    def is_done(self) -> bool:
        """Has the work before it ended? Raises CudaError."""
        try:
            self._context.call("cuEventQuery", self.raw)
        except CudaError as error:
            if error.code == _NOT_READY:
                return False
            raise
        return True

    def synchronize(self) -> None:
        """Wait until the work before it has ended. Raises CudaError."""
        self._context.call("cuEventSynchronize", self.raw)

    def close(self) -> None:
        """Destroy it; work that waits for it goes on to do so. Raises CudaError."""
        raw, self.raw = self.raw, None
        if raw is not None:
            self._context.call("cuEventDestroy", raw)


class Stream:
    """A queue of work on a device, in a context."""

    def __init__(self, context: Context, handle: int | None = None) -> None:
        """A new stream, or another's by its raw handle (torch: ``stream.cuda_stream``). Raises CudaError."""
        self.context = context
        self._is_own = handle is None
        bindings = context.driver.bindings
        self.raw: Any = (
            context.call("cuStreamCreate", _NON_BLOCKING) if handle is None else bindings.CUstream(handle)
        )
        self._lock = threading.Lock()  # protects against two threads that make the event
        self._end: Event | None = None

    def wait(self, event: Event) -> None:
        """Later work begins when the work before ``event`` has ended. Raises CudaError."""
        self.context.call("cuStreamWaitEvent", self.raw, event.raw, 0)

    def synchronize(self) -> None:
        """Wait, asleep, until all its work has ended. Raises CudaError: also of that work."""
        with self._lock:  # cuStreamSynchronize would spin, as the engine's context may be set to
            self._end = self._end or Event(self.context)
            self._end.record(self)
        self._end.synchronize()

    def close(self) -> None:
        """Destroy it, unless it is somebody else's. Its work goes on to its end. Raises CudaError."""
        raw, self.raw, end, self._end = self.raw, None, self._end, None
        if end is not None:
            end.close()
        if raw is not None and self._is_own:
            self.context.call("cuStreamDestroy", raw)
