"""Copies of many pieces of memory in one call, without the GIL and past the processor's caches.

An ordinary store instruction first reads the cache line that it overwrites. Copying one byte thus moves three
bytes over the memory bus, and one thread saturates the bus. *Non-temporal* stores do not read the line.
glibc's memcpy uses them only for pieces far larger than a block of KV; numpy and torch never use them. This
module therefore compiles its own copy loop, with the LLVM that every vLLM installs (llvmlite, through numba).
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line. Target addresses must be multiples of it."""

_STREAMS, _LINES = 4, 2
"""Positions at which a piece is copied in turn, and lines per turn: so memory works in parallel."""

PIECE_BYTES = _STREAMS * _LINES * LINE
"""Bytes of which the size of each piece must be a multiple."""

Words = npt.NDArray[np.uint64]
"""Addresses and sizes in bytes, such as those of the pieces of a copy."""

Copy = Callable[[Words, Words, Words], None]
"""``copy(to, from_, sizes)`` takes the addresses and bytes of each piece. It returns when all are copied."""

_FENCE = "call void @llvm.x86.sse.sfence()"  # on x86, only this fence orders non-temporal stores

_SOURCE = """
DECLARE
define void @copy(ptr %to, ptr %from, ptr %sizes, i64 %count) {
begin:
  br label %next
next:
  %piece = phi i64 [0, %begin], [%piece1, %done]
  %is_over = icmp eq i64 %piece, %count
  br i1 %is_over, label %end, label %load
load:
  %to_place = getelementptr i64, ptr %to, i64 %piece
  %from_place = getelementptr i64, ptr %from, i64 %piece
  %size_place = getelementptr i64, ptr %sizes, i64 %piece
  %to_address = load i64, ptr %to_place
  %from_address = load i64, ptr %from_place
  %size = load i64, ptr %size_place
  %target = inttoptr i64 %to_address to ptr
  %source = inttoptr i64 %from_address to ptr
  %part = udiv i64 %size, STREAMS
  br label %more
more:
  %at = phi i64 [0, %load], [%at1, %line]
  %is_done = icmp uge i64 %at, %part
  br i1 %is_done, label %done, label %line
line:
  LINES
  %at1 = add i64 %at, STEP
  br label %more
done:
  %piece1 = add i64 %piece, 1
  br label %next
end:
  FENCE
  ret void
}
!0 = !{i32 1}
"""


def _source() -> str:
    is_x86 = platform.machine() == "x86_64"
    loads, stores = [], []
    for number, (stream, line) in enumerate(itertools.product(range(_STREAMS), range(_LINES))):
        loads += [
            f"%start{number} = mul i64 %part, {stream}",
            f"%place{number} = add i64 %start{number}, %at",
            f"%offset{number} = add i64 %place{number}, {line * LINE}",
            f"%source{number} = getelementptr i8, ptr %source, i64 %offset{number}",
            f"%target{number} = getelementptr i8, ptr %target, i64 %offset{number}",
            f"%line{number} = load <{LINE} x i8>, ptr %source{number}, align 1",
        ]
        stores.append(
            f"store <{LINE} x i8> %line{number}, ptr %target{number}, align {LINE}, !nontemporal !0"
        )
    filled = {
        "DECLARE": "declare void @llvm.x86.sse.sfence()" if is_x86 else "",
        "FENCE": _FENCE if is_x86 else "fence seq_cst",
        "STREAMS": str(_STREAMS),
        "STEP": str(_LINES * LINE),
        "LINES": "\n  ".join(loads + stores),
    }
    return re.sub("[A-Z]{4,}", lambda name: filled[name[0]], _SOURCE)


def make_copy() -> Copy | None:
    """Compile the copy loop for this machine (about 20 ms); None if that is not possible."""
    try:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(_source()), machine)
        engine.finalize_object()
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_size_t)(
            engine.get_function_address("copy")
        )
    except Exception:  # llvmlite is missing or has another API, or the system forbids executable memory
        return None

    def copy(to: Words, from_: Words, sizes: Words, _engine: Any = engine) -> None:
        function(to.ctypes.data, from_.ctypes.data, sizes.ctypes.data, len(to))

    return copy
