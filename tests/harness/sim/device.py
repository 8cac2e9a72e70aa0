"""Memory of a simulated engine's KV, and the time at which the kernels of its forward passes run.

On the host, kernels run at once. In a process on the simulated driver (``testing.cuda``), the KV is device
memory and kernels are delayed: they run during the next step, in the order of the compute stream, as on a
GPU. A copy that does not wait for its fence reads or leaves wrong bytes.
"""

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable
from unittest import mock

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_client.cuda.driver import Device, GpuStream
from testing.engine import simulated_gpu

Kernel = Callable[[], None]

TIMEOUT = 60.0


class HostDevice:
    """Host memory. Kernels run when they are launched."""

    def allocate(self, cache: KVCacheConfig, layout: str) -> dict[str, torch.Tensor]:
        """Allocate the engine's KV as vLLM does."""
        return allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])

    def launch(self, kernel: Kernel) -> None:
        """Queue work on the compute stream."""
        kernel()

    def release_kernels(self) -> None:
        """Let everything launched so far run."""

    def synchronize(self) -> None:
        """Wait until everything launched has run."""

    def close(self) -> None:
        """Free the memory."""


class LateDevice(HostDevice):
    """Memory of the simulated GPU. The compute stream waits for a word that counts completed kernels."""

    def __init__(self) -> None:
        self._context = Device.visible()[0].primary_context()
        self._word = int(self._context.call("cuMemAlloc", 4))
        ctypes.c_uint32.from_address(self._word).value = 0
        self._addresses = [self._word]
        self._compute = GpuStream(self._context, 0)  # the legacy stream, which the engine's computations use
        self._launched = 0
        self._kernels: queue.SimpleQueue[tuple[int, Kernel] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # protects the fields below
        self._may_run = self._has_run = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="simulated-gpu", daemon=True)
        self._thread.start()

    def allocate(self, cache: KVCacheConfig, layout: str) -> dict[str, torch.Tensor]:
        with mock.patch("vllm.v1.worker.utils.torch.zeros", self._zeros):
            return super().allocate(cache, layout)

    def launch(self, kernel: Kernel) -> None:
        self._launched += 1
        self._context.call("cuStreamWaitValue32", self._compute.raw, self._word, self._launched, 0)
        self._kernels.put((self._launched, kernel))

    def release_kernels(self) -> None:
        with self._changed:
            self._may_run = self._launched
            self._changed.notify_all()

    def synchronize(self) -> None:
        self.release_kernels()
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_run == self._launched or self._error, TIMEOUT)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.synchronize()
        self._kernels.put(None)
        self._thread.join()
        self._compute.synchronize()
        for address in self._addresses:
            self._context.call("cuMemFree", address)
        self._context.close()

    def _zeros(self, num_bytes: int, *, dtype: torch.dtype, device: object) -> torch.Tensor:
        memory = simulated_gpu.zeros(self._context, num_bytes, dtype)
        self._addresses.append(memory.data_ptr())
        return memory

    def _work(self) -> None:
        while (launched := self._kernels.get()) is not None:
            number, kernel = launched
            with self._changed:
                self._changed.wait_for(lambda number=number: self._may_run >= number)
            try:
                kernel()
            except BaseException as error:  # an error of the harness: raised by synchronize
                self._error = error
            ctypes.c_uint32.from_address(self._word).value = number
            with self._changed:
                self._has_run = number
                self._changed.notify_all()


def make_device() -> HostDevice:
    """A device for this process, on the simulated driver or on the host."""
    return LateDevice() if "CUDASIM_NODE" in os.environ else HostDevice()
