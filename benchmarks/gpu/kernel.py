"""Kernel that reads device memory, as decoding does, and the time of each of its runs."""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import Any

from lmcache_client.cuda.driver import GpuContext, GpuStream

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 vectors, .param .u64 out)
{
    .reg .pred %p<3>;
    .reg .b32 %r<7>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [vectors];
    ld.param.u64 %rd3, [out];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r4;
    mov.u32 %r5, %nctaid.x;
    mul.lo.s32 %r6, %r5, %r2;
    cvt.u64.u32 %rd5, %r6;
    mov.f32 %f1, 0f00000000;
NEXT:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra DONE;
    shl.b64 %rd6, %rd4, 4;
    add.s64 %rd7, %rd1, %rd6;
    ld.global.v4.f32 {%f2, %f3, %f4, %f5}, [%rd7];
    add.f32 %f1, %f1, %f2;
    add.f32 %f1, %f1, %f3;
    add.f32 %f1, %f1, %f4;
    add.f32 %f1, %f1, %f5;
    add.s64 %rd4, %rd4, %rd5;
    bra NEXT;
DONE:
    setp.eq.f32 %p2, %f1, 0f42280000;
    @%p2 st.global.f32 [%rd3], %f1;
    ret;
}
\0"""
"""PTX of the kernel: each thread adds up 16 bytes at a time.

The kernel writes the sum only if it is 42, so the compiler can't skip the sum. The driver compiles the PTX
for its chip (checked with ptxas 12.9 for sm_70 to sm_100).
"""


class Kernel:
    """Reads ``num_bytes`` of device memory on a separate stream, as an engine's attention does."""

    def __init__(self, context: GpuContext, num_bytes: int) -> None:
        """Raises CudaError."""
        self._context, self._num_bytes = context, num_bytes
        self._module = context.call("cuModuleLoadData", PTX)
        self._function = context.call("cuModuleGetFunction", self._module, b"read_all")
        self._data = int(context.call("cuMemAlloc", num_bytes))
        self._out = int(context.call("cuMemAlloc", 4))
        context.call("cuMemsetD8", self._data, 0, num_bytes)
        self._blocks = 8 * context.device.attribute("MULTIPROCESSOR_COUNT")
        self._stream = GpuStream(context)

    def times(self, number: int) -> list[float]:
        """Run the kernel ``number`` times. Returns the seconds of each run on the device, ascending."""
        events: list[Any] = [self._context.call("cuEventCreate", 0) for _ in range(number + 1)]
        with self._context:
            call = self._context.driver.call
            call("cuEventRecord", events[0], self._stream.raw)
            for event in events[1:]:
                self._launch()
                call("cuEventRecord", event, self._stream.raw)
            call("cuEventSynchronize", events[-1])
            milliseconds = [call("cuEventElapsedTime", *pair) for pair in itertools.pairwise(events)]
            for event in events:
                call("cuEventDestroy", event)
        return sorted(float(each) * 1e-3 for each in milliseconds)

    def step(self) -> float:
        """Launch the kernel and wait for its end, as an engine's step does. Returns seconds on the host."""
        began_at = time.perf_counter()
        with self._context:
            self._launch()
        self._stream.synchronize()
        return time.perf_counter() - began_at

    def _launch(self) -> None:
        arguments = (self._data, self._num_bytes // 16, self._out), (ctypes.c_uint64,) * 3
        shape = self._blocks, 1, 1, 256, 1, 1, 0
        self._context.driver.call("cuLaunchKernel", self._function, *shape, self._stream.raw, arguments, 0)

    def close(self) -> None:
        self._stream.close()
        for address in (self._data, self._out):
            self._context.call("cuMemFree", address)
        self._context.call("cuModuleUnload", self._module)
